"""comms(): how fast are the collectives of these ranks, and is what they deliver right?"""

from __future__ import annotations

from collections.abc import Sequence

from mldebug.cluster.collectives._options import Options, check_options
from mldebug.cluster.collectives._report import CommsReport
from mldebug.cluster.collectives._table import ALL_DTYPES, COLLECTIVES


def comms(
    collectives: str | Sequence[str] = "all_reduce",
    *,
    first: int = 32 << 10,
    last: int = 0,
    factor: float = 2.0,
    step: int = 0,
    dtypes: str | Sequence[str] = "float32",
    op: str = "sum",
    root: int = 0,
    iters: int = 0,
    warmup: int = 5,
    check: int = 1,
    mode: str = "auto",
    launches: int = 20,
    in_place_only: bool = False,
    stability: int = 0,
    objects: int = 0,
    nproc: int | None = None,
    backend: str = "auto",
    hosts: str | Sequence[str] = (),
    timeout: float = 60.0,
    start_timeout: float = 180.0,
    min_busbw: float = 0.0,
    output: str = "",
) -> CommsReport:
    """Measure collectives at payloads of `first` to `last` bytes, each `factor` times the one before or `step` more.

    `collectives` are all_reduce, all_gather, reduce_scatter, alltoall, broadcast, reduce, gather, scatter, sendrecv, or
    "all"; `dtypes` as torch spells them, or "all"; `op` sum, prod, min, max or avg. algbw and busbw are those of
    nccl-tests (its PERFORMANCE.md), in 10^9 bytes/s; times are the mean over the ranks, in microseconds.

    `mode` is how calls are timed: "queued" (one behind the other, as nccl-tests does), "graph" (`iters` calls are
    captured in a CUDA graph, which is replayed `launches` times), "barrier" (before each call, and not counted), or
    "auto": graph below 16 MiB on NCCL, where launching costs more than the collective. `iters` 0 is 20, and fewer where
    a call takes long. `check` times the contents are checked. `last` 0 is 16 GiB (16 MiB on CPUs), less where memory
    does not allow it. `stability` measures one payload of that many bytes call by call, `objects` calls of
    all_gather_object against tensors. `output` is a .jsonl, .json, .csv or .md file that is whole at any time, or .png.

    Under torchrun, srun or mpirun this is one of the ranks, and all have to call it; else it starts `nproc` ranks
    (default: one for each accelerator) here, or on each of `hosts` over ssh. A rank that does not end a step within
    `timeout` seconds is named. Ctrl-C returns what was measured until then. Wrong usage is a UsageError; what goes
    wrong in the run is in the report.

        report = comms("all", last=1 << 30)
        report.ok or sys.exit(report.text())
    """
    from mldebug.cluster.collectives._launch import launch
    from mldebug.core.hosts import checked, parse_hosts

    names = [collectives] if isinstance(collectives, str) else list(collectives)
    kinds = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    options = Options(
        collectives=tuple(COLLECTIVES) if names == ["all"] else tuple(names),
        dtypes=ALL_DTYPES if kinds == ["all"] else tuple(kinds),
        op=op, root=root, first=first, last=last, factor=factor, step=step, iters=iters, warmup=warmup, check=check,
        mode=mode, launches=launches, in_place_only=in_place_only, stability=stability, objects=objects, nproc=nproc,
        backend=backend, timeout=timeout, start_timeout=start_timeout, min_busbw=min_busbw, output=output,
        hosts=parse_hosts(hosts) if isinstance(hosts, str) and hosts else checked(hosts) if hosts else [],
    )  # fmt: skip
    check_options(options)
    return launch(options)
