from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.core.scope import Scope


class Log(Scope):
    """Writes down what happens to it. It does not call Scope.__init__: subclasses need not."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def start(self) -> None:
        self.events.append("start")

    def stop(self, exc: BaseException | None) -> None:
        self.events.append(type(exc).__name__ if exc is not None else "stop")


@pytest.fixture
def log() -> Log:
    return Log()


def test_with(log: Log) -> None:
    with log as entered:
        assert entered is log
        log.events.append("body")
    assert log.events == ["start", "body", "stop"]


def test_exceptions_pass_through_and_are_told(log: Log) -> None:
    with pytest.raises(ZeroDivisionError), log:
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), log:
        raise KeyboardInterrupt
    assert log.events == ["start", "ZeroDivisionError", "start", "KeyboardInterrupt"]


def test_function(log: Log) -> None:
    @log
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        log.events.append("body")
        return a + b

    assert log.events == []
    assert add(1, b=2) == 3
    assert add(5) == 6
    assert log.events == ["start", "body", "stop"] * 2
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert add.__wrapped__ is not None  # type: ignore[attr-defined]


def test_function_that_raises(log: Log) -> None:
    @log
    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match=r"^x$"):
        fail()
    assert log.events == ["start", "ValueError"]


def test_methods_of_all_kinds(log: Log) -> None:
    class Trainer:
        @log
        def train(self) -> str:
            return type(self).__name__

        @log
        @classmethod
        def make(cls) -> str:
            return cls.__name__

        @log
        @staticmethod
        def helper() -> str:
            return "helper"

    assert (Trainer().train(), Trainer.make(), Trainer.helper()) == ("Trainer", "Trainer", "helper")
    assert log.events == ["start", "stop"] * 3


def test_a_class_is_refused(log: Log) -> None:
    with pytest.raises(UsageError, match="Log decorates functions, and int is a class\nhint: "):
        log(int)


def test_callable_objects_and_partials(log: Log) -> None:
    class Step:
        def __call__(self, x: int) -> int:
            return x + 1

    class AsyncStep:
        async def __call__(self, x: int) -> int:
            log.events.append("body")
            return x + 1

    assert log(Step())(1) == 2
    assert log(functools.partial(max, 3))(1) == 3
    log.events.clear()
    assert asyncio.run(log(AsyncStep())(1)) == 2
    assert log.events == ["start", "body", "stop"]


def test_coroutine_function(log: Log) -> None:
    @log
    async def work(x: int) -> int:
        log.events.append("before")
        await asyncio.sleep(0)
        log.events.append("after")
        if x < 0:
            raise ValueError("negative")
        return x

    assert inspect.iscoroutinefunction(work)
    pending = work(1)
    assert log.events == []
    assert asyncio.run(pending) == 1
    assert log.events == ["start", "before", "after", "stop"]
    with pytest.raises(ValueError, match="negative"):
        asyncio.run(work(-1))
    assert log.events[-1] == "ValueError"


def test_a_cancelled_coroutine_leaves_the_scope(log: Log) -> None:
    @log
    async def forever() -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log.events == ["start", "CancelledError"]


def test_generator(log: Log) -> None:
    @log
    def batches() -> Iterator[int]:
        yield 1
        yield 2

    assert inspect.isgeneratorfunction(batches)
    iterator = batches()
    assert log.events == []
    assert next(iterator) == 1
    assert log.events == ["start"]
    assert list(iterator) == [2]
    assert log.events == ["start", "stop"]


def test_generator_send_throw_return_and_close(log: Log) -> None:
    @log
    def talk() -> Any:
        got = yield "first"
        try:
            yield got
        except KeyError:
            yield "caught"
        return "result"

    generator = talk()
    assert next(generator) == "first"
    assert generator.send("hello") == "hello"
    assert generator.throw(KeyError("x")) == "caught"
    with pytest.raises(StopIteration) as stopped:
        next(generator)
    assert stopped.value.value == "result"
    assert log.events == ["start", "stop"]

    generator = talk()
    next(generator)
    generator.close()
    assert log.events[2:] == ["start", "GeneratorExit"]
    talk().close()  # never begun: never entered
    assert log.events[4:] == []


def test_generator_that_raises(log: Log) -> None:
    @log
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(broken())
    assert log.events == ["start", "OSError"]


def test_async_generator(log: Log) -> None:
    closed = []

    @log
    async def stream() -> AsyncIterator[Any]:
        try:
            got = yield "first"
            await asyncio.sleep(0)
            try:
                yield got
            except KeyError:
                yield "caught"
        finally:
            closed.append(True)

    assert inspect.isasyncgenfunction(stream)

    async def through() -> None:
        generator: Any = stream()
        assert log.events == []
        assert await generator.__anext__() == "first"
        assert log.events == ["start"]
        assert await generator.asend("hello") == "hello"
        assert await generator.athrow(KeyError("x")) == "caught"
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()
        assert log.events == ["start", "stop"]

    async def early() -> None:
        generator: Any = stream()
        await generator.__anext__()
        await generator.aclose()
        assert log.events == ["start", "GeneratorExit"]

    async def loop() -> None:
        assert [item async for item in stream()] == ["first", None]

    for run, closes in ((through, 1), (early, 1), (loop, 1)):
        log.events.clear()
        closed.clear()
        asyncio.run(run())
        assert len(closed) == closes


def test_async_generator_that_raises(log: Log) -> None:
    @log
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise OSError("gone")

    async def main() -> None:
        async for _ in broken():
            pass

    with pytest.raises(OSError, match="gone"):
        asyncio.run(main())
    assert log.events == ["start", "OSError"]


def test_recursion_and_nesting_enter_once(log: Log) -> None:
    @log
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + down(n - 1)

    assert down(5) == 5
    with log, log:
        down(1)
    assert log.events == ["start", "stop"] * 2


def test_tasks_at_the_same_time_share_the_scope(log: Log) -> None:
    @log
    async def work() -> None:
        await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.gather(work(), work(), work())

    asyncio.run(main())
    assert log.events == ["start", "stop"]


def test_threads_share_the_scope(log: Log) -> None:
    barrier = threading.Barrier(4)

    @log
    def work() -> None:
        barrier.wait(10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.events == ["start", "stop"]


def test_a_start_that_fails_leaves_the_scope_closed() -> None:
    class Fails(Log):
        def start(self) -> None:
            super().start()
            if len(self.events) == 1:
                raise RuntimeError("not yet")

    scope = Fails()
    with pytest.raises(RuntimeError, match="not yet"), scope:
        pytest.fail("the body must not run")
    with scope:
        pass
    assert scope.events == ["start", "start", "stop"]


def test_a_stop_that_fails_keeps_the_first_error_in_sight() -> None:
    class Fails(Log):
        def stop(self, exc: BaseException | None) -> None:
            raise RuntimeError("while stopping")

    with pytest.raises(RuntimeError, match="while stopping") as caught, Fails():
        raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)
