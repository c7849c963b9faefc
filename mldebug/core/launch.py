"""Reach other machines: many commands at once (ssh, srun, kubectl), each with a deadline, a limit on what it may say,
and nothing of it left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.errors import MldebugError, UsageError

_TAIL = 4096  # bytes of stderr that are kept
_CHUNK = 65536
_GRACE = 0.5  # seconds between asking a command to end and killing it


@dataclass(frozen=True)
class Call:
    """A command that is to run here, such as an ssh client, and the host that it is for."""

    host: str
    command: tuple[str, ...]
    deadline: float  # of time.monotonic()
    env: Mapping[str, str] | None = None  # default: the environment of this process


@dataclass
class Ending:
    """How a call ended: `exit` with its `code`, `timeout` or `refused` (its output was not wanted)."""

    call: Call
    how: str
    code: int | None
    complaint: str  # the end of its stderr
    seconds: float


class Refused(Exception):
    """Raised by a reader of output that wants no more of it: the command is ended."""


@dataclass
class _Running:
    call: Call
    process: subprocess.Popen[bytes]
    began: float
    complaint: bytearray = field(default_factory=bytearray)
    open: set[int] = field(default_factory=set)
    exited: float | None = None
    refused: str = ""


def call_all(
    calls: Iterable[Call],
    *,
    read: Callable[[Call, bytes], None],
    done: Callable[[Ending], None],
    fanout: int = 64,
) -> None:
    """Run commands, `fanout` at a time, and hand over what they write to stdout as it comes.

    `read(call, data)` may raise Refused to end a command; `done(ending)` is called once for each. Each command is in a
    session of its own, and when this function is left in any way all of them have ended: asked first, killed half a
    second later. A command that does not exist is a MldebugError.

        call_all([Call("n1", ("ssh", "n1", "uptime"), time.monotonic() + 9)], read=print, done=print)
    """
    fanout = max(1, min(fanout, _room()))
    waiting = iter(calls)
    running: dict[int, _Running] = {}
    more = True
    with selectors.DefaultSelector() as selector, ends_on_sigterm():
        try:
            while more or running:
                while more and len(running) < fanout:
                    call = next(waiting, None)  # only now: how much time is left may be a part of the command
                    if call is None:
                        more = False
                        break
                    if time.monotonic() >= call.deadline:
                        done(Ending(call, "timeout", None, "", 0.0))
                        continue
                    one = _start(call)
                    running[one.process.pid] = one
                    _watch(selector, one)
                _turn(selector, running, read)
                for ending in _ended(selector, running):
                    done(ending)
        finally:
            _stop([one.process for one in running.values()])
            for one in running.values():
                _close(selector, one)


def remote_command(words: Sequence[str]) -> str:
    """The words as one line for the shell at the other end, each of them quoted: none can be anything but a word.

    remote_command(["/opt/my python", "-c", "x; y"])  # "'/opt/my python' -c 'x; y'"
    """
    for word in words:
        if re.search(r"[\0\r\n]", word):  # not every shell takes a line break inside quotes
            raise UsageError(f"{word[:80]!r} has a line break in it", "it cannot be a part of a remote command")
    return " ".join(shlex.quote(word) for word in words)


def ssh_command(host: str, words: Sequence[str], seconds: float, ssh: Sequence[str] = ()) -> tuple[str, ...]:
    """The ssh client that runs `words` on a host; it gives up on one that cannot be reached or goes silent.

    `ssh` are options of the user's own: the first value that ssh sees is what counts, so they come first. Nothing is
    asked for: no password, no host key.
    """
    connect = max(2, min(10, int(seconds / 2)))
    ours = {
        "BatchMode": "yes", "ConnectTimeout": str(connect), "ConnectionAttempts": "1", "ServerAliveInterval": "3",
        "ServerAliveCountMax": "2", "ControlMaster": "no", "ClearAllForwardings": "yes", "ForwardAgent": "no",
        "RequestTTY": "no", "LogLevel": "ERROR",
    }  # fmt: skip
    options = [word for key, value in ours.items() for word in ("-o", f"{key}={value}")]
    return (program("ssh"), "-n", *ssh, *options, "--", host, remote_command(words))


def ssh_options(config: str | None, options: Sequence[str]) -> list[str]:
    """Options of the user for ssh: a configuration file, and `Key=value` as in one."""
    words = []
    if config is not None:
        path = os.path.abspath(os.path.expanduser(config))
        if not os.path.isfile(path):
            raise UsageError(f"--ssh-config {config}: there is no such file", "check the path")
        words += ["-F", path]
    for option in options:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*\s*[=\s]\s*[^\r\n\0]+", option):
            raise UsageError(
                f"--ssh-option {option!r} is no option of ssh", "for example: --ssh-option Port=2222; `man ssh_config`"
            )
        words += ["-o", option]
    return words


def srun_command(job: str, nodes: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The srun that runs `words` once on each of these nodes of a job, beside what runs there."""
    count = len(nodes)
    return (
        program("srun"), f"--jobid={job}", "--overlap", f"--nodes={count}-{count}", f"--ntasks={count}",
        "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--cpu-bind=none", "--mpi=none",
        "--input=none", "--kill-on-bad-exit=0", "--wait=0", "--quiet", "--chdir=/", f"--nodelist={','.join(nodes)}",
        *words,
    )  # fmt: skip


