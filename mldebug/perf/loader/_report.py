"""The settings of a loader, what was measured of each, and which are enough."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from mldebug.core.report import Report

_LITTLE = 0.2  # of training's time, up to which loading in the same process is no trouble


@dataclass(frozen=True, order=True)
class Setting:
    """What a DataLoader is told, in the order of what costs most. `prefetch_factor` is 0 without workers, and
    `non_blocking` how batches are copied to the device (None: they are not)."""

    num_workers: int
    prefetch_factor: int = 0
    pin_memory: bool = False
    non_blocking: bool | None = None
    persistent_workers: bool = False


@dataclass(frozen=True)
class LoaderRow:
    """One setting. `samples_per_second` is the median of `rounds` measurements and `spread` half their range, as a
    share of it; `first_batch` the seconds from the start of workers to the first batch; `step_seconds` the shortest
    step that it feeds. Per worker: `worker_cpu` as a share of a CPU, `worker_memory` in bytes (PSS)."""

    setting: Setting
    samples_per_second: float
    spread: float
    rounds: int
    first_batch: float
    step_seconds: float
    worker_cpu: float | None
    worker_memory: int | None


@dataclass(frozen=True)
class DataloaderReport(Report):
    """What a loader delivers by its settings, and the smallest ones within 3% of the best.

    `step_seconds` is the step that was given or measured (None: none, and the best is then the highest rate);
    `enough_workers` is where the loader stops being its bottleneck (None: nowhere that was measured), `waits` the share
    of a step that training waits for data with the chosen settings, measured with a step of that length. Times in
    seconds, memory in bytes. `gain` is how many times faster than now training goes with that step, or data come where
    none is known. `restart` is what an epoch costs before its first batch where workers are started anew,
    `resume` where they are kept. Not `complete` is what was `interrupted` by Ctrl-C, or had too little time.
    """

    rows: tuple[LoaderRow, ...]
    chosen: Setting | None
    now: Setting | None
    gain: float | None
    batch_samples: float
    batch_bytes: int
    device: str
    step_seconds: float | None
    enough_workers: int | None
    waits: float | None
    restart: float | None
    resume: float | None
    cpus: int
    limits: str
    notes: tuple[str, ...]
    seconds: float
    complete: bool
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is an answer, and the loader with it is no bottleneck of the step that was given."""
        fed = self.step_seconds is None or self.enough_workers is not None
        return self.chosen is not None and (fed or (self.beside or 1.0) <= _LITTLE)

    @property
    def beside(self) -> float | None:
        """The share of training's time that loading takes where the choice is to load in the same process, and no
        step hides it; None with workers, and without a step."""
        best = self.row(measured_as(self.chosen))
        if best is None or self.step_seconds is None or best.setting.num_workers:
            return None
        return best.step_seconds / (best.step_seconds + self.step_seconds)

    def row(self, setting: Setting | None) -> LoaderRow | None:
        return next((row for row in self.rows if row.setting == setting), None)

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [*self._answer(), "", *self._table(), ""]
        lines += [f"{self.cpus} CPU{'s' * (self.cpus != 1)} {self.limits}", *self.notes]
        if not self.complete:
            more = "" if self.interrupted else ": give it more with --seconds"
            lines.append(f"{self._ended()} before all was measured{more}")
        filled = [line if line.startswith(" ") else _filled(line, width) for line in lines]
        return "\n".join(filled)

    def _ended(self) -> str:
        return "it was interrupted" if self.interrupted else "time was up"

    def _answer(self) -> list[str]:
        best = self.row(measured_as(self.chosen))
        if self.chosen is None or best is None:
            return [f"nothing was measured: {self._ended()} before the first batches had come"]
        lines = [f"use {code(self.chosen)}"]
        if self.chosen.non_blocking is not None and self.chosen.pin_memory:
            lines[0] += f" and batch.to(device, non_blocking={self.chosen.non_blocking})"
        rate = f"{number(best.samples_per_second)} samples/s"
        if self.gain is not None and measured_as(self.now) != best.setting:
            what = "training is" if self.step_seconds is not None else "data come"
            lines.append(f"{what} {self.gain:.2g} times as fast as with the present {code(self.now)}")
        lines.append(f"{rate}; it feeds steps of {ms(best.step_seconds)} and more (batches of {self.batch_samples:g})")
        if self.step_seconds is not None:
            lines.append(self._about_step(best))
        if self.restart is not None:
            kept = f", {ms(self.resume)} where workers are kept" if self.resume is not None else ""
            lines.append(f"an epoch starts after {ms(self.restart)}{kept}")
        return lines

    def _about_step(self, best: LoaderRow) -> str:
        step = ms(self.step_seconds)
        if self.enough_workers is None and self.beside is not None and self.beside < 0.5:
            return (
                f"loading takes {ms(best.step_seconds)} beside each step of {step}, {100 * self.beside:.0f}% of the "
                "time, and workers cost more than they hide"
            )
        if self.enough_workers is None:
            return (
                f"a step of {step} waits for data whatever was tried: the loader is the bottleneck, "
                f"which takes {ms(best.step_seconds)} for each batch"
            )
        many = f"{self.enough_workers} worker{'s' * (self.enough_workers != 1)}"
        waits = f"; with these settings it waits {100 * self.waits:.1f}% of a step" if self.waits is not None else ""
        return f"a step of {step} is fed from {many} on{waits}"

    def _table(self) -> list[str]:
        moves = any(row.setting.non_blocking is not None for row in self.rows)
        head = ["workers", "prefetch", *(["pin", "nonblock"] if moves else []), "samples/s", "+-%", "first", "step"]
        table = [[*head, "CPU%", "memory", ""]]
        for row in self.rows:
            one = row.setting
            mark = "<" if one == measured_as(self.chosen) else "now" if one == measured_as(self.now) else ""
            pinned = [_yes(one.pin_memory), _yes(bool(one.non_blocking))] if moves else []
            cells = [str(one.num_workers), str(one.prefetch_factor or "-"), *pinned, number(row.samples_per_second)]
            cells += [f"{100 * row.spread:.0f}" if row.rounds > 1 else "-", ms(row.first_batch), ms(row.step_seconds)]
            cells.append("-" if row.worker_cpu is None else f"{100 * row.worker_cpu:.0f}")
            cells.append("-" if row.worker_memory is None else size(row.worker_memory))
            table.append([*cells, mark])
        widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
        shown = ("  ".join(f"{cell:>{wide}}" for cell, wide in zip(line, widths, strict=True)) for line in table)
        return ["  " + line.rstrip() for line in shown]


def code(setting: Setting | None) -> str:
    """As it is written in a program."""
    if setting is None:
        return ""
    words = [f"num_workers={setting.num_workers}"]
    if setting.num_workers:
        words.append(f"prefetch_factor={setting.prefetch_factor}")
    if setting.pin_memory:
        words.append("pin_memory=True")
    if setting.persistent_workers:
        words.append("persistent_workers=True")
    return f"DataLoader(..., {', '.join(words)})"


def measured_as(setting: Setting | None) -> Setting | None:
    """The row of a setting: whether workers persist makes no difference between two epochs."""
    if setting is None:
        return None
    one = setting
    return Setting(one.num_workers, one.prefetch_factor, one.pin_memory, one.non_blocking, False)


def number(value: float) -> str:
    """Three digits or all before the point: 0.123, 12.3, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _filled(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
