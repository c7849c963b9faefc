"""Step after step: the sizes of what is alive by the place that made it, in windows of steps, and the verdict."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mldebug.core.report import jsonable
from mldebug.perf.memory._follow import Followed
from mldebug.perf.memory._growth import LEAST_BYTES, grows, thinned
from mldebug.perf.memory._holders import Holder, find_holder, length_of
from mldebug.perf.memory._live import Live, LiveTensors
from mldebug.perf.memory._process import Process
from mldebug.perf.memory._reading import size
from mldebug.perf.memory._run_report import Growth, Leak
from mldebug.perf.memory._sites import Site

FIRST = 40  # steps of the first window
_LATER = 18  # of each later one, of which the first two are left out
_EARLY = 18  # after so many steps a growth is told for the first time
_SAMPLES = 256
_SLACK = 64 << 20  # growth of a process that is not looked into: allocators take and keep memory in pieces


class Steps:
    """Looks at what is alive after each step of a window; `leak` is the verdict of the last window."""

    def __init__(
        self,
        alive: Callable[[], list[Live] | None],
        kinds: Callable[[], dict[int, str]],
        live: LiveTensors,
        announce: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._alive, self._kinds, self._live, self._announce = alive, kinds, live, announce
        self._on_cuda = torch.cuda.is_available()
        self.leak: Leak | None = None
        self.judged = 0
        self.notes: list[str] = []
        self.process = Process()
        self._told = False
        self._cleared: set[Site] = set()  # places whose growth was found to end
        self.begin_again()

    def begin_again(self) -> None:
        """What counts as a step has changed."""
        self._uses: deque[int] = deque(maxlen=_SAMPLES)
        self._window: list[dict[Site, Live]] | None = []
        self._left_out, self._ends, self._next, self._step = 1, FIRST, 100, 0
        self.leak, self.judged = None, 0
        self.process.begin_again()
        self._followed: Followed | None = None
        self._held_by = 0  # the id of what keeps them
        self._held_from: set[Site] = set()  # and where they were made
        self._in_doubt: Leak | None = None  # of a later window: what was there before it is not known
        self._first = self._telling = True

    def clear(self) -> None:
        self._window, self._followed = None, None

    def all_notes(self) -> list[str]:
        """What is to be said beside the verdict."""
        doubt = self._in_doubt
        told = [self.process.note] if self.process.note else []
        if doubt is not None:
            where = doubt.growths[0].where.site.where()
            told.append(f"what {where} makes grew by {size(doubt.per_step)} a step near the end: too few steps to say")
        return [*self.notes, *told]

    def ended(self, step: int, use: int | None, telling: bool) -> None:
        """A step has ended, and `use` bytes of an accelerator are in use; None: those of the process count. Without
        `telling` a growth is for the report alone."""
        self._step, self._telling = step, telling
        own = self.process.ended(step)
        self._uses.append(own if use is None else use)
        if self._followed is not None and self._window is None:
            self._follow(step)
        if self._window is None:
            if self._is_due(step):
                self._open(step)
            return
        alive = self._alive()
        if alive is None:
            self._window = None
            return
        if self._left_out:
            self._left_out -= 1
            return
        self._window.append(_by_site(alive))
        if len(self._window) == _EARLY and step < FIRST:
            self.judge(runs=True)
        if step >= self._ends:
            self.judge(runs=True)
            self._window, self._first = None, False
            self._live.end()

    def judge(self, runs: bool = False) -> None:
        """Look at the window as far as it has come; `runs`: the script goes on, so that what it holds is there."""
        if not self._window or len(self._window) < 8:
            self.process.judge()
            return
        growths = [growth for growth in _growths(self._window) if growth.where.site not in self._cleared]
        if runs and growths and gc.isenabled():
            growths = self._without_cycles(growths)
        per_step = sum(growth.per_step for growth in growths)
        self.judged = len(self._window)
        if per_step < LEAST_BYTES:
            if self.leak is not None and (self._first or not self._still_grows(self.leak)):
                self.leak = None
            self.process.judge()
            return
        old = self.leak.holder if self.leak is not None else None
        holder = old or self._holder(growths)
        if holder is not None and holder.most is not None:
            self._clear(self._held_from, f"fills up to {holder.most} in {holder.name or 'a deque'}, and is no leak")
            self.judge(runs)  # the other places
            return
        leak = Leak(per_step, len(self._window), self._step, tuple(growths), holder)
        # A tensor that is made anew and larger each time is seen as a whole; of more and more of them the window has
        # only those that are made in it.
        sites = {growth.where.site for growth in growths if growth.pieces_per_step > 0.05}
        if runs and sites and not self._on_cuda:
            self._followed = Followed(self._step, self._live.alive_at(sites))
        if self._followed is not None and self.leak is None and not self._first:
            self._in_doubt = leak  # a list that is bounded to more than the window looks like this, too
        else:
            self._believe(leak)

    def _still_grows(self, leak: Leak) -> bool:
        """Whether there is more at its places than at the window's begin: one that grows at times shows no more."""
        window = self._window or [{}]
        return any(
            one.where.site in window[-1]
            and window[-1][one.where.site].count
            > (window[0][one.where.site].count if one.where.site in window[0] else 0)
            for one in leak.growths
        )

    def _tell(self) -> None:
        leak = self.leak
        if leak is None or self._told or not self._telling:
            return
        self._told = True
        first = next((growth for growth in leak.growths if growth.where.site.user_line), leak.growths[0])
        kept = f", kept by {leak.holder.name}" if leak.holder is not None and leak.holder.name else ""
        self._announce(
            f"memory grows by {size(leak.per_step)} a step since {leak.steps} steps: {first.where.site.where()}{kept}",
            jsonable({"leak": leak}),
        )

    def _follow(self, step: int) -> None:
        """What leaks stays: where the oldest goes as the newest comes, or all at once, the growth has an end."""
        followed, leak = self._followed, self.leak or self._in_doubt
        assert followed is not None
        if leak is None or (step - followed.step) % 8:
            return
        lost = followed.lost() & {growth.where.site for growth in leak.growths}
        if lost:
            self._clear(lost, "grew, and was let go later: a buffer that is bounded, or emptied at times")
        elif self._in_doubt is not None and step - followed.step == 16:
            holder = leak.holder
            now = length_of(self._held_by, holder.kind) if holder is not None else None
            if holder is None or now is None:
                return
            if now <= holder.count:
                name = holder.name or f"a {holder.kind}"
                self._clear(self._held_from, f"is kept by {name}, which stays at {now}, and is no leak")
            else:
                self._believe(leak)
        elif self._in_doubt is not None and step - followed.step >= 3 * _LATER:
            self._believe(leak)

    def _believe(self, leak: Leak) -> None:
        self.leak, self._in_doubt = leak, None
        # What is kept by keys may be a cache that still fills: it is told of when it grows in a later window, too.
        if not (self._first and leak.holder is not None and leak.holder.may_be_cache):
            self._tell()

    def _clear(self, sites: set[Site], why: str) -> None:
        """These places are no leak; what else there was stays in view."""
        self._cleared |= sites
        self._note(f"what {' and '.join(sorted(site.where() for site in sites)[:2])} makes {why}")
        for name in ("leak", "_in_doubt"):
            leak = getattr(self, name)
            if leak is not None:
                rest = tuple(growth for growth in leak.growths if growth.where.site not in sites)
                per_step = sum(growth.per_step for growth in rest)
                holder = leak.holder if not sites & self._held_from else None
                left = replace(leak, growths=rest, per_step=per_step, holder=holder)
                setattr(self, name, left if per_step >= LEAST_BYTES else None)

    def _without_cycles(self, growths: list[Growth]) -> list[Growth]:
        """Without what goes when Python's collector runs, as it does by itself later."""
        gc.collect()
        now = _by_site(self._alive() or [])
        stays = []
        for growth in growths:
            site, grown = growth.where.site, growth.per_step * (len(self._window or ()) - 1)
            gone = growth.where.nbytes - (now[site].nbytes if site in now else 0)
            if gone < grown / 2:
                stays.append(growth)
                continue
            self._cleared.add(site)
            self._note(
                f"what {site.where()} makes, {size(growth.per_step)} a step, is in reference cycles and goes only when "
                "Python's collector runs: break the cycle, or call gc.collect() at times"
            )
        return stays

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 8:
            self.notes.append(text)

    def _is_due(self, step: int) -> bool:
        if step >= self._next:
            while self._next <= step:
                self._next *= 2
            return True
        if step % 64 or len(self._uses) < 64:
            return False
        uses = thinned(self._uses, 32)
        return uses[-1] - uses[0] > _SLACK // 4 and grows(uses) is not None

    def _open(self, step: int) -> None:
        if self._on_cuda or self._live.begin():
            self._window, self._left_out, self._ends = [], 2, step + _LATER

    def _holder(self, growths: list[Growth]) -> Holder | None:
        sites = {growth.where.site for growth in growths}
        least = max(6, len(self._window or ()) // 3)  # it has had one more at each step, or nearly
        if self._on_cuda:
            found = find_holder(lambda tensor: tensor.is_cuda and not isinstance(tensor, torch.nn.Parameter), least)
        else:
            found = find_holder(lambda tensor: self._live.site_of(tensor) in sites, least)
        if found is None:
            return None
        holder, self._held_by, tensor = found
        site = None if self._on_cuda else self._live.site_of(tensor)
        self._held_from = {site} if site is not None else sites
        return holder


def _by_site(alive: list[Live]) -> dict[Site, Live]:
    """Without what a model or an optimizer holds: that is bounded, and comes when it is first needed."""
    bounded = ("parameter", "gradient", "optimizer state")
    found: dict[Site, Live] = {}
    for live in alive:
        if live.kind not in bounded:
            # One line may make several kinds: models that are kept, and the one whose optimizer is known.
            other = found.get(live.site)
            found[live.site] = (
                replace(other, nbytes=other.nbytes + live.nbytes, count=other.count + live.count) if other else live
            )
    return found


def _growths(window: list[dict[Site, Live]]) -> list[Growth]:
    found = []
    for site, last in window[-1].items():
        sizes = [step[site].nbytes if site in step else 0 for step in window]
        counts = [step[site].count if site in step else 0 for step in window]
        pieces = (counts[-1] - counts[0]) / (len(window) - 1)
        # One tensor that is larger each time may be a batch of data that is sorted by length: less is forgiven.
        growth = grows(sizes, strict=counts[-1] - counts[0] < 3)
        if growth is not None and growth > 0:
            found.append(Growth(last, growth, pieces))
    return sorted(found, key=lambda growth: -growth.per_step)
