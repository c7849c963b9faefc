"""What dist-test and pairs share to start ranks: their options, and clients of ssh whose hosts report to this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

from mldebug.cluster._dist_where import own_addresses
from mldebug.core.errors import MldebugError, UsageError

_BACKENDS = ("auto", "nccl", "rccl", "gloo", "xccl")
_PASSED = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_DEVICE_ORDER", "HSA_")


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
