"""Scope: one class that is a context manager and a decorator for every kind of function."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, TypeVar, cast

from mldebug.core.errors import UsageError

_Self = TypeVar("_Self", bound="Scope")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Scope:
    """Watches the code that runs inside it. A subclass defines `start()` and `stop(exc)`.

    `with` enters the scope; as a decorator it is entered while the function runs: a coroutine while it is awaited, a
    generator from its first `next` until it is exhausted or closed. Exceptions always pass through.
    A scope that is entered again while it is open (recursion, tasks, threads) starts once and stops with the last
    one to leave; one that was left can be entered anew.

        with SomeScope():
            train()
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        # Made here, so that a subclass need not call an __init__ of this class.
        self = super().__new__(cls)
        self._scope_lock = threading.RLock()
        self._scope_depth = 0
        return self

    _scope_lock: threading.RLock  # type: ignore[valid-type,unused-ignore]  # a function on some versions of Python
    _scope_depth: int

    def start(self) -> None:
        """Begin to watch."""
        raise NotImplementedError

    def stop(self, exc: BaseException | None) -> None:
        """End watching. `exc` is what is leaving the scope: GeneratorExit where a generator was closed."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        with self._scope_lock:
            if self._scope_depth == 0:
                self.start()
            self._scope_depth += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._scope_lock:
            self._scope_depth -= 1
            if self._scope_depth == 0:
                self.stop(exc)

    def __call__(self, function: _Function) -> _Function:
        """Decorate `function`, keeping its kind (plain, async, generator, async generator) and its name."""
        if isinstance(function, (staticmethod, classmethod)):
            return cast(_Function, type(function)(self(function.__func__)))
        if isinstance(function, type):
            raise UsageError(
                f"{type(self).__name__} decorates functions, and {function.__name__} is a class",
                "decorate one of its methods",
            )
        body = _with_code(function)
        if inspect.iscoroutinefunction(body):
            wrapper = _coroutine(self, function)
        elif inspect.isasyncgenfunction(body):
            wrapper = _async_generator(self, function)
        elif inspect.isgeneratorfunction(body):
            wrapper = _generator(self, function)
        else:
            wrapper = _plain(self, function)
        return cast(_Function, functools.wraps(function)(wrapper))


def _with_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """What inspect can tell the kind of: for an object with a __call__ method, that method."""
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    return type(function).__call__


def _plain(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def _coroutine(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return await function(*args, **kwargs)

    return call


def _generator(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with scope:
            return (yield from function(*args, **kwargs))

    return call


def _async_generator(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        # There is no `yield from` for these: what is sent, thrown and closed is handed on one by one.
        with scope:
            inner = function(*args, **kwargs)
            try:
                item = await inner.__anext__()
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as exc:
                        item = await inner.athrow(exc)
                    else:
                        item = await inner.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await inner.aclose()

    return call
