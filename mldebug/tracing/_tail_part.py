"""Where the ranks of a job went different ways: all texts are compared with that of the largest party."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mldebug.tracing._tail_align import Split, align
from mldebug.tracing._tail_index import DIGEST, Index, bound

_MOST_CLASSES = 64
_FOLLOWED = 16  # classes that are followed to the end; of the others only the first split is looked for
_COUNTED = 12  # partings whose iteration is counted


@dataclass(frozen=True)
class Way:
    """The ranks that went on with the same line."""

    ranks: tuple[int, ...]
    line: str


@dataclass(frozen=True)
class Parting:
    """A line after which ranks went different ways; `iteration` says how often that line had run before."""

    place: str  # `train.py:14`
    line: str  # the last line that all have in common, or the one that called the function that line is in
    call: str  # the function that it is in, `train:5 main`
    iteration: int | None  # from 0; None: not counted, or the beginning of the files is gone
    ways: tuple[Way, ...]  # the smaller parties first
    times: int  # how often the same happened, with this one
    meets: bool  # they went on with the same lines later
    expected: bool  # the line asks for the rank, and not only this once


@dataclass
class Party:
    """Ranks whose texts are the same, as far as each goes. The first is the one that goes on longest."""

    ranks: list[int]

    @property
    def first(self) -> int:
        return self.ranks[0]


def parties(indexes: dict[int, Index]) -> tuple[list[Party], list[int]]:
    """The ranks by their text, the largest party first; and those that are left when there are too many parties."""
    found: list[Party] = []
    rest: list[int] = []
    for rank in sorted(indexes, key=lambda rank: (-indexes[rank].length, rank)):
        for party in found:
            if _same(indexes[party.first], indexes[rank]):
                party.ranks.append(rank)
                break
        else:
            if len(found) < _MOST_CLASSES:
                found.append(Party([rank]))
            else:
                rest.append(rank)
    return sorted(found, key=lambda party: (-len(party.ranks), min(party.ranks))), rest


def partings(
    indexes: dict[int, Index], found: list[Party], cut: bool, progress: Callable[[str], None]
) -> tuple[Parting, ...]:
    """Where the parties left the way of the first, in the order of the first one's text."""
    main = indexes[found[0].first]
    splits: list[tuple[Party, Split]] = []
    for number, party in enumerate(found[1:]):
        progress(f"comparing party {number + 2} of {len(found)}")
        other = indexes[party.first]
        start = bound(max(0, _common_chunks(main, other) - 1))
        most = None if number < _FOLLOWED else 1
        splits += [(party, split) for split in align(main.text(start), other.text(start), start, most).splits]
    splits.sort(key=lambda item: item[1].position)
    left_at = {party.first: split.position for party, split in splits if not split.meets}
    same: dict[tuple[bytes, bytes | int, bytes], list[tuple[Party, Split]]] = {}
    for party, split in splits:  # what happens again and again is one thing, whenever it was first
        again = split.times > 1
        key = (split.last, split.left, split.right) if again else (split.last, split.position, b"")
        same.setdefault(key, []).append((party, split))
    groups = list(same.values())
    order = sorted(range(len(groups)), key=lambda at: (_asks(groups[at][0][1].last), groups[at][0][1].position))
    wanted = order[:_COUNTED]
    progress("counting iterations")
    branches = {at: _branch(main, indexes, groups[at]) for at in wanted}
    marks = {at: (branch.line, groups[at][0][1].position) for at, branch in branches.items()}
    counts = count_before(main, list(dict.fromkeys(marks.values())))
    for at, branch in branches.items():
        branch.count = None if cut else counts[marks[at]]
    return tuple(
        _parting(group, indexes, found, left_at, branches.get(at) or _Branch(group[0][1].last))
        for at, group in enumerate(groups)
    )


@dataclass
class _Branch:
    """The line at which the ways part, the call it is in, how often it ran before."""

    line: bytes
    call: bytes = b""
    count: int | None = None


