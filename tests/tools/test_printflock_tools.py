"""The single files with the classic names: imported and run as ever."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_printflock_is_found_beside_a_script(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("from printflock import printflock as print\nprint('a', 'b', sep=', ', end='.')\n")
    done = run_python(program, env={"PYTHONPATH": str(TOOLS)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "a, b.", "")


def test_every_rank_prints_its_line(run_python: Run) -> None:
    pytest.importorskip("torch")
    done = run_python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        TOOLS / "multi-gpu-non-interleaved-print.py",
        timeout=110,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    lines = [f"This is a very long message from rank {rank} (world_size=2)" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == lines


def test_without_torchrun_it_says_how(run_python: Run) -> None:
    pytest.importorskip("torch")
    done = run_python(TOOLS / "multi-gpu-non-interleaved-print.py")
    assert done.returncode == 1
    assert "torchrun --nproc_per_node 2" in done.stderr
