"""The lock of printing: who waits for whom, for how long, and where the file lies."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldebug.ranks import _lock_file
from mldebug.ranks._lock import BOTH, LOCK, NOTHING, SLOTS, THREAD, PrintLock

ROOT = Path(__file__).resolve().parent.parent.parent

# Takes the lock of slot 7, says so, and stays.
HOLDER = """
import sys, time
from mldebug.ranks._lock import LOCK
print(LOCK.take(7, -1), flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    LOCK.leave()  # what other tests have opened
    LOCK._leaving = False
    monkeypatch.setattr(_lock_file, "_used", None)
    return tmp_path / "mldebug"


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(HOLDER)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{BOTH}\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def lock(folder: Path) -> Iterator[PrintLock]:
    lock = PrintLock()
    yield lock
    lock.leave()


def start(program: str, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_one_process_waits_for_another(holder: subprocess.Popen[str], lock: PrintLock) -> None:
    threading.Timer(0.5, holder.kill).start()
    started = time.monotonic()
    assert lock.take(7, -1) == BOTH  # the kernel has released it
    assert 0.3 < time.monotonic() - started < 4
    lock.free(7, BOTH)


def test_outputs_do_not_wait_for_each_other(holder: subprocess.Popen[str], lock: PrintLock) -> None:
    started = time.monotonic()
    assert lock.take(8, -1) == BOTH
    assert time.monotonic() - started < 4  # and not the 5 s that a holder may stand still
    lock.free(8, BOTH)


def test_a_stopped_holder_is_passed_by_and_named_once(
    holder: subprocess.Popen[str], lock: PrintLock, capsys: pytest.CaptureFixture[str]
) -> None:
    holder.send_signal(signal.SIGSTOP)
    for bound, least, most in ((0.5, 0.4, 20.0), (30.0, 0.0, 20.0)):  # the second time it is known
        started = time.monotonic()
        had = lock.take(7, -1, bound)
        assert had == THREAD
        assert least < time.monotonic() - started < most
        lock.free(7, had)
    said = capsys.readouterr().err
    assert said.count("mldebug: printing without the lock") == 1
    assert f"pid {holder.pid} has held the lock for printing for 0.5 s" in said
    holder.kill()
    holder.wait()
    assert lock.take(7, -1) == BOTH  # as before
    lock.free(7, BOTH)


def test_a_full_pipe_is_waited_for(holder: subprocess.Popen[str], lock: PrintLock) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    threading.Timer(1.5, holder.kill).start()
    assert (
        lock.take(7, writing, 0.3) == BOTH
    )  # not unlocked after 0.3 s: who has the lock may be waiting for the reader
    lock.free(7, BOTH)
    os.close(reading)
    os.close(writing)


def test_a_busy_lock_is_not_a_stuck_one(folder: Path, lock: PrintLock, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import sys, time
from mldebug.ranks._lock import LOCK
print("go", flush=True)
end = time.monotonic() + 2.5
while time.monotonic() < end:
    had = LOCK.take(7, -1)
    time.sleep(0.05)  # almost always held
    LOCK.free(7, had)
"""
    process = start(program)
    assert process.stdout is not None
    process.stdout.readline()
    for _print in range(5):
        had = lock.take(7, -1, 0.4)
        assert had == BOTH
        lock.free(7, had)
    process.kill()
    process.wait()
    process.stdout.close()
    assert capsys.readouterr().err == ""


def test_threads_exclude_each_other(lock: PrintLock) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _turn in range(200):
            had = lock.take(3, -1)
            inside += 1
            most = max(most, inside)
            time.sleep(0)
            inside -= 1
            lock.free(3, had)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_thread_that_stands_still_is_passed_by(lock: PrintLock, capsys: pytest.CaptureFixture[str]) -> None:
    had, release = [], threading.Event()

    def hold() -> None:
        had.append(lock.take(3, -1))
        release.wait(30)
        lock.free(3, had[0])

    thread = threading.Thread(target=hold)
    thread.start()
    while not had:
        time.sleep(0.01)
    assert lock.take(3, -1, 0.1) == NOTHING
    lock.free(3, NOTHING)
    release.set()
    thread.join()
    assert "a thread of this process has stood still while printing" in capsys.readouterr().err


def test_the_same_thread_may_take_it_again(lock: PrintLock) -> None:
    outer = lock.take(3, -1)
    inner = lock.take(3, -1)
    lock.free(3, inner)
    other = PrintLock()
    assert other.take(3, -1, 0.2) == THREAD  # the inner one has not released it
    other.free(3, THREAD)
    lock.free(3, outer)
    assert other.take(3, -1, 5) == BOTH
    other.free(3, BOTH)
    other.leave()


def test_a_child_has_a_lock_of_its_own_though_forked_under_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = LOCK.take(5, -1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "another"))
    pid = os.fork()
    if pid == 0:
        taken = LOCK.take(5, -1, 0.3)  # the parent has it: an inherited descriptor would have it too
        os._exit(taken)
    _pid, status = os.waitpid(pid, 0)
    LOCK.free(5, had)
    assert os.waitstatus_to_exitcode(status) == THREAD
    assert LOCK.take(5, -1, 0.3) == BOTH
    LOCK.free(5, BOTH)
    LOCK.leave()
    LOCK._leaving = False


def test_fork_while_another_thread_holds_it(folder: Path) -> None:
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        had = LOCK.take(5, -1)
        taken.set()
        release.wait(30)
        LOCK.free(5, had)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    pid = os.fork()
    if pid == 0:
        os._exit(10 + LOCK.take(6, -1, 5))  # no deadlock on the thread that is not here
    _pid, status = os.waitpid(pid, 0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 10 + BOTH
    LOCK.leave()
    LOCK._leaving = False


def test_the_file_is_private_and_goes_with_the_last_process(folder: Path, lock: PrintLock) -> None:
    other = PrintLock()
    for one in (lock, other):
        one.free(1, one.take(1, -1))
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lock.leave()
    assert path.exists()
    other.leave()
    assert not folder.exists()


def test_files_of_killed_jobs_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks, paths = [PrintLock() for _job in range(3)], []
    for name, lock in zip(("killed", "alive", "young"), locks, strict=True):
        monkeypatch.setattr(_lock_file, "_name", lambda name=name: f"print-{socket.gethostname()}-{name}.lock")
        monkeypatch.setattr(_lock_file, "_used", None)
        lock.free(1, lock.take(1, -1))
        paths.append(folder / _lock_file._name())
    for path in paths[:2]:
        os.utime(path, (1, 1))
    os.close(locks[0]._fd)  # as the kernel does at the end of a process
    locks[0]._unmap(ours=True)
    monkeypatch.setattr(_lock_file, "_name", lambda: f"print-{socket.gethostname()}-new.lock")
    monkeypatch.setattr(_lock_file, "_used", None)
    new = PrintLock()
    new.free(1, new.take(1, -1))
    assert [path.exists() for path in paths] == [False, True, True]
    for lock in (new, *locks[1:]):
        lock.leave()


def test_a_removed_file_is_made_anew(folder: Path, lock: PrintLock) -> None:
    lock.free(1, lock.take(1, -1))
    (path,) = folder.iterdir()
    path.unlink()
    lock._checked = 0.0  # it looks once a second
    lock.free(1, lock.take(1, -1))
    assert path.exists()


def test_a_program_that_closes_all_descriptors_and_opens_its_own(tmp_path: Path, lock: PrintLock) -> None:
    lock.free(1, lock.take(1, -1))
    with open(tmp_path / "theirs", "w+b") as theirs:
        os.dup2(theirs.fileno(), lock._fd)
        stolen = lock._fd
        lock.free(1, lock.take(1, -1))
        lock._checked = 0.0
        assert lock.take(1, -1) == BOTH
        lock.free(1, BOTH)
        assert lock._fd != stolen
        theirs.seek(0)
        assert theirs.read() == b""
        os.close(stolen)


def test_runtime_directory_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    os.close(_lock_file.open_lock_file(SLOTS))
    assert [path.parent for path in tmp_path.rglob("*.lock")] == [runtime / "mldebug"]


@pytest.mark.parametrize("attack", ["link to folder", "link to file", "folder of all", "a file", "a fifo"])
def test_what_others_may_have_put_in_tmp_is_passed_over(
    attack: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_best = tmp_path / "next"
    next_best.mkdir()
    monkeypatch.setattr(_lock_file, "_folders", lambda: [str(folder), str(next_best / "mldebug")])
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    if attack == "link to folder":
        folder.symlink_to(victim)
    elif attack == "a file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        name = folder / _lock_file._name()
        if attack == "link to file":
            (victim / "file").write_text("precious")
            name.symlink_to(victim / "file")
        elif attack == "a fifo":
            os.mkfifo(name)
        else:
            folder.chmod(0o777)
    fd = _lock_file.open_lock_file(SLOTS)
    assert fd >= 0
    os.close(fd)
    assert [path.parent for path in next_best.rglob("*.lock")] == [next_best / "mldebug"]
    assert [path.read_text() for path in victim.iterdir()] in ([], ["precious"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")
def test_several_users_on_one_node() -> None:
    for uid in (4001, 4002):
        pid = os.fork()
        if pid == 0:
            os.setgid(uid)
            os.setuid(uid)
            os.environ.pop("XDG_RUNTIME_DIR", None)
            lock = PrintLock()
            had = lock.take(1, -1)
            lock.free(1, had)
            ours = os.fstat(lock._fd).st_uid == uid
            lock.leave()
            os._exit(had if ours else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == BOTH


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_ranks_with_a_tmpdir_each_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    found = []
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr(_lock_file, "_used", None)
        found.append(_lock_file.open_lock_file(SLOTS))
    assert os.path.samestat(*map(os.fstat, found))
    _lock_file.remove_lock_file(found[0])
    for fd in found:
        os.close(fd)


def test_no_folder_at_all_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lock: PrintLock
) -> None:
    monkeypatch.setattr(_lock_file, "_folders", lambda: ["/proc/mldebug"])
    for _print in range(3):
        had = lock.take(1, -1)
        assert had == THREAD
        lock.free(1, had)
    assert capsys.readouterr().err.count("there is no private folder for a lock file") == 1


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "local"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "local"),  # a script may set these after its first print
        ({"SLURM_JOB_ID": "12"}, "local"),  # in an allocation, no step of it
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_STEP_ID": "3"}, "slurm-12.3"),
        ({"TORCHELASTIC_RUN_ID": "x/y", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun-x_y-a:1"),
    ],
)
def test_one_file_for_each_job(environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(os.environ):
        if key.startswith(("SLURM", "TORCH", "MASTER", "OMPI", "PM", "PALS")):
            monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert _lock_file._name().endswith(f"-{name}.lock")


def test_without_locks_of_bytes(monkeypatch: pytest.MonkeyPatch, lock: PrintLock) -> None:
    monkeypatch.setattr("mldebug.ranks._lock._whole_file", True)
    other = PrintLock()
    outer, inner = lock.take(1, -1), lock.take(2, -1)
    lock.free(2, inner)
    assert other.take(2, -1, 0.2) == THREAD  # the whole file is one lock, and the outer one still has it
    other.free(2, THREAD)
    lock.free(1, outer)
    assert other.take(2, -1, 2) == BOTH
    other.free(2, BOTH)
    other.leave()
