"""What is found in logs: folded lines, tracebacks, and ranks that ended without one."""

from __future__ import annotations

from dataclasses import dataclass

from mldebug.ranks._logs_words import who


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
