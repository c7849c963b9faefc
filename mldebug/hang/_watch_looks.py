"""Looks at a job from time to time, and judges what they show together."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError
from mldebug.hang import _nccl as nccl
from mldebug.hang._collect import collect
from mldebug.hang._judge import judge
from mldebug.hang._report import SpyReport
from mldebug.hang._source import annotate

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence, Rank

_COST = 0.003  # of a core for each rank, at most, while the job moves
_LATE = 10.0  # seconds that a look may take on a machine that is very busy
_AGAIN = 2  # times that the last look before an alarm is taken again where a stack was not read in time


class Looks:
    """What was seen of a job so far, as far as `timeout` reaches back.

    looks = Looks(300)
    while running():
        time.sleep(looks.pause)
        report = looks.look([pid])  # a SpyReport once nothing has moved for 300 seconds
    """

    def __init__(self, timeout: float) -> None:
        self.count = 0
        self.last: SpyReport | None = None
        self.slow: SpyReport | None = None  # the last that named a straggler
        self._timeout = timeout
        self._often = max(1.0, timeout / 2.2)  # three looks span the time
        self._enough = timeout / 2  # seconds between looks in which nothing has moved
        self._seldom = self._often
        self._complained = False
        self._kept: list[tuple[float, float, Evidence]] = []  # looks, with their begin and end

    @property
    def pause(self) -> float:
        """Seconds until the next look: longer while the job moves, so that looks cost each rank next to nothing."""
        moves = self.last is not None and not self.last.verdict.hung
        return self._seldom if moves else self._often

    def look(self, pids: Sequence[int]) -> SpyReport | None:
        """Look at the ranks among these processes and below them; the report if they hang.

        They do where nothing moved over the time and the stacks say so. A job that cannot be seen does not. Whatever
        goes wrong in a look is told once on stderr: a job must not die of being watched.
        """
        before = _cpu()
        try:
            found = self._hangs(pids)
            ranks = len(self.last.evidence["ranks"]) if self.last is not None else 0
            self._seldom = max(self._often, min((_cpu() - before) / (_COST * max(1, ranks)), 2 * self._timeout))
            return found
        except Exception:
            if not self._complained:
                self._complained = True
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"mldebug: a look at the job failed, and it goes on:\n{traceback.format_exc()}")
            return None

    def _hangs(self, pids: Sequence[int]) -> SpyReport | None:
        now = time.monotonic()
        evidence = self._look(pids, 1)
        if evidence is None or not any(rank["status"] == "ok" for rank in evidence["ranks"]):
            self._kept.clear()
            return None
        if self._kept and now - self._kept[-1][1] > 3 * self._often + _LATE:
            self._kept.clear()  # we were stopped ourselves (Ctrl-Z, a machine that slept), and the job with us
        if self._kept and not _same_ranks(self._kept[-1][2], evidence):
            self._kept.clear()  # a launcher made its ranks, or one came or went: looks at others tell nothing of these
        self._kept.append((now, time.monotonic(), evidence))
        while len(self._kept) > 2 and self._kept[1][0] <= now - self._timeout and self._span(1) >= self._enough:
            self._kept.pop(0)
        found = self._judge([look for *_, look in self._kept])
        if found.verdict.kind == "straggler" and not found.verdict.hung:
            self.slow = found
        if not found.verdict.hung or now - self._kept[0][0] < self._timeout * 0.9 or self._span(0) < self._enough:
            return None
        closer = self._closer(pids)
        if closer is None or not _same_ranks(evidence, closer) or not self._read_before() >= _read(closer):
            return None
        found = self._judge([*(look for *_, look in self._kept), closer])
        return found if found.verdict.hung else None

    def _closer(self, pids: Sequence[int]) -> Evidence | None:
        """The look that an alarm rests on. A stack that was read before and is late now tells of a busy machine, and
        without it another rank may seem to be at fault."""
        read = self._read_before() | _read(self._kept[-1][2])
        for _ in range(_AGAIN):
            closer = self._look(pids, 2)
            if closer is None or not any(one["status"] == "timeout" and one["pid"] in read for one in closer["ranks"]):
                return closer
        return self._look(pids, 2)

    def _read_before(self) -> set[int]:
        """Whose stacks an earlier look than the last one has: nobody can say of any other whether it stood still."""
        return {pid for *_, look in self._kept[:-1] for pid in _read(look)}

    def _span(self, first: int) -> float:
        """Seconds between the looks from this one on: what moves while a rank is looked at, and so stopped, tells
        nothing. On a machine that is very busy looks take most of the time."""
        return sum(begin - end for (_, end, _), (begin, *_) in pairwise(self._kept[first:]))

    def _judge(self, parts: Sequence[Evidence]) -> SpyReport:
        joined = _joined(parts)
        self.last = SpyReport(judge(joined), joined)
        return self.last

    def _look(self, pids: Sequence[int], samples: int) -> Evidence | None:
        """What is seen now. A job that ends under our eyes is no error, and neither is one that cannot be seen."""
        with contextlib.suppress(MldebugError):
            evidence = collect(pids=pids, samples=samples, timeout=max(_LATE, self._timeout / 2))
            annotate(evidence)
            self.count += 1
            return evidence
        return None


def _read(look: Evidence) -> set[int]:
    """The processes whose stacks a look has."""
    return {rank["pid"] for rank in look["ranks"] if rank["status"] == "ok"}


def _same_ranks(before: Evidence, after: Evidence) -> bool:
    """Whether two looks saw the same processes, and not others that have their numbers."""
    then = {rank["pid"]: rank["start"] for rank in before["ranks"]}
    now = {rank["pid"]: rank["start"] for rank in after["ranks"]}
    return then.keys() == now.keys() and all(abs(then[pid] - now[pid]) < 1 for pid in now)


def _cpu() -> float:
    """Seconds of CPU of this process and of the readers that it started."""
    return sum(os.times()[:4])


def _joined(looks: Sequence[Evidence]) -> Evidence:
    """The last evidence with the samples of the earlier ones in front, as far as the same processes were there."""
    last = looks[-1]
    ranks: list[Rank] = []
    for rank in last["ranks"]:
        before = [
            one
            for look in looks[:-1]
            for one in look["ranks"]
            if one["pid"] == rank["pid"] and abs(one["start"] - rank["start"]) < 1
        ]
        joined: Rank = {**rank, "samples": [sample for one in [*before, rank] for sample in one["samples"]]}
        progress: Any = {}
        for key in ("step", "heartbeat"):
            values = [value for one in [*before, rank] for value in one.get("progress", {}).get(key, [])]  # type: ignore[attr-defined]
            if values:
                progress[key] = values
        if progress:
            joined["progress"] = progress
        joined["nccl"], joined["gpus"] = nccl.joined([*before, rank])
        joined["children"] = [
            {
                **child,
                "samples": [
                    sample
                    for one in [*before, rank]
                    for other in one["children"]
                    if other["pid"] == child["pid"]
                    for sample in other["samples"]
                ],
            }
            for child in rank["children"]
        ]
        ranks.append(joined)
    sources: dict[str, Any] = {}
    for look in looks:
        sources.update(look.get("source", {}))
    return {**last, "ranks": ranks, "source": sources}
