"""LogsReport: what logs() found, the answer first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mldebug.core.report import Report, paint
from mldebug.ranks._logs_found import FoldedLine, LogTraceback, Silent
from mldebug.ranks._logs_outside import Outside, is_interrupt
from mldebug.ranks._logs_source import NOBODY
from mldebug.ranks._logs_words import brackets, count, short, who, wrap

_SHOWN = 5  # tracebacks in full
_VARIANTS = 8  # messages of one traceback


@dataclass(frozen=True)
class LogsReport(Report):
    """What logs() found. `ok` is False where there is a traceback, a failure, a timeout or an event of the kernel.

        report = logs("job.log"); report.ok or print(report.tracebacks[0].exception)

    - `tracebacks`: sorted, the first is the likely root cause; each has `exception`, `ranks`, `times` (how often it is
      in the log), `file`, `line` (from 1) and `victim` ("" where it may be a cause, else what befell these ranks)
    - `first_by`: what that order rests on: "time", "order" (of the lines in the log) or "torchrun"
    - `files`, `lines` (number), `size` (bytes, unpacked), `prefixes` (an example of each kind that was recognised)
    - `ranks`: all that were seen; `silent`: those without a traceback, by their last line
    - `failures`: what torchrun's own summary says; `timeouts`: collectives in NCCL's watchdog, with the ranks that did
      not complain; `events`: lines of the kernel and the scheduler, such as out of memory
    - `folded`: the last lines, those that ranks share as one, with `ranks` and `times`; `folded_lines`: how many there
      are of all; `broken`: lines that were cut by others
    - `interrupted`: ended by Ctrl-C, there is more in the log
    """

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


def _on_host(host: str) -> str:
    return f" on {host}" if host else ""


def _on(one: LogTraceback) -> str:
    if one.ranks or one.others != (NOBODY,):
        return one.who
    return f"{one.times} times, no rank named" if one.times > 1 else "no rank named"


def _at(one: LogTraceback) -> str:
    return f"{one.file}:{one.line}" + (f", {one.time}" if one.time else "")
