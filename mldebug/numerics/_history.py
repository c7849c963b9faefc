"""The numbers of the last steps, computed from the ring when somebody asks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics.ring._records import Call, Site
from mldebug.numerics.ring._stats import LIMIT, SUBNORMAL_SHARE

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_CALLS = 64  # forwards that a report looks back on
_LOSS_NAMES = ("loss", "output.loss")


class History:
    """Reads steps, notes and heat map out of a recorder's memory."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._waiting: list[tuple[int, list[Call]]] = []
        self._told = 0  # calls before this one were handed out

    def rows(self, event: Event | None = None) -> list[dict[str, Any]]:
        """One dict per step: loss, grad_norm, absmax, where; oldest first. That of the event names it."""
        steps: dict[int, list[Call]] = {} if event is None else {event.step: []}
        for call in self._recent():
            steps.setdefault(call.step, []).append(call)
        rows = {step: self._row(step, calls) for step, calls in sorted(steps.items())}
        if event is not None:
            _name_event(rows[event.step], event)
        return list(rows.values())

    def finished(self, step: int) -> list[dict[str, Any]]:
        """The rows of steps before this one, which the device has long left behind: reading them waits for nothing."""
        rows = self.rest()
        calls = [call for call in self._recorder.memory.calls if call.step == step and call.grad]
        self._waiting.append((step, calls))
        return rows

    def rest(self) -> list[dict[str, Any]]:
        waiting, self._waiting = self._waiting, []
        return [self._row(step, [c for c in calls if self._held(c)]) for step, calls in waiting]

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Abs max of every output by batch, for the heat map."""
        found: dict[str, list[tuple[int, float]]] = {}
        for call in self._recent():
            for place, role, absmax in self._values(call):
                if role in ("output", "loss"):
                    found.setdefault(place, []).append((call.batch, absmax))
        if self._recorder.output_gradients is not None:
            memory = self._recorder.memory
            for batch, numbers in self._recorder.output_gradients.by_batch():
                for number, stats in zip(numbers, memory.stats(numbers), strict=True):
                    found.setdefault(place_of(memory.site(number)), []).append((batch, stats.absmax))
        return found

    def dtypes(self) -> dict[str, str]:
        """The dtype of every output in `series`; the narrowest, where a place has several."""
        memory, gradients = self._recorder.memory, self._recorder.output_gradients
        found: dict[str, torch.dtype] = {}
        numbers: list[Iterable[int]] = [range(call.first, call.end) for call in self._recent()]
        numbers += [] if gradients is None else [held for _, held in gradients.by_batch()]
        for site in map(memory.site, itertools.chain.from_iterable(numbers)):
            if site.role in ("output", "loss", "gradient") and site.dtype in LIMIT:
                place = place_of(site)
                found[place] = min(found.get(place, site.dtype), site.dtype, key=LIMIT.__getitem__)
        return {place: str(dtype).removeprefix("torch.") for place, dtype in found.items()}

    def batch_steps(self) -> dict[int, int]:
        """The optimizer step of every batch in `series`."""
        return {call.batch: call.step for call in self._recent()}

    def notes(self, before: int | None) -> list[str]:
        """Trends towards the limit, and outputs that underflow, as of the last training forward.

        With an event, of the last one before its batch: what came after shows the damage, not the way there.
        """
        memory = self._recorder.memory
        calls = [call for call in self._recent() if call.training and (before is None or call.batch < before)]
        if not calls:
            return []
        same: dict[tuple[str, str], list[str]] = {}  # what is said of one place or of several -> the places
        masks: list[str] = []
        last = calls[-1]
        numbers = range(last.first, last.end)
        for number, stats in zip(numbers, memory.stats(numbers), strict=True):
            site = memory.site(number)
            if stats.mask:
                masks.append(place_of(site))
            if site.role not in ("output", "loss"):
                continue
            place, dtype = place_of(site), str(site.dtype).removeprefix("torch.")
            share = stats.subnormal / max(memory.numel(number), 1)
            if stats.subnormal > 0 and share >= SUBNORMAL_SHARE:
                said = f"underflow: {100 * share:.0f}% of", f"is subnormal in {dtype}"
                same.setdefault(said, []).append(place)
            if stats.near(site.dtype):
                trend = self._trend(calls, place)
                share = stats.absmax / LIMIT[site.dtype]
                said = "", f"stands at {100 * share:.0f}% of the limit of {dtype}{trend}"
                same.setdefault(said, []).append(place)
        notes = [f"{before} {in_short(places)} {after}".strip() for (before, after), places in same.items()]
        if masks:
            notes.append(f"-inf, as masks have it, in {', '.join(masks[:5])}{' ...' if len(masks) > 5 else ''}")
        return notes[:10]

    def _trend(self, calls: list[Call], place: str) -> str:
        values = [v for call in calls[-8:] for name, _, v in self._values(call) if name == place]
        return "; last batches: " + ", ".join(f"{v:.3g}" for v in values) if len(values) > 1 else ""

    def _recent(self) -> list[Call]:
        return [c for c in list(self._recorder.memory.calls)[-_CALLS:] if self._held(c)]

    def _held(self, call: Call) -> bool:
        memory = self._recorder.memory
        return call.end > call.start and memory.holds(call.start) and call.end <= memory.unread

    def _values(self, call: Call) -> Iterable[tuple[str, str, float]]:
        memory = self._recorder.memory
        numbers = range(call.first, call.end)
        for number, stats in zip(numbers, memory.stats(numbers), strict=True):
            site = memory.site(number)
            if stats.lo <= stats.hi or stats.has_nan:  # else nothing is remembered of it
                yield place_of(site), site.role, stats.absmax

    def _row(self, step: int, calls: list[Call]) -> dict[str, Any]:
        row: dict[str, Any] = {"step": step}
        memory, told = self._recorder.memory, -1
        for call in calls:
            numbers = range(call.first, call.end)
            for number, stats in zip(numbers, memory.stats(numbers), strict=True):
                site = memory.site(number)
                if stats.lo > stats.hi:
                    continue  # nothing is remembered of it
                if site.role == "loss" and site.path in _LOSS_NAMES and stats.lo == stats.hi:
                    # The first of a batch is the model's own; the one that a backward starts from may be a share of it.
                    if told != call.batch or not math.isfinite(stats.hi):
                        row["loss"], told = stats.hi, call.batch
                elif site.role == "loss" and stats.has_nan:
                    row["loss"] = math.nan
                if site.role == "output" and not stats.mask and not stats.absmax <= row.get("absmax", -1.0):
                    row["absmax"], row["where"] = stats.absmax, place_of(site)
        norms = self._recorder.gradients.of(step)
        if norms is not None:
            row["grad_norm"] = norms.total
        return row


def place_of(site: Site) -> str:
    """A tensor's place as notes and history name it: `encoder.block.0 output[0]`."""
    return spell_place(site.module, "" if site.owner is None else site.owner.cls, site.path)


