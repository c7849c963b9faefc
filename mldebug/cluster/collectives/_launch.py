"""Where the ranks of the benchmark are: on this host, on others over ssh, or in the job that this process is one of."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterator

from mldebug.cluster._start import Clients, check_place, node_process, program_of, progress_line, told
from mldebug.cluster.collectives._coordinator import Coordinator
from mldebug.cluster.collectives._options import Options
from mldebug.cluster.collectives._report import CommsReport, judged
from mldebug.cluster.collectives._run import Run
from mldebug.cluster.collectives._save import Saver
from mldebug.cluster.dist._local import devices_here, need_device
from mldebug.cluster.dist._where import find, local_world
from mldebug.cluster.dist._wire import listen
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.world import Claim, claims, job

PROGRAM = program_of("mldebug.cluster.collectives._node")
Show = Callable[[CommsReport], None]


def launch(options: Options, show: Show | None = None) -> CommsReport:
    """Measure and judge. `show` is called once, by rank 0 where this is one of the ranks, while the others are there.

    At Ctrl-C and SIGTERM what was measured until then is shown, and the exception goes on. Without `show` Ctrl-C
    returns what was measured; SIGTERM ends the process in any case.
    """
    claim = next(iter(claims(os.environ)), None)
    if claim is not None and not options.hosts and options.nproc is None:
        return _join(options, claim, show)
    return _over_ssh(options, show) if options.hosts else _here(options, show)


def _here(options: Options, show: Show | None) -> CommsReport:
    count = options.nproc or devices_here()
    if not options.nproc and (options.backend == "gloo" or not count):
        count = min(4, max(2, os.cpu_count() or 2))
    if count < 2:
        few = "--nproc is 1" if options.nproc else "there is one GPU here"
        raise UsageError(f"{few}, and a collective needs two ranks", "give --hosts, or run it under srun")
    if options.root >= count:
        raise UsageError(f"root is {options.root}, and there are {count} ranks", f"give one of 0 to {count - 1}")
    need_device(options.backend)
    name = secrets.token_hex(8)
    listener = listen(address="127.0.0.1")
    what = told(options, name, [listener.getsockname()], local=list(range(count)), parent=os.getpid())
    with ends_on_sigterm(), node_process(what, PROGRAM) as node:

        def failures() -> dict[str, str]:
            return {what["host"]: f"it ended with status {node.returncode}"} if node.poll() is not None else {}

        return _coordinate(options, _coordinator(options, name, 1, listener, failures), [], show)


def _over_ssh(options: Options, show: Show | None) -> CommsReport:
    name = secrets.token_hex(8)
    listener = listen()
    clients = Clients(options, name, listener, "rank")
    hosts = [host.rpartition("@")[2] for host in options.hosts]
    coordinator = _coordinator(options, name, len(hosts), listener, clients.failures)
    with ends_on_sigterm():
        try:
            clients.start(PROGRAM)
            return _coordinate(options, coordinator, hosts, show)
        finally:
            clients.end(coordinator)


def _join(options: Options, claim: Claim, show: Show | None) -> CommsReport:
    name = job()
    local = claim.local_rank if claim.local_rank is not None else claim.rank % (devices_here() or 1)
    where = find(os.environ, name, claim.size, local_world(os.environ), options.collector)
    what = told(options, name, [], local=[local], rank=claim.rank, parent=os.getpid(), tell=claim.rank > 0)
    with ends_on_sigterm():
        if claim.rank == 0:
            check_place(where)
            listener = listen(where.candidates)
            what["places"] = [["127.0.0.1", listener.getsockname()[1]]]
            with node_process(what, PROGRAM):
                return _coordinate(options, _coordinator(options, name, claim.size, listener, dict), [], show)
        what["places"] = [list(place) for place in where.places()]
        with node_process(what, PROGRAM, subprocess.PIPE) as node:
            assert node.stdout is not None
            line = node.stdout.readline()
    try:
        return judged(json.loads(line)["evidence"])
    except (ValueError, KeyError) as exc:
        raise MldebugError(
            f"rank {claim.rank} on {socket.gethostname()} got no report from rank 0",
            "see what rank 0 says; or --collector",
        ) from exc


def _coordinator(
    options: Options, name: str, agents: int, listener: socket.socket, failures: Callable[[], dict[str, str]]
) -> Coordinator:
    return Coordinator(name, agents, listener, failures, options.timeout, options.start_timeout)


def _coordinate(options: Options, coordinator: Coordinator, hosts: list[str], show: Show | None) -> CommsReport:
    saver = Saver(options.output)
    run = Run(options, coordinator, saver.row, progress_line("comms", options.progress))
    broken: BaseException | None = None
    try:
        with saver:
            try:
                run.measure(hosts)
            except (KeyboardInterrupt, SystemExit) as exc:
                broken = exc
            report = judged(run.evidence)
            with _undisturbed():
                try:
                    saver.end(report)
                except MldebugError as exc:  # what was measured is worth more than the file
                    run.evidence["unsaved"] = exc.message
                    report = judged(run.evidence)
                if show is not None:
                    show(report)
    finally:
        coordinator.end({"t": "end", "evidence": run.evidence})
    if broken is not None and (show is not None or isinstance(broken, SystemExit)):
        raise broken
    return report


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C while the report is written does not leave half of it."""
    import signal

    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_report(path: str) -> CommsReport:
    """The report on what an earlier run left in a .json or .jsonl file; a damaged file is a UsageError."""
    from mldebug.cluster.collectives._save import csv_of, load, markdown_of

    evidence = load(path)
    try:
        report = judged(evidence)
        # All that may be asked of it is tried: what a damaged file lacks shows itself here, and not in the midst.
        report.text(), report.text(width=118), report.plot_text(), report.json()
        csv_of(evidence), markdown_of(evidence)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError) as exc:
        raise UsageError(f"{path} is damaged: {type(exc).__name__}: {exc}", "measure again with -o FILE") from exc
    return report
