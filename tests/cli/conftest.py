"""A stand-in for the numerics room, so that the commands are tested without torch and one error at a time."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# Executed into a module named mldebug.numerics, here or in a fresh process.
STAND_IN = '''
from dataclasses import dataclass
from mldebug.core.errors import MldebugError
from mldebug.core.report import Report
from mldebug.core.script import run_script

calls = []

@dataclass(frozen=True)
class NumericsReport(Report):
    event: object = None

    @property
    def ok(self):
        return self.event is None

    def plot(self, path):
        if "refuse" in str(path):
            raise MldebugError("matplotlib is not in the mood", "try later")
        open(path, "w").write("png")

    def html(self, path):
        open(path, "w").write("<!doctype html>")

class NumericsError(MldebugError, ValueError):
    def __init__(self, message, report=None):
        super().__init__(message)
        self.report = report

def overflow():
    """Scripts call this where a real model would overflow."""
    raise NumericsError("inf in layer.3", NumericsReport("inf in layer.3"))

def abort():
    """Scripts call this where --abort-after-batch-num would stop them."""
    raise NumericsError("aborting after 2 batches due to `abort_after_batch_num=1` arg", NumericsReport())

def watch_script(argv, *, module, **options):
    calls.append((argv, module, options))
    event = "seen" if "--event" in argv else None
    try:
        run_script(argv, module=module)
    except BaseException as exc:
        if getattr(exc, "report", None) is None:
            exc.report = NumericsReport(event)
        raise
    return NumericsReport(event)
'''

# Runs the command of the process with the stand-in in place of the room.
COMMAND = f"""
import sys, types
room = types.ModuleType("mldebug.numerics")
sys.modules["mldebug.numerics"] = room
exec({STAND_IN!r}, room.__dict__)
from mldebug.cli import main
sys.exit(main())
"""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mldebug.numerics")
    module.__path__ = []  # type: ignore[attr-defined]  # a package, for mldebug.numerics._demo
    monkeypatch.setitem(sys.modules, "mldebug.numerics", module)
    exec(STAND_IN, module.__dict__)
    return module


@pytest.fixture
def command() -> str:
    return COMMAND


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write
