"""Binding for real: affinity and memory policy of processes, their threads, children and workers."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., "CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two CPUs"
)
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

# A machine of this one's CPUs whose first one alone is near the GPU; what is bound is this process itself.
NEAR_FIRST = """
import os, sys, tempfile, threading
from pathlib import Path
from tests.perf.numa_kit import FakeMachine
from mldebug.perf.numa import _bind

first, *others = sorted(os.sched_getaffinity(0))

class Here(FakeMachine):
    affinity = lambda self: frozenset(os.sched_getaffinity(0))
    bind = _bind.Machine.bind

def here():
    machine = Here(Path(tempfile.mkdtemp(dir=os.environ["FOLDER"])))
    machine.add_nodes({0: str(first), 1: ",".join(map(str, others))})
    machine.add_gpu("0000:01:00.0", 0)
    return machine
"""


def test_all_threads_are_bound_and_children_inherit(run_python: Run, tmp_path: Path) -> None:
    program = (
        NEAR_FIRST
        + """
import subprocess, time
pinned, go = threading.Event(), threading.Event()
seen = {}
def plain():
    go.wait(); seen["plain"] = os.sched_getaffinity(0)
def on_purpose():
    os.sched_setaffinity(0, others); pinned.set(); go.wait(); seen["pinned"] = os.sched_getaffinity(0)
threads = [threading.Thread(target=one) for one in (plain, on_purpose)]
[one.start() for one in threads]
pinned.wait()
report = _bind.bind(here(), None, share=False, memory=None)
go.set(); [one.join() for one in threads]
look = "import os; print(os.sched_getaffinity(0))"
child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
assert report.bound and report.cpus == str(first), report
assert os.sched_getaffinity(0) == {first} == seen["plain"], seen
assert seen["pinned"] == set(others), seen
assert child.stdout.strip() == str({first}), child
"""
    )
    done = run_python(program, env={"FOLDER": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_workers_of_a_dataloader_inherit(run_python: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = (
        NEAR_FIRST
        + """
import torch
class Where(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return sorted(os.sched_getaffinity(0))
_bind.bind(here(), None, share=False, memory=None)
for cpus in torch.utils.data.DataLoader(Where(), batch_size=None, num_workers=2):
    assert [int(cpu) for cpu in cpus] == [first], cpus
"""
    )
    done = run_python(program, env={"FOLDER": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_a_failure_in_the_kernel_leaves_all_as_it_was(run_python: Run, tmp_path: Path) -> None:
    program = (
        NEAR_FIRST
        + """
def refused(*_): raise OSError(22, "Invalid argument")
before = os.sched_getaffinity(0)
os.sched_setaffinity, keep = refused, os.sched_setaffinity
report = _bind.bind(here(), None, share=False, memory=None)
assert not report.bound and not report.ok and "invalid argument" in report.why, report
assert os.sched_getaffinity(0) == before
"""
    )
    done = run_python(program, env={"FOLDER": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of get_mempolicy")
def test_the_memory_policy_is_set_and_inherited(run_python: Run) -> None:
    number = 239 if platform.machine() == "x86_64" else 236
    libc = ctypes.CDLL(None, use_errno=True)
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    if libc.syscall(ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0)):
        pytest.skip("this sandbox has no get_mempolicy")
    look = f"""
import ctypes
mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
def policy():
    ctypes.CDLL(None).syscall({number}, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0))
    return mode.value, mask[0]
"""
    program = (
        look
        + f"""
import subprocess, sys
from mldebug.perf.numa._memory import set_memory_policy
said = set_memory_policy("prefer", 0)
child = subprocess.run([sys.executable, "-c", {look!r} + "print(policy())"], capture_output=True, text=True).stdout
print(said, policy(), child.strip(), set_memory_policy("bind", 4000), sep="|")
"""
    )
    done = run_python(program)
    said, own, child, far = done.stdout.strip().split("|")
    if "not permitted" in said:
        assert "CAP_SYS_NICE" in said
        return
    assert said == "memory from node 0 first" and own == child == "(1, 1)", done
    assert far.startswith("memory policy not set: ")


class TestCommand:
    def test_a_script_runs_with_its_own_arguments_and_status(self, run_python: Run, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
        done = run_python("-c", MAIN, "numa", "--", script, "--lr", "1")
        assert (done.returncode, done.stdout) == (7, "['--lr', '1']\n")
        assert "CPUs left as they were" in done.stderr and "no GPU" in done.stderr

    def test_json_is_one_document(self, run_python: Run, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("print('hello')")
        done = run_python("-c", MAIN, "numa", "--json", "--", script)
        assert done.returncode == 0 and json.loads(done.stdout)["bound"] is False and "hello" in done.stderr

    def test_a_program_takes_the_place_of_the_process(self, run_python: Run) -> None:
        done = run_python("-c", MAIN, "numa", "-q", "--no-python", "--", "sh", "-c", "echo $0 $1; exit 5", "a", "b")
        assert (done.returncode, done.stdout) == (5, "a b\n")

    def test_a_program_that_is_not_there(self, run_python: Run) -> None:
        done = run_python("-c", MAIN, "numa", "-q", "--no-python", "--", "no-such-program")
        assert done.returncode == 2 and "cannot run no-such-program: no such file" in done.stderr

    @pytest.mark.parametrize("words", [["--device", "0"], ["--memory", "bind"], ["--no-python"]], ids=" ".join)
    def test_options_that_need_a_script(self, run_python: Run, words: list[str]) -> None:
        done = run_python("-c", MAIN, "numa", *words)
        assert done.returncode == 2 and "no script to run" in done.stderr

    def test_the_table(self, run_python: Run) -> None:
        done = run_python("-c", MAIN, "numa")
        assert done.returncode == 0 and "CPUs allowed" in done.stdout, done
        document = json.loads(run_python("-c", MAIN, "numa", "--json").stdout)
        assert document["schema"] == 1 and document["rows"] == []


# The command by its module, as the table of commands has it.
MAIN = """
import sys
from mldebug import cli
cli.COMMANDS.setdefault("numa", ("mldebug.cli._numa", "", "bind"))
sys.exit(cli.main())
"""
