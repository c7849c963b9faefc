"""Ranks on other hosts, started over ssh: each host runs what looks after its ranks, and that comes back to us."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mldebug.cluster._dist_collector import Collector
from mldebug.cluster._dist_local import devices_here
from mldebug.cluster._dist_node import Node, Unheard
from mldebug.cluster._dist_report import DistTestReport, make_report, read_report
from mldebug.cluster._dist_where import Where, own_addresses
from mldebug.cluster._dist_wire import listen
from mldebug.core.errors import UsageError
from mldebug.core.launch import Call, Ending, call_all, ssh_command

if TYPE_CHECKING:
    from mldebug.cluster._dist_test import Options

# So that a host has the settings that ranks on it will have.
_PASSED = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "HSA_")
_LONGEST = 86400.0


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
    calls = []
    for number, host in enumerate(options.hosts):
        told = {
            "ranks": [[number * count + local, local] for local in range(count)], "world": world, "job": name,
            "hosts": addresses, "port": port, "timeout": options.timeout, "env": passed,
        }  # fmt: skip
        words = [options.python or sys.executable, "-m", "mldebug.cluster._dist_hosts", json.dumps(told)]
        command = ssh_command(host, words, options.timeout, options.ssh)
        calls.append(Call(host, command, time.monotonic() + _LONGEST))
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(collector.run()), name="mldebug-collector", daemon=True)
    thread.start()

    def done(ending: Ending) -> None:
        """A client that ends before its host has reported could not start anything there."""
        if ending.code and not any(one["done"] or one["lost"] for one in _of(collector, ending.call.host)):
            last = ending.complaint.strip().splitlines()[-1:] or [f"ssh ended with status {ending.code}"]
            if not _of(collector, ending.call.host):
                collector.host_failed(ending.call.host, f"no rank could be started there: {last[0][:200]}")

    try:
        call_all(calls, read=lambda call, data: None, done=done, fanout=len(calls))
    except KeyboardInterrupt:
        collector.interrupt()
        thread.join(1.0)
        raise
    thread.join(10.0)
    report = read_report(found[0], options.verbose) if found else make_report(collector.evidence, options.verbose)
    if show is not None:
        show(report)
    return report


def _of(collector: Collector, host: str) -> list[dict[str, Any]]:
    ranks = {rank for rank, where in collector.evidence["plan"].items() if where == host}
    return [one for rank, one in list(collector.ranks.items()) if rank in ranks]


def main() -> int:
    """On a host: looks after its ranks. What the collector judged is shown where it is, not here."""
    told = json.loads(sys.argv[1])
    os.environ.update(told["env"])
    os.environ["LOCAL_WORLD_SIZE"] = str(len(told["ranks"]))
    where = Where(tuple(told["hosts"]), "the host that started this", (int(told["port"]),))
    ranks = [(int(rank), int(local)) for rank, local in told["ranks"]]
    try:
        Node(ranks, told["world"], told["job"], where, told["timeout"]).run()
    except Unheard as exc:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{exc.why}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
