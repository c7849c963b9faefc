"""One run on one device: memory, warm-up, search, and the figures of the winner. What ends it early ends it with those
that it has."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.device import Device, find_device
from mldebug.core.errors import MldebugError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.report import write
from mldebug.perf.matmul._blocks import Block, Shape, flops_of, shape_text, spread
from mldebug.perf.matmul._candidates import Limits, limits_for, neighbours_in, reference_shape, seeds
from mldebug.perf.matmul._references import known_shapes
from mldebug.perf.matmul._report import Figure, MamfReport, make_report
from mldebug.perf.matmul._results import ResultFile, read_results
from mldebug.perf.matmul._search import Candidate, Note, Search, mean_rate, settle, warm_up
from mldebug.perf.matmul._telemetry import Telemetry

_SECONDS = {"cpu": 10.0}  # of the whole run, by kind of device
_DEFAULT_SECONDS = 55.0
_MOST = 12  # shapes of a list that meet in the duel


@dataclass(frozen=True)
class Options:
    """What `mamf()` was asked. `shapes` are all that is measured, where there are any, `exhaustive` says to take each
    of them in turn however long it lasts; else a search begins at `extra` and at seeds of its own."""

    dtype: str = "bfloat16"
    device: str = "auto"
    index: int | None = None
    seconds: float | None = None
    shapes: Sequence[Shape] = ()
    extra: Sequence[Shape] = ()
    exhaustive: bool = False
    scaling: str = "tensor"
    fast_accum: bool = True
    seed: int | None = None
    output: str | None = None
    resume: str | None = None
    also: Sequence[Shape] = ()  # to be measured beside, with a batch or without, and to take no part in the race


@dataclass
class _State:
    """What is known so far. Every step leaves it fit to make a report of."""

    began: float
    phase: str = "start"
    search: Search | None = None
    also: Search | None = None
    settled: list[Block] = field(default_factory=list)
    winner: Shape | None = None
    flat: bool = False
    burst: float | None = None
    flushed: float | None = None
    flushed_known: tuple[Shape, float] | None = None
    steady: tuple[float, float] | None = None  # when the winner ran alone, of time.monotonic()
    load: tuple[float, float] | None = None
    ended: str = ""


def run(options: Options, progress: Callable[[str], None] = lambda text: None) -> MamfReport:
    """Measure on one device. An error comes before anything was measured; later it is a part of the report."""
    state = _State(time.monotonic())
    progress("loading torch")
    device = find_device(options.device, options.index)
    device.set_current()
    from mldebug.perf.matmul._formats import find_format

    form = find_format(device, options.dtype, options.scaling, options.fast_accum)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    start = _facts(device, form, options, seed)
    before = _resumed(options, start)
    file = ResultFile(options.resume or options.output, f"{device.kind}{device.index}", options.resume is not None)
    file.append({"kind": "start", "tool": "mamf", "schema": 1, **start})
    report = None
    try:
        with Telemetry(device) as telemetry, _until_the_end(state):
            _measure(state, form, options, seed, before, file, progress)
        report = make_report(start, _figures(state, telemetry, str(file.path)))
        file.append({"kind": "report", **report.to_dict()})
        return report
    finally:
        if report is None:
            file.append({"kind": "end", "ended": state.ended or "error", "phase": state.phase})
        file.close()


def _measure(
    state: _State,
    form: Any,
    options: Options,
    seed: int,
    before: dict[Shape, list[float]],
    file: ResultFile,
    progress: Callable[[str], None],
) -> None:
    from mldebug.perf.matmul._machine import TorchMachine, first_rate, may_fit, multiprocessors

    device, rng = form.device, random.Random(seed)
    state.phase = "first look"
    progress("a first look at the speed")
    rate = first_rate(form, 1.0 if device.kind == "cpu" else 0.4)
    limits = limits_for(rate, device.kind, multiprocessors(device))
    reference = reference_shape(limits)
    shapes = _shapes(options, limits, before, form.dtype)
    total = _total(options, device, shapes, limits, rate)
    roomy = [shape for shape in (*shapes, *options.also) if may_fit(form, shape)]
    with TorchMachine(form, shapes=[*roomy, reference], tflops=rate, seed=seed) as machine:
        end = total - (time.monotonic() - state.began) + machine.now()  # on the machine's clock
        note = _noting(file, progress, state, machine.now, end)
        search = Search(machine, reference, rng=rng, note=note, neighbours=neighbours_in(limits))
        search.reference_races = not options.shapes or reference in options.shapes
        state.search = search
        state.phase = "warm-up"
        search.touch([reference, *shapes])
        left = end - machine.now()
        state.load = (time.monotonic(), math.inf)
        state.flat = warm_up(machine, reference, 0.06 * left, machine.now() + 0.2 * left, note)
        left = end - machine.now()
        tail = min(0.25 * left, 8.0)  # for the winner alone, burst and flushed
        if options.also:
            search.each([], "warm-up")  # a first figure, should it be ended before the race begins
            state.also = Search(machine, reference, rng=rng, note=note, neighbours=lambda shape: [])
            _beside(state.also, options.also, machine.now, machine.now() + 0.4 * (end - tail - machine.now()))
        if options.shapes:
            _in_rounds(search, shapes, machine.now, end - tail, options.exhaustive)
        else:
            search.run(shapes, end - tail)
        best = search.best()
        if best is None:
            return
        state.phase, state.winner = "final", best.shape
        since = time.monotonic()
        state.settled = settle(machine, best.shape, 0.55 * (end - machine.now()), note)
        state.steady = (since, time.monotonic())
        state.load = (state.load[0], time.monotonic())
        _other_ways(state, machine, best.shape, form.dtype, device, progress)


def _in_rounds(
    search: Search, shapes: Sequence[Shape], now: Callable[[], float], until: float, exhaustive: bool
) -> None:
    """The shapes that were asked for: rounds until the time is over, and a duel of the best five if there are more."""
    if exhaustive:
        search.each(shapes, "round 1")  # all of them, whatever the time
        search.duel(search.finalists(), until)
        return
    stop = now() + (0.3 if len(shapes) > 1 else 0.1) * max(0.0, until - now())
    number = 0
    while number == 0 or now() < stop:
        number += 1
        search.each(shapes, f"round {number}")
        if all(one.error for one in search.known.values()):
            return
    search.duel(search.ranking()[:_MOST], until)


def _beside(also: Search, shapes: Sequence[Shape], now: Callable[[], float], until: float) -> None:
    """Rounds over the shapes of a model: at least two, so that one odd block is not all that is known."""
    also.touch(shapes)
    number = 0
    while number < 2 or now() < until:
        number += 1
        also.each(shapes, "model")


def _other_ways(
    state: _State, machine: Any, winner: Shape, dtype: str, device: Device, progress: Callable[[str], None]
) -> None:
    from mldebug.perf.matmul._references import mamf_references
    from mldebug.perf.matmul._ways import burst, flushed_rate, without_room

    few = device.kind == "cpu"

    def classic(shape: Shape) -> float:
        return flushed_rate(machine, shape, 0.05, 32 << 20) if few else flushed_rate(machine, shape)

    progress("burst, and the classic way")
    state.phase = "burst"
    state.burst = without_room(lambda: burst(machine, winner), machine)
    state.phase = "flushed"
    state.flushed = without_room(lambda: classic(winner), machine)
    known = mamf_references(device.name, dtype, "flushed")
    if known and known[0].shape and known[0].shape != winner and machine.fits(known[0].shape):
        shape = known[0].shape
        rate = without_room(lambda: classic(shape), machine)
        state.flushed_known = (shape, rate) if rate is not None else None


@contextlib.contextmanager
def _until_the_end(state: _State) -> Iterator[None]:
    """Ctrl-C, SIGTERM or a failure of the device end the measuring, and not the report, once something is known."""
    try:
        with ends_on_sigterm():
            yield
    except KeyboardInterrupt:
        state.ended = "SIGINT"
        if not _knows(state):
            raise
    except SystemExit as exc:
        state.ended = "SIGTERM" if exc.code == 143 else "exit"
        if exc.code == 143 and not _knows(state):
            write("mldebug: ended by SIGTERM before anything was measured\n", sys.stderr)
        if not _knows(state) or exc.code != 143:
            raise
    except Exception as exc:
        state.ended = f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
        if not _knows(state):
            raise
    if not _knows(state) and state.search is not None:
        errors = [one.error for one in state.search.known.values() if one.error]
        state.ended = "nothing could be measured"
        raise MldebugError(
            f"none of the shapes could be measured: {errors[0] if errors else 'there was no time'}",
            "give it other shapes, more --seconds, or a device with more free memory",
        )


def _knows(state: _State) -> bool:
    return bool(state.settled) or (state.search is not None and state.search.best() is not None)


def _figures(state: _State, telemetry: Telemetry, path: str) -> dict[str, Any]:
    """What the run found, as the fields of the report."""
    search = state.search
    assert search is not None
    best = search.best()
    assert best is not None
    winner = state.winner or best.shape
    rates = [one.tflops for one in state.settled]
    sustained = mean_rate(state.settled) if rates else search.estimate(best)
    # The others by the number that the winner was chosen by: its share and theirs in the duel, where there was one.
    unit = sustained / best.share
    figures = [
        Figure(one.shape, one.share * unit, one.share, len(one.duel), _is_equal(one, best))
        for one in search.ranking()
        if one.shape != winner and one.level == best.level
    ]
    also = (
        [Figure(one.shape, one.share * unit, one.share, 0, False) for one in state.also.ranking()] if state.also else []
    )
    steady, load = state.steady, state.load
    now = time.monotonic()
    return {
        "shape": winner, "sustained": sustained, "spread": spread(rates), "settled": bool(rates),
        "flat": state.flat, "burst": state.burst, "flushed": state.flushed, "flushed_known": state.flushed_known,
        "reference_shape": search.reference, "reference_share": best.share,
        "others": tuple(figures), "also": tuple(also), "tried": len(search.known) + 1,
        "failed": {shape_text(one.shape): one.error for one in search.known.values() if one.error},
        "steady": telemetry.summary(*steady) if steady else {},
        "load": telemetry.summary(load[0], min(load[1], now)) if load else {},
        "seconds": now - state.began, "ended": state.ended, "path": path,
    }  # fmt: skip


def _is_equal(one: Candidate, best: Candidate) -> bool:
    """Whether the duel does not tell them apart: by less than two standard errors of the difference."""
    error = math.hypot(one.error_of_share, best.error_of_share if best.duel else 0.0)
    return best.share - one.share < 2 * error if math.isfinite(error) else False


def _facts(device: Device, form: Any, options: Options, seed: int) -> dict[str, Any]:
    """What was measured, where and with what: the first line of the result file."""
    import torch

    return {
        "dtype": form.dtype, "scaling": form.scaling, "fast_accum": form.fast_accum,
        "device": device.name, "device_kind": device.kind, "index": device.index,
        "physical_index": device.physical_index(), "uuid": device.uuid, "host": socket.gethostname(),
        "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or "", "seed": seed,
        "mode": "exhaustive" if options.exhaustive else "shapes" if options.shapes else "search",
    }  # fmt: skip


def _resumed(options: Options, start: dict[str, Any]) -> dict[Shape, list[float]]:
    if options.resume is None:
        return {}
    first, shares = read_results(options.resume)
    for name in ("dtype", "device", "scaling", "fast_accum"):
        if first.get(name) != start[name]:
            raise MldebugError(
                f"{options.resume} has {name} {first.get(name)!r}, and this run {start[name]!r}",
                "start a new file with -o, or give the options of that run",
            )
    return shares


def _shapes(options: Options, limits: Limits, before: dict[Shape, list[float]], dtype: str) -> list[Shape]:
    """What is to be measured. What an earlier run measured begins a search; of a list its best take part again."""
    good = sorted(before, key=lambda shape: -statistics.median(before[shape]))
    if options.shapes:
        asked = set(options.shapes)
        left = [shape for shape in options.shapes if shape not in before]
        return list(dict.fromkeys([*left, *[shape for shape in good if shape in asked][:_MOST]]))
    good = good[:24]
    wanted = 128 if limits.multiprocessors > 1 else 24
    found = [*options.extra, *good, *seeds(limits, known_shapes(dtype), wanted)]
    return list(dict.fromkeys(found))


def _total(options: Options, device: Device, shapes: Sequence[Shape], limits: Limits, rate: float) -> float:
    """Seconds for the whole run: as asked for; for shapes that are listed no more than they need."""
    if options.seconds is not None:
        return options.seconds
    usual = _SECONDS.get(device.kind, _DEFAULT_SECONDS)
    if options.exhaustive:
        work = sum(max(0.06, 3 * flops_of(shape) / (rate * 1e12)) for shape in shapes) * 1.3
        return usual + work
    return usual


def _noting(
    file: ResultFile, progress: Callable[[str], None], state: _State, now: Callable[[], float], end: float
) -> Note:
    said = -math.inf

    def note(phase: str, block: Block, share: float | None) -> None:
        nonlocal said
        file.block(phase, block, share)
        if phase == state.phase and now() < said + 0.5:  # the device waits while the best is looked up
            return
        state.phase, said = phase, now()
        best = state.search.best() if state.search is not None else None
        lead = f", best so far {shape_text(best.shape)}" if best is not None else ""
        progress(f"{phase}, {max(0.0, end - now()):.0f} s to go{lead}")

    return note
