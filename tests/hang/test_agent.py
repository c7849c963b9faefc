"""The agent: heartbeat, steps, the record of collectives, stacks by signal; and that it is inert unless asked for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import mldebug.hang
from mldebug.core import stacks
from mldebug.core.stacks import Stacks
from mldebug.hang import Evidence, collect
from mldebug.hang import _collect as collect_module
from mldebug.hang._agent_files import read_record
from mldebug.hang._find import processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., int]
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PTH = Path(mldebug.hang.__file__).with_name("mldebug_agent.pth")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(program)` runs it as a rank, with its agent in a folder of the test, until it says a line."""
    started: list[subprocess.Popen[bytes]] = []
    folder = tmp_path / "agent"

    def run(program: str, agent: bool = True) -> int:
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        env["MLDEBUG_AGENT"] = str(folder) if agent else ""
        program = "from mldebug.hang._agent import enable, mark\n" + program
        process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield run
    for process in started:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if process.returncode != -signal.SIGKILL and folder.exists():
            assert list(folder.iterdir()) == []


READY = "print('ready', flush=True)\nimport time\n"


def look(pid: int) -> Evidence:
    return collect(pids=[pid], interval=0.4)


def test_a_heartbeat_that_moves_and_the_step(start: Start) -> None:
    (rank,) = look(start(f"enable(); mark(41); mark(42)\n{READY}time.sleep(600)"))["ranks"]
    beats = rank["progress"]["heartbeat"]
    assert beats[1] > beats[0]
    assert rank["progress"]["step"] == [42, 42]
    assert [thread["name"] for thread in rank["samples"][-1]["threads"]] == ["MainThread"]


def test_mark_alone_needs_no_thread(start: Start) -> None:
    program = f"mark(0)\n{READY}\nfor step in range(10**9):\n    mark(step)\n    time.sleep(0.01)"
    pid = start(program)
    for _ in range(60):  # a busy machine may let it wait from one reading to the next
        (rank,) = look(pid)["ranks"]
        first, last = rank["progress"]["step"]
        if last > first:
            break
    assert last > first


def test_the_heartbeat_stands_while_the_gil_is_held(start: Start) -> None:
    program = f"""
import re, threading
enable()
{READY}
time.sleep(0.5)
threading.Thread(target=re.match, args=(r"(a+)+$", "a" * 64 + "!"), daemon=True).start()
time.sleep(600)
"""
    pid = start(program)
    for _ in range(60):  # a busy machine may let the thread begin late
        (rank,) = look(pid)["ranks"]
        if len(set(rank["progress"]["heartbeat"])) == 1:
            break
    os.kill(pid, signal.SIGKILL)
    assert len(set(rank["progress"]["heartbeat"])) == 1


def test_a_forked_child_has_no_agent_and_leaves_the_page_alone(run_python: Run, tmp_path: Path) -> None:
    program = """
import os
from mldebug.hang import _agent
from mldebug.hang._page import STEP
assert _agent.enable()
_agent.mark(5)
child = os.fork()
if child == 0:
    _agent.mark(99)
    os._exit(0 if not _agent.enable() else 1)
print(os.waitpid(child, 0)[1], _agent._page[STEP], sorted(os.listdir(os.environ["MLDEBUG_AGENT"]))[0].split(".")[1])
"""
    done = run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")})
    assert done.stdout == "0 5 page\n", done.stderr
    assert list((tmp_path / "agent").iterdir()) == []


def test_mark_is_cheap(run_python: Run, tmp_path: Path) -> None:
    program = """
import timeit
from mldebug.hang._agent import mark
mark(0)
print(min(timeit.repeat(lambda: mark(3), number=10000, repeat=7)) / 10000)
"""
    done = run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")})
    assert float(done.stdout) < 2e-6


