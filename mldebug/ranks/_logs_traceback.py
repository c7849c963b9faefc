"""Whole tracebacks out of the lines of one writer, and the kinds of them over all writers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mldebug.ranks._logs_fold import Entry
from mldebug.ranks._logs_normal import normal, normal_peer
from mldebug.ranks._logs_source import Source

HEADER = b"Traceback (most recent call last):"
_RICH = b"\xe2\x95\xad\xe2\x94\x80"  # how the box begins that rich draws around it
_RICH_SIDES = (b"\xe2\x94\x82", b"\xe2\x95\xb0")
_LINES = 400  # of one traceback
_KINDS = 256
_MESSAGES = 64  # of one kind
_FOREIGN = 200  # lines of others that may stand between the lines of a traceback

_CHAIN = (b"During handling of the above exception", b"The above exception was the direct cause")
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(?:\[[^\]]*\])?:(?= |$)|(?:[\w.]+\.)?[A-Z]\w+$")
_FRAME = re.compile(rb'[ |]*File "(.*?)", line (\d+)(?:, in (.*))?')
_RICH_FRAME = re.compile(rb"\xe2\x94\x82 (\S+?):(\d+) in (.*?) +\xe2\x94\x82")
_GUTTER = re.compile(rb" *[|+]")
_GOES_ON = re.compile(rb"CUDA kernel errors might|For debugging consider|Compile with `?TORCH_USE|Device-side assert"
                      rb"|Exception raised from|frame #\d+:|Last error:|nccl\w+: |\(?Triggered internally"
                      rb"|NOTE: |Search for `cuda|Exception in thread|Expected |Original Traceback")  # fmt: skip
_LAUNCHER = re.compile(rb"(?:[\w.]*\.)?(?:ChildFailedError|CalledProcessError|Process(?:Raised|Exited)Exception)\b")
_SEPARATOR = re.compile(rb"={10,}$")

# A rank that ends with one of these felt the end of another rank, or was told to end.
_VICTIMS = tuple(
    (re.compile(b"|".join(patterns), re.M), words)
    for words, *patterns in (
        (
            "lost the connection to another rank",
            rb"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited",
        ),
        (
            "lost the connection to the store",
            rb"recvValue failed|sendBytes failed|recvVector failed|Connection was likely closed|DistNetworkError",
        ),
        ("lost another rank, says NCCL", rb"ncclRemoteError|NCCL communicator was aborted|NCCL Error 6"),
        (
            "waited in vain for another rank",
            rb"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|Timeout at NCCL work",
            rb"Application timeout caused pair closure|wait timeout after|Socket Timeout|DistStoreError",
        ),
        ("was ended by a signal of the launcher", rb"SignalException|got signal: (?:15|2)\b|SIGTERM"),
        ("waited for a rank that went first", rb"^(?:\w+\.)*MldebugError: .* failed in the block that goes first \("),
        ("was interrupted", rb"^KeyboardInterrupt"),
    )
)


class Gathering:
    """A traceback under way: takes the lines of its writer until it is whole."""

    __slots__ = (
        "entry",
        "exceptions",
        "file",
        "foreign",
        "grouped",
        "hook",
        "line",
        "lines",
        "named",
        "order",
        "rich",
        "state",
        "summary",
        "time",
    )

    def __init__(self, first: bytes, line: int, file: str, time: bytes, hook: bool, order: int) -> None:
        self.lines = [first]
        self.line = line
        self.file = file
        self.time = time
        self.hook = hook  # torch's hook put the prefix there: every line with it belongs to the traceback
        self.order = order
        self.grouped = b"Exception Group" in first
        self.rich = first.startswith(_RICH)
        self.named: int | None = None  # the rank that the line before it has named
        self.exceptions: list[bytes] = []
        self.state = "stack"
        self.summary = 0  # separators still to come of torchrun's block
        self.foreign = 0
        self.entry: Entry | None = None  # its place among the folded lines

    def take(self, text: bytes, hooked: bool) -> bool | None:
        """Whether this line belongs to it; None when it is over, and the line is somebody else's."""
        if len(self.lines) >= _LINES and self.state != "summary":
            return None if text[:1] not in (b" ", b"\t") else True  # the middle of an endless one is not kept
        if self.summary:
            if _SEPARATOR.match(text):
                self.summary -= 1
            return self._keep(text, "after" if not self.summary else "summary")
        if self.grouped and _GUTTER.match(text):
            return self._keep(text, "stack")
        verdict = self._stack(text) if self.state == "stack" else self._after(text, hooked)
        if verdict is False:
            self.foreign += 1
            return False if self.foreign < _FOREIGN else None
        return verdict

    def _stack(self, text: bytes) -> bool | None:
        if text[:1] in (b" ", b"\t"):
            return self._keep(text, "stack")
        if self.rich and text.startswith(_RICH_SIDES):
            return self._keep(text, "stack")
        if begins(text) or text.lstrip(b" +|").startswith(b"Exception Group Traceback"):
            return None
        if self.grouped and _GUTTER.match(self.lines[-1]):
            return self._after(text, False)
        if _EXCEPTION.match(text) and len(self.lines) > 1:
            self.exceptions.append(text)
            if _LAUNCHER.match(text):
                self.summary = 2 if text.rstrip().endswith(b"ChildFailedError:") else 0
            return self._keep(text, "after")
        return self._keep(text, "stack") if not text.strip() else False

    def _after(self, text: bytes, hooked: bool) -> bool | None:
        if not text.strip():
            return self._keep(text, self.state) if self.lines[-1].strip() or self.lines[-2].strip() else None
        if text.startswith(_CHAIN):
            return self._keep(text, "chain")
        if begins(text) or text.startswith(b"  + Exception Group"):
            if self.state != "chain":
                return None
            self.grouped = self.grouped or b"Exception Group" in text
            return self._keep(text, "stack")
        if self.state == "chain":
            return None
        close = bool(self.lines[-1].strip())  # nothing but the message itself can stand between
        if (hooked and self.hook) or self.wants(text) or (close and text[:1] in (b" ", b"\t")):
            return self._keep(text, "after")
        return None

    def wants(self, text: bytes) -> bool:
        """Whether this is a line of a message that is known to go on."""
        return (bool(_GOES_ON.match(text)) and text not in self.lines) or self.lines[-1].startswith(b"Last error:")

    def _keep(self, text: bytes, state: str) -> bool:
        self.state = state
        self.lines.append(text[:2000])
        return True

    @property
    def whole(self) -> bool:
        return bool(self.exceptions) or (self.grouped and len(self.lines) > 2)


