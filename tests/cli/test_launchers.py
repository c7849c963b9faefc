from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_under_torchrun_each_rank_reports(run_python: Run, command: str, script, tmp_path: Path) -> None:
    """torchrun hands the words after -m MODULE on untouched, the `--` too."""
    pytest.importorskip("torch")
    script(command, "command.py")
    # One write: under torchrun streams are not buffered, and the words of two ranks would mix.
    path = script("""
        import os, sys
        sys.stdout.write(f"rank {os.environ['RANK']} {sys.argv[1:]}\\n")
    """)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "-m", "command")
    done = run_python(*launcher, "overflow", "--json", "--", path, "--lr", "1", "--", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"schema": 1, "ok": True, "event": None}] * 2
    for rank in range(2):
        assert f"rank {rank} ['--lr', '1', '--', 'x']" in done.stderr