def test_a_folder_of_others_is_not_used(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("agent").mkdir(mode=0o777)
    tmp_path.joinpath("agent").chmod(0o777)
    program = "from mldebug.hang._agent import enable, mark; mark(1); print(enable())"
    assert run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")}).stdout == "False\n"


def test_stacks_by_signal_where_ptrace_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""
import threading
def inner():
    {READY.replace(chr(10), "; ")}time.sleep(600)
enable()
threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
inner()
"""
    pid = start(program)
    monkeypatch.setattr(collect_module, "dump", lambda *_args, **_options: Stacks("no-permission", "not permitted"))
    for _ in range(60):  # the agent looks at the names of threads once a second
        (rank,) = look(pid)["ranks"]
        if all({"MainThread", "helper"} <= {one["name"] for one in sample["threads"]} for sample in rank["samples"]):
            break
    assert rank["status"] == "ok"
    for sample in rank["samples"]:
        threads = {thread["name"]: [frame["name"] for frame in thread["frames"]] for thread in sample["threads"]}
        assert threads["MainThread"] == ["inner", "<module>"]
        assert "wait" in threads["helper"]
    assert stacks.process_state(pid) == "S"


def test_without_an_agent_the_refusal_stays(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    pid = start(f"{READY}time.sleep(600)", agent=False)
    monkeypatch.setattr(collect_module, "dump", lambda *_args, **_options: Stacks("no-permission", "run as root"))
    (rank,) = look(pid)["ranks"]
    assert (rank["status"], rank["why"]) == ("no-permission", "run as root")
    assert stacks.process_state(pid) == "S"  # no signal was sent to it: it would have ended


def as_in_a_container(*command: str, folder: Path, closed: str = "") -> subprocess.Popen[str]:
    """Run `command` without any right to look at other processes; of `closed` processes the memory cannot be opened."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env.pop("MLDEBUG_AGENT", None)
    words = [sys.executable, str(PROGRAMS / "confined.py"), *command]
    env["CONFINED_PIDS"] = closed
    return subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="a test that closes files of /proc has to be root")
@pytest.mark.parametrize("agent", ["agent", "plain"])
def test_a_hung_job_that_may_not_be_traced(agent: str) -> None:
    pytest.importorskip("torch")
    folder = Path(tempfile.mkdtemp())  # not in pytest's own folder, which other users cannot enter
    folder.chmod(0o777)
    program = shutil.copy(PROGRAMS / "guarded_save.py", folder)
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", "3"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, program, agent]
    job = as_in_a_container(*torchrun, folder=folder)
    document = {}
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and job.poll() is None:
            time.sleep(3)
            ranks = ",".join(str(one.pid) for one in processes().values() if program in one.command)
            spy = as_in_a_container(
                *[sys.executable, "-m", "mldebug", "spy", "--json", "--interval", "1"], folder=folder, closed=ranks
            )
            stdout, stderr = spy.communicate(timeout=60)
            document = json.loads(stdout) if stdout else {"verdict": {"text": stderr}, "ranks": []}
            whys = [rank["why"] for rank in document["ranks"]]
            if ranks.count(",") >= 3 and len(whys) == 3 and (agent == "plain" or document["verdict"]["hung"]):
                break
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.communicate(timeout=60)
        shutil.rmtree(folder)
        shutil.rmtree(Path("/dev/shm", "mldebug-65534"), ignore_errors=True)
    verdict = document["verdict"]
    if agent == "agent":
        assert (verdict["kind"], verdict["culprits"]) == ("rank-guarded-collective", [0]), verdict
        assert [rank["status"] for rank in document["ranks"]] == ["ok"] * 3
    else:
        assert not verdict["hung"]
        assert [rank["status"] for rank in document["ranks"]] == ["no-permission"] * 3
        for why in whys:
            assert "docker run --cap-add SYS_PTRACE" in why and "mldebug.hang.enable()" in why


