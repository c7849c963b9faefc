from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from mldebug.cli import main


@pytest.fixture
def demo(room: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's module with a run that finds `demo.event`."""
    module = ModuleType("mldebug.numerics._demo")
    module.event = "inf in block.1"  # type: ignore[attr-defined]

    def run_demo(progress):
        progress("step 1")
        return room.NumericsReport(module.event)

    module.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mldebug.numerics._demo", module)
    return module


def test_the_demo_is_fine_when_it_finds_its_overflow(demo, capsys, tmp_path) -> None:
    assert main(["demo", "-o", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    assert "inf in block.1" in out
    assert err == ""
    assert json.loads((tmp_path / "r.json").read_text())["event"] == "inf in block.1"
    assert main(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["event"] == "inf in block.1"


def test_progress_is_for_terminals(demo, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["demo"]) == 0
    assert capsys.readouterr().err == "step 1\n"
    assert main(["demo", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_demo_that_finds_nothing_is_an_error(demo, capsys) -> None:
    demo.event = None
    assert main(["demo"]) == 1
    assert "met no overflow" in capsys.readouterr().err
