"""watch: names what hangs, ends all of it, and leaves a healthy job alone."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.core.stacks import Stacks
from mldebug.hang import _collect as collect_module
from mldebug.hang._find import processes
from mldebug.hang._page import WATCHED, reclaim_folders, start_ticks
from mldebug.hang._watch import watch
from mldebug.hang._watch_looks import Looks
from tests.at_once import AtOnce
from tests.ranks.rank_kit import FORKED

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROGRAMS = Path(__file__).parent / "programs"
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


def as_rank(program: str) -> list[str]:
    """The command of a launcher that starts `program` as rank 0 of 1 and waits for it."""
    launcher = (
        "import os, subprocess, sys\n"
        "env = dict(os.environ, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')\n"
        f"sys.exit(subprocess.call([sys.executable, '-c', {program!r}], env=env))"
    )
    return [sys.executable, "-c", launcher]


def forked_torchrun(ranks: int, program: str, *args: str) -> list[str]:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(ranks)]
    return [sys.executable, str(FORKED), "-m", "torch.distributed.run", *where, str(PROGRAMS / program), *args]


def left_behind(word: str) -> list[int]:
    return [one.pid for one in processes().values() if word in one.line and one.pid != os.getpid()]


def start_watch(program: str, ready: Path, *options: str) -> subprocess.Popen[bytes]:
    """The command on a program, once that has made the file `ready`."""
    words = [sys.executable, "-m", "mldebug", "watch", *options, "--", sys.executable, "-c", program]
    process = subprocess.Popen(words, start_new_session=True)
    assert becomes(ready.exists)
    return process


def becomes(holds: Callable[[], bool], patience: float = 100) -> bool:
    deadline = time.monotonic() + patience
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def folders(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"{WATCHED}{pid}-")]


# Jobs that mostly wait, as watch does, are started at once by the first test of them. These tests come before those
# that call watch() here: it buries what ends below this process.


def under_watch(options: Sequence[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mldebug", "watch", *options, "--on-hang", "spy,kill", "--json", "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)


def slow_jobs() -> subprocess.CompletedProcess[str]:
    benchmark = Path(__file__).parents[1] / "benchmarks" / "watch_healthy.py"
    words = [sys.executable, str(benchmark), "--quick"]
    return subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    folder = tmp_path_factory.mktemp("jobs")
    with AtOnce(3) as found:
        found.add("slow", slow_jobs)
        found.add("hung", lambda: under_watch(["--timeout", "4"], forked_torchrun(3, "guarded_gather.py")))
        healthy = forked_torchrun(2, "healthy_steps.py", "40", "20")
        found.add("healthy", lambda: under_watch(["--timeout", "3"], healthy))
        for number in SIGNALS:
            found.add(number, lambda number=number: signalled(folder, number))
        yield found


def test_a_hung_gloo_job(jobs: AtOnce) -> None:
    pytest.importorskip("torch")
    done = jobs["hung"]
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["verdict"]["hung"]
    assert document["verdict"]["kind"] == "rank-guarded-collective"
    assert document["watch"]["left"] == []
    assert left_behind("guarded_gather.py") == []


def test_no_alarm_while_rank_0_writes_a_checkpoint(jobs: AtOnce) -> None:
    pytest.importorskip("torch")
    document = json.loads(jobs["healthy"].stdout)
    assert not document["verdict"]["hung"], document["verdict"]
    assert document["ok"]
    assert document["watch"]["looks"] > 2


@pytest.mark.timeout(300)
def test_slow_jobs_are_left_alone(jobs: AtOnce) -> None:
    pytest.importorskip("torch")
    done = jobs["slow"]
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "3 of 3 left alone"


def signalled(folder: Path, number: int) -> tuple[int, int, int]:
    """Of a job whose watch got a signal: its folders at the start, the status, its folders at the end."""
    ready = folder / f"ready-{number}"
    program = f"""
import signal, sys, time
got = []
def handle(number, frame):
    got.append(number)
signal.signal({number:d}, handle)
open({str(ready)!r}, "w").close()
while not got:
    time.sleep(0.1)
time.sleep(1)
sys.exit(20 + len(got))
"""
    process = start_watch(program, ready)
    before = len(folders(process.pid))
    process.send_signal(number)
    return before, process.wait(100), len(folders(process.pid))


@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_signals_go_to_the_job_once(jobs: AtOnce, number: int) -> None:
    assert jobs[number] == (1, 21, 0)


def test_a_stopped_rank_is_named_and_all_of_it_ended() -> None:
    word = f"very-odd-word-{os.getpid()}"
    program = f"""
