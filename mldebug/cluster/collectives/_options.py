"""What a run of the benchmark is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mldebug.cluster._start import check_start
from mldebug.cluster.collectives._table import COLLECTIVES, OPS, dtype_name
from mldebug.core.errors import UsageError

MODES = ("auto", "queued", "graph", "barrier")


@dataclass(frozen=True)
class Options:
    """`comms()` says what each of these is."""

    collectives: tuple[str, ...] = ("all_reduce",)
    dtypes: tuple[str, ...] = ("float32",)
    op: str = "sum"
    root: int = 0
    first: int = 32 << 10
    last: int = 0  # 0: 16 GiB on accelerators, 16 MiB on CPUs
    factor: float = 2.0
    step: int = 0
    iters: int = 0  # 0: 20, and fewer where one call takes long
    warmup: int = 5
    check: int = 1
    mode: str = "auto"
    launches: int = 20
    in_place_only: bool = False
    stability: int = 0
    objects: int = 0
    nproc: int | None = None
    backend: str = "auto"
    hosts: Sequence[str] = ()
    timeout: float = 60.0
    start_timeout: float = 180.0
    collector: str = ""
    python: str = ""
    ssh: Sequence[str] = ()
    min_busbw: float = 0.0
    output: str = ""
    progress: bool = False

    def asked(self) -> dict[str, Any]:
        """What the evidence keeps of it."""
        kept = ("collectives", "dtypes", "op", "root", "iters", "warmup", "check", "mode", "launches", "min_busbw")
        return {key: value for key, value in asdict(self).items() if key in kept}


def check_options(options: Options) -> None:
    """Refuse what cannot be measured."""
    check_start(options.backend, options.timeout, options.start_timeout)
    for name in options.collectives:
        if name not in COLLECTIVES:
            raise UsageError(f"there is no collective {name!r} here", f"one of {', '.join(COLLECTIVES)}, or all")
    for dtype in options.dtypes:
        dtype_name(dtype)
    if options.op not in OPS:
        raise UsageError(f"there is no operation {options.op!r} here", f"one of {', '.join(OPS)}")
    if options.mode not in MODES:
        raise UsageError(f"there is no mode {options.mode!r}", f"one of {', '.join(MODES)}")
    if options.nproc is not None and not 0 < options.nproc <= 4096:
        raise UsageError(f"nproc is {options.nproc}", "give the number of ranks to start on each host, 1 or more")
    if options.first < 8 or (options.last and options.last < options.first):
        raise UsageError(
            f"sizes from {options.first} to {options.last} bytes", "the first is 8 or more, the last not below it"
        )
    if max(options.first, options.last, options.step, options.stability) > 1 << 44:
        raise UsageError("a size is above 16 TiB", "give one that the memory of a device can hold, such as -e 16G")
    if options.factor <= 1 and not options.step:
        raise UsageError(f"the factor between sizes is {options.factor:g}", "give one above 1, or a step in bytes")
    if min(options.iters, options.warmup, options.check, options.root, options.stability, options.objects) < 0:
        raise UsageError("a count is below 0", "iters, warmup, check and root are 0 or more")
