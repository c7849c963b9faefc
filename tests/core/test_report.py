from __future__ import annotations

import dataclasses
import enum
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldebug.core.errors import MldebugError
from mldebug.core.report import Report, emit, jsonable, paint, wants_color, write


@dataclasses.dataclass(frozen=True)
class Loss(Report):
    value: float = 1.5
    names: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.value == self.value


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Level(enum.Enum):
    HIGH = "high"


@dataclasses.dataclass
class Point:
    x: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        ({1: (1, 2.5, None, True)}, {"1": [1, 2.5, None, True]}),
        ({"b", "a"}, ["a", "b"]),
        (Path("a/b"), "a/b"),
        (Level.HIGH, "high"),
        ([Point(float("nan"))], [{"x": "nan"}]),
    ],
)
def test_jsonable(value: Any, expected: Any) -> None:
    assert jsonable(value) == expected


def test_jsonable_takes_numpy_and_torch() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    assert jsonable(numpy.float32("inf")) == "inf"
    assert jsonable(numpy.int64(3)) == 3
    assert jsonable(numpy.array([1.0, float("nan")])) == [1.0, "nan"]
    assert jsonable(torch.tensor(2)) == 2
    assert jsonable(torch.tensor([1.5], dtype=torch.bfloat16)) == [1.5]
    assert jsonable(torch.float16) == "torch.float16"
    assert jsonable(torch.Size([2, 3])) == [2, 3]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
)


@given(anything)
def test_jsonable_is_always_strict_json(value: Any) -> None:
    json.dumps(jsonable(value), allow_nan=False)


def test_a_report_is_frozen_and_has_a_schema() -> None:
    report = Loss(names=("a",))
    assert report.to_dict() == {"schema": 1, "ok": True, "value": 1.5, "names": ["a"]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.value = 2.0  # type: ignore[misc]


def test_json_is_one_strict_line() -> None:
    line = Loss(float("nan"), ("a\nb",)).json()
    assert "\n" not in line
    assert json.loads(line) == {"schema": 1, "ok": False, "value": "nan", "names": ["a\nb"]}


def test_text_fits_the_width_and_is_plain() -> None:
    text = Loss(names=tuple(f"layer.{i}" for i in range(40))).text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("ok     true\nvalue  1.5\n")


def test_color_changes_nothing_but_the_colors() -> None:
    import re

    text = "the loss is nan, an x-inf-y is not, inf is\nhint: lower it   \n" + "long " * 60
    painted = paint(text)
    assert painted != text
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == text
    assert "\x1b[1;31mnan\x1b[0m" in painted


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(Terminal())
    assert not wants_color(Terminal(), no_color=True)
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())


def test_emit_text_json_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Loss()
    emit(report)
    assert capsys.readouterr().out == report.text() + "\n"
    emit(report, json=True, output=tmp_path / "r.json")
    assert capsys.readouterr().out == report.json() + "\n"
    assert (tmp_path / "r.json").read_text() == report.json() + "\n"


def test_quiet_is_for_good_news(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Loss(), quiet=True)
    assert capsys.readouterr().out == ""
    emit(Loss(float("nan")), quiet=True)
    assert "nan" in capsys.readouterr().out
    emit(Loss(), quiet=True, json=True)
    assert capsys.readouterr().out == Loss().json() + "\n"


def test_emit_paints_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Terminal(), io.StringIO()
    emit(Loss(float("nan")), stream=terminal)
    emit(Loss(float("nan")), stream=pipe)
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_a_file_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(MldebugError, match=r"cannot write .*: no such file or directory\nhint: "):
        emit(Loss(), output=tmp_path / "missing" / "r.json")


def test_an_ascii_stream_gets_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write("20 µs", stream)
    assert raw.getvalue() == b"20 \\xb5s"


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class Gone(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_stream_that_takes_nothing_is_our_error() -> None:
    closed = io.StringIO()
    closed.close()
    for stream, reason in ((None, "it is closed"), (closed, "it is closed"), (Full(), "no space left on device")):
        with pytest.raises(MldebugError, match=f"cannot write the output: {reason}\nhint: "):
            write("text", stream)
    with pytest.raises(MldebugError, match="closed"):
        emit(Loss(), stream=closed)
    with pytest.raises(BrokenPipeError):
        write("text", Gone())


def test_rich_is_not_loaded_without_a_terminal(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python("import sys; from mldebug.core.report import *; emit(Report()); assert 'rich' not in sys.modules")
    assert (done.returncode, done.stdout) == (0, "ok  true\n"), done.stderr
