"""tools/swiglu-maf-bench.py: by rule, and measured on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TOOL = Path(__file__).parent.parent.parent / "tools" / "swiglu-maf-bench.py"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_it_says_what_it_would_measure(run_torch: Run) -> None:
    done = run_torch(TOOL, "--hidden", "4096", "--d-ff-base", "10922", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["asked"] == 10922 and report["tokens"] == 4 * 4096
    if not report["measured"]:
        assert report["sizes"][0]["intermediate"] == 11008


SMALL = ["--hidden", "64", "--seq", "32", "--batch-size", "1", "--distance", "8", "--dtype", "float32", "--cpu"]


def test_the_table_of_the_classic_script(run_torch: Run) -> None:
    done = run_torch(TOOL, *SMALL, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    head, _, table = done.stdout.partition(" d_ff  tflops mlp_params\n")
    assert head.splitlines() == [
        "Wanted the closest to 170 d_ff value that leads to the highest TFLOPS (d_hidden=64)",
        "",
        "Searching 4 steps in the range of 162 .. 178",
        "Results: baseline, followed by near-by best performing d_ff results:",
        "",
    ]
    rule, base, again, *best = table.splitlines()
    assert rule == again == "-" * 25 and re.fullmatch(r"170 +\d+\.\d\d 32640", base) and len(best) == 5
    rows = [re.fullmatch(r"(\d+) +(\d+\.\d\d) (\d+)", line) for line in best]
    found = [(int(row[1]), float(row[2]), int(row[3])) for row in rows if row]
    assert len(found) == 5 and all(size * 3 * 64 == weights for size, _, weights in found)
    assert [rate for _, rate, _ in found] == sorted((rate for _, rate, _ in found), reverse=True)


def test_the_report_has_what_was_measured(run_torch: Run) -> None:
    done = run_torch(TOOL, *SMALL, "--step", "8", "--json", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["measured"] and [one["intermediate"] for one in report["sizes"]].count(170) == 1
    assert all(one["tflops"] > 0 and one["ms"] > 0 for one in report["sizes"])


def test_wrong_usage_is_status_2() -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--hidden", "x"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "--hidden" in done.stderr and "Traceback" not in done.stderr