@dataclass
class Kind:
    """Tracebacks that are equal but for what follows from the rank, and for the words of the exception."""

    text: bytes
    exception: bytes  # the last line of the first of them
    line: int
    file: str
    order: int
    time: bytes
    victim: str = ""
    launcher: bool = False
    whole: bool = True
    mask: int = 0
    survived: int = 0  # mask of those that went on for long after it
    times: int = 0
    messages: dict[bytes, list[object]] = field(default_factory=dict)  # normal -> [mask, as first seen]
    more_messages: int = 0


class Kinds:
    """All kinds of traceback in the order of their appearance."""

    def __init__(self) -> None:
        self.all: dict[object, Kind] = {}
        self.left_out = 0

    def add(self, got: Gathering, source: Source) -> Kind | None:
        while len(got.lines) > 1 and not got.lines[-1].strip():
            got.lines.pop()
        last = got.exceptions[-1] if got.exceptions else _last_said(got.lines)
        victim = victim_words(_from_last(got.lines, last))
        frames, message = _key(got, source)
        key = (frames, victim)  # where all wait at the same line, one of them may say something else
        kind = self.all.get(key)
        if kind is None:
            if len(self.all) >= _KINDS:
                self.left_out += 1
                return None
            text = b"\n".join(got.lines)
            kind = Kind(text, last, got.line, got.file, got.order, got.time, whole=got.whole)
            kind.launcher = bool(got.exceptions and _LAUNCHER.match(last))
            kind.victim = victim
            self.all[key] = kind
        elif got.time and (not kind.time or got.time < kind.time):
            kind.time = got.time
        kind.mask |= source.bit
        kind.times += 1
        seen = kind.messages.get(message)
        if seen is not None:
            seen[0] |= source.bit  # type: ignore[operator]
        elif len(kind.messages) < _MESSAGES:
            kind.messages[message] = [source.bit, got.exceptions[-1] if got.exceptions else b""]
        else:
            kind.more_messages += 1
        return kind


def begins(text: bytes) -> bool:
    """Whether a traceback begins with this line."""
    return text.startswith(HEADER) or (text.startswith(_RICH) and b"Traceback (most recent call last)" in text)


def victim_words(message: bytes) -> str:
    """What befell a rank whose exception says this, or "" where it may be the cause itself."""
    return next((words for pattern, words in _VICTIMS if pattern.search(message)), "")


def _key(got: Gathering, source: Source) -> tuple[object, bytes]:
    """The frames and types of a traceback, and its messages, without what follows from the rank."""
    frames: list[bytes] = []
    message: list[bytes] = []
    for line in got.lines:
        frame = _FRAME.match(line) or (_RICH_FRAME.match(line) if got.rich else None)
        if frame:
            frames.append(b"%s:%s:%s" % (frame[1], frame[2], frame[3] or b""))
        elif got.grouped and _GUTTER.match(line):
            frames.append(normal(line, source.rank, source.local)[0])
        elif line in got.exceptions:
            frames.append(line.partition(b":")[0])
            message.append(normal_peer(line, source.rank, source.local))
    return (tuple(frames), got.whole), b"\n".join(message)


def _from_last(lines: list[bytes], last: bytes) -> bytes:
    at = len(lines) - 1 - lines[::-1].index(last) if last in lines else len(lines) - 1
    return b"\n".join(lines[at:])


def _last_said(lines: list[bytes]) -> bytes:
    """The line of an exception group, or the end of a traceback that breaks off."""
    for line in lines:
        bare = line.lstrip(b" |+")
        if bare != line and _EXCEPTION.match(bare) and b"Group" in bare.partition(b":")[0]:
            return bare
    return lines[-1]
