"""Ctrl-C that comes while the tracer decides about a function of the program."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug.tracing._settrace import SettraceEngine


def test_ctrl_c_is_shown_as_nothing_but_itself() -> None:
    def admit(frame: Any) -> None:
        raise KeyboardInterrupt  # a function that is seen for the first time

    options = SimpleNamespace(depth=None, returns=False, exceptions=False, lines=True)
    hooks = dict.fromkeys(("line", "leave", "left", "failed", "exception", "call", "within"))
    recorder: Any = SimpleNamespace(options=options, codes={}, calls=True, admit=admit, **hooks)
    engine = SettraceEngine(recorder)
    engine.running = True
    engine._make()
    with pytest.raises(KeyboardInterrupt) as caught:
        engine._call(sys._getframe(), "call", None)
    assert caught.value.__context__ is None
