"""The evidence as the judge reads it: one View a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mldebug.hang._frames import COMMUNICATION, Wait, main_thread, own_frames, read, source_of
from mldebug.hang._frames_gpu import on_gpu
from mldebug.hang._judge_text import counts_to, is_endless, is_loop, is_poll
from mldebug.hang._source import is_library

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child, Evidence, Frame, Rank, Sample, Source, Thread


_Memo = dict[tuple[int, bool, str], Wait]


@dataclass(frozen=True)
class View:
    """A rank: what its main thread waits for in each sample, and what moved in between."""

    number: int
    rank: Rank
    waits: tuple[Wait, ...]  # of the main thread, by sample
    threads: tuple[tuple[str, Wait], ...]  # the other threads, in the last sample
    moved: bool  # the main thread got somewhere between the samples
    ticks: int  # of CPU, between first and last sample
    seconds: float  # between first and last sample
    polls: bool  # stands in a loop that asks again and again

    @property
    def wait(self) -> Wait:
        return self.waits[-1] if self.waits else Wait("idle")

    @property
    def state(self) -> str:
        return self.rank["state"]

    @property
    def communicates(self) -> bool:
        """Whether it waits for other ranks."""
        return self.wait.communicates

    @property
    def runs(self) -> bool:
        """Whether it used more than a tenth of a core between the samples, or was seen running in each."""
        busy = bool(self.waits) and all(wait.kind == "busy" for wait in self.waits)
        return busy or self.ticks > max(2, 10 * self.seconds)


def views(evidence: Evidence) -> list[View]:
    """The ranks whose stacks are known or whose state says enough, by number."""
    memo: _Memo = {}
    found = [view(rank, number, evidence, memo) for number, rank in numbered(evidence)]
    return sorted(found, key=lambda item: item.number)


def numbered(evidence: Evidence) -> Iterable[tuple[int, Rank]]:
    """Ranks with their number: from the environment, or from the program's own variable where that has none."""
    for rank in evidence["ranks"]:
        number = rank["rank"] if rank["rank"] is not None else _rank_in_process(rank)
        if number is not None:
            yield number, rank


def view(rank: Rank, number: int, evidence: Evidence, memo: _Memo | None = None) -> View:
    memo = {} if memo is None else memo
    samples = [sample for sample in rank["samples"] if sample["threads"]]
    waits = on_gpu(tuple(_main_wait(sample, evidence, memo) for sample in samples), rank, evidence)
    threads = tuple(
        (thread["name"], _read(thread, evidence, memo))
        for thread in (samples[-1]["threads"] if samples else ())
        if thread["name"] != "MainThread"
    )
    looked = rank["samples"]
    ticks = looked[-1]["ticks"] - looked[0]["ticks"] if looked else 0
    seconds = looked[-1]["time"] - looked[0]["time"] if looked else 0.0
    polls = bool(waits) and all(_polls(*seen, evidence) for seen in zip(samples, waits, strict=True))
    polls = polls and not _counts(waits, evidence)
    moved = not polls and any(_place(wait) != _place(waits[0]) for wait in waits[1:])
    moved = moved or _worked_unseen(waits, samples, ticks, seconds) or _woke(waits, rank, seconds)
    steps = rank.get("progress", {}).get("step", [])
    moved = moved or any(step != steps[0] for step in steps)
    return View(number, rank, waits, threads, moved, ticks, seconds, polls)


def child_wait(child: Child, evidence: Evidence) -> tuple[Wait, Thread] | None:
    """What the main thread of a child waits for, in the last sample that shows it."""
    for sample in reversed(child["samples"]):
        thread = main_thread(sample["threads"])
        if thread is not None:
            return read(thread, evidence), thread
    return None


def child_moved(child: Child, evidence: Evidence) -> bool:
    memo: _Memo = {}
    waits = [_main_wait(sample, evidence, memo) for sample in child["samples"] if sample["threads"]]
    looked = child["samples"]
    ticks = looked[-1]["ticks"] - looked[0]["ticks"] if looked else 0
    return ticks > 3 or any(_place(wait) != _place(waits[0]) for wait in waits[1:])


def frame_source(evidence: Evidence, place: tuple[str, str, int]) -> Source | None:
    return evidence.get("source", {}).get(f"{place[0]}:{place[2]}")