def srun_environment() -> dict[str, str]:
    """The environment for srun: called inside of a job, its variables would be options for another one."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    foreign = ("SLURM_", "SRUN_", "SALLOC_", "SBATCH_", "PMI_", "PMIX_")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(foreign)}


def kubectl_command(pod: str, words: Sequence[str], options: Sequence[str], container: str | None) -> tuple[str, ...]:
    inside = (f"--container={container}",) if container else ()
    return (program("kubectl"), *options, "exec", *inside, pod, "--", *words)


def program(name: str) -> str:
    """The path of a program of this machine, or an error that says what to install."""
    path = shutil.which(name)
    if path is None:
        hints = {"ssh": "install the OpenSSH client", "kubectl": "install kubectl"}
        hint = hints.get(name, "run this where SLURM's commands are, on a login node for example")
        raise MldebugError(f"{name} is not installed here, or not on PATH", hint)
    return path


def ask(command: Sequence[str], deadline: float, limit: int = 64 * 1024 * 1024) -> tuple[Ending, bytes]:
    """Run one command and keep what it writes, up to `limit` bytes."""
    parts: list[bytes] = []
    endings: list[Ending] = []

    def read(call: Call, data: bytes) -> None:
        parts.append(data)
        if sum(map(len, parts)) > limit:
            raise Refused(f"more than {limit} bytes of output")

    call_all([Call("", tuple(command), deadline)], read=read, done=endings.append)
    return endings[0], b"".join(parts)


def _room() -> int:
    """How many commands the open files of this process allow at a time: two pipes each, and some to spare."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(4096, (soft - 64) // 4)


def _start(call: Call) -> _Running:
    try:
        process = subprocess.Popen(
            call.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env=call.env,
        )  # fmt: skip
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot run {call.command[0]}: {reason}", "check what `ulimit -a` allows") from exc
    return _Running(call, process, time.monotonic())


def _watch(selector: selectors.BaseSelector, one: _Running) -> None:
    for stream, says in ((one.process.stdout, False), (one.process.stderr, True)):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        selector.register(stream.fileno(), selectors.EVENT_READ, (one, says))
        one.open.add(stream.fileno())


def _turn(selector: selectors.BaseSelector, running: dict[int, _Running], read: Callable[[Call, bytes], None]) -> None:
    """Wait for output for a short while and hand it over."""
    nearest = min((one.call.deadline for one in running.values()), default=0.0)
    for key, _ in selector.select(max(0.0, min(0.1, nearest - time.monotonic()))):
        one, says = key.data
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            continue
        except OSError:
            data = b""
        if not data:
            selector.unregister(key.fd)
            one.open.discard(key.fd)
        elif says:
            one.complaint = (one.complaint + data)[-_TAIL:]
        elif not one.refused:
            try:
                read(one.call, data)
            except Refused as exc:
                one.refused = str(exc) or "its output was not wanted"


def _ended(selector: selectors.BaseSelector, running: dict[int, _Running]) -> Iterator[Ending]:
    """Those that have ended by themselves, and those that have to end now."""
    now = time.monotonic()
    over: list[tuple[_Running, str]] = []
    for one in running.values():
        if one.process.poll() is not None and one.exited is None:
            one.exited = now
        # What an ended client left behind may hold its pipes open: no more than a moment is waited for that.
        if one.refused:
            over.append((one, "refused"))
        elif one.exited is not None and (not one.open or now - one.exited > _GRACE):
            over.append((one, "exit"))
        elif now >= one.call.deadline:
            over.append((one, "timeout"))
    _stop([one.process for one, how in over if how != "exit"])
    for one, how in over:
        del running[one.process.pid]
        _close(selector, one)
        text = one.refused or one.complaint.decode("utf-8", "replace")
        yield Ending(one.call, how, one.process.returncode, text.strip(), now - one.began)


def _close(selector: selectors.BaseSelector, one: _Running) -> None:
    for descriptor in one.open:
        selector.unregister(descriptor)
    one.open.clear()
    for stream in (one.process.stdout, one.process.stderr):
        if stream is not None:
            stream.close()


def _stop(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """End these with all that they started, and wait until they are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.returncode is None or number == signal.SIGKILL:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)
        limit = time.monotonic() + _GRACE
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """While entered, SIGTERM raises, so that what was started is ended too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
