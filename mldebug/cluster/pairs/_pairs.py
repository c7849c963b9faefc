"""pair_matrix(): which GPU, node or path is bad, from the bandwidths of all pairs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.cluster.pairs._files import load_pairs, merge_pairs
from mldebug.cluster.pairs._report import PairsReport

Source = PairsEvidence | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def pair_matrix(
    source: Source | None = None,
    *,
    nproc: int | None = None,
    backend: str = "auto",
    hosts: str | Sequence[str] = (),
    nodes_only: bool = False,
    sample: bool = False,
    bytes: int = 0,
    timeout: float = 30.0,
    start_timeout: float = 180.0,
    collector: str = "",
    python: str = "",
    ssh: Sequence[str] = (),
    ping: bool = False,
) -> PairsReport:
    """Measure all pairs of GPUs and judge them, or judge a recorded matrix: evidence, or files (several make one).

    Without `source` it measures: bandwidths in GBps (10^9 bytes/s), latencies in microseconds, contents verified. In a
    process that torchrun, srun or mpirun started all ranks have to call it; else it starts `nproc` workers (default:
    one for each accelerator) on this host, or on each of `hosts` over ssh. A pair has `timeout` seconds, a worker
    `start_timeout` to load torch. `nodes_only` measures an all_reduce over all GPUs of two nodes at a time, `sample`
    about a dozen rounds whatever the size, and `bytes` is the size of a message (default: 256 MiB; CPUs 4 MiB).
    `ping` measures TCP between hosts instead, with no torch and no GPU anywhere: connections, round trips, throughput
    and losses; its matrix has hosts. `collector` is host:port of rank 0, where it cannot be worked out. The workers are
    processes of their own; this one does not load torch. In a job all ranks return the same verdict; the matrix is
    rank 0's.

    Raises UsageError for a file that is no pair matrix and for options that do not go together, MldebugError where no
    worker could be started.

        report = pair_matrix("pairs.csv")
        print(report.text()); report.verdict.culprits
    """
    if source is None:
        from mldebug.cluster.pairs._live import Options, measure
        from mldebug.core.hosts import checked, parse_hosts

        names = parse_hosts(hosts) if isinstance(hosts, str) and hosts else checked(hosts) if hosts else []
        return measure(
            Options(
                nproc,
                backend,
                names,
                nodes_only,
                sample,
                bytes,
                timeout,
                start_timeout,
                collector,
                python,
                tuple(ssh),
                ping=ping,
            )
        )
    from mldebug.cluster.pairs._judge import judge_pairs

    if isinstance(source, dict):
        evidence: PairsEvidence = source  # type: ignore[assignment]
    else:
        paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        evidence = merge_pairs([load_pairs(path) for path in paths])
    return PairsReport(judge_pairs(evidence), evidence)
