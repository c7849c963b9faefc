"""dist_test(): can these ranks work together, and if not, which of them is to blame?"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mldebug.cluster._start import check_start
from mldebug.cluster.dist._collector import Collector, Config
from mldebug.cluster.dist._evidence import empty, new_rank
from mldebug.cluster.dist._local import boot_id, devices_here, need_device
from mldebug.cluster.dist._node import PROGRAM, Node, Unheard
from mldebug.cluster.dist._report import DistTestReport, make_report, read_report
from mldebug.cluster.dist._where import Where, apart, find, local_world, plan
from mldebug.cluster.dist._wire import listen
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.world import Claim, claims, job

Show = Callable[[DistTestReport], None]


@dataclass(frozen=True)
class Options:
    nproc: int | None = None
    backend: str = "auto"
    timeout: float = 30.0
    start_timeout: float = 180.0
    hosts: Sequence[str] = ()
    sizes: tuple[int, ...] = ()
    collector: str = ""
    python: str = ""
    ssh: Sequence[str] = ()
    output: dict[str, Any] | None = None  # how the command's report is to be shown where rank 0 cannot do it
    verbose: bool = False


def dist_test(
    *,
    nproc: int | None = None,
    backend: str = "auto",
    timeout: float = 30.0,
    start_timeout: float = 180.0,
    hosts: str | Sequence[str] = (),
    sizes: Sequence[int] = (),
    collector: str = "",
    python: str = "",
    ssh: Sequence[str] = (),
) -> DistTestReport:
    """Test that ranks can start, hold memory, compute and talk to each other, contents verified; name those who cannot.

    In a process that torchrun, srun or mpirun started this is one of the ranks, and all of them have to call it; else
    it starts `nproc` ranks (default: one for each accelerator) on this host, or on each of `hosts` over ssh. `timeout`
    are the seconds without progress after which the ranks that are behind are named, `start_timeout` those for loading
    torch. `sizes` are bytes for each collective (default: 4 B to 64 MiB). `collector` is host:port of rank 0, where it
    cannot be worked out. The ranks themselves run in processes of their own: this one does not load torch.

    All ranks return the same report; the `evidence` is rank 0's. Wrong usage is a UsageError.

        report = dist_test(nproc=4)
        report.ok or sys.exit(report.text())
    """
    from mldebug.core.hosts import checked, parse_hosts

    names = parse_hosts(hosts) if isinstance(hosts, str) and hosts else checked(hosts) if hosts else []
    return run(Options(nproc, backend, timeout, start_timeout, names, tuple(sizes), collector, python, ssh))


def run(options: Options, show: Show | None = None) -> DistTestReport:
    """The command's way in: `show` is called once, by rank 0 where that can do it."""
    _check(options)
    claim = next(iter(claims(os.environ)), None)
    if claim is not None and not options.hosts and options.nproc is None:
        return _join(options, claim, show)
    if options.hosts:
        from mldebug.cluster.dist._hosts import launch_hosts

        return launch_hosts(options, show)
    return _launch(options, show)


def _check(options: Options) -> None:
    check_start(options.backend, options.timeout, options.start_timeout)
    if options.nproc is not None and not 0 < options.nproc <= 4096:
        raise UsageError(f"nproc is {options.nproc}", "give the number of ranks to start on each host, 1 or more")
    if any(not 0 < size <= 1 << 36 for size in options.sizes):
        raise UsageError(f"sizes are {', '.join(map(str, options.sizes))}", "give bytes, 1 to 64 GiB")


def config_of(options: Options, world: int, name: str) -> Config:
    return Config(world, name, options.backend, options.timeout, options.start_timeout, options.sizes)


def judged(evidence: Any) -> dict[str, Any]:
    return make_report(evidence).to_dict()


# Our own ranks on this host


def _launch(options: Options, show: Show | None) -> DistTestReport:
    need_device(options.backend)
    count = options.nproc or devices_here() or min(4, max(2, os.cpu_count() or 2))
    name = secrets.token_hex(8)
    listener = listen(address="127.0.0.1")
    collector = Collector(config_of(options, count, name), listener, judged)
    where = Where(("127.0.0.1",), "this host", (listener.getsockname()[1],))
    node = Node([(rank, rank) for rank in range(count)], count, name, where, options.timeout, count)
    thread = threading.Thread(target=collector.run, name="mldebug-collector", daemon=True)
    thread.start()
    shown: list[DistTestReport] = []

    def keep(report: dict[str, Any]) -> None:
        shown.append(read_report(report, options.verbose))
        if show is not None:
            show(shown[0])

    def interrupted() -> None:
        if (report := collector.interrupt()) and not shown:
            keep(report)

    try:
        node.run(keep, interrupted)
    except Unheard as exc:
        if node.link is None:  # the thread listens, and nobody can come to it
            raise MldebugError(exc.why, "`ip addr show lo`: is it up? `ip link set lo up`") from exc
        # The thread failed: it says so itself, on stderr.
        raise MldebugError(exc.why, "this is a fault of mldebug: please report what stderr says") from exc
    thread.join(3.0)
    return shown[0]


# As one of the ranks that a launcher started


def _join(options: Options, claim: Claim, show: Show | None) -> DistTestReport:
    name = job()
    rank, local_rank = claim.rank, claim.local_rank
    if local_rank is None:
        local_rank = rank % (devices_here() or 1)
    local = local_world(os.environ)
    where = find(os.environ, name, claim.size, local, options.collector)
    process = _start_collector(options, claim.size, name, where) if rank == 0 else None
    node = Node([(rank, local_rank)], claim.size, name, where, options.timeout, local, apart(os.environ))
    found: list[DistTestReport] = []

    def keep(told: dict[str, Any]) -> None:
        found.append(read_report(told, options.verbose))
        if show is not None:
            show(found[0])

    try:
        told = node.run(keep)
        return found[0] if found else read_report(told, options.verbose)
    except Unheard as exc:
        report = _alone(options, claim, local_rank, exc, node)
        if show is not None:
            show(report)
        node.end_stopped()
        return report
    finally:
        if process is not None:
            _await_collector(process)


def _start_collector(options: Options, world: int, name: str, where: Where) -> subprocess.Popen[bytes]:
    """Beside rank 0 and not in it, so that there is somebody to say what happened to rank 0."""
    told = {
        "config": config_of(options, world, name).to_dict(), "ports": list(where.candidates), "output": options.output,
        "verbose": options.verbose, "plan": plan(os.environ, world),
    }  # fmt: skip
    root = str(Path(__file__).resolve().parent.parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format("_beside", "sys.exit(main())")],
        stdin=subprocess.PIPE,
        env=env | {"MLDEBUG_DIST_TEST": name},
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    return process


def _await_collector(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(6.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(2.0)
    finally:
        if process.stdin is not None:
            process.stdin.close()


def _alone(options: Options, claim: Claim, local_rank: int, exc: Unheard, node: Node) -> DistTestReport:
    """What a rank without a collector has to say by itself: rank 0 is missing, or cannot be reached from here."""
    evidence = empty(claim.size, options.backend, options.timeout)
    evidence["missing_why"] = exc.why
    evidence["ended"] = "no collector"
    one = new_rank(claim.rank, local_rank, socket.gethostname(), boot_id(), os.getpid(), os.getpid())
    evidence["ranks"][str(claim.rank)] = {**one, "phase": node.phase}
    return replace(make_report(evidence, options.verbose), seconds=options.timeout)
