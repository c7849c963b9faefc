"""A real job of four ranks with all of it on at once: it must print and compute what it does without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mldebug import trace_tail
from tests.ranks.rank_kit import FORKED

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "programs" / "four_ranks.py"
Run = Callable[..., "CompletedProcess[str]"]


def run_job(run_torch: Run, folder: Path, *under: str) -> dict[str, list[str]]:
    """What each rank printed, in its order; `under` is what mldebug is to do."""
    folder.mkdir()
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "4", *under, str(JOB), str(folder)]
    done = run_torch(FORKED, *launch, env=env, timeout=110)
    assert done.returncode == 0, done.stderr
    ranks: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        first, rank = line.split()[:2]
        assert first == "rank", line[:200]
        ranks.setdefault(rank, []).append(line)
    return ranks


@pytest.mark.timeout(300)
def test_four_ranks_with_everything_on_print_and_compute_the_same(run_torch: Run, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    trace = ["-m", "mldebug", "trace", "--threads", "--args", "--returns", "--exceptions", "-o", str(traces), "--"]
    lock = ["-m", "mldebug", "printflock", "--no-prefix", "--"]
    alone = run_job(run_torch, tmp_path / "alone")
    watched = run_job(run_torch, tmp_path / "watched", *trace, *lock)

    assert len(alone["0"]) == 27 and [len(alone[rank]) for rank in "123"] == [25] * 3
    assert watched == alone

    files = sorted(traces.iterdir())
    assert [file.name.split("-")[-2] for file in files] == ["0", "1", "2", "3"]
    for rank, file in enumerate(files):
        text = file.read_text()
        assert f"rank={rank} world=4" in text
        assert text.count('print(f"rank {rank} step') == 12
        assert text.count("[counter] four_ranks.py") == 102  # the loop's 2 x 50 lines, its last look, and a return
        assert "sys.stdout.write(f" in text and os.fspath(JOB) in text
    report = trace_tail([traces])
    assert report.ok, report.text()
