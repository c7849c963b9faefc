"""Ranks on other hosts, started over ssh: each host runs what looks after its ranks, and that comes back to us."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mldebug.cluster._dist_collector import Collector
from mldebug.cluster._dist_local import devices_here
from mldebug.cluster._dist_node import Node, Unheard, ends_on_sigterm
from mldebug.cluster._dist_report import DistTestReport, read_report
from mldebug.cluster._dist_where import Where, own_addresses
from mldebug.cluster._dist_wire import listen
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ssh_command

if TYPE_CHECKING:
    from mldebug.cluster._dist_test import Options

# So that a host has the settings that ranks on it will have.
_PASSED = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "HSA_")


def launch_hosts(options: Options, show: Callable[[DistTestReport], None] | None) -> DistTestReport:
    """The collector is here; `options.nproc` ranks are started on each host."""
    from mldebug.cluster._dist_test import config_of, judged

    count = options.nproc or devices_here()
    if not count:
        raise UsageError(
            "how many ranks to start on each host is not known: this host has no accelerator", "give --nproc N"
        )
    addresses = own_addresses()
    if not addresses:
        raise UsageError(
            f"the hosts cannot be told where to report to: the name {socket.gethostname()} has no address but loopback",
            "add its name and address to /etc/hosts, or run it on one of the hosts under srun, mpirun or torchrun",
        )
    name, world = secrets.token_hex(8), count * len(options.hosts)
    listener = listen()
    collector = Collector(config_of(options, world, name), listener, judged)
    collector.evidence["plan"] = {str(rank): options.hosts[rank // count] for rank in range(world)}
    port = listener.getsockname()[1]
    passed = {key: value for key, value in os.environ.items() if key.startswith(_PASSED)}
    commands = {}
    for number, host in enumerate(options.hosts):
        told = {
            "ranks": [[number * count + local, local] for local in range(count)], "world": world, "job": name,
            "hosts": addresses, "port": port, "timeout": options.timeout, "env": passed,
        }  # fmt: skip
        words = [options.python or sys.executable, "-m", "mldebug.cluster._dist_hosts", json.dumps(told)]
        commands[host] = ssh_command(host, words, options.timeout, options.ssh)
    thread = threading.Thread(target=collector.run, name="mldebug-collector", daemon=True)
    thread.start()
    clients = {}
    with ends_on_sigterm():
        try:
            for host, command in commands.items():
                clients[host] = _Client(host, command)
            while thread.is_alive():
                for client in clients.values():
                    if (why := client.failure()) and not _came(collector, client.host):
                        collector.host_failed(client.host, why)
                time.sleep(0.1)
        except KeyboardInterrupt:
            if (told := collector.interrupt()) and show is not None:
                show(read_report(told, options.verbose))
            raise
        finally:
            for client in clients.values():
                client.end()
    report = read_report(collector.report, options.verbose)
    if show is not None:
        show(report)
    return report


def _came(collector: Collector, host: str) -> bool:
    return any(collector.evidence["plan"][rank] == host for rank in list(collector.ranks))


class _Client:
    """An ssh that runs; what comes from its host is passed on to our stderr."""

    def __init__(self, host: str, command: tuple[str, ...]) -> None:
        self.host = host
        self.last = ""
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            raise MldebugError(f"cannot run {command[0]}: {reason}", "check what `ulimit -a` allows") from exc
        threading.Thread(target=self._pass_on, daemon=True).start()

    def failure(self) -> str:
        """Why no ranks are there, if the client has ended in the meantime."""
        if not self.process.poll():
            return ""
        time.sleep(0.1)  # its last words may be under way
        return f"no rank could be started there: {self.last or f'ssh ended with status {self.process.returncode}'}"

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = line.strip()[:200] or self.last
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{self.host}: {line}")
        self.process.stdout.close()


def main() -> int:
    """On a host: looks after its ranks. What the collector judged is shown where it is, not here."""
    told = json.loads(sys.argv[1])
    os.environ.update(told["env"])
    where = Where(tuple(told["hosts"]), "the host that started this", (int(told["port"]),))
    ranks = [(int(rank), int(local)) for rank, local in told["ranks"]]
    try:
        Node(ranks, told["world"], told["job"], where, told["timeout"], len(ranks)).run()
    except Unheard as exc:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{exc.why}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
