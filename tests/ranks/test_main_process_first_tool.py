"""tools/main_process_first.py: the classic names and the classic command line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .rank_kit import FORKED, ROOT, clean, torchrun

TOOL = ROOT / "tools" / "main_process_first.py"
# The tool, whose sleeps of two seconds are for people who watch it.
QUICK = f"""
import runpy, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / 8)
runpy.run_path({str(TOOL)!r}, run_name="__main__")
"""


def test_its_command_under_torchrun(run_torch: Callable[..., Any], tmp_path: Path) -> None:
    """The main process runs and loads alone, and the other after it: what they print has the classic form."""
    tool = tmp_path / "main_process_first.py"
    tool.write_text(QUICK)
    done = run_torch(FORKED, *torchrun(tool, ranks=2)[1:], env=clean(), timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.split(r"\n+", done.stdout.strip()) == [
        "*** Demo global_main_process_first",
        *("Running on global rank 0", "Loading dataset", "Running on global rank 1", "Loading dataset"),
        "*** Demo local_main_process_first",
        *("Running on local rank 0", "Loading dataset", "Running on local rank 1", "Loading dataset"),
        "*** Demo is_main_process_by_path",
        *("Running on main rank local=0 global=0", "Loading dataset"),
        *("Running on non-main rank local=1 global=1", "Loading dataset"),
    ]


PROGRAM = """
import sys
from main_process_first import *
from main_process_first import is_global_main_process, is_local_main_process, path_to_fs_type
print(get_local_rank(), get_global_rank(), is_local_main_process(), is_global_main_process())
print(path_to_fs_type("/proc"), is_local_fs("/proc"), is_main_process_by_path("/proc"))
print("torch" in sys.modules)
if get_global_rank() == 0:
    for scope in (main_process_by_path_first("/proc"), global_main_process_first(), local_main_process_first()):
        with scope:
            pass
"""


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, ["0 0 True True", "proc True True", "False"]),
        (
            {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ["0 4 True False", "proc True True", "False"],
        ),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ["1 5 False False", "proc True False", "False"],
        ),
    ],
)
def test_its_names(environment: dict[str, str], lines: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM]
    env = clean(**environment)
    done = subprocess.run(command, env=env, cwd=TOOL.parent, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.returncode) == (lines, 0), done.stderr
