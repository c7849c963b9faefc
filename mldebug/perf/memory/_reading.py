"""One look at the memory of this process, and the line that says it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

from mldebug.core.world import world
from mldebug.perf.memory._card import Card, look_at_card
from mldebug.perf.memory._host import Host, look_at_host


@dataclass(frozen=True)
class Reading:
    """Who, when, where in the program, and what is in use: bytes, None where nobody says."""

    label: str
    rank: int
    world_size: int
    host_name: str
    time: float  # seconds since 1970
    card: Card
    host: Host

    @property
    def peak(self) -> int | None:
        """The largest use so far: of torch's allocator, or of the process where there is no accelerator."""
        return self.host.peak if self.card.allocated is None else self.card.peak

    @property
    def use(self) -> int | None:
        """What `peak` is the largest of."""
        return self.host.rss if self.card.allocated is None else self.card.allocated

    def with_peak(self, peak: int | None) -> Reading:
        """The same with another peak."""
        if self.card.allocated is None:
            return replace(self, host=replace(self.host, peak=peak))
        return replace(self, card=replace(self.card, peak=peak))


def look(label: str = "") -> Reading:
    """What is in use now. Waits for nothing on the device: torch counts memory when it is asked for."""
    me = world()
    try:
        card = look_at_card()
    except Exception:  # a device that has failed may answer no more; the host's part is then all there is
        card = Card("unknown")
    return Reading(label, me.rank, me.world_size, me.host, time.time(), card, look_at_host())


def line_of(now: Reading, before: Reading | None = None, more: str = "") -> str:
    """The line: `mldebug memory` and key=value words, so that grep and awk can take it apart; `before` adds deltas."""
    card, host = now.card, now.host
    old_card, old_host = (before.card, before.host) if before is not None else (Card(""), Host(None, None, None, None))
    words = [f"rank={now.rank}/{now.world_size}", f"host={now.host_name}", f"at={_word(now.label)}", more]
    device = card.device if card.physical is None else f"{card.device}/gpu{card.physical}"
    words.append(f"device={device}")
    if card.allocated is not None:
        words.append(f"allocated={_change(card.allocated, old_card.allocated)}")
        words.append(f"peak={size(card.peak)}")
        words.append(f"reserved={_change(card.reserved, old_card.reserved)}")
        if card.fragmentation is not None:
            words.append(f"fragmentation={card.fragmentation:.0%}")
    if card.total is not None:
        words.append(f"driver={_change(card.used, old_card.used)}/{size(card.total)}")
    if card.other_processes:
        of = f"{card.other_processes}process{'es' if card.other_processes > 1 else ''}"
        words.append(f"others={size(card.others)}({of})")
    elif card.other_processes == 0:
        words.append("others=0")
    words.append(f"rss={_change(host.rss, old_host.rss)}")
    words.append(f"rss_peak={size(host.peak)}")
    if host.limit is not None:
        words.append(f"cgroup={size(host.used)}/{size(host.limit)}")
    return "mldebug memory: " + " ".join(word for word in words if word)


def size(count: float | None) -> str:
    """Bytes in words of one piece: "812B", "3.2MiB", "17.25GiB"; "?" for None."""
    if count is None:
        return "?"
    sign, count = ("-" if count < 0 else ""), abs(count)
    if count < 1024:
        return f"{sign}{count:.0f}B"
    for unit, digits in (("KiB", 1), ("MiB", 1), ("GiB", 2), ("TiB", 2)):
        count /= 1024
        if count < 1023.95 or unit == "TiB":
            return f"{sign}{count:.{digits}f}{unit}"
    raise AssertionError  # the last unit takes all


def _change(now: int | None, before: int | None) -> str:
    if now is None or before is None:
        return size(now)
    return f"{size(now)}({'+' if now >= before else ''}{size(now - before)})"


def _word(label: str) -> str:
    """The label as one word of the line: quoted where it has spaces or quotes."""
    if re.fullmatch(r"[^\s\"'=]+", label):
        return label
    return '"' + label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
