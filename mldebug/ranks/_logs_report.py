"""LogsReport: what logs() found, the answer first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mldebug.core.report import Report, paint
from mldebug.ranks._logs_fold import rank_set
from mldebug.ranks._logs_outside import Outside, is_interrupt, is_launcher, outside
from mldebug.ranks._logs_source import NOBODY, Source
from mldebug.ranks._logs_traceback import Kind
from mldebug.ranks._logs_words import brackets, count, short, who, wrap

if TYPE_CHECKING:
    from mldebug.ranks._logs import _Reading

_SHOWN = 5  # tracebacks in full
_VARIANTS = 8  # messages of one traceback


@dataclass(frozen=True)
class FoldedLine:
    """A line and who printed it; `differs` names what is not equal in it (time, rank, pid, address, device)."""

    text: str  # as the first of them printed it
    ranks: tuple[int, ...]
    others: tuple[str, ...]  # writers of which no rank is known
    times: int
    differs: tuple[str, ...]
    line: int  # number in the log, of the first

    @property
    def who(self) -> str:
        return who(self.ranks, self.others)


@dataclass(frozen=True)
class Message:
    """What the exception of a traceback says, and on which ranks it says so."""

    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LogTraceback:
    """A traceback that ranks share. `victim` is "" where it may be the cause, else what befell these ranks."""

    text: str
    exception: str
    victim: str
    ranks: tuple[int, ...]
    others: tuple[str, ...]
    times: int
    messages: tuple[Message, ...]
    more_messages: int
    time: str
    file: str
    line: int
    whole: bool
    survived: bool  # all ranks that have it printed many lines more

    @property
    def who(self) -> str:
        return who(self.ranks, self.others)


@dataclass(frozen=True)
class Silent:
    """Ranks without a traceback that end alike."""

    ranks: tuple[int, ...]
    last: str  # the last line of the first of them
    ended: str  # what torchrun said of them, or ""


@dataclass(frozen=True)
class LogsReport(Report):
    """What logs() found. `tracebacks` are sorted: the first is the likely root cause."""

    files: tuple[str, ...]
    lines: int
    size: int  # bytes, unpacked
    prefixes: tuple[str, ...]  # an example of each kind that was recognised
    ranks: tuple[int, ...]
    tracebacks: tuple[LogTraceback, ...]
    first_by: str  # "time", "order" or "torchrun": what the sorting rests on
    silent: tuple[Silent, ...]
    failures: tuple[dict[str, Any], ...]  # the summary of torchrun
    timeouts: tuple[dict[str, Any], ...]  # collectives in NCCL's watchdog, with the ranks that did not complain
    events: tuple[dict[str, Any], ...]
    broken: int
    folded: tuple[FoldedLine, ...] = field(repr=False)
    folded_lines: int = 0
    split_files: int = 0
    notes: tuple[str, ...] = ()
    interrupted: bool = False  # by Ctrl-C: there is more in the log
    outside: Outside | None = None  # the job was interrupted, and where its ranks stood

    @property
    def ok(self) -> bool:
        return not (self.tracebacks or self.failures or self.timeouts or self.events)

    def text(self, color: bool = False, width: int = 80) -> str:
        return self.answer(color, width) + self.tail()

    def answer(self, color: bool = False, width: int = 80) -> str:
        """The report without the folded lines."""
        lines = [*self._headline(width), *self._causes(width), *self._victims(width), *self._others(width)]
        text = "\n".join(lines) + "\n"
        return paint(text) if color else text

    def tail(self) -> str:
        if not self.folded:
            return ""
        head = f"last {len(self.folded)} of {self.folded_lines:,} folded lines:"
        if len(self.folded) == self.folded_lines:
            head = f"{len(self.folded)} folded lines:"
        return "\n".join(["", head, *map(folded_text, self.folded)]) + "\n"

    def _headline(self, width: int) -> list[str]:
        causes = [one for one in self.tracebacks if not one.victim]
        where = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        ranks = count(len(self.ranks), "rank") if self.ranks else "no ranks"
        about = f"{ranks}, {self.lines:,} lines, {where}" + (
            f", prefix {' '.join(self.prefixes)}" if self.prefixes else ""
        )
        if causes:
            launcher = next((one["launcher"] for one in self.failures if one["first"]), "torchrun")
            by = {"time": "by time", "torchrun": f"as {launcher} saw it", "order": "by order in the log"}[self.first_by]
            first = causes[0]
            kinds = f"{count(len(self.tracebacks), 'kind')} of traceback"
            head = f"{kinds}; first {by}: {_on(first)}: {short(first.exception)}"
        elif self.outside:
            slurm = [said for said in self._ends() if said.startswith("SLURM")]
            head = "; ".join([self.outside.head, *slurm[:1]])
        elif self.tracebacks:
            odd = [one for one in self.silent if one.ranks]
            kinds = f"{count(len(self.tracebacks), 'kind')} of traceback"
            head = f"{kinds}, and none is the cause: all felt the end of another rank"
            if odd:
                by = next((one["launcher"] for one in self.failures if one["rank"] in odd[0].ranks), "")
                ended = f" ({odd[0].ended}, says {by})" if by else ""
                head += f"; look at {brackets(odd[0].ranks)}, which left no traceback{ended}"
            elif self.events:
                head += f"; {self._ends()[0]}"
        else:
            head = "; ".join(["no traceback", *self._ends()[:1]])
        return [*wrap(head, width), *wrap(about, width)]

    def _causes(self, width: int) -> list[str]:
        lines: list[str] = []
        causes = [one for one in self.tracebacks if not one.victim]
        for number, one in enumerate(causes[:_SHOWN], 1):
            more = (", which breaks off" if not one.whole else "") + (
                ", which went on after it" if one.survived else ""
            )
            lines += ["", f"{number}. {_on(one)}{more}  ({_at(one)})"]
            lines += [f"    {line}" for line in one.text.split("\n")]
            if len(one.messages) > 1:
                lines.append(f"   {len(one.messages) + one.more_messages} different messages:")
                lines += [f"    {brackets(message.ranks)} {message.text}" for message in one.messages[:_VARIANTS]]
                if len(one.messages) + one.more_messages > _VARIANTS:
                    lines.append(f"    ... {len(one.messages) + one.more_messages - _VARIANTS} more: --json has them")
        lines += [f"{number}. {_on(one)}: {short(one.exception)}  ({_at(one)})"
                  for number, one in enumerate(causes[_SHOWN:], _SHOWN + 1)][:20]  # fmt: skip
        return lines

    def _victims(self, width: int) -> list[str]:
        lines = self.outside.frames() if self.outside else []
        victims = [one for one in self.tracebacks if one.victim and not (self.outside and is_interrupt(one))]
        lines += [""] if victims else []
        for one in victims[:12]:
            lines += wrap(
                f"consequence: {_on(one)} {one.victim}: {short(one.exception)}  ({_at(one)})",
                width,
                subsequent_indent="    ",
            )
        if len(victims) > 12:
            lines.append(f"... and {len(victims) - 12} kinds more of such")
        return lines

    def _others(self, width: int) -> list[str]:
        said: list[str] = []
        if self.tracebacks or self.failures:
            for one in self.silent[:8]:
                ended = f", {one.ended}" if one.ended else ""
                last = f"; last line: {short(one.last)}" if one.last else ""
                said.append(f"no traceback: {brackets(one.ranks)}{ended}{last}")
            if len(self.silent) > 8:
                said.append(f"no traceback: {len(self.silent) - 8} more groups of ranks; --json has them")
        said += self._ends()
        if self.broken:
            looks = "looks" if self.broken == 1 else "look"
            hint = "print with printflock (`mldebug printflock -- train.py`)"
            said.append(f"{count(self.broken, 'line')} {looks} interleaved; {hint}")
        if self.split_files:
            said.append(f"{count(self.split_files, 'file')} written, one a rank")
        said += self.notes
        lines = [line for one in said for line in wrap(one, width, subsequent_indent="    ")]
        return ["", *lines] if lines else []

    def _ends(self) -> list[str]:
        """How it ended, as launchers, NCCL and the system tell it; what is most likely the reason comes first."""
        said = [
            f"{one['launcher']} saw first: rank {one['rank']}{_on_host(one['host'])}, {one['ended']}"
            for one in self.failures
            if one["first"]
        ]
        for late in self.timeouts:
            missing = f"; not on {brackets(late['missing'])}" if late["missing"] else ""
            what = f"{late['op']} number {late['seq']} timed out on {brackets(late['ranks'])}"
            said.append(f"NCCL's watchdog: {what}{missing}")
        for event in self.events[:12]:
            named = event["ranks"] or event["others"] != (NOBODY,)
            said.append(f"{event['said']}: {who(event['ranks'], event['others'])}" if named else event["said"])
        return said


def folded_text(line: FoldedLine) -> str:
    """A folded line as it is printed: `[0-6,8-63] text`."""
    but = f"  (equal but for {', '.join(line.differs)})" if line.differs else ""
    times = f"  ({line.times} times)" if line.times > 1 else ""
    by = "" if line.who == NOBODY else f"{line.who} "
    return f"{by}{short(line.text, 2000)}{times}{but}"


def make_report(reading: _Reading, folded: tuple[FoldedLine, ...]) -> LogsReport:
    """The report of what was read."""
    names = _Names(reading)
    ends = reading.ends
    ends.settle(names.every)
    kinds = [kind for kind in reading.kinds.all.values() if not kind.launcher]
    first = next((one.rank for one in ends.failures.values() if one.first), None)
    timed = all(kind.time for kind in kinds) and len({len(kind.time) for kind in kinds}) == 1
    first_of_torchrun = [kind for kind in kinds if not kind.victim and first in names.ranks(kind.mask)]

    def place(kind: Kind) -> tuple[Any, ...]:
        by = kind.time if timed else b""
        return (bool(kind.victim), _is_survived(kind), not kind.whole, kind not in first_of_torchrun, by, kind.order)

    kinds.sort(key=place)
    by = (
        "torchrun"
        if first_of_torchrun and len([kind for kind in kinds if not kind.victim]) > 1
        else "time"
        if timed
        else "order"
    )
    tracebacks = tuple(_traceback(kind, names) for kind in kinds)
    failures = tuple({**dataclasses.asdict(one), "ended": one.words} for one in ends.failures.values())
    silent = _silent(reading, names, tracebacks)
    return LogsReport(
        tuple(reading.names),
        reading.lines,
        reading.size,
        tuple(reading.used),
        tuple(sorted({*names.every, *(ends.failures if reading.ranks is None else ())})),
        tracebacks,
        by,
        silent,
        failures,
        _timeouts(reading, names),
        tuple(
            {"said": said, "ranks": names.ranks(mask), "others": names.others(mask)}
            for said, mask in ends.events.items()
        ),
        reading.broken + reading.interleaved,
        folded,
        reading.window.folded,
        reading.split_files,
        tuple(_notes(reading, names)),
        reading.interrupted,
        None if ends.timeouts else outside(tracebacks, silent, failures, ends.events),
    )


class _Names:
    """From the bits of sources to ranks, once all is known of them."""

    def __init__(self, reading: _Reading) -> None:
        self._sources = sources = reading.sources.all
        spoke = {one.rank for one in sources if one.rank is not None and one.last and one.wanted}
        traced = {rank for kind in reading.kinds.all.values() for rank in self.ranks(kind.mask)}
        self.every = tuple(sorted(spoke | traced))
        chosen_by = ((one.local if one.rank is None else one.rank, one) for one in sources)
        self.there = {rank for rank, one in chosen_by if rank is not None and (one.last or one.traced)}

    def _of(self, mask: int) -> list[Source]:
        return [one for one in self._sources if mask & one.bit]

    def ranks(self, mask: int) -> tuple[int, ...]:
        return tuple(sorted({one.rank for one in self._of(mask) if one.rank is not None}))

    def others(self, mask: int) -> tuple[str, ...]:
        return tuple(sorted({one.words for one in self._of(mask) if one.rank is None}))


def _traceback(kind: Kind, names: _Names) -> LogTraceback:
    messages = tuple(Message(_decoded(seen[1]), names.ranks(seen[0])) for seen in kind.messages.values())  # type: ignore[arg-type]
    return LogTraceback(
        _decoded(kind.text), _decoded(kind.exception), kind.victim, names.ranks(kind.mask), names.others(kind.mask),
        kind.times, messages, kind.more_messages, _decoded(kind.time), kind.file, kind.line, kind.whole,
        _is_survived(kind),
    )  # fmt: skip


def _is_survived(kind: Kind) -> bool:
    return kind.mask & ~kind.survived == 0


def _silent(reading: _Reading, names: _Names, tracebacks: tuple[LogTraceback, ...]) -> tuple[Silent, ...]:
    """The ranks without a traceback, those that end alike together; the few first, as they are the odd ones."""
    spoke = {rank for one in tracebacks for rank in one.ranks}
    if any(NOBODY in one.others and not (is_interrupt(one) and is_launcher(one)) for one in tracebacks):
        return ()  # whose these are nobody can tell
    last: dict[int, bytes] = {}
    for source in reading.sources.all:
        if source.rank is not None and source.last and source.wanted:
            last[source.rank] = source.last
    groups: dict[tuple[str, bytes], list[int]] = {}
    ranks = set(names.every) | {
        rank for rank in reading.ends.failures if reading.ranks is None or rank in reading.ranks
    }
    from mldebug.ranks._logs_normal import normal

    for rank in sorted(ranks - spoke):
        failure = reading.ends.failures.get(rank)
        groups.setdefault((failure.words if failure else "", normal(last.get(rank, b""), rank, None)[0]), []).append(
            rank
        )
    found = [Silent(tuple(ranks), _decoded(last.get(ranks[0], b"")), ended) for (ended, _), ranks in groups.items()]
    return tuple(sorted(found, key=lambda one: ("SIGTERM" in one.ended, len(one.ranks), one.ranks)))


def _timeouts(reading: _Reading, names: _Names) -> tuple[dict[str, Any], ...]:
    ranks = set(names.every)
    complained = {rank for mask in reading.ends.timeouts.values() for rank in names.ranks(mask)}
    return tuple(
        {"op": op, "seq": seq, "ranks": names.ranks(mask), "missing": tuple(sorted(ranks - complained))}
        for (op, seq), mask in sorted(reading.ends.timeouts.items(), key=lambda item: item[0][1])
    )


def _notes(reading: _Reading, names: _Names) -> list[str]:
    notes = list(reading.notes)
    absent = (reading.ranks or frozenset()) - names.there
    if absent:
        there = (
            f"there are lines of {brackets(names.there)}" if names.there else "no line names its rank (see --prefix)"
        )
        notes.append(f"no line is of rank {rank_set(absent)}; {there}")
    groups: dict[str, dict[int, list[int]]] = {}
    for (index, group), enqueued in reading.ends.enqueued.items():
        groups.setdefault(group, {}).setdefault(enqueued, []).extend(names.ranks(1 << index))
    for group, queued in groups.items():
        if len(queued) > 1:
            low, high = min(queued), max(queued)
            notes.append(f"NCCL work of group {group}: {brackets(queued[low])} had enqueued {low}, others up to {high}")
    if reading.kinds.left_out:
        notes.append(f"{reading.kinds.left_out} tracebacks of further kinds were left out")
    return notes


def _decoded(text: object) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _on_host(host: str) -> str:
    return f" on {host}" if host else ""


def _on(one: LogTraceback) -> str:
    if one.ranks or one.others != (NOBODY,):
        return one.who
    return f"{one.times} times, no rank named" if one.times > 1 else "no rank named"


def _at(one: LogTraceback) -> str:
    return f"{one.file}:{one.line}" + (f", {one.time}" if one.time else "")
