"""Calls that cannot be meant: a wrong name or type of an argument is a UsageError that says what to write."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from mldebug.core.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

NUMBER = (Integral,)
TEXT = (str,)
PATH = (str, os.PathLike)


def checked_call(**kinds: tuple[type, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that names the right argument where one is misspelt, missing or of a wrong type.

    `kinds` says what the arguments may be; None only where it is the default. A bool is no number.

        @checked_call(layers=NUMBER)
        def tiny_model(source, *, layers=None): ...
        tiny_model("llama", layer=2)  # UsageError: did you mean layers?
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _check_names(function.__name__, signature, args, kwargs)
            bound = signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                absent = value is None and signature.parameters[name].default is None
                if name in kinds and not absent:
                    _check_kind(name, value, kinds[name])
                if isinstance(value, Integral) and not isinstance(value, bool):
                    bound.arguments[name] = int(value)  # a whole number of NumPy is none to JSON
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def _check_names(name: str, signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    for word in given:
        if word not in signature.parameters:
            near = difflib.get_close_matches(word, signature.parameters, 1, 0.55)
            hint = f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(signature.parameters)}"
            raise UsageError(f"{name}() has no argument {word}", hint)
    try:
        signature.bind(*args, **given)
    except TypeError as exc:
        raise UsageError(f"{name}(): {exc}", f"it is called as {name}{_short(signature)}") from None


def _short(signature: inspect.Signature) -> str:
    """The arguments that have a place, without their types."""
    words = [word for word, parameter in signature.parameters.items() if parameter.kind != parameter.KEYWORD_ONLY]
    return f"({', '.join([*words, '...'])})"


def _check_kind(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join(dict.fromkeys(_WORDS.get(kind, kind.__name__) for kind in kinds))
        raise UsageError(f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}", f"give {words}")


_WORDS: dict[type, str] = {
    Integral: "a whole number",
    Real: "a number",
    str: "a text",
    os.PathLike: "a path",
    Mapping: "a dict",
    Sequence: "a list",
}
