"""PairsReport and `mldebug pairs`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mldebug.cli import _pairs, main
from mldebug.cli._parser import Parser, file_or_picture_to_write
from mldebug.cluster import PairsReport, load_pairs, pair_matrix, save_pairs
from mldebug.core.errors import UsageError
from tests.cluster.simulate import Case, healthy, planted


def report(case: Case) -> PairsReport:
    return pair_matrix(case.evidence)


def arguments(*words: str) -> argparse.Namespace:
    parser = Parser(prog="mldebug pairs")
    _pairs.add_arguments(parser)
    return parser.parse_args(words)


def test_sixteen_gpus_fit_eighty_columns() -> None:
    text = report(planted(4, "rails", (2, 8))).text()
    lines = text.splitlines()
    assert lines[0] == "bad: inter-rail"
    assert max(map(len, lines)) <= 80
    rows = lines[-16:]
    assert all(row.count("!") == 7 and row.count(" .") == 1 for row in rows)


@pytest.mark.parametrize(
    ("fault", "shape"), [("gpu tx", (1, 72)), ("leaf", (32, 8)), ("node alone", (24, 1)), ("gpu fails", (4, 8))]
)
def test_larger_ones_show_the_bad(fault: str, shape: tuple[int, int]) -> None:
    case = planted(4, fault, shape)
    found = report(case)
    text = found.text()
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 60
    assert "!" in text.split("siblings reach" if "% of" in text else "GBps,")[-1]
    assert not found.ok


def test_no_fault() -> None:
    found = report(healthy(4))
    assert found.ok
    assert found.text().splitlines()[0] == "nothing stands out"
    document = json.loads(found.json())
    assert document["verdict"]["kind"] == "none"
    assert document["verdict"]["culprits"] == []


def test_json_says_what_was_measured() -> None:
    case = planted(3, "gpu fails", (2, 4))
    document = report(case).to_dict()
    assert document["schema"] == 1
    assert document["ok"] is False
    assert document["verdict"]["culprits"] == list(case.culprits)
    assert document["pairs"] == {"ok": 42, **{key: 14 for key in document["pairs"] if key != "ok"}}
    same = document["gbps"]["same node"]
    assert same["lowest"] <= same["median"] <= same["highest"]


def test_color_marks_the_bad_and_changes_nothing_else() -> None:
    found = report(planted(4, "rails", (2, 4)))
    painted = found.text(color=True)
    assert "\033[31m" in painted
    import re

    assert re.sub(r"\033\[[\d;]*m", "", painted) == found.text()


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for shape in ((2, 4), (24, 4)):
        report(planted(4, "gpu fails", shape)).save(tmp_path / "pairs.png")
        assert (tmp_path / "pairs.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = planted(5, "gpu fails", (2, 4))
    file = tmp_path / "pairs.csv"
    save_pairs(case.evidence, file)
    assert _pairs.run(arguments("--from", str(file), "--json", "-o", str(tmp_path / "again.json"))) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["kind"] == "gpu"
    assert document["verdict"]["culprits"] == list(case.culprits)
    assert load_pairs(tmp_path / "again.json")["status"] == case.evidence["status"]
    save_pairs(healthy(4).evidence, file)
    assert _pairs.run(arguments("--from", str(file), "-q")) == 0
    assert capsys.readouterr().out == ""


def test_the_room_is_light() -> None:
    """Its names, and what needs no numbers, load neither numpy nor torch."""
    program = (
        "import sys, mldebug.cluster as room; room.pair_matrix, room.PairsVerdict, room.gpu_rounds, room.load_pairs\n"
        "import mldebug.cli._pairs\n"
        "sys.exit([name for name in ('numpy', 'torch', 'rich', 'matplotlib') if name in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_picture_without_matplotlib_is_told_before_anything_is_measured(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"a\.png: a picture needs matplotlib") as caught:
        file_or_picture_to_write("--output", str(tmp_path / "a.png"))
    assert "[plot]'" in caught.value.hint
    assert file_or_picture_to_write("--output", str(tmp_path / "a.csv")) == str(tmp_path / "a.csv")


def test_the_verdict_is_shown_where_the_file_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "pairs.csv"
    source.write_text("src,dst,gbps,status\na:0,b:0,40,ok\nb:0,a:0,40,ok\n")
    assert main(["pairs", "--from", str(source), "-o", "/dev/full"]) == 1
    told = capsys.readouterr()
    assert "2 ok" in told.out and "mldebug: cannot write /dev/full" in told.err
