"""Follows two texts side by side: where they part, and whether they meet again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mldebug.tracing._tail_read import THE_END

_HISTORY = 1 << 16  # bytes kept before the position, for the line that both had last
_AHEAD = 1 << 18
_RUN = 3  # equal lines that make a meeting
_WINDOWS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # bytes that are searched for one, in growing steps
_MOST_KINDS = 10_000


@dataclass
class Split:
    """A place where two texts part: the last line of both, and how each goes on. Positions are of the first time."""

    last: bytes
    left: bytes
    right: bytes
    position: int  # in the left text
    right_position: int
    meets: bool  # in the end; False: never again
    apart: int  # lines of the longer way until they meet again
    times: int = 1


@dataclass
class Alignment:
    """All splits of two texts, in the order of their first time; `truncated`: there were too many kinds of them."""

    splits: list[Split]
    truncated: bool = False


def align(left: Iterator[bytes], right: Iterator[bytes], position: int = 0, most: int | None = None) -> Alignment:
    """Compare two texts from a position on that both have in common. One that ends earlier is only behind.

    `left` and `right` are blocks of whole lines; `most` ends the search after so many kinds of splits.
    """
    a, b = _Cursor(left, position), _Cursor(right, position)
    kinds: dict[tuple[bytes, bytes, bytes], Split] = {}
    while True:
        a.fill(_AHEAD)
        b.fill(_AHEAD)
        if not a.left or not b.left:
            break
        same = _common(a.data, a.at, b.data, b.at)
        if same:
            a.at += same
            b.at += same
            if not a.left or not b.left:
                continue
        back = a.at - (a.data.rfind(b"\n", 0, a.at) + 1)
        a.at -= back
        b.at -= back
        split, skip = _part(a, b)
        kind = split.last, split.left, split.right
        known = kinds.get(kind) or _last_time(split, kinds.values())
        if known is not None and (split.meets or a.ends_soon or b.ends_soon):
            known.times += 1  # or one ended on a way from which it came back before
            known.apart = max(known.apart, split.apart)
        else:
            kinds[kind if split.meets else (*kind[:2], kind[2] + b"\n")] = split
        if skip is None or len(kinds) >= (most or _MOST_KINDS):
            break
        a.at += skip[0]
        b.at += skip[1]
    return Alignment(list(kinds.values()), len(kinds) >= _MOST_KINDS)


class _Cursor:
    """A position in a text that is read once, with some of it before and after."""

    def __init__(self, blocks: Iterator[bytes], position: int) -> None:
        self._blocks = blocks
        self._base = position  # of data[0]
        self.data = b""
        self.at = 0
        self.ended = False

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    @property
    def position(self) -> int:
        return self._base + self.at

    @property
    def ends_soon(self) -> bool:
        return self.ended and self.left < _WINDOWS[0]

    def fill(self, want: int) -> None:
        """Have `want` bytes after the position, or all that there are."""
        if self.left >= want or self.ended:
            return
        cut = max(0, self.at - _HISTORY)
        parts, have = [self.data[cut:]], self.left
        self._base += cut
        self.at -= cut
        while have < want:
            block = next(self._blocks, None)
            if block is None:
                self.ended = True
                break
            parts.append(block)
            have += len(block)
        self.data = b"".join(parts)

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        return self.data[self.at : end if end >= 0 else len(self.data)]

    def before(self) -> bytes:
        """The line before the position."""
        end = self.at - 1
        return self.data[self.data.rfind(b"\n", 0, end) + 1 : end] if end > 0 else b""


def _common(a: bytes, i: int, b: bytes, j: int) -> int:
    """The number of equal bytes from a[i] and b[j] on, by comparing pieces that grow while they are equal."""
    most = min(len(a) - i, len(b) - j)
    done, step = 0, 256
    while done < most:
        size = min(step, most - done)
        if a[i + done : i + done + size] == b[j + done : j + done + size]:
            done += size
            step = min(step * 4, 1 << 18)
            continue
        while size > 1:  # the first difference is within these `size` bytes
            half = size // 2
            if a[i + done : i + done + half] == b[j + done : j + done + half]:
                done += half
                size -= half
            else:
                size = half
        return done
    return done


def _part(a: _Cursor, b: _Cursor) -> tuple[Split, tuple[int, int] | None]:
    """What the two do where they part, and how many bytes each goes until they meet; None if they never do."""
    split = Split(a.before(), a.line(), b.line(), a.position, b.position, False, 0)
    for window in _WINDOWS:
        a.fill(window)
        b.fill(window)
        lines_a, whole_a = _lines(a, window)
        lines_b, whole_b = _lines(b, window)
        found = _meet(lines_a, lines_b, whole_a, whole_b)
        if found is not None:
            i, j = found
            split.meets, split.apart = True, max(i, j)
            return split, (sum(map(len, lines_a[:i])) + i, sum(map(len, lines_b[:j])) + j)
        if whole_a and whole_b:
            break
    return split, None


def _last_time(split: Split, known: Iterable[Split]) -> Split | None:
    """The split that this one is, where one of the two ends instead of going on with the loop, and the other too."""
    end = THE_END.rstrip()
    if not split.meets or end not in (split.left, split.right):
        return None
    same = (each for each in known if each.last == split.last)
    return next((each for each in same if each.left == split.left or each.right == split.right), None)


def _lines(cursor: _Cursor, window: int) -> tuple[list[bytes], bool]:
    """The next lines, and whether they are all that there are."""
    data = cursor.data[cursor.at : cursor.at + window]
    whole = cursor.ended and cursor.left <= window
    lines = data.split(b"\n")
    return lines[:-1] or lines, whole


def _meet(a: list[bytes], b: list[bytes], whole_a: bool, whole_b: bool) -> tuple[int, int] | None:
    """How many lines of each to leave out until some lines in a row are equal; as few as can be."""
    where: dict[bytes, list[int]] = {}
    for j, line in enumerate(b):
        where.setdefault(line, []).append(j)
    best: tuple[int, int] | None = None
    for i, line in enumerate(a):
        if best is not None and i >= sum(best):
            break
        for j in where.get(line, ()):
            if best is not None and i + j >= sum(best):
                break
            run = _RUN
            if whole_a or whole_b:  # the last lines of a text are fewer
                run = min(_RUN, len(a) - i if whole_a else _RUN, len(b) - j if whole_b else _RUN)
            if a[i : i + run] == b[j : j + run]:
                best = (i, j)
                break
    return best