def guards_of(evidence: Evidence, path: tuple[tuple[str, str, int], ...]) -> list[str]:
    """The guards of all frames of a path, outermost first."""
    found: list[str] = []
    for place in path:
        source = frame_source(evidence, place)
        found += source["guards"] if source else []
    return found


def _main_wait(sample: Sample, evidence: Evidence, memo: _Memo) -> Wait:
    thread = main_thread(sample["threads"])
    if thread is None:
        return Wait("shutdown") if sample["threads"] else Wait("idle")
    return _read(thread, evidence, memo)


def _read(thread: Thread, evidence: Evidence, memo: _Memo) -> Wait:
    """What a thread waits for, read once for frames that evidence of another node has once for many ranks."""
    key = id(thread["frames"]), thread["active"], thread["name"]
    if key not in memo:
        memo[key] = read(thread, evidence)
    return memo[key]


def _place(wait: Wait) -> tuple[object, ...]:
    return wait.kind == "busy", wait.op, wait.group, wait.path, wait.ints, wait.objects


def _worked_unseen(waits: tuple[Wait, ...], samples: list[Sample], ticks: int, seconds: float) -> bool:
    """Whether a rank was seen waiting each time but used CPU in between, though no thread of it was seen at work."""
    idle = all(wait.kind in COMMUNICATION for wait in waits)
    quiet = not any(thread["active"] for sample in samples for thread in sample["threads"])
    mains = [thread for sample in samples if (thread := main_thread(sample["threads"])) and "ticks" in thread]
    if len(mains) == len(samples) and mains and waits[-1].kind != "backward":  # that works in threads of its own
        ticks = mains[-1]["ticks"] - mains[0]["ticks"]  # a thread of a library may spin for ever
    return len(waits) > 1 and idle and quiet and ticks > max(5, 30 * seconds)


def _woke(waits: tuple[Wait, ...], rank: Rank, seconds: float) -> bool:
    """Whether the main thread waited for other ranks each time, and woke up often in between, which gloo does not."""
    if rank.get("nccl") or not waits or any(wait.kind not in ("collective", "p2p", "backward") for wait in waits):
        return False
    looks = [sample["woke"] for sample in rank["samples"] if "woke" in sample]
    wakes = sum(max(0, second[0] - first[1]) for first, second in pairwise(looks))
    return wakes > max(3, 3 * seconds)


def _counts(waits: tuple[Wait, ...], evidence: Evidence) -> bool:
    """Whether the loop ends by a number that was seen to move: `while got < wanted`."""
    tables = [{name: value for _, name, value in wait.ints} for wait in waits]
    moving = {name for name in tables[0] if any(table.get(name) != tables[0][name] for table in tables[1:])}
    if not moving or not waits[-1].path:
        return False
    loops = [guard for guard in guards_of(evidence, waits[-1].path[-1:]) if guard.startswith("while ")]
    return bool(loops) and counts_to(loops[-1], moving)


def _polls(sample: Sample, wait: Wait, evidence: Evidence) -> bool:
    """Whether the innermost loop of the program around the main thread waits for something from elsewhere."""
    thread = main_thread(sample["threads"])
    if thread is None:
        return False
    users: list[Frame] = [frame for frame in own_frames(thread) if not is_library(frame["file"])]
    if not users or wait.kind in COMMUNICATION:
        return False
    for frame in users[:3]:
        source = source_of(evidence, frame)
        loops = [guard for guard in source["guards"] if is_loop(guard)] if source else []
        if source and loops:
            inside = [step for step in source["steps"] if loops[-1] in step["guards"]]
            ways_out = [step["guards"] for step in inside if step["what"] in ("break", "return", "raise")]
            steps = " ".join(step["what"] for step in inside)
            return is_poll(loops[-1], source["text"], steps) or is_endless(source["guards"], ways_out)
    return False


def _rank_in_process(rank: Rank) -> int | None:
    for sample in rank["samples"]:
        thread = main_thread(sample["threads"])
        for frame in reversed(thread["frames"] if thread else []):
            for local in frame.get("locals") or []:
                if local["name"] in ("rank", "global_rank", "local_rank") and local["repr"].isdecimal():
                    return int(local["repr"])
    return None
