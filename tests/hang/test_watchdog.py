"""hang_watchdog: a job that looks after itself, with real launchers; and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mldebug import hang_watchdog
from mldebug.core.errors import UsageError
from mldebug.hang import load_evidence, spy
from mldebug.hang._find import processes
from tests.at_once import AtOnce
from tests.ranks.rank_kit import FORKED

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROGRAM = Path(__file__).parent / "programs" / "watched_by_itself.py"
ROOT = Path(__file__).resolve().parents[2]
# A rank that enters the scope, says so, and waits; `{body}` runs inside.
RANK = """
import os, signal, sys, time
from mldebug import hang_watchdog
with hang_watchdog(timeout=1, on_hang="spy"):
    print("ready", flush=True)
    {body}
print("left", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the agents; no process that looks may be left at the end."""
    folder = tmp_path / "agent"
    yield folder
    assert gone(lambda: lookers(folder) == []), lookers(folder)


def lookers(folder: Path) -> list[int]:
    found = {one.pid: one for one in processes().values() if "_watchdog_look" in one.line and str(folder) in one.line}
    return [pid for pid, one in found.items() if one.parent not in found]  # a child of it looks like it until it execs


def gone(holds: Callable[[], bool], patience: float = 60) -> bool:
    deadline = time.monotonic() + patience
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


def job(folder: Path, ranks: int, *args: str) -> tuple[list[str], dict[str, str]]:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MLDEBUG_AGENT": str(folder), "PYTHONPATH": path}
    return [sys.executable, str(FORKED), "-m", "torch.distributed.run", *where, str(PROGRAM), *args], env


# Jobs under torchrun mostly wait: for the watchdog, or to see that it says nothing. All are started at once, by the
# first test of them that runs.


@dataclass(frozen=True)
class Ended:
    status: int
    err: str
    called: str  # the line of the job's own function
    lookers: list[int]  # processes that still look
    files: list[Path]  # what the agents left
    verdict: tuple[str, tuple[int, ...], str] | None = None  # of the evidence that was written


def run_job(folder: Path, ranks: int, *args: str) -> Ended:
    output = args[2:3]
    command, env = job(folder, ranks, *args)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    gone(lambda: lookers(folder) == [])
    if args[0] != "gil":  # a rank that is killed clears up nothing
        gone(lambda: list(folder.iterdir()) == [])
    verdict = None
    if output:
        report = spy(load_evidence([Path(output[0])]))
        verdict = (report.verdict.kind, report.verdict.culprits, report.verdict.text)
    return Ended(done.returncode, done.stderr, "", lookers(folder), list(folder.iterdir()), verdict)


def call_job(folder: Path) -> Ended:
    command, env = job(folder, 2, "skip", "call")
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        called = next((line for line in iter(process.stdout.readline, "") if line.startswith("called:")), "")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    gone(lambda: lookers(folder) == [])
    return Ended(process.returncode, "", called, lookers(folder), [])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("jobs")
    with AtOnce(4) as found:
        found.add("slow", lambda: run_job(folder / "slow", 2, "slow", "kill"))
        found.add("skip", lambda: run_job(folder / "skip", 3, "skip", "kill", str(folder / "evidence.json")))
        found.add("gil", lambda: run_job(folder / "gil", 2, "gil", "kill"))
        found.add("call", lambda: call_job(folder / "call"))
        yield found


@pytest.mark.timeout(300)
def test_a_hung_job_names_its_culprit_and_is_ended(jobs: AtOnce) -> None:
    done: Ended = jobs["skip"]
    assert done.status != 0
    assert done.err.count("hung: skipped-collective, rank 1") == 1  # one process looks, not three
    assert "the ranks of this node were ended\n" in done.err
    assert done.verdict is not None and done.verdict[:2] == ("skipped-collective", (1,))
    assert done.verdict[2].split()[:4] == ["Rank", "1", "has", "left"]
    assert (done.lookers, done.files) == ([], [])


@pytest.mark.timeout(300)
def test_the_verdict_comes_where_the_gil_is_held(jobs: AtOnce) -> None:
    done: Ended = jobs["gil"]
    assert "hung: gil-held, rank 1" in done.err
    assert done.status != 0 and done.lookers == []


@pytest.mark.timeout(300)
def test_a_function_gets_the_report(jobs: AtOnce) -> None:
    done: Ended = jobs["call"]
    kind, culprits, _rank = json.loads(done.called.partition(":")[2])
    assert (kind, culprits) == ("skipped-collective", [1])
    assert done.lookers == []


@pytest.mark.timeout(300)
def test_a_slow_job_is_left_alone(jobs: AtOnce) -> None:
    done: Ended = jobs["slow"]
    assert done.status == 0, done.err
    assert "mldebug" not in done.err
    assert (done.lookers, done.files) == ([], [])


def rank(folder: Path, body: str, number: int = 0, size: int = 1) -> subprocess.Popen[str]:
    env = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "MASTER_PORT": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**env, "MLDEBUG_AGENT": str(folder), "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.format(body=body)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_rank_is_ended(folder: Path, number: int) -> None:
    process = rank(folder, "time.sleep(600)")
    assert len(lookers(folder)) == 1
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number
    assert gone(lambda: list(folder.iterdir()) == []), list(folder.iterdir())


def test_another_rank_takes_over(folder: Path) -> None:
    first = rank(folder, "time.sleep(600)", 0, 2)
    second = rank(folder, "time.sleep(600)", 1, 2)
    (looker,) = lookers(folder)
    first.kill()
    first.communicate()
    assert gone(lambda: lookers(folder) not in ([], [looker])), lookers(folder)
    assert len(lookers(folder)) == 1
    second.kill()
    second.communicate()


def test_a_looker_that_dies_is_started_again_but_not_for_ever(folder: Path) -> None:
    process = rank(folder, "time.sleep(600)")
    seen: set[int] = set()
    for _ in range(3):
        assert gone(lambda: bool(set(lookers(folder)) - seen))
        (looker,) = set(lookers(folder)) - seen
        seen.add(looker)
        os.kill(looker, signal.SIGKILL)
    assert process.stderr is not None
    assert any("watches no more" in line for line in iter(process.stderr.readline, ""))
    time.sleep(1)
    assert lookers(folder) == []
    process.kill()
    process.communicate()


def test_leaving_the_scope_ends_it_and_entering_again_works(run_python: Run, tmp_path: Path) -> None:
    program = """
import os, subprocess
from mldebug import hang_watchdog
def count():
    return len(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split())
scope = hang_watchdog(timeout=60)
@scope
def train(): return count()
print(train(), count(), train(), count(), [one for one in os.listdir(os.environ["MLDEBUG_AGENT"]) if "lock" in one])
"""
    done = run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")})
    assert done.stdout == "1 0 1 0 []\n", done.stderr


def test_where_it_cannot_watch_it_says_so(run_python: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("agent").mkdir(mode=0o777)
    tmp_path.joinpath("agent").chmod(0o777)  # a folder that others can write to
    program = "from mldebug import hang_watchdog\nwith hang_watchdog(): print('trained')"
    done = run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")})
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "does not watch" in done.stderr


def test_wrong_options() -> None:
    with pytest.raises(UsageError, match="timeout is 0"):
        hang_watchdog(0)
    with pytest.raises(UsageError, match="on_hang is 'mail'"):
        hang_watchdog(on_hang="mail")  # type: ignore[arg-type]
