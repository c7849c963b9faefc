"""The live pair matrix: workers on this host, on other hosts over ssh, or in the job that this process is a rank of."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mldebug.cluster._start import Clients, check_place, check_start, node_process, program_of, progress_line, told
from mldebug.cluster.dist._local import devices_here, need_device
from mldebug.cluster.dist._where import find, local_world
from mldebug.cluster.dist._wire import listen
from mldebug.cluster.pairs._coordinator import Coordinator
from mldebug.cluster.pairs._evidence import SCHEMA, PairsEvidence
from mldebug.cluster.pairs._parts import Wanted
from mldebug.cluster.pairs._ping import PingCoordinator
from mldebug.cluster.pairs._report import PairsReport
from mldebug.cluster.pairs._verdict import Finding, PairsVerdict
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.world import Claim, claims, job

INTERRUPTED = "interrupted: what was measured until then is judged"
Show = Callable[[PairsReport], None]

PROGRAM = program_of("mldebug.cluster.pairs._node")
PING_PROGRAM = program_of("mldebug.cluster.pairs._ping_node")


@dataclass(frozen=True)
class Options:
    nproc: int | None = None
    backend: str = "auto"
    hosts: Sequence[str] = ()
    nodes_only: bool = False
    sample: bool = False
    bytes: int = 0
    timeout: float = 30.0
    start_timeout: float = 180.0
    collector: str = ""
    python: str = ""
    ssh: Sequence[str] = ()
    progress: bool = False
    ping: bool = False

    @property
    def program(self) -> str:
        return PING_PROGRAM if self.ping else PROGRAM


def measure(options: Options, show: Show | None = None) -> PairsReport:
    """Measure all pairs and judge them. `show` is called once, by rank 0, while the other ranks are still there.

    At Ctrl-C what was measured until then is judged: with `show` that is shown and KeyboardInterrupt goes on.
    """
    _check(options)
    if options.ping:  # nothing heavy is loaded, and TCP answers at once or not at all
        limits = min(options.timeout, 8.0), min(options.start_timeout, 20.0)
        options = replace(options, timeout=limits[0], start_timeout=limits[1])
    claim = next(iter(claims(os.environ)), None)
    if claim is not None and not options.hosts and options.nproc is None:
        return _join(options, claim, show)
    if options.ping and len(options.hosts) < 2:
        raise UsageError("ping needs two hosts at least", "give --hosts a,b,c, or run it under srun or mpirun")
    return _over_ssh(options, show) if options.hosts else _here(options, show)


def _check(options: Options) -> None:
    check_start(options.backend, options.timeout, options.start_timeout)
    if options.nproc is not None and not 0 < options.nproc <= 1024:
        raise UsageError(f"nproc is {options.nproc}", "give the number of workers to start on each host, 1 or more")
    if options.bytes and not 8 <= options.bytes <= 1 << 36:
        raise UsageError(f"bytes is {options.bytes}", "give the size of a message in bytes, 8 to 64 GiB")
    if options.ping and (options.nodes_only or options.nproc is not None):
        raise UsageError("ping measures hosts and starts no ranks", "leave nodes_only and nproc out")
    if options.nodes_only and options.sample:
        raise UsageError("nodes_only and sample do not go together", "leave one of them out")


# On this host


def _here(options: Options, show: Show | None) -> PairsReport:
    need_device(options.backend)
    count = options.nproc or devices_here()
    if not options.nproc and options.backend == "gloo":
        count = min(4, max(2, os.cpu_count() or 2))
    if count == 0:
        raise UsageError(
            "this host has no accelerator to measure", "--backend gloo --nproc 4 measures CPUs; --hosts other hosts"
        )
    if count == 1:
        raise UsageError(
            "there is one GPU here, and a pair needs two", "give --hosts, or run it under torchrun or srun"
        )
    if options.nodes_only:
        raise UsageError("nodes_only needs several hosts, and this is one", "give --hosts, or run it under srun")
    name = secrets.token_hex(8)
    listener = listen(address="127.0.0.1")
    what = told(options, name, [listener.getsockname()], local=list(range(count)), parent=os.getpid())
    with ends_on_sigterm(), node_process(what, PROGRAM) as node:

        def failures() -> dict[str, str]:
            return {what["host"]: f"it ended with status {node.returncode}"} if node.poll() is not None else {}

        return _coordinate(options, _coordinator(options, _wanted(options, name, 1), listener, failures), show)


def _wanted(options: Options, name: str, agents: int) -> Wanted:
    mode = "nodes" if options.nodes_only else "pairs"
    return Wanted(
        name,
        agents,
        options.hosts,
        mode,
        options.sample,
        options.bytes,
        options.timeout,
        options.start_timeout,
        options.backend == "gloo",
    )


def _coordinate(options: Options, coordinator: Coordinator, show: Show | None) -> PairsReport:
    from mldebug.cluster.pairs._judge import judge_pairs

    interrupted = False
    try:
        coordinator.run()
    except KeyboardInterrupt:
        interrupted = True
        coordinator.notes.append(INTERRUPTED)
    coordinator.progress("")
    names = [gpu.name for gpu in coordinator.gpus]
    if options.nodes_only or options.ping:
        names = list(dict.fromkeys(gpu.host for gpu in coordinator.gpus))
    if not names and not interrupted:
        why = "; ".join(f"{host}: {why}" for host, why in coordinator.failures().items())
        coordinator.end({"t": "end"})
        why = why or "; ".join(coordinator.notes) or "nothing was heard of any"
        raise MldebugError(f"no worker could be started: {why}", "`mldebug dist-test` looks closer")
    evidence = coordinator.evidence(names)
    devices = Counter(gpu.device for gpu in coordinator.gpus if gpu.device)
    if devices and not options.nodes_only and (options.bytes or 1 << 28) >= 1 << 26:
        evidence["device"] = devices.most_common(1)[0][0]
    if options.backend == "gloo" and not options.ping:
        evidence["backend"] = "gloo"
    report = PairsReport(judge_pairs(evidence), evidence)
    try:
        if show is not None:
            show(report)
    finally:
        verdict = report.to_dict()["verdict"]
        coordinator.end({"t": "end", "verdict": verdict, "gpus": names, "notes": coordinator.notes})
    if interrupted and show is not None:
        raise KeyboardInterrupt
    return report


# On other hosts, over ssh


def _over_ssh(options: Options, show: Show | None) -> PairsReport:
    name = secrets.token_hex(8)
    listener = listen()
    clients = Clients(options, name, listener, "worker")
    coordinator = _coordinator(options, _wanted(options, name, len(options.hosts)), listener, clients.failures)
    with ends_on_sigterm():
        try:
            clients.start(options.program, **({"local": [0]} if options.ping else {}))
            return _coordinate(options, coordinator, show)
        finally:
            clients.end(coordinator)


def _coordinator(
    options: Options, wanted: Wanted, listener: socket.socket, failures: Callable[[], dict[str, str]]
) -> Coordinator:
    kind = PingCoordinator if options.ping else Coordinator
    return kind(wanted, listener, failures, progress_line("pairs", options.progress))


# As one of the ranks that a launcher started


def _join(options: Options, claim: Claim, show: Show | None) -> PairsReport:
    name = job()
    local = claim.local_rank if claim.local_rank is not None else claim.rank % (devices_here() or 1)
    if options.ping:
        local = 0
    where = find(os.environ, name, claim.size, local_world(os.environ), options.collector)
    what = told(options, name, [], local=[local], rank=claim.rank, parent=os.getpid(), tell=claim.rank > 0)
    with ends_on_sigterm():
        if claim.rank == 0:
            check_place(where)
            listener = listen(where.candidates)
            what["places"] = [["127.0.0.1", listener.getsockname()[1]]]
            with node_process(what, options.program):
                wanted = _wanted(options, name, claim.size)
                return _coordinate(options, _coordinator(options, wanted, listener, dict), show)
        what["places"] = [list(place) for place in where.places()]
        with node_process(what, options.program, subprocess.PIPE) as node:
            assert node.stdout is not None
            line = node.stdout.readline()
    return _heard(line, claim.rank)


def _heard(line: bytes, rank: int) -> PairsReport:
    """The report of rank 0 as the others get it: without the matrix, which is large in a large job."""
    try:
        message = json.loads(line)
        verdict = message["verdict"]
    except (ValueError, KeyError) as exc:
        raise MldebugError(
            f"rank {rank} on {socket.gethostname()} got no report from rank 0", "see what rank 0 says; or --collector"
        ) from exc
    findings = tuple(Finding(**found) for found in verdict["findings"])
    evidence: PairsEvidence = {
        "schema": SCHEMA, "gpus": message["gpus"], "src": [], "dst": [], "gbps": [], "status": [],
        "notes": message["notes"],
    }  # fmt: skip
    verdict = {**verdict, "culprits": tuple(verdict["culprits"]), "findings": findings}
    return PairsReport(PairsVerdict(**verdict), evidence)
