"""What two ranks may say differently in the same line: the time, their own number, a process id, an address.

Nothing else is passed over: a loss, a shape or another rank's number that differs keeps two lines apart.
"""

from __future__ import annotations

import re

TIME, RANK, PID, ADDRESS, DEVICE = 1, 2, 4, 8, 16
NAMES = {TIME: "time", RANK: "rank", PID: "pid", ADDRESS: "address", DEVICE: "device"}

_CLOCK = rb"\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d\b)?"
STAMP = re.compile(rb"(?:\d{4}[-/]\d\d[-/]\d\d[T _])?" + _CLOCK)
_LEADING = re.compile(rb"([IWEF])\d{3,4} (" + _CLOCK + rb")( +\d+)?|\[([IWEF])\d{3,4} (" + _CLOCK + rb")")
_HEX = re.compile(rb"0x[0-9a-fA-F]{6,}")
_PID = re.compile(rb"\b((?:pid|PID|tid|process)[ =:]{1,2})\d{2,}")
_NCCL = re.compile(rb"^[\w.-]+:\d+:\d+ \[\d+\] NCCL")
_LOCAL_RANK = re.compile(rb"\b(local[_ ]rank[ =:]{1,2})\d+")
_RANK = re.compile(rb"([Rr]ank|RANK)([ =:_#]{0,2})(\d+)\b")
_DEVICE = re.compile(rb"\bcuda:(\d+)\b")
_PEER = re.compile(rb"\[?\b\d{1,3}(?:\.\d{1,3}){3}\]?:\d{2,5}\b|\[[0-9a-f:]*:[0-9a-f:]*\]:\d{2,5}\b")


def normal(text: bytes, rank: int | None, local: int | None) -> tuple[bytes, int]:
    """`text` with what follows from the rank taken out, and which of these it had."""
    what = 0
    if text.count(b":") > 1:
        text, what = _without_time(text)
    if b"0x" in text:
        text, found = _HEX.subn(b"0x..", text)
        what |= ADDRESS if found else 0
    if b"pid" in text or b"PID" in text or b"tid" in text or b"process " in text:
        text, found = _PID.subn(rb"\g<1><pid>", text)
        what |= PID if found else 0
    if b"ank" in text or b"RANK" in text:
        text, what = _without_rank(text, rank, what)
    if b"cuda:" in text and rank is not None:
        own = (b"%d" % rank, b"%d" % (rank % 8 if local is None else local))
        changed = _DEVICE.sub(lambda found: b"cuda:<rank>" if found[1] in own else found[0], text)
        what |= DEVICE if changed != text else 0
        text = changed
    return text, what


def normal_peer(text: bytes, rank: int | None, local: int | None) -> bytes:
    """The same for the message of a traceback, where the port of a peer follows from the rank too."""
    return _PEER.sub(b"<peer>", normal(text, rank, local)[0])


def names_of(what: int) -> tuple[str, ...]:
    return tuple(name for bit, name in NAMES.items() if what & bit)


def _without_time(text: bytes) -> tuple[bytes, int]:
    what = 0
    first = text[:1]
    found = None
    if first in b"[IWEF":  # the logs of Google and torch: letter, date, time and thread
        found = _LEADING.match(text)
    elif first.isdigit():
        found = STAMP.match(text)
    if found:
        text = b"<time>" + text[found.end() :]
        what = TIME
    if text.count(b":") > 1:
        text, count = STAMP.subn(b"<time>", text)
        what |= TIME if count else 0
        if b"] NCCL" in text and _NCCL.match(text):
            text = _NCCL.sub(b"<pid> NCCL", text)
            what |= PID
    return text, what


def _without_rank(text: bytes, rank: int | None, what: int) -> tuple[bytes, int]:
    changed = _LOCAL_RANK.sub(rb"\g<1><rank>", text)
    if rank is not None:
        own = b"%d" % rank
        changed = _RANK.sub(lambda found: found[1] + found[2] + b"<rank>" if found[3] == own else found[0], changed)
    return changed, what | (RANK if changed != text else 0)
