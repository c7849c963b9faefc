"""What dist-test, pairs and comms share to start ranks: their options, programs here, and clients of ssh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mldebug.cluster._hub import Hub
from mldebug.cluster.dist._where import Where, own_addresses
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ssh_command

_BACKENDS = ("auto", "nccl", "rccl", "gloo", "xccl")
_KILL = 4.0  # seconds to end what was stopped on other hosts
_PASSED = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_DEVICE_ORDER", "HSA_")


class Start(Protocol):
    """The options that say how ranks are started."""

    @property
    def nproc(self) -> int | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def hosts(self) -> Sequence[str]: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def python(self) -> str: ...
    @property
    def ssh(self) -> Sequence[str]: ...


def check_start(backend: str, timeout: float, start_timeout: float) -> None:
    """Refuse what ranks cannot be started with."""
    if backend not in _BACKENDS:
        raise UsageError(f"there is no backend {backend!r}", f"one of {', '.join(_BACKENDS)}")
    for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not 0 < value < 1e7:
            raise UsageError(f"{name} is {value:g}", "give a number of seconds above 0")


class Client:
    """An ssh that runs; what comes from its host is passed on to our stderr. `what` is started there."""

    def __init__(self, host: str, command: tuple[str, ...], what: str) -> None:
        self.host = host
        self._what = what
        self._last = ""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            raise MldebugError(f"cannot run {command[0]}: {reason}", "check what `ulimit -a` allows") from exc
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def failure(self) -> str:
        """Why nothing is there, if the client has ended in the meantime."""
        if not self._process.poll():
            return ""
        self._reader.join(0.1)  # its last words may be under way
        why = self._last or f"ssh ended with status {self._process.returncode}"
        return f"no {self._what} could be started there: {why}"

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last = line.strip()[:200] or self._last
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{self.host}: {line}")
        self._process.stdout.close()


class Clients:
    """The ssh of each host, where `program` looks after its ranks and reports to `listener`."""

    def __init__(self, options: Start, job: str, listener: socket.socket, what: str) -> None:
        self._options, self._job, self._what = options, job, what
        self._places = [(address, listener.getsockname()[1]) for address in report_to()]
        self._clients: list[Client] = []

    def start(self, program: str, **more: Any) -> None:
        options = self._options
        passed = passed_on() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        for host in options.hosts:
            plain = host.rpartition("@")[2]
            what = told(options, self._job, self._places, host=plain, env=passed, **more)
            words = [options.python or sys.executable, "-c", program, json.dumps(what)]
            command = ssh_command(host, words, options.start_timeout, options.ssh)
            self._clients.append(Client(plain, command, self._what))

    def failures(self) -> dict[str, str]:
        """The hosts where nothing could be started, and why."""
        return {client.host: why for client in self._clients if (why := client.failure())}

    def end(self, hub: Hub) -> None:
        """End them, and what was stopped on their hosts: that does not notice that all is over. A host that is frozen
        is left alone."""
        for client in self._clients:
            client.end()
        hosts = {host.rpartition("@")[2]: host for host in self._options.hosts}
        script = 'grep -q "$1" "/proc/$2/cmdline" && kill -KILL "$2"'
        no = subprocess.DEVNULL
        processes = []
        for agent in hub.silent:
            if host := hosts.get(agent.name):
                words = ["/bin/sh", "-c", script, "sh", self._job, str(agent.pid)]
                command = ssh_command(host, words, _KILL, self._options.ssh)
                with contextlib.suppress(OSError):
                    processes.append(subprocess.Popen(command, stdin=no, stdout=no, stderr=no))
        limit = time.monotonic() + _KILL
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
            process.kill()
            process.wait()


def program_of(module: str) -> str:
    """What `python -c` runs to look after the workers of a host. Not `-m`: that would import modules from the folder
    where it happens to start. Ctrl-C is for the coordinator, which ends it, and is not to come while modules load."""
    return (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = [p for p in sys.path if p]; "
        f"import {module} as node; sys.exit(node.main())"
    )


def told(options: Start, job: str, places: Sequence[Any], **more: Any) -> dict[str, Any]:
    """What such a program gets to know."""
    return {
        "job": job, "places": [list(place[:2]) for place in places], "host": socket.gethostname(), "local": [],
        "nproc": options.nproc or 0, "backend": options.backend, "rank": None, "parent": 0, "tell": False,
        "timeout": options.start_timeout, "env": {"TORCH_CPP_LOG_LEVEL": "ERROR"}, **more,
    }  # fmt: skip


@contextlib.contextmanager
def node_process(
    what: dict[str, Any], program: str, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Such a program on this host, ended with its workers at the end."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # and it is forked, which threads do not survive
    env = {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    words = [sys.executable, "-c", program, json.dumps(what)]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout, env=env)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if sys.exc_info()[0] else 3.0)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def check_place(where: Where) -> None:
    """Refuse what the other ranks cannot know: they look for rank 0 where mpirun is, and this is another host."""
    if "mpirun" in where.source and not any(is_own(address) for address, _ in where.places()):
        name = socket.gethostname()
        raise MldebugError(
            f"rank 0 runs on {name}, and mpirun on another host ({', '.join(where.hosts)}): "
            "the other ranks would look for rank 0 there",
            f"mpirun -x MASTER_ADDR={name} ..., or let the first of its hosts be the one that it runs on",
        )


def progress_line(name: str, wanted: bool) -> Callable[[str], None]:
    """A line on stderr that is written over, a few times a second; "" wipes it."""
    if not wanted or not sys.stderr.isatty():
        return lambda text: None
    last = [0.0]

    def show(text: str) -> None:
        now = time.monotonic()
        if not text or now - last[0] > 0.2:
            last[0] = now
            with contextlib.suppress(OSError):
                sys.stderr.write(f"\r\x1b[K{f'{name}: {text}'[:79] if text else ''}")
                sys.stderr.flush()

    return show


def passed_on(*more: str) -> dict[str, str]:
    """The variables whose names begin so: a host gets the settings that ranks on it will have."""
    return {key: value for key, value in os.environ.items() if key.startswith(_PASSED + more)}


def report_to() -> list[str]:
    """The addresses at which other hosts reach this one."""
    addresses = own_addresses()
    if not addresses:
        raise UsageError(
            f"the hosts cannot be told where to report to: the name {socket.gethostname()} has no address but loopback",
            "add its name and address to /etc/hosts, or run it on one of the hosts under srun, mpirun or torchrun",
        )
    return addresses


def is_own(address: str) -> bool:
    """Whether an interface of this host has this address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True
