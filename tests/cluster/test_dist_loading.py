"""dist-test where ranks hang while they load torch, and on hosts whose /dev/shm takes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import judge_dist_test
from mldebug.cluster.dist._evidence import empty, new_rank
from mldebug.cluster.dist._facts import shm_fault
from mldebug.cluster.dist._report import make_report

STUCK = """F.find_spec (/nfs/site/hook.py:6)
_find_spec (<frozen importlib._bootstrap>:1098)
_find_and_load (<frozen importlib._bootstrap>:1178)
<module> (/nfs/torch/__init__.py:1931)"""


def evidence(**facts: Any) -> dict[str, Any]:
    seen = empty(2, "gloo", 30.0)
    for rank in range(2):
        one = new_rank(rank, rank, "node1", "boot", 1000 + rank, 500)
        one["facts"] = dict(facts)
        seen["ranks"][str(rank)] = one
    return seen


def test_each_rank_that_does_not_load_torch_is_named_with_its_place() -> None:
    seen = evidence()
    seen["ended"] = "no rank got on for 30 s"
    for one in seen["ranks"].values():
        one |= {"phase": "import", "step": 1, "age": 31.0, "state": "R", "stack": "<module> (/nfs/torch/_ops.py:3)"}
    seen["ranks"]["1"] |= {"state": "D", "stack": STUCK}
    first, second = judge_dist_test(seen).culprits
    assert [(one.kind, one.rank, one.phase) for one in (first, second)] == [
        ("behind", 1, "import"),  # which does not compute
        ("behind", 0, "import"),
    ]
    assert "has not loaded torch in 31 s" in first.reason and "--start-timeout" in first.hint
    shown = make_report(seen).text()
    assert "    F.find_spec (/nfs/site/hook.py:6)\n    <module> (/nfs/torch/__init__.py:1931)\n" in shown
    assert "/nfs/torch/_ops.py:3" in shown


def test_a_shm_that_takes_nothing_is_a_note_without_a_gpu_too() -> None:
    seen = evidence(shm=1 << 40, shm_fault="read-only file system")
    assert [note for note in judge_dist_test(seen).notes if "read-only file system" in note and "ranks 0, 1" in note]
    assert judge_dist_test(evidence(shm=1 << 40, shm_fault="")).notes == ()


def test_whether_it_takes_a_file(tmp_path: Path) -> None:
    assert shm_fault(str(tmp_path)) == ""
    assert shm_fault(str(tmp_path / "none")) == "no such file or directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts, so it needs root and unshare")
@pytest.mark.parametrize(
    "mounted, fault",
    [
        ("mount -t tmpfs -o ro none $0", "read-only file system"),
        ("mount -t tmpfs -o size=64k none $0; head -c 1000000 /dev/zero > $0/all", "no space left on device"),
    ],
)
def test_a_read_only_and_a_full_one(tmp_path: Path, mounted: str, fault: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not unshare mounts")
    program = "import sys; from mldebug.cluster.dist._facts import shm_fault; print(shm_fault(sys.argv[1]))"
    script = f'{mounted} 2>/dev/null; exec "$1" -c "$2" "$0"'
    words = ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, program]
    assert subprocess.run(words, check=False, capture_output=True, text=True, timeout=60).stdout == f"{fault}\n"