def spell_place(module: str | None, module_class: str, path: str) -> str:
    """The same from its parts. The root has no name: its class stands for it."""
    return path if module is None else f"{module or module_class} {path}"


def in_short(places: list[str]) -> str:
    """Many places as one subject: `layers.0-7 output` where they differ by one number that counts up."""
    if len(places) == 1:
        return places[0]
    pieces = [re.split(r"(\d+)", text) for text in places]  # numbers are at the odd places
    if len(set(map(len, pieces))) == 1:
        differ = [i for i, column in enumerate(zip(*pieces, strict=True)) if len(set(column)) > 1]
        if len(differ) == 1 and differ[0] % 2:
            numbers = [int(piece[differ[0]]) for piece in pieces]
            if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
                before, after = pieces[0][: differ[0]], pieces[0][differ[0] + 1 :]
                return f"each of {''.join(before)}{numbers[0]}-{numbers[-1]}{''.join(after)}"
    if len(places) == 2:
        return f"each of {places[0]} and {places[1]}"
    return f"each of {places[0]} and {len(places) - 1} more, up to {places[-1]},"


def _name_event(row: dict[str, Any], event: Event) -> None:
    if event.role == "state":
        where = f"{event.name} of {event.param}"
    elif event.role == "gradient" and event.param is None and event.op is None:
        where = "the gradient from outside"
        if event.module is not None:
            where = f"the gradient that {event.module or event.module_class} sends back"
    elif event.role == "gradient":
        where = f"{event.param or spell_place(event.module, event.module_class, event.op or '')} gradient"
    elif event.param is not None:
        where = event.param
    else:
        where = spell_place(event.module, event.module_class, event.name)
    row["event"] = f"{event.kind} in {where}"
    if event.role not in ("gradient", "state") and event.kind in ("nan", "inf"):
        row["absmax"], row["where"] = float(event.kind), where
