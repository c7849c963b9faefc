"""One run of the benchmark: climb the ladder of workers, take turns until it is plain, then the other settings."""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mldebug.core.device import Device
from mldebug.perf.loader._alone import visit_alone
from mldebug.perf.loader._choose import WITHIN, contenders, is_settled, smallest, spread, useful
from mldebug.perf.loader._failure import LoaderFailure
from mldebug.perf.loader._limits import Limits
from mldebug.perf.loader._report import DataloaderReport, LoaderRow, Setting, measured_as, size
from mldebug.perf.loader._source import Source
from mldebug.perf.loader._visit import How, Visit, copy_seconds, epoch_start, visit

_GAIN = 1.03  # what another step up the ladder must bring
_LIMITS = (7, 9)  # SIGBUS: /dev/shm is full; SIGKILL: memory is
_LONGEST_WINDOW = 2.0
_WAITS = 1 - WITHIN  # of a step, and the loader is no bottleneck


class Bench:
    """One run: the settings, what was seen of each, and the time that is left."""

    def __init__(
        self,
        source: Source,
        device: Device | None,
        step: float | None,
        limits: Limits,
        seconds: float,
        timeout: float,
        progress: Callable[[str], object] | None,
    ) -> None:
        self.source, self.device, self.step, self.limits = source, device, step, limits
        self.timeout, self.progress = timeout, progress
        self.began = time.perf_counter()
        self.budget, self.deadline = seconds, self.began + seconds
        self.window = min(_LONGEST_WINDOW, max(0.1, seconds / 50))
        self.counts: Sequence[int] | None = None
        self.max_workers: int | None = None
        self.prefetch: tuple[int, ...] = (2, 4)
        self.seen: dict[Setting, list[Visit]] = {}
        self.notes: list[str] = []
        self.samples, self.nbytes, self.copy = 1.0, 0, 0.0
        self.chosen: Setting | None = None
        self.waits: float | None = None
        self.resume: float | None = None
        self.complete = True
        self.crashed_at_start = False

    def run(self) -> None:
        self._probe()
        self._climb()
        self._rounds(self._near_the_best(), self._at(0.65), least=2)
        self.chosen = self._smallest(self.seen)
        if self.chosen is None:
            return
        now = self.source.now
        rivals = self._rivals(self.chosen)
        if now is not None and (mine := self._as_measured(now)) not in rivals:
            rivals.append(mine)
        self._rounds(rivals, self._at(0.85), least=2)
        self.chosen = self._smallest([one for one in rivals if one.num_workers == self.chosen.num_workers])
        if self.chosen is not None:
            self._persistence()
            self._with_steps()

    # The parts of a run

    def _probe(self) -> None:
        """A first look, that counts for nothing: caches are cold, modules are loaded; it finds what fails at once."""
        window, failed, again = min(self.window, 0.3), "", None
        if self.source.indices is not None:
            self.source.indices, again = itertools.tee(self.source.indices)
        try:
            found = self._visit(self._setting(1), replace_window=window)
        except LoaderFailure as exc:
            if exc.worker_signal not in _LIMITS:
                raise
            failed = f"1 worker: {exc.message}. hint: {exc.hint}"
            self.source.indices = again  # the same samples: without workers they may do, or it is one of them
            try:
                found = self._visit(self._setting(0), replace_window=window)
            except LoaderFailure as alone:
                raise exc if alone.worker_signal in _LIMITS else alone from None
        self.samples, self.nbytes = found.samples or self.samples, found.nbytes
        if failed and self._no_room(self._setting(1)) is None:  # else that says more
            self.notes.append(failed)
        if self.device is not None and self.nbytes:
            self.copy = copy_seconds(self.nbytes, self.device)

    def _climb(self) -> None:
        """More and more workers, until two steps in a row bring nothing."""
        best, idle = 0.0, 0
        for count in self._ladder():
            setting = self._setting(count)
            if (why := self._no_room(setting)) is not None:
                self.notes.append(why)
                break
            if not self._measure(setting):
                break
            found = self.seen[setting][-1]
            rate = useful(setting, found.rate, self.samples, self.step)
            idle = idle + 1 if rate < best * _GAIN and count else 0
            best = max(best, rate)
            if self.counts is None and idle >= 2:
                break
            if self.counts is None and count >= self._most(found):
                break

    def _ladder(self) -> Iterator[int]:
        if self.counts is not None:
            yield from sorted(set(self.counts))
            return
        yield from (0, 1, 2, 3, 4)
        count = 4
        while True:
            yield count * 3 // 2
            count *= 2
            yield count

    def _most(self, found: Visit) -> int:
        """More workers than CPUs are of use only where they wait."""
        if self.max_workers is not None:
            return self.max_workers
        waiting = found.cpu is not None and found.cpu + found.queued < 0.5
        return self.limits.waiting_workers if waiting else self.limits.workers

    def _no_room(self, setting: Setting) -> str | None:
        count = setting.num_workers
        are = f"{_workers(count)} {'is' if count == 1 else 'are'}"
        shm = self.nbytes * count * ((setting.prefetch_factor or 0) + 1)
        if count and self.limits.shm is not None and shm > self.limits.shm:
            free = f"{size(shm)} of /dev/shm, and {size(self.limits.shm)} are free"
            return f"{are} not tried: batches that wait need {free}. hint: docker --shm-size"
        known = [one.memory for seen in self.seen.values() for one in seen if one.memory]
        if known and self.limits.memory is not None and count * max(known) > 0.7 * self.limits.memory:
            return f"{are} not tried: at {size(max(known))} each memory might not do"
        return None

    def _rounds(self, settings: Sequence[Setting], until: float, least: int = 0) -> None:
        """Measure in turns, in another order each time, what may be the answer, until it is plain."""
        pick = random.Random(0)
        while time.perf_counter() < until:
            rates = self._rates(settings)
            few = [one for one in settings if len(rates.get(one, ())) < least]
            again = few or ([] if is_settled(rates, self.samples, self.step) else self._contenders(rates))
            if not again or min((len(rates.get(one, ())) for one in again), default=0) >= 9:
                return
            pick.shuffle(again)
            for one in again:
                if time.perf_counter() >= until or not self._measure(one):
                    self.complete = self.complete and not few
                    return
        self.complete = self.complete and is_settled(self._rates(settings), self.samples, self.step)

    def _contenders(self, rates: dict[Setting, list[float]]) -> list[Setting]:
        return contenders(rates, self.samples, self.step)

    def _near_the_best(self) -> list[Setting]:
        """What one look does not rule out: machines that are busy with other things may show half of a rate."""
        middle = {
            one: useful(one, rates[0], self.samples, self.step) for one, rates in self._rates(list(self.seen)).items()
        }
        return [one for one, rate in middle.items() if rate >= 0.6 * max(middle.values())]

    def _rivals(self, base: Setting) -> list[Setting]:
        """The chosen count of workers with the other settings."""
        found = [base]
        if base.num_workers:
            found += [replace(base, prefetch_factor=one) for one in self.prefetch[1:]]
            if self.device is not None:
                found += [
                    replace(base, pin_memory=pin, non_blocking=free) for pin in (False, True) for free in (False, True)
                ]
        return [one for one in dict.fromkeys(found) if self._no_room(one) is None]

    def _persistence(self) -> None:
        """Whether to keep the workers: where starting them is more than 3% of an epoch, or the epoch is not known."""
        chosen = self.chosen
        if chosen is None or not chosen.num_workers or time.perf_counter() >= self.deadline:
            return
        self._say("how an epoch starts")
        self.resume = epoch_start(self.source, chosen, self._how())
        restart = self._first(chosen)
        try:
            samples = len(self.source.dataset)
        except (TypeError, NotImplementedError):  # a stream has none
            samples = 0
        if samples and restart - (self.resume or 0.0) < (1 - WITHIN) * samples / self._rates([chosen])[chosen][0]:
            return
        if restart - (self.resume or 0.0) > 0.05:
            self.chosen = replace(chosen, persistent_workers=True)

    def _with_steps(self) -> None:
        """Train on with steps of that length, slept, and look how long they wait for data: batches come in bursts, so
        that a rate that would do may not. Larger settings follow until one does."""
        if self.chosen is None or self.step is None or not self.chosen.num_workers:
            return
        base = replace(self.chosen, persistent_workers=False)
        larger = [one for one in sorted(self.seen) if one >= base and one.pin_memory == base.pin_memory]
        seen: dict[Setting, float] = {}
        for setting in larger:
            skipped = setting.num_workers * (setting.prefetch_factor + 1) + 2
            left = self.deadline - time.perf_counter() - self._first(setting)
            if left < (skipped + 5) * self.step:
                self.notes.append(f"a step with {_workers(setting.num_workers)} was not tried: time was up")
                break
            window = min(left - skipped * self.step, max(10 * self.step, 2 * self.window))
            self._say(f"{_workers(setting.num_workers)} with a step of {self.step:g} s")
            found = visit(self.source, setting, replace(self._how(), step=self.step, window=window))
            if found.waits:
                seen[setting] = statistics.mean(found.waits) / self.step
            if seen.get(setting, 1.0) <= _WAITS:
                break
        if seen:
            least = min(seen.values())  # what it takes to hand a batch over, where none is late
            best = min(one for one, waits in seen.items() if 1 + least >= WITHIN * (1 + waits))
            self.waits = seen[best]
            self.chosen = replace(best, persistent_workers=self.chosen.persistent_workers)

    # Measuring

    def _measure(self, setting: Setting) -> bool:
        """Whether there was time, and the workers lived."""
        if time.perf_counter() >= self.deadline:
            self.complete = False
            return False
        try:
            found = self._visit(setting)
        except LoaderFailure as exc:
            if exc.worker_signal not in _LIMITS or not self.seen:
                raise
            # The dataset has been read by fewer workers: what ended this one is a limit, and no sample.
            self.notes.append(f"{_workers(setting.num_workers)}: {exc.message}. hint: {exc.hint}")
            self.complete = False
            return False
        if found.rate:
            self.seen.setdefault(setting, []).append(found)
        else:
            self.complete = False
        return bool(found.rate)

    def _visit(self, setting: Setting, replace_window: float | None = None) -> Visit:
        self._say(_workers(setting.num_workers))
        how = self._how()
        if replace_window is not None:
            how = replace(how, window=replace_window)
        try:
            return self._visit_once(setting, how)
        except LoaderFailure as exc:
            # A fork of a process with threads may crash by chance as it starts: once in a run that is no answer.
            if exc.begun or exc.worker_signal != signal.SIGSEGV or self.crashed_at_start:
                raise
            self.crashed_at_start = True
            self.notes.append(f"{exc.message}, and was started again. hint: {exc.hint}")
            return self._visit_once(setting, how)

    def _visit_once(self, setting: Setting, how: How) -> Visit:
        if not setting.num_workers:
            # The child of a process that uses an accelerator cannot use it: the copy is added.
            alone = visit_alone(self.source, setting, replace(how, device=None))
            if alone is not None:
                if self.copy and alone.rate:
                    alone.rate = alone.samples / (alone.samples / alone.rate + self.copy)
                return alone
        return visit(self.source, setting, how)

    def _how(self) -> How:
        return How(self.window, self.deadline, self.timeout, self.device)

    def _setting(self, count: int) -> Setting:
        moved = self.device is not None
        return Setting(count, self.prefetch[0] if count else 0, moved and count > 0, moved or None)

    def _as_measured(self, now: Setting) -> Setting:
        """The user's own setting, as a row of the table."""
        moved = self.device is not None
        pinned = now.pin_memory and moved
        return replace(measured_as(now) or now, pin_memory=pinned, non_blocking=pinned if moved else None)

    # What was seen

    def _rates(self, settings: Sequence[Setting]) -> dict[Setting, list[float]]:
        return {one: [found.rate for found in self.seen[one]] for one in settings if self.seen.get(one)}

    def _smallest(self, settings: Any) -> Setting | None:
        rates = {one: statistics.median(found) for one, found in self._rates(list(settings)).items()}
        return smallest(rates, self.samples, self.step)

    def _first(self, setting: Setting) -> float:
        return statistics.median(found.first for found in self.seen[setting])

    def _at(self, share: float) -> float:
        return self.began + share * self.budget

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(f"{time.perf_counter() - self.began:.0f} of {self.budget:.0f} s: {what}")

    def report(self, interrupted: bool = False) -> DataloaderReport:
        """What is known by now."""
        rows = tuple(self._row(one) for one in sorted(self.seen))
        chosen = self.chosen or self._smallest(self.seen)
        measured = measured_as(chosen)
        fed = [row.setting.num_workers for row in rows if self._feeds(row.setting, row.samples_per_second)]
        if self.waits is not None and chosen is not None and (fed or self.waits <= _WAITS):
            fed = [chosen.num_workers]  # this was tried, and says more than rates
        notes = [*self.notes, *self._insights(measured)]
        return DataloaderReport(
            rows=rows,
            chosen=chosen,
            now=self._as_measured(self.source.now) if self.source.now is not None else None,
            gain=self._gain(chosen),
            batch_samples=self.samples,
            batch_bytes=self.nbytes,
            device=self.device.name if self.device is not None else "cpu",
            step_seconds=self.step,
            enough_workers=min(fed, default=None),
            waits=self.waits,
            restart=self._first(measured) if measured in self.seen and measured is not None else None,
            resume=self.resume,
            cpus=self.limits.cpus,
            limits=self.limits.why,
            notes=tuple(notes),
            seconds=time.perf_counter() - self.began,
            complete=self.complete and not interrupted,
            interrupted=interrupted,
        )

    def _feeds(self, setting: Setting, rate: float) -> bool:
        """Whether training with the given step goes as fast as with data that cost nothing."""
        step = self.step
        return step is not None and useful(setting, rate, self.samples, step) >= WITHIN * self.samples / step

    def _gain(self, chosen: Setting | None) -> float | None:
        """How many times faster than now data comes, or training with the given step goes."""
        now = self._as_measured(self.source.now) if self.source.now is not None else None
        mine = measured_as(chosen)
        if now is None or mine is None or now not in self.seen or mine not in self.seen:
            return None
        rates = [useful(one, self._row(one).samples_per_second, self.samples, self.step) for one in (mine, now)]
        if self.step is not None and self.waits is not None:  # batches come in bursts: what was seen of it counts
            rates[0] = min(rates[0], self.samples / (self.step * (1 + self.waits)))
        return rates[0] / rates[1]

    def _row(self, setting: Setting) -> LoaderRow:
        seen = self.seen[setting]
        rates = [found.rate for found in seen]
        rate = statistics.median(rates)
        cpu = [found.cpu for found in seen if found.cpu is not None]
        memory = [found.memory for found in seen if found.memory is not None]
        return LoaderRow(
            setting, rate, spread(rates), len(rates), self._first(setting), self.samples / rate,
            statistics.median(cpu) if cpu else None, max(memory, default=None) if setting.num_workers else None,
        )  # fmt: skip

    def _insights(self, chosen: Setting | None) -> list[str]:
        """What holds the workers up."""
        if chosen is None or chosen not in self.seen:
            return []
        row = self._row(chosen)
        found = []
        if chosen.num_workers and row.worker_cpu is not None:
            queued = statistics.median(one.queued for one in self.seen[chosen])
            if queued > 0.3:
                found.append(
                    f"workers are ready {100 * queued:.0f}% of the time and have no CPU: other processes, the ranks "
                    "beside this one or a quota take them"
                )
            elif row.worker_cpu > 0.85:
                found.append("workers compute all the time: cheaper transforms, or more CPUs, make it faster")
            elif row.worker_cpu + queued < 0.5:
                found.append(
                    f"workers compute {100 * row.worker_cpu:.0f}% of the time and wait for the rest: for storage, "
                    "for locks, or for this process to take their batches"
                )
        if any(one.alike for seen in self.seen.values() for one in seen):
            found.append(
                "each worker yields the same samples: split them by torch.utils.data.get_worker_info(), or training "
                "sees every sample once for each worker"
            )
        if self.source.indices is None:
            found.append("an iterable dataset begins anew each time: what its beginning leaves in the page cache helps")
        return found


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
