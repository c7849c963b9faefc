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


def test_quiet_prints_nothing_and_writes_the_file(demo, capsys, tmp_path) -> None:
    assert main(["demo", "-q", "-o", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "r.json").read_text())["event"] == "inf in block.1"
    assert main(["demo", "-q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["event"] == "inf in block.1"


def test_a_demo_that_finds_nothing_is_an_error(demo, capsys) -> None:
    demo.event = None
    assert main(["demo"]) == 1
    assert "met no overflow" in capsys.readouterr().err


def test_ctrl_c_shows_what_was_seen(demo, room, capsys, monkeypatch) -> None:
    def interrupted(progress):
        stop = KeyboardInterrupt()
        stop.report = room.NumericsReport()
        raise stop

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert main(["demo"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("ok     true\nevent  null\n", "mldebug: interrupted\n")


def test_ctrl_c_before_anything_was_seen(demo, capsys, monkeypatch) -> None:
    def interrupted(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert main(["demo"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "mldebug: interrupted\n")


def test_a_file_that_cannot_be_written_is_told_before_the_run(demo, capsys, monkeypatch) -> None:
    monkeypatch.setattr(demo, "run_demo", None)  # calling it would fail
    assert main(["demo", "-o", "no/where/r.json"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_help_says_that_an_event_is_no_failure(capsys) -> None:
    assert main(["demo", "--help"]) == 0
    assert "status is 0 although an event is found" in capsys.readouterr().out