import os, signal, subprocess, sys
sleeper = "import time; time.sleep(600)  # {word}"
subprocess.Popen([sys.executable, "-c", sleeper])
subprocess.Popen([sys.executable, "-c", f"import os; os.fork() and os._exit(0); os.setsid(); {{sleeper}}"])
subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + sleeper])
os.kill(os.getpid(), signal.SIGSTOP)  # {word}
"""
    alarms = []
    report = watch(as_rank(program), timeout=1, on_hang=("spy", "kill"), on_alarm=alarms.append)
    assert (report.verdict.hung, report.verdict.kind, report.verdict.culprits) == (True, "process-stopped", (0,))
    assert alarms == [report.spy]
    assert report.killed
    assert report.left == ()
    assert left_behind(word) == []
    assert "was ended" in report.text()
    document = json.loads(report.json())
    assert (document["ok"], document["verdict"]["kind"], document["watch"]["killed"]) == (
        False,
        "process-stopped",
        True,
    )
    assert not report.ok


def test_without_kill_the_job_goes_on() -> None:
    program = """
import os, signal, subprocess, sys
words = f"import os, time; time.sleep(6); os.kill({os.getpid()}, {signal.SIGCONT:d})"
with subprocess.Popen([sys.executable, "-c", words]):
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(7)
"""
    alarms = []
    report = watch(as_rank(program), timeout=1, on_alarm=alarms.append)
    assert len(alarms) == 1
    assert (report.status, report.killed, report.verdict.kind) == (7, False, "process-stopped")


def test_what_loses_its_parent_is_buried_while_the_job_runs() -> None:
    """Else a job of days with many such processes fills the table of the machine."""
    program = """
import os, subprocess, sys, time
starts = "import subprocess; print(subprocess.Popen(['true']).pid)"
orphan = int(subprocess.run([sys.executable, "-c", starts], stdout=subprocess.PIPE).stdout)
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{orphan}") and time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(os.path.exists(f"/proc/{orphan}"))
"""
    assert watch([sys.executable, "-c", program], timeout=300).status == 0


def test_the_status_of_a_job_that_ends() -> None:
    report = watch(as_rank("import sys; sys.exit(3)"), timeout=60)
    assert (report.status, report.verdict.hung, report.ok) == (3, False, False)
    assert watch([sys.executable, "-c", "pass"], timeout=60).ok


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="cannot run no-such-command"):
        watch(["no-such-command"])
    with pytest.raises(UsageError, match="no command"):
        watch([])
    with pytest.raises(UsageError, match="on_hang has no 'mail'"):
        watch(["true"], on_hang=("mail",))


def test_the_command_under_json(run_python: Run) -> None:
    command = as_rank("print('from the job'); import sys; sys.exit(4)")
    done = run_python("-m", "mldebug", "watch", "--json", "--", *command)
    assert done.returncode == 4
    assert json.loads(done.stdout)["verdict"]["hung"] is False
    assert "from the job" in done.stderr
    done = run_python("-m", "mldebug", "watch", "--", *command)
    assert (done.returncode, done.stdout) == (4, "from the job\n")


def test_the_command_says_what_is_wrong(run_python: Run) -> None:
    done = run_python("-m", "mldebug", "watch", "--on-hang", "mail", "--", "true")
    assert done.returncode == 2
    assert "'mail' is not one of spy and kill" in done.stderr
    assert run_python("-m", "mldebug", "watch").returncode == 2


def test_a_second_ctrl_c_ends_a_job_that_ignores_them(tmp_path: Path) -> None:
    word = f"odd-word-{os.getpid()}"
    program = f"""
