"""hang_watchdog: a job that looks after itself. One process a node looks at its ranks, beside them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mldebug.core.errors import UsageError
from mldebug.core.scope import Scope
from mldebug.hang import _agent
from mldebug.hang._find import job_of
from mldebug.hang._page import ENVIRONMENT, folder_for, start_ticks

if TYPE_CHECKING:
    from mldebug.hang._report import SpyReport

_ROOT = Path(__file__).resolve().parents[2]
# Not `-m`: that would import from the folder that the program runs in, whatever modules lie there.
_PROGRAM = "import sys; sys.path[:1] = [{root!r}]; from mldebug.hang._watchdog_look import main; main(sys.argv[1])"
_FAILURES = 3  # of the process that looks, until we leave it


class hang_watchdog(Scope):
    """Says which rank holds the job up, and why, when nothing moves for `timeout` seconds inside of it.

    A process of its own looks at the ranks of this node, so that it works while Python stands still: one a node,
    whichever rank starts it, and it ends with the scope. It writes the verdict of `mldebug spy` to stderr, once a
    hang, and the evidence to `output` (for `mldebug spy --from`), if given. `on_hang` is "spy"; "kill", which then
    ends the ranks of this node with all that they started, for the launcher to see; or a function, called with the
    SpyReport in a thread of the rank that started the process. `mark(step)` in the loop makes slow steps plain.
    Needs Linux; elsewhere it says so and does nothing. Raises UsageError for a wrong option.

        with hang_watchdog(timeout=300):
            train()
    """

    def __init__(
        self,
        timeout: float = 300.0,
        *,
        on_hang: Literal["spy", "kill"] | Callable[[SpyReport], object] = "spy",
        output: str | os.PathLike[str] | None = None,
    ) -> None:
        if not timeout > 0:
            raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "300 is usual for a long job")
        if not callable(on_hang) and on_hang not in ("spy", "kill"):
            raise UsageError(f"on_hang is {on_hang!r}", 'it takes "spy", "kill" or a function of the report')
        self._timeout, self._on_hang = timeout, on_hang
        self._output = os.path.abspath(output) if output is not None else None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._open = False

    def start(self) -> None:
        if not _agent.enable():
            _say("hang_watchdog does not watch: it needs Linux, and a private folder in /dev/shm")
            return
        self._open, self._failures = True, 0
        self._stand_in()
        _agent.each_second.append(self._stand_in)

    def stop(self, exc: BaseException | None) -> None:
        if not self._open:
            return
        with contextlib.suppress(ValueError):
            _agent.each_second.remove(self._stand_in)
        with self._lock:
            self._open = False
            if self._process is not None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                self._process = None
                handle = _take(_lock_path())
                if handle is not None:  # no other rank has taken over: the last one to leave
                    with contextlib.suppress(OSError):
                        os.unlink(_lock_path())
                    os.close(handle)

    def _stand_in(self) -> None:
        """Start the process that looks, unless one of this node's ranks has it. Tried again and again."""
        with self._lock:
            if not self._open or self._failures >= _FAILURES:
                return
            if self._process is not None:
                if self._process.poll() is None:
                    return
                self._failures += 1
                self._process = None
                if self._failures == _FAILURES:
                    _say("hang_watchdog watches no more: the process that looks has ended three times")
                    return
            handle = _take(_lock_path())
            if handle is None:
                return
            try:
                self._process = self._launch(handle)
            except OSError as exc:
                self._failures = _FAILURES
                _say(f"hang_watchdog does not watch: {sys.executable} cannot be run ({exc.strerror})")
            finally:
                os.close(handle)

    def _launch(self, lock: int) -> subprocess.Popen[bytes]:
        calls = callable(self._on_hang)
        config = {
            "pid": os.getpid(),
            "start": start_ticks("self"),
            "lock": _lock_path(),
            "spawned": multiprocessing.parent_process() is not None,
            "timeout": self._timeout,
            "kill": self._on_hang == "kill",
            "output": self._output,
            "report": calls,
        }
        # It is no rank. The agent's folder stays, so that `mldebug watch` knows it as a part of its job.
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME", "COLUMNS", "NO_COLOR", ENVIRONMENT)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(root=str(_ROOT)), json.dumps(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if calls else subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ},
            pass_fds=[lock],  # held as long as it lives
            start_new_session=True,  # Ctrl-C is for the job
        )
        if calls:
            threading.Thread(target=self._receive, args=(process,), name="mldebug-watchdog", daemon=True).start()
        return process

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        """Hand what the process finds to the function of the user."""
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                from mldebug.hang._inspect import spy

                if callable(self._on_hang):
                    self._on_hang(spy(json.loads(line)))


def _lock_path() -> str:
    """The file that tells the ranks of this job on this node that one of them has started the process."""
    job = job_of(os.environ)
    if not job:
        job = f"pid {os.getppid() if multiprocessing.parent_process() is not None else os.getpid()}"
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return os.path.join(folder_for(os.environ.get(ENVIRONMENT), os.geteuid()), f"watchdog-{name}.lock")


def _take(path: str) -> int | None:
    """The lock as an open file, or None where somebody has it."""
    handle = -1
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == os.stat(path).st_ino:  # else it was removed meanwhile, and means nothing
            return handle
    except OSError:
        pass
    if handle >= 0:
        os.close(handle)
    return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mldebug: {text}\n")
