"""A job that was ended from outside, by Ctrl-C or a signal: its tracebacks tell where the ranks stood then."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mldebug.ranks._logs_found import LogTraceback, Silent
from mldebug.ranks._logs_source import NOBODY
from mldebug.ranks._logs_words import count, who

_SHOWN = 8  # places
_INTERRUPT = "KeyboardInterrupt"
_SIGNAL = re.compile(r"SignalException\b.*got signal: (\d+)")
_SIGNALS = {"1": "SIGHUP", "2": "SIGINT: Ctrl-C", "3": "SIGQUIT", "12": "SIGUSR2", "15": "SIGTERM"}
_FRAME = re.compile(r' *File "(.*?)", line (\d+)(?:, in (.*))?')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<frozen|[/\\]bin[/\\][^/\\.]+$")
_LAUNCHER = re.compile(r"torch[/\\]distributed[/\\](?:run|launcher|elastic)|mldebug[/\\]ranks[/\\]_emulate")
_HARMLESS = re.compile(r"srun: .*: (?:Interrupt|Terminated|Killed|Exited with exit code (?:1|130|143))|SLURM|NCCL WARN")


@dataclass(frozen=True)
class Stood:
    """Where ranks stood when the job was interrupted: the innermost line of the user's, and how it came there."""

    place: str
    ranks: tuple[int, ...]
    others: tuple[str, ...]
    times: int
    frames: str


@dataclass(frozen=True)
class Outside:
    """What ended the job (KeyboardInterrupt, or a signal that its launcher got), and where the ranks stood."""

    reason: str
    stood: tuple[Stood, ...]

    @property
    def head(self) -> str:
        if not self.stood:
            return f"interrupted from outside ({self.reason})"
        named = any(one.ranks for one in self.stood)
        they = "the ranks" if named else "it" if sum(one.times for one in self.stood) == 1 else "the processes"
        places = [" ".join(filter(None, [_name(one), one.place])) for one in self.stood[:_SHOWN]]
        more = [f"and {len(self.stood) - _SHOWN} more places"] if len(self.stood) > _SHOWN else []
        return f"interrupted from outside ({self.reason}); where {they} stood then: {', '.join([*places, *more])}"

    def frames(self) -> list[str]:
        lines: list[str] = []
        for one in self.stood[:_SHOWN]:
            lines += ["", f"{_name(one) or 'it'} stood at {one.place}:"]
            lines += [f"    {line}" for line in one.frames.split("\n")]
        return lines


def outside(
    tracebacks: Sequence[LogTraceback], silent: Sequence[Silent], failures: Iterable[Any], events: Iterable[str]
) -> Outside | None:
    """What interrupted the job; None where something else, or a rank without a word, may have been its end."""
    told = [one for one in tracebacks if is_interrupt(one)]
    mute = {rank for one in silent for rank in one.ranks}
    launched = any(_SIGNAL.search(one.exception) for one in told)
    if not told or any(not one.victim for one in tracebacks) or any(not _HARMLESS.match(said) for said in events):
        return None
    if any(one["rank"] in mute and "SIGTERM" not in one["ended"] for one in failures):
        return None
    if len(told) < len(tracebacks) and mute and not launched:
        return None  # some lost a connection: that one of the silent ranks died first is as likely
    interrupts = [one for one in told if one.exception.startswith(_INTERRUPT)]
    signal = next((found[1] for one in told if (found := _SIGNAL.search(one.exception))), "2")
    reason = _INTERRUPT if interrupts else _SIGNALS.get(signal, f"signal {signal}")
    return Outside(reason, _places([one for one in told if not is_launcher(one)]))


def is_interrupt(one: LogTraceback) -> bool:
    """Whether it tells of a signal from outside: Python's own at Ctrl-C, or the one torch's launcher raises."""
    return one.exception.startswith(_INTERRUPT) or bool(_SIGNAL.search(one.exception))


def is_launcher(one: LogTraceback) -> bool:
    """Whether it is the traceback of torchrun (or `mldebug emulate`) itself, and of no rank."""
    return bool(_LAUNCHER.search(one.text))


def _places(tracebacks: Iterable[LogTraceback]) -> tuple[Stood, ...]:
    """Equal places together; the few first, as they are the odd ones."""
    groups: dict[str, Stood] = {}
    for one in tracebacks:
        place, frames = _place(one.text)
        if place:
            old = groups.get(place, Stood(place, (), (), 0, frames))
            ranks = tuple(sorted({*old.ranks, *one.ranks}))
            others = tuple(sorted({*old.others, *one.others}))
            groups[place] = Stood(place, ranks, others, old.times + one.times, old.frames)
    return tuple(sorted(groups.values(), key=lambda one: (len(one.ranks) + len(one.others), one.ranks)))


def _place(text: str) -> tuple[str, str]:
    """`train.py:15 load` and the frames of a traceback, those of libraries only counted."""
    parts = text.split("Traceback (most recent call last):")[1:] or [text]
    # what cleaning up ran into after the first interrupt is no place of the job
    part = next((part for part in parts if f"\n{_INTERRUPT}" in part), parts[-1])
    place, last, libraries, own = "", "", 0, False
    lines: list[str] = []
    for line in part.split("\n"):
        found = _FRAME.match(line)
        if found:
            name = re.split(r"[/\\]", found[1])[-1]
            last = f"{name}:{found[2]} {found[3] or ''}".rstrip()
            own = not _LIBRARY.search(found[1])
            if own and libraries:
                lines.append(f"  ... {count(libraries, 'frame')} of libraries")
            libraries = 0 if own else libraries + 1
            place = last if own else place
        if own and line[:1] == " ":
            lines.append(line)
    if libraries:
        lines.append(f"  ... {count(libraries, 'frame')} of libraries, the last at {last}")
    return place or last, "\n".join(lines)


def _name(one: Stood) -> str:
    if one.ranks or one.others != (NOBODY,):
        return who(one.ranks, one.others)
    return f"{one.times} times" if one.times > 1 else ""
