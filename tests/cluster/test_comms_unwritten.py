"""A disk that is full costs the file, and nothing of what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mldebug.cluster.collectives._options import Options
from mldebug.cluster.collectives._report import judged
from mldebug.cluster.collectives._run import new_evidence
from mldebug.cluster.collectives._save import Saver, load


@pytest.mark.timeout(120)
def test_the_table_is_shown_and_the_status_is_1(tmp_path: Path) -> None:
    words = f"-m mldebug comms alltoall --nproc 2 -b 64K -e 64K -n 2 -w 1 --json -o {tmp_path / 'a.jsonl'}"
    # Room for the first row, and not for what comes behind it.
    command = ["sh", "-c", f"ulimit -f 1; exec {sys.executable} {words}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert done.returncode == 1 and not found["ok"] and "cannot write" in found["unsaved"], done.stderr
    # As nccl-tests counts: of what goes to each rank.
    assert row["bytes"] == 65536 and row["count"] == 65536 // 4 // 2 and row["out_of_place"]["wrong"] == 0
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0]) == {"row": row}
    assert found["ended"] == "finished" and [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_disk_that_has_room_again_has_the_whole_file(tmp_path: Path) -> None:
    evidence = new_evidence(Options())
    (tmp_path / "deep").mkdir()
    with Saver(str(tmp_path / "deep" / "a.json")) as saver:
        (tmp_path / "deep").rename(tmp_path / "gone")
        saver.row(evidence)
        assert saver.trouble is not None
        (tmp_path / "gone").rename(tmp_path / "deep")
        saver.end(judged(evidence))
    assert load(str(tmp_path / "deep" / "a.json"))["rows"] == []


def test_a_picture_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    with Saver(str(tmp_path / "a.png")) as saver:
        saver.end(judged(new_evidence(Options())))
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
