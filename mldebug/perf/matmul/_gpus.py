"""All GPUs of a node at once, or all ranks of a job: a process for each, and which of them is behind the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldebug.core.device import find_device
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.report import Report, jsonable, paint
from mldebug.core.world import world
from mldebug.perf.matmul._blocks import shape_text
from mldebug.perf.matmul._run import Options, run

_Z = -3.5  # robust standard deviations from the median
_BEHIND = 0.02  # share of the median that a straggler is below it at least
_FLOOR = 0.005  # of the median: cards of one kind are this far apart by themselves
_GRACE = 20.0  # seconds for the ends of the others after the first
_PROGRAM = "import sys; sys.path[:1] = [{root!r}]; from mldebug.perf.matmul._gpus import worker; worker()"


@dataclass(frozen=True)
class Straggler:
    """A device that is behind: its rate, how many robust standard deviations off and by what share of the median."""

    rank: int
    host: str
    index: int
    uuid: str
    sustained: float
    z: float
    below: float


@dataclass(frozen=True)
class MamfAllReport(Report):
    """The reports of all devices (as plain JSON, with `rank`), who is behind, and who gave no figure and why."""

    devices: tuple[Mapping[str, Any], ...]
    median: float
    stragglers: tuple[Straggler, ...]
    missing: Mapping[str, str]
    ended: str

    @property
    def ok(self) -> bool:
        """Whether every device gave a figure, none is behind, and none is held back by heat or its supply."""
        return not (self.missing or self.stragglers or self.ended or any(one["trouble"] for one in self.devices))

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = []
        for one in self.stragglers:
            lines.append(
                f"behind: rank {one.rank}, {one.host} device {one.index}: {one.sustained:.4g} TFLOPS,"
                f" {100 * one.below:.1f}% below the median"
            )
        lines += [f"missing: {who}: {why}" for who, why in self.missing.items()]
        if self.devices:
            first = self.devices[0]
            lines.append(
                f"MAMF of {len(self.devices)} x {first['device']}, {first['dtype']}: median {self.median:.4g} TFLOPS"
            )
            lines.append("rank  host                 dev   TFLOPS     burst  shape                 W  °C")
        for row in self.devices:
            told = row["steady"]
            watts, celsius = (f"{told[name]:.0f}" if name in told else "" for name in ("watts", "celsius"))
            burst = f"{row['burst']:.4g}" if row["burst"] else ""
            lines.append(
                f"{row['rank']:>4}  {row['host'][:20]:<20} {row['index']:>3} {row['sustained']:>8.4g}  {burst:>8}"
                f"  {shape_text(row['shape']):<18} {watts:>4} {celsius:>3}"
            )
        troubles = {name for one in self.devices for name in one["trouble"]}
        if troubles:
            lines.append(f"held back by {', '.join(sorted(troubles))}: `mldebug doctor` looks why")
        if self.ended:
            lines.append(f"ended early by {self.ended}: these are the best so far")
        text = "\n".join(lines)
        return paint(text) if color else text


def mamf_all_gpus(
    dtype: str = "bfloat16",
    *,
    seconds: float | None = None,
    shapes: Sequence[tuple[int, int, int]] = (),
    scaling: str = "tensor",
    fast_accum: bool = True,
    device: str = "auto",
    output: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> MamfAllReport | None:
    """`mamf()` on every GPU of this node at once; under torchrun on that of each rank, of all nodes.

    By itself it starts a process for each visible device. Under a launcher each rank calls it: rank 0 gets the report
    of all and the others None; they meet by a TCPStore at MASTER_ADDR, as a collective could hang on what is tested.
    `output` FILE becomes FILE.0, FILE.1 ... by rank. A device is behind if it is 3.5 robust standard deviations and 2%
    below the median.

        report = mamf_all_gpus()
        print(report.stragglers)
    """
    path = None if output is None else os.fspath(output)
    options = Options(
        dtype, device, None, seconds, tuple(shapes), scaling=scaling, fast_accum=fast_accum, seed=seed, output=path
    )
    tell = progress or (lambda text: None)
    if world().world_size > 1:
        return _as_a_rank(options, tell)
    count = find_device(device).count()
    return run_many(options, list(range(count)), tell)


def run_many(options: Options, indices: Sequence[int], progress: Callable[[str], None]) -> MamfAllReport:
    """A process for each of these devices, all at once. Ctrl-C and SIGTERM are handed on, and all are waited for."""
    root = str(Path(__file__).resolve().parents[3])
    children: dict[int, subprocess.Popen[bytes]] = {}
    ended = ""
    outputs: dict[int, bytearray] = {}
    try:
        with ends_on_sigterm():
            for rank, index in enumerate(indices):
                one = _for_rank(options, rank, index)
                children[rank] = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(root=root), json.dumps(dataclasses.asdict(one))],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                outputs[rank] = bytearray()
            _read(children, outputs, progress, None)
    except KeyboardInterrupt:
        ended = "SIGINT"
    except SystemExit:
        ended = "SIGTERM"
    finally:
        if ended:
            for child in children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):
                _read(children, outputs, progress, time.monotonic() + _GRACE)
        for child in children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    return judge({rank: _parsed(bytes(text), children[rank].returncode) for rank, text in outputs.items()}, ended)


def worker() -> None:
    """What the process for one device runs: its options are the argument, its report the last line of stdout."""
    told = json.loads(sys.argv[1])
    told |= {name: tuple(map(tuple, told[name])) for name in ("shapes", "extra", "also")}
    sys.stdout.write("\n" + json.dumps(_outcome(Options(**told), lambda text: None)) + "\n")
    sys.stdout.flush()


def judge(told: Mapping[int, Mapping[str, Any]], ended: str = "") -> MamfAllReport:
    """Who is behind, from the reports by rank; {"error": why} is one without a figure.

    judge({0: report.to_dict(), 1: {"error": "killed"}}).missing
    """
    devices = [{"rank": rank, **one} for rank, one in sorted(told.items()) if "error" not in one]
    missing = {f"rank {rank}": str(one["error"]) for rank, one in sorted(told.items()) if "error" in one}
    rates = [float(one["sustained"]) for one in devices]
    middle = statistics.median(rates) if rates else 0.0
    found = []
    for one, z in zip(devices, robust_z(rates), strict=True):
        below = 1 - float(one["sustained"]) / middle
        if z < _Z and below > _BEHIND:
            found.append(
                Straggler(one["rank"], one["host"], one["index"], one["uuid"], float(one["sustained"]), z, below)
            )
    return MamfAllReport(tuple(devices), middle, tuple(sorted(found, key=lambda one: one.z)), missing, ended)


def robust_z(values: Sequence[float]) -> list[float]:
    """How many standard deviations each value is from the median, the deviation being 1.4826 times the median distance
    from it, and at least half a percent of it. Of two values the larger one is taken for the median.

    robust_z([730, 731, 729, 650])[3]  # -21
    """
    if not values:
        return []
    middle = max(values) if len(values) == 2 else statistics.median(values)
    scale = 0.0 if len(values) == 2 else 1.4826 * statistics.median(abs(one - middle) for one in values)
    scale = max(scale, _FLOOR * abs(middle)) or 1.0
    return [(one - middle) / scale for one in values]


def _for_rank(options: Options, rank: int, index: int | None) -> Options:
    output = f"{options.output}.{rank}" if options.output is not None else None
    return dataclasses.replace(options, index=index, output=output)


def _outcome(options: Options, progress: Callable[[str], None]) -> dict[str, Any]:
    """The report of a run as plain JSON, or why there is none."""
    try:
        found: dict[str, Any] = jsonable(run(options, progress).to_dict())
        return found
    except MldebugError as exc:
        return {"error": exc.message}
    except KeyboardInterrupt:
        return {"error": "interrupted before anything was measured"}
    except SystemExit as exc:
        return {"error": f"ended with {exc.code} before anything was measured"}
    except Exception as exc:
        return {"error": f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"}


def _read(
    children: Mapping[int, subprocess.Popen[bytes]],
    outputs: Mapping[int, bytearray],
    progress: Callable[[str], None],
    deadline: float | None,
) -> None:
    """All that the processes write, until each has closed its stdout or the deadline has come."""
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for rank, child in children.items():
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, rank)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            for key, _ in selector.select(0.5):
                if data := os.read(key.fd, 65536):
                    outputs[key.data].extend(data)
                else:
                    selector.unregister(key.fileobj)
            progress(f"{len(selector.get_map())} of {len(children)} devices at work, {time.monotonic() - began:.0f} s")


def _parsed(text: bytes, status: int | None) -> dict[str, Any]:
    for line in reversed(text.decode("utf-8", "replace").splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {"error": f"its process ended with status {status} and no report"}


def _as_a_rank(options: Options, progress: Callable[[str], None]) -> MamfAllReport | None:
    """Run as one rank of a job, and meet the others by its store."""
    here = world()
    store = _store(here.rank, here.world_size)
    count = find_device(options.device).count()
    index = (here.local_rank if count > 1 else 0) if options.device != "cpu" else None
    store.set(f"here/{here.rank}", "1")
    _wait_for(store, [f"here/{rank}" for rank in range(here.world_size)], time.monotonic() + 120)
    told = _outcome(_for_rank(options, here.rank, index), progress)
    store.set(f"report/{here.rank}", json.dumps({**told, "host": told.get("host", here.host)}))
    if here.rank:
        # Where rank 0 holds the store it goes with it; nobody else is waited for.
        return None
    ended = str(told.get("ended", ""))
    keys = [f"report/{rank}" for rank in range(here.world_size)]
    _wait_for(store, keys, time.monotonic() + (5 if ended else 60))
    found = {}
    for rank, key in enumerate(keys):
        there = store.check([key])
        found[rank] = json.loads(store.get(key)) if there else {"error": "it sent no report in time"}
    return judge(found, ended)


def _store(rank: int, size: int) -> Any:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"{size} ranks, and {' and '.join(missing)} not set: they cannot meet",
            "use torchrun, or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port for all of them",
        )
    from datetime import timedelta

    import torch.distributed

    dist: Any = torch.distributed  # its names are not exported for type checkers
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=120)))
    except Exception as exc:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MldebugError(
            f"rank {rank} cannot reach the store at {where}: {' '.join(str(exc).split())[:200]}",
            "is rank 0 running there, and is the port open?",
        ) from exc
    return dist.PrefixStore("mldebug/mamf", store)


def _wait_for(store: Any, keys: Sequence[str], deadline: float) -> None:
    """Until all keys are there, or it is too late: who is missing is said by rank 0 then."""
    while time.monotonic() < deadline and not store.check(list(keys)):
        time.sleep(0.1)
