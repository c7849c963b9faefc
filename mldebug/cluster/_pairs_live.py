"""The live pair matrix: workers on this host, on other hosts over ssh, or in the job that this process is a rank of."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldebug.cluster._dist_local import devices_here
from mldebug.cluster._dist_where import find, local_world
from mldebug.cluster._dist_wire import listen
from mldebug.cluster._pairs_coordinator import Coordinator
from mldebug.cluster._pairs_evidence import SCHEMA, PairsEvidence
from mldebug.cluster._pairs_parts import Wanted
from mldebug.cluster._pairs_report import PairsReport
from mldebug.cluster._pairs_tasks import evidence_of
from mldebug.cluster._pairs_verdict import Finding, PairsVerdict
from mldebug.cluster._start import Client, check_start, passed_on, report_to
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ends_on_sigterm, ssh_command
from mldebug.core.world import Claim, claims, job

INTERRUPTED = "interrupted: what was measured until then is judged"
Show = Callable[[PairsReport], None]

# What looks after the workers of a host. Not `-m`: that would import modules from the folder where it happens to start.
PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "from mldebug.cluster._pairs_node import main; sys.exit(main())"
)


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


def measure(options: Options, show: Show | None = None) -> PairsReport:
    """Measure all pairs and judge them. `show` is called once, by rank 0, while the other ranks are still there.

    At Ctrl-C what was measured until then is judged: with `show` that is shown and KeyboardInterrupt goes on.
    """
    _check(options)
    claim = next(iter(claims(os.environ)), None)
    if claim is not None and not options.hosts and options.nproc is None:
        return _join(options, claim, show)
    return _over_ssh(options, show) if options.hosts else _here(options, show)


def _check(options: Options) -> None:
    check_start(options.backend, options.timeout, options.start_timeout)
    if options.nproc is not None and not 0 < options.nproc <= 1024:
        raise UsageError(f"nproc is {options.nproc}", "give the number of workers to start on each host, 1 or more")
    if options.bytes and not 8 <= options.bytes <= 1 << 36:
        raise UsageError(f"bytes is {options.bytes}", "give the size of a message in bytes, 8 to 64 GiB")
    if options.nodes_only and options.sample:
        raise UsageError("nodes_only and sample do not go together", "leave one of them out")


# On this host


def _here(options: Options, show: Show | None) -> PairsReport:
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
    told = _told(options, name, [listener.getsockname()], local=list(range(count)), parent=os.getpid())
    with ends_on_sigterm(), _node(told) as node:

        def failures() -> dict[str, str]:
            return {told["host"]: f"it ended with status {node.returncode}"} if node.poll() is not None else {}

        wanted = _wanted(options, name, 1)
        return _coordinate(options, Coordinator(wanted, listener, failures, _progress(options)), show)


def _told(options: Options, name: str, places: Sequence[Any], **more: Any) -> dict[str, Any]:
    """What a node program gets to know."""
    return {
        "job": name, "places": [list(place[:2]) for place in places], "host": socket.gethostname(), "local": [],
        "nproc": options.nproc or 0, "backend": options.backend, "rank": None, "parent": 0, "tell": False,
        "timeout": options.start_timeout, "env": {"TORCH_CPP_LOG_LEVEL": "ERROR"}, **more,
    }  # fmt: skip


def _wanted(options: Options, name: str, agents: int) -> Wanted:
    mode = "nodes" if options.nodes_only else "pairs"
    return Wanted(
        name, agents, options.hosts, mode, options.sample, options.bytes, options.timeout, options.start_timeout
    )


@contextlib.contextmanager
def _node(told: dict[str, Any], stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """A node program of this host, ended with its workers at the end."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # and it is forked, which threads do not survive
    env = {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    words = [sys.executable, "-c", PROGRAM, json.dumps(told)]
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


def _coordinate(options: Options, coordinator: Coordinator, show: Show | None) -> PairsReport:
    from mldebug.cluster._pairs_judge import judge_pairs

    interrupted = False
    try:
        coordinator.run()
    except KeyboardInterrupt:
        interrupted = True
        coordinator.notes.append(INTERRUPTED)
    coordinator.progress("")
    names = [gpu.name for gpu in coordinator.gpus]
    if options.nodes_only:
        names = list(dict.fromkeys(gpu.host for gpu in coordinator.gpus))
    if not names and not interrupted:
        why = "; ".join(f"{host}: {why}" for host, why in coordinator.failures().items())
        coordinator.end({"t": "end"})
        why = why or "; ".join(coordinator.notes) or "nothing was heard of any"
        raise MldebugError(f"no worker could be started: {why}", "`mldebug dist-test` looks closer")
    evidence = evidence_of(names, coordinator.tasks, coordinator.notes, coordinator.blame)
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


def _progress(options: Options) -> Callable[[str], None] | None:
    """A line on stderr that is written over, a few times a second; "" wipes it."""
    if not options.progress or not sys.stderr.isatty():
        return None
    last = [0.0]

    def show(text: str) -> None:
        now = time.monotonic()
        if not text or now - last[0] > 0.2:
            last[0] = now
            with contextlib.suppress(OSError):
                sys.stderr.write(f"\r\x1b[K{f'pairs: {text}'[:79] if text else ''}")
                sys.stderr.flush()

    return show


# On other hosts, over ssh


def _over_ssh(options: Options, show: Show | None) -> PairsReport:
    addresses = report_to()
    name = secrets.token_hex(8)
    listener = listen()
    port = listener.getsockname()[1]
    passed = passed_on() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    clients: list[Client] = []

    def failures() -> dict[str, str]:
        return {client.host: why for client in clients if (why := client.failure())}

    coordinator = Coordinator(_wanted(options, name, len(options.hosts)), listener, failures, _progress(options))
    with ends_on_sigterm():
        try:
            for host in options.hosts:
                plain = host.rpartition("@")[2]
                told = _told(options, name, [(address, port) for address in addresses], host=plain, env=passed)
                words = [options.python or sys.executable, "-c", PROGRAM, json.dumps(told)]
                clients.append(Client(plain, ssh_command(host, words, options.start_timeout, options.ssh), "worker"))
            return _coordinate(options, coordinator, show)
        finally:
            for client in clients:
                client.end()


# As one of the ranks that a launcher started


def _join(options: Options, claim: Claim, show: Show | None) -> PairsReport:
    name = job()
    local = claim.local_rank if claim.local_rank is not None else claim.rank % (devices_here() or 1)
    where = find(os.environ, name, claim.size, local_world(os.environ), options.collector)
    told = _told(options, name, [], local=[local], rank=claim.rank, parent=os.getpid(), tell=claim.rank > 0)
    with ends_on_sigterm():
        if claim.rank == 0:
            listener = listen(where.candidates)
            told["places"] = [["127.0.0.1", listener.getsockname()[1]]]
            with _node(told):
                wanted = _wanted(options, name, claim.size)
                return _coordinate(options, Coordinator(wanted, listener, dict, _progress(options)), show)
        told["places"] = [list(place) for place in where.places()]
        with _node(told, subprocess.PIPE) as node:
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