import signal, time  # {word}
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    process = start_watch(program, tmp_path / "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(100) != 0
    assert left_behind(word) == []
    assert folders(process.pid) == []


def test_the_job_outlives_a_watch_that_is_killed_and_the_next_one_clears_up(tmp_path: Path) -> None:
    program = f"""
import os, time
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(2)
open({str(tmp_path / "done")!r}, "w").close()
"""
    process = start_watch(program, tmp_path / "ready")
    process.kill()
    process.wait()
    assert becomes((tmp_path / "done").exists)
    assert len(folders(process.pid)) == 1
    assert watch([sys.executable, "-c", "pass"]).ok
    assert folders(process.pid) == []


def test_folders_in_use_are_not_cleared_up(tmp_path: Path) -> None:
    mine = Path("/dev/shm", f"{WATCHED}{os.getpid()}-{start_ticks('self')}-abc")
    busy = Path("/dev/shm", f"{WATCHED}999999999-1-abc")  # the watch is gone, and a rank of its job lives on
    try:
        for folder in (mine, busy):
            folder.mkdir(mode=0o700)
        for name in (f"{os.getpid()}.page", "999999998.page", "999999998.record", "not-ours"):
            busy.joinpath(name).touch()
        reclaim_folders()
        assert mine.exists()
        assert sorted(path.name for path in busy.iterdir()) == [f"{os.getpid()}.page", "not-ours"]
    finally:
        for folder in (mine, busy):
            shutil.rmtree(folder)


def test_a_full_shared_memory_hurts_neither_job_nor_watch(run_python: Run, tmp_path: Path) -> None:
    program = """
import os, sys, errno
def full(*_args):
    raise OSError(errno.ENOSPC, "No space left on device")
os.posix_fallocate = full
from mldebug.hang import _agent
_agent.mark(1)
print(_agent.enable(), os.listdir(os.environ["MLDEBUG_AGENT"]))
"""
    done = run_python(program, env={"MLDEBUG_AGENT": str(tmp_path / "agent")})
    assert done.stdout == "False []\n", done.stderr


def test_a_watch_without_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mldebug.hang._watch.tempfile.mkdtemp", full)
    report = watch(as_rank("import os, sys; sys.exit(5 if os.path.exists(os.environ['MLDEBUG_AGENT']) else 6)"))
    assert report.status == 6


def test_a_look_that_fails_is_told_once_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> None:
        raise ZeroDivisionError("in the judge")

    monkeypatch.setattr("mldebug.hang._watch_looks.judge", broken)
    report = watch(as_rank("import time; time.sleep(4)"), timeout=1, on_hang=("spy", "kill"))
    assert (report.status, report.killed) == (0, False)
    assert report.looks > 1
    assert capsys.readouterr().err.count("ZeroDivisionError: in the judge") == 1


def test_a_stack_that_is_late_when_the_alarm_is_near_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stack of the culprit all others seem to wait for the network."""
    whole = json.loads((PROGRAMS.parent / "evidence" / "skip_collective.json").read_text())
    late = copy.deepcopy(whole)
    for rank in late["ranks"]:
        rank.pop("record", None)
        if rank["rank"] == 2:
            rank.update(status="timeout", samples=[])
    closer = [late, whole]
    monkeypatch.setattr(
        "mldebug.hang._watch_looks.collect",
        lambda *, samples, **_: closer.pop(0) if samples == 2 else copy.deepcopy(whole),
    )
    looks = Looks(1.0)
    report = looks.look([1])
    while report is None:
        time.sleep(looks.pause)
        report = looks.look([1])
    assert (report.verdict.kind, report.verdict.culprits) == ("skipped-collective", (2,))
    assert closer == []


def looked_at(monkeypatch: pytest.MonkeyPatch, seen: list[dict[str, Any]], times: list[float]) -> list[bool]:
    """Whether each look raises an alarm, of looks at these times that see this; the last stays what it is."""
    clock = [0.0]
    monkeypatch.setattr("mldebug.hang._watch_looks.time", SimpleNamespace(monotonic=lambda: clock[0]))
    turn = [0]
    monkeypatch.setattr("mldebug.hang._watch_looks.collect", lambda **_: copy.deepcopy(seen[turn[0]]))
    looks, alarms = Looks(8.0), []
    for number, clock[0] in enumerate(times):
        turn[0] = min(number, len(seen) - 1)
        alarms.append(looks.look([1]) is not None)
    return alarms


def test_what_was_seen_before_a_rank_came_tells_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a launcher starts its ranks seconds later, and a look has it alone."""
    whole = json.loads((PROGRAMS.parent / "evidence" / "skip_collective.json").read_text())
    launcher = copy.deepcopy(whole)
    launcher["ranks"] = [{**whole["ranks"][0], "pid": 4711, "children": []}]
    assert looked_at(monkeypatch, [launcher, whole], [0, 4, 8, 11, 12]) == [False, False, False, False, True]
    again = copy.deepcopy(whole)
    again["ranks"][2]["start"] += 5  # its launcher started it once more, by chance with the same number
    assert looked_at(monkeypatch, [whole, again], [0, 4, 8, 11, 12]) == [False, False, False, False, True]
    assert looked_at(monkeypatch, [whole], [0, 4, 8]) == [False, False, True]


def test_a_rank_whose_stack_is_read_for_the_first_time_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads((PROGRAMS.parent / "evidence" / "skip_collective.json").read_text())
    late = copy.deepcopy(whole)
    late["ranks"][2].update(status="timeout")
    for sample in late["ranks"][2]["samples"]:
        sample["threads"] = []
    assert looked_at(monkeypatch, [late, late, whole], [0, 4, 8, 12]) == [False, False, False, True]
    never = [late, late, late, late]
    assert looked_at(monkeypatch, never, [0, 4, 8])[-1]  # the others wait, and that one cannot be read


def test_no_alarm_where_nothing_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "dump", lambda *_args, **_options: Stacks("no-permission", "run as root"))
    report = watch(as_rank("import time; time.sleep(4)"), timeout=1, on_hang=("spy", "kill"))
    assert (report.verdict.hung, report.status) == (False, 0)
    assert report.looks > 1
