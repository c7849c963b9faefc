"""Ranks on other hosts, started over ssh: each host runs what looks after its ranks, and that comes back to us."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mldebug.cluster._start import Client, passed_on, report_to
from mldebug.cluster.dist._collector import Collector
from mldebug.cluster.dist._local import devices_here
from mldebug.cluster.dist._node import PROGRAM, Node, Unheard
from mldebug.cluster.dist._report import DistTestReport, read_report
from mldebug.cluster.dist._where import Where
from mldebug.cluster.dist._wire import listen
from mldebug.core.errors import UsageError
from mldebug.core.launch import ends_on_sigterm, ssh_command

if TYPE_CHECKING:
    from mldebug.cluster.dist._dist_test import Options


def launch_hosts(options: Options, show: Callable[[DistTestReport], None] | None) -> DistTestReport:
    """The collector is here; `options.nproc` ranks are started on each host."""
    from mldebug.cluster.dist._dist_test import config_of, judged

    count = options.nproc or devices_here()
    if not count:
        raise UsageError(
            "how many ranks to start on each host is not known: this host has no accelerator", "give --nproc N"
        )
    addresses = report_to()
    name, world = secrets.token_hex(8), count * len(options.hosts)
    listener = listen()
    collector = Collector(config_of(options, world, name), listener, judged)
    collector.evidence["plan"] = {str(rank): options.hosts[rank // count] for rank in range(world)}
    port = listener.getsockname()[1]
    passed = passed_on("OMP_NUM_THREADS")
    commands = {}
    for number, host in enumerate(options.hosts):
        told = {
            "ranks": [[number * count + local, local] for local in range(count)], "world": world, "job": name,
            "hosts": addresses, "port": port, "timeout": options.timeout, "env": passed,
        }  # fmt: skip
        program = PROGRAM.format("_hosts", "sys.exit(main())")
        words = [options.python or sys.executable, "-c", program, json.dumps(told)]
        commands[host] = ssh_command(host, words, options.timeout, options.ssh)
    thread = threading.Thread(target=collector.run, name="mldebug-collector", daemon=True)
    thread.start()
    clients = {}
    with ends_on_sigterm():
        try:
            for host, command in commands.items():
                clients[host] = Client(host, command, "rank")
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