def _branch(main: Index, indexes: dict[int, Index], group: list[tuple[Party, Split]]) -> _Branch:
    """The line that decided. If the last line was of a function that returned since, it is the line that called it."""
    party, split = group[0]
    left = main.around(split.position)
    right = indexes[party.first].around(split.right_position)
    if left.inside in (left.following, right.following):
        return _Branch(split.last, left.inside)
    call = max(left.following, right.following, key=lambda call: left.before.get(call, (-1, b""))[0])
    return _Branch(left.before.get(call, (0, split.last))[1], call)


def count_before(index: Index, marks: list[tuple[bytes, int]]) -> dict[tuple[bytes, int], int]:
    """For each line and a position behind it: how often it ran before the last time."""
    counts = dict.fromkeys(marks, 0)
    end = max((position for _, position in marks), default=0)
    at = 0
    for block in index.text():
        if at >= end:
            break
        data = b"\n" + block
        for mark in marks:
            line, position = mark
            if position > at:
                counts[mark] += data[: position - at].count(b"\n" + line)  # without the newline that ends the last
        at += len(block)
    return {mark: max(0, count - 1) for mark, count in counts.items()}


def place_of(line: bytes) -> str:
    """`train.py:14` of a line, `train:5 main` of a call."""
    match = _PLACE.match(line)
    if match:
        return f"{show(match[1])}:{int(match[2])}"
    return show(line.strip()[:100]) or "the first line"


def source_of(line: bytes) -> str:
    """The source text of a line, or the call."""
    match = _PLACE.match(line)
    return show((line[match.end() :] if match else line).strip()[:300])


def show(text: bytes) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text.decode("utf-8", "replace"))


_PLACE = re.compile(rb"([^\n]{1,400}?): {0,8}(\d{1,9}): ?")
_RANK = re.compile(rb"rank|is_(main|master|global|world|leader|first)|main_process|coordinator", re.IGNORECASE)


def _same(long: Index, short: Index) -> bool:
    """Whether the shorter text is the beginning of the longer one."""
    if not long.digests.startswith(short.digests):
        return False
    if long.length == short.length:
        return long.tail == short.tail
    start = bound(short.chunks)
    a, b = long.text(start), short.text(start)
    left = right = b""
    for right in b:
        while len(left) < len(right):
            block = next(a, None)
            if block is None:
                return False
            left += block
        if left[: len(right)] != right:
            return False
        left = left[len(right) :]
    return True


def _common_chunks(a: Index, b: Index) -> int:
    """The number of whole chunks at the beginning that are equal."""
    low, high = 0, min(a.chunks, b.chunks)
    while low < high:
        middle = (low + high + 1) // 2
        if a.digests[: middle * DIGEST] == b.digests[: middle * DIGEST]:
            low = middle
        else:
            high = middle - 1
    return low


def _asks(line: bytes) -> bool:
    return bool(_RANK.search(line))


def _parting(
    group: list[tuple[Party, Split]],
    indexes: dict[int, Index],
    found: list[Party],
    left_at: dict[int, int],
    branch: _Branch,
) -> Parting:
    first = group[0][1]
    ways: dict[bytes, list[int]] = {first.left: []}
    here = {party.first for party, _ in group}
    for party, split in group:
        ways.setdefault(split.right, []).extend(party.ranks)
    for party in found:  # who did not part here, came by and was not on another way already
        if party.first not in here and left_at.get(party.first, first.position + 1) > first.position:
            ways[first.left] += [rank for rank in party.ranks if indexes[rank].length > first.position]
    times = max(split.times for _, split in group)
    asks = _asks(branch.line) or _asks(first.last)
    return Parting(
        place_of(branch.line),
        source_of(branch.line),
        show(branch.call),
        branch.count,
        tuple(
            Way(tuple(sorted(ranks)), show(line))
            for line, ranks in sorted(ways.items(), key=lambda item: (len(item[1]), item[1]))
            if ranks
        ),
        times,
        all(split.meets for _, split in group),
        asks and not (times == 1 and branch.count),  # all went one way there before, and then once not
    )