def test_the_record_of_gloo(start: Start, tmp_path: Path) -> None:
    program = f"""
enable()
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
group = dist.new_group([0], group_desc="mine")
for step in range(3):
    dist.all_reduce(torch.ones(2, 3))
dist.broadcast(torch.ones(1), 0, group=group)
{READY}time.sleep(600)
"""
    evidence = collect(pids=[start(program)], interval=0.5, timeout=30)
    for _ in range(5):
        if "record" in evidence["ranks"][0]:
            break
        evidence = collect(pids=[evidence["ranks"][0]["pid"]], interval=0.5, timeout=30)
    record = evidence["ranks"][0]["record"]
    assert [(call["group"], call["seq"], call["op"], call["done"]) for call in record["calls"]] == [
        ("0", 1, "all_reduce", True),
        ("0", 2, "all_reduce", True),
        ("0", 3, "all_reduce", True),
        ("1", 1, "broadcast", True),
    ]
    assert record["calls"][0]["sizes"] == [[2, 3]]
    assert record["calls"][0]["frames"][-1]["name"] == "<module>"
    assert record["whole"]
    assert record["groups"]["1"] == {"desc": "mine", "ranks": [0]}


def test_a_record_is_plain_values_and_nothing_else() -> None:
    entry = {
        "record_id": 7, "process_group": ("0", "default_pg"), "collective_seq_id": 0, "p2p_seq_id": 3, "is_p2p": True,
        "profiling_name": "nccl:send 0->1", "state": "completed", "input_sizes": [[4]], "frames": [],
    }  # fmt: skip
    record = read_record(pickle.dumps({"entries": [entry], "pg_config": {"0": {"ranks": "[0, 1]"}}}))
    (call,) = record["calls"]
    assert (call["seq"], call["op"], call["done"], call["p2p"]) == (3, "send 0->1", True, True)
    assert not record["whole"]
    assert record["groups"]["0"]["ranks"] == [0, 1]
    barrier = {**entry, "profiling_name": "nccl:all_reduce_barrier"}
    assert read_record(pickle.dumps({"entries": [barrier]}))["calls"][0]["op"] == "barrier"
    with pytest.raises(pickle.UnpicklingError):
        read_record(pickle.dumps({"entries": [os.path.join], "pg_config": print}))


def test_the_pth_is_installed_where_python_reads_it() -> None:
    try:
        found = distribution("mldebug-toolkit")
    except PackageNotFoundError:
        pytest.skip("mldebug is not installed here")
    (name,) = [file for file in found.files or () if file.name == PTH.name and len(file.parts) == 1]
    installed = Path(str(found.locate_file(name)))
    assert installed.read_text(encoding="utf-8") == PTH.read_text(encoding="utf-8")
    assert installed.parent in map(Path, site.getsitepackages())


def test_a_process_that_is_not_asked_for_an_agent_starts_as_fast(run_python: Run) -> None:
    line = PTH.read_text(encoding="utf-8")
    program = f"""
import timeit
print(min(timeit.repeat({line!r}, number=1000, repeat=7)) / 1000)
"""
    assert float(run_python(program, env={"MLDEBUG_AGENT": ""}).stdout) < 50e-6


def test_the_line_in_the_pth_is_inert(run_python: Run, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    folder.joinpath("mldebug_agent.pth").write_text(PTH.read_text(encoding="utf-8"))
    assert len(PTH.read_text(encoding="utf-8").splitlines()) == 1
    program = f"""
import site, sys
site.addsitedir({str(folder)!r})
agent = sys.modules.get("mldebug.hang._agent")
print(agent is not None, agent is not None and agent._agent is not None, "torch" in sys.modules)
"""
    where = {"MLDEBUG_AGENT": str(tmp_path / "agent")}
    assert run_python(program, env={"MLDEBUG_AGENT": ""}).stdout == "False False False\n"
    assert run_python(program, env={**where, "RANK": "0"}).stdout == "True True False\n"
    assert run_python(program, env={**where, "RANK": ""}).stdout == "True False False\n"  # a launcher
