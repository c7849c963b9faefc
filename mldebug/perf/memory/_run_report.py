"""What `mldebug memory` saw of a run: memory by phase, what was alive, and what grows."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from mldebug.core.report import Report, paint
from mldebug.perf.memory._growth import LEAST_BYTES
from mldebug.perf.memory._holders import Holder
from mldebug.perf.memory._live import Live
from mldebug.perf.memory._process import HostLeak
from mldebug.perf.memory._reading import Reading, size

_SURE = 100  # steps after which a cache is taken to be full


@dataclass(frozen=True)
class Phase:
    """A part of the run: memory at its end, the bytes of what was alive by kind, and the largest of it."""

    name: str
    steps: int
    reading: Reading
    tensors: int | None  # bytes of what is alive in tensors; None: not looked at
    kinds: dict[str, int]
    largest: tuple[Live, ...]
    peak_is_here: bool  # the largest use so far was in this phase


@dataclass(frozen=True)
class Growth:
    """A place that makes tensors of which more are alive after each step; bytes and pieces per step."""

    where: Live
    per_step: float
    pieces_per_step: float


@dataclass(frozen=True)
class Leak:
    """What grows step after step: by `per_step` bytes, seen over `steps` steps up to step `last`."""

    per_step: float
    steps: int
    last: int
    growths: tuple[Growth, ...]  # the largest first
    holder: Holder | None


@dataclass(frozen=True)
class OutOfMemory:
    """The moment when memory ran out; `advice` says what would help, by what was alive."""

    phase: str
    step: int
    asked: int | None  # bytes
    error: str
    reading: Reading
    kinds: dict[str, int]
    largest: tuple[Live, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True)
class MemoryRunReport(Report):
    """Of one process. `ok` is false where memory leaks or ran out."""

    rank: int
    world_size: int
    host: str
    device: str
    steps: int
    step_is: str  # what counts as a step: an optimizer step, or a backward or forward where there is none
    phases: tuple[Phase, ...]
    leak: Leak | None
    judged: int  # steps that the verdict on growth rests on; 0: too few
    out_of_memory: OutOfMemory | None
    notes: tuple[str, ...] = field(default=())
    process_growth: float | None = None  # bytes a step by which the process grew without a place that makes tensors
    host_leak: HostLeak | None = None  # a container of Python's that explains such growth
    results: float | None = None  # bytes after each forward, where there are forwards alone and their results are kept

    @property
    def ok(self) -> bool:
        return self.leak is None and self.host_leak is None and self.out_of_memory is None

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [f"memory of rank {self.rank}/{self.world_size} on {self.host}, {self.device}: {self._verdict()}"]
        if self.out_of_memory is not None:
            lines += self._out_of_memory_text()
        if self.leak is not None:
            lines += _leak_text(self.leak)
        elif self.host_leak is not None:
            lines += _host_leak_text(self.host_leak)
        lines += ["", *self._phases_text()]
        fullest = max(
            (phase for phase in self.phases if phase.tensors), key=lambda phase: phase.tensors or 0, default=None
        )
        if fullest is not None and self.out_of_memory is None:
            lines += ["", f"at the end of the {_plain(fullest.name)}:", *_alive_text(fullest.kinds, fullest.largest)]
        lines += [f"note: {note}" for note in self.notes]
        text = "\n".join(_wrapped(line, width) for line in lines)
        return paint(text) if color else text

    def _verdict(self) -> str:
        if self.out_of_memory is not None:
            return f"it ran out in the {_plain(self.out_of_memory.phase)}"
        if self.leak is not None:
            return f"LEAK, {size(self.leak.per_step)} more after each {self._unit}"
        if self.host_leak is not None:
            return f"LEAK, {size(self.host_leak.per_step)} more of the host's memory after each {self._unit}"
        if self.process_growth is not None:
            return f"no tensors leak, but the process grows by {size(self.process_growth)} a step"
        if self.results is not None:
            return f"forwards alone, of which {size(self.results)} are kept after each"
        unit = self._unit
        if self.judged and not self.steps:
            return f"forwards alone, no leak above {size(LEAST_BYTES)} a forward in {self.judged} that were looked at"
        if self.judged:
            return f"no leak above {size(LEAST_BYTES)} a {unit} in {self.judged} of {self.steps} {unit}s"
        return f"{self.steps} {unit}s, too few to say whether it grows"

    @property
    def _unit(self) -> str:
        return "forward" if self.step_is == "forward" and self.steps else "step"

    def _phases_text(self) -> list[str]:
        on_card = any(phase.reading.card.allocated is not None for phase in self.phases)
        if on_card:
            heads = ("phase", "allocated", "peak", "reserved", "driver", "rss")
        else:
            heads = ("phase", "tensors", "rss", "rss peak", "", "")
        rows = [heads]
        for phase in self.phases:
            card, host = phase.reading.card, phase.reading.host
            name = phase.name if phase.name != "steady" else f"steady ({phase.steps} steps)"
            peak = size(phase.reading.peak) if phase.peak_is_here else "(earlier)"
            if on_card:
                rows.append((name, size(card.allocated), peak, size(card.reserved), size(card.used), size(host.rss)))
            else:
                rows.append((name, "-" if phase.tensors is None else size(phase.tensors), size(host.rss), peak, "", ""))
        return [f"  {row[0]:<22}" + "".join(f"{cell:>11}" for cell in row[1:]).rstrip() for row in rows]

    def _out_of_memory_text(self) -> list[str]:
        seen = self.out_of_memory
        assert seen is not None
        asked = f" when {size(seen.asked)} more were asked for" if seen.asked else ""
        lines = [f"  step {seen.step + 1}{asked}: {seen.error}"[:200]]
        lines += ["  alive then:", *_alive_text(seen.kinds, seen.largest)]
        return lines + [f"hint: {line}" for line in seen.advice]


def _leak_text(leak: Leak) -> list[str]:
    lines = [f"  seen in {leak.steps} steps up to step {leak.last}; what grows was made here:"]
    for growth in leak.growths[:6]:
        site = growth.where.site
        lines.append(
            f"    +{size(growth.per_step)} a step  {site.where()}{'  ' + site.module if site.module else ''}"
            f"  (now {size(growth.where.nbytes)} in {growth.where.count})"
        )
    if len(leak.growths) > 6:
        rest = sum(growth.per_step for growth in leak.growths[6:])
        lines.append(f"    +{size(rest)} a step  at {len(leak.growths) - 6} more places")
    holder = leak.holder
    if holder is not None:
        what = "with their autograd graph" if holder.graph else "of them"
        lines.append(f"  kept by {holder.name or 'an object without a name'}, a {holder.kind} of {holder.count} {what}")
        if holder.may_be_cache and leak.last < _SURE:
            lines.append("  a cache that still fills looks like this, too: run more steps to tell")
    if holder is not None and holder.graph:
        lines.append("hint: a tensor keeps the graph that made it: store loss.item() or loss.detach() instead")
    elif holder is not None:
        lines.append("hint: empty it, bound its length, or keep numbers and not tensors")
    else:
        lines.append("hint: look for what keeps them: a list, an attribute, a cache that is joined to, or a graph")
    return lines


def _host_leak_text(leak: HostLeak) -> list[str]:
    return [
        f"  seen over {leak.steps} steps; no tensor explains it",
        f"  kept by {leak.name or 'an object without a name'}, a {leak.kind} of {leak.count} things, the last one a "
        f"{leak.item} of {size(leak.item_bytes)}",
        "hint: keep a number of each step, float(x), bound its length, or write it to a file",
    ]


def _alive_text(kinds: dict[str, int], largest: tuple[Live, ...]) -> list[str]:
    parts = ", ".join(f"{size(nbytes)} {_PLURALS.get(kind, kind)}" for kind, nbytes in kinds.items())
    lines = [f"  {parts}"] if parts else []
    for live in largest:
        kind = "" if live.kind == "tensor" else f"{live.kind}  "
        pieces = f"{live.count}x" if live.count > 1 else ""
        name = live.site.module or "?"
        lines.append(f"  {size(live.nbytes):>9} {pieces:>5} {kind}{name}  {live.site.where()}")
    return lines


_PLURALS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer state": "optimizer states",
    "buffer": "buffers",
    "tensor": "activations and others",
}


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = "    " + " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _plain(name: str) -> str:
    return {"init": "setting up", "steady": "steady steps"}.get(name, name)
