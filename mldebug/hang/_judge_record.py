"""The record of collectives: the first call in which the ranks differ, and what the stacks' verdict gains by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mldebug.hang._frames import Wait
from mldebug.hang._judge_case import Case, name_ranks, sentence
from mldebug.hang._judge_parted import Party, compare
from mldebug.hang._source import is_library
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Call
    from mldebug.hang._judge_views import View

# Verdicts about order, which a record knows better than a stack.
_ORDERS = (
    "rank-guarded-collective", "skipped-collective", "extra-collective", "fewer-iterations", "more-iterations",
    "iteration-skew", "rank-local-decision", "cross-group-order", "network", "unknown",
)  # fmt: skip

What = tuple[str, tuple[str, ...]]  # of a call: the operation, and the program's lines, innermost first


@dataclass(frozen=True)
class Parting:
    """Where the records part: in `group`, call number `seq`, ranks `odd` issued `theirs`, the others `usual`."""

    group: str
    seq: int
    odd: tuple[int, ...]
    theirs: str
    usual: str
    kind: str
    whole: bool  # the records reach back to the start
    calls: dict[int, Call]  # the call number `seq` of each rank


def settle(case: Case, verdict: Verdict) -> Verdict:
    """A verdict from stacks, with what the records say: confirmed, or corrected where it was only likely."""
    if not verdict.hung or (verdict.sure == "high" and verdict.rests_on[:1] == ("process state",)):
        return verdict
    found = parting(case)
    if found is None:
        return _stalled(case) or verdict if verdict.kind in _ORDERS else verdict
    since = "" if found.whole else " (the record does not reach back to the start)"
    text = (
        f"in the record, call {found.seq} of group {found.group or 'default'} is {found.theirs} on "
        f"{name_ranks(found.odd)} and {found.usual} on the others{since}"
    )
    rests = ("record of collectives", *verdict.rests_on)
    if verdict.kind == "two-threads-one-group" and not verdict.culprits:
        odd = found.odd if 2 * len(found.odd) < len(found.calls) else ()  # half of them is no exception
        return replace(verdict, culprits=odd, text=f"{verdict.text} {sentence(text)}", rests_on=rests)
    if verdict.kind not in _ORDERS:
        same = tuple(sorted(verdict.culprits)) == found.odd
        sure = "high" if same else verdict.sure
        return replace(verdict, text=f"{verdict.text} {sentence(text)}", sure=sure, rests_on=rests)
    second = _compare(case, found)
    if second.kind == "unknown":
        second = replace(second, kind=found.kind, culprits=found.odd, text="", sure="low")
    if set(verdict.culprits) == set(second.culprits) and verdict.kind != "unknown":
        kind = second.kind if second.sure == "high" and verdict.sure != "high" else verdict.kind
        return replace(verdict, kind=kind, text=f"{verdict.text} {sentence(text)}", sure="high", rests_on=rests)
    if verdict.sure == "high" and not found.whole:
        return replace(verdict, text=f"{verdict.text} {sentence(text)}", rests_on=rests)
    sure = "high" if second.sure == "high" and found.whole else "medium"
    return replace(second, text=f"{sentence(text)} {second.text}".strip(), sure=sure, rests_on=rests)


def _stalled(case: Case) -> Verdict | None:
    """Nobody is late: a call that every rank issued, and that does not end. Who is further ran ahead, as a root may."""
    records = {view.number: view.rank["record"] for view in case.views if "record" in view.rank}
    if len(records) < max(2, case.world) or not all(record["whole"] for record in records.values()):
        return None
    calls = {number: [call for call in record["calls"] if not call.get("p2p")] for number, record in records.items()}
    groups = {call["group"] for row in calls.values() for call in row if not call["done"]}
    if len(groups) != 1:
        return None
    group = groups.pop()
    late = {number: [c["seq"] for c in row if c["group"] == group and not c["done"]] for number, row in calls.items()}
    first = min(seq for row in late.values() for seq in row)
    issued = [number for number, row in calls.items() if any((c["group"], c["seq"]) == (group, first) for c in row)]
    stuck = tuple(sorted(number for number, row in late.items() if first in row))
    if len(issued) != len(records):
        return None
    call = next(c for c in calls[stuck[0]] if (c["group"], c["seq"]) == (group, first))
    text = (
        f"{_say(_what(call))}, call {first} of group {group or 'default'}, was issued by all {len(issued)} ranks and "
        f"does not end on {name_ranks(stuck)}: no rank is late, so the network."
    )
    return Verdict(True, "network", (), text, "medium", ("record of collectives", "two samples"))


def parting(case: Case) -> Parting | None:
    """The earliest call, over all groups, in which the operations or the call sites part for good."""
    found = []
    records = {view.number: calls for view in case.views if (calls := _calls(view.rank.get("record")))}
    whole = all(view.rank["record"].get("whole", False) for view in case.views if view.number in records)
    names = {call["group"] for calls in records.values() for call in calls}
    for name in sorted(names):
        rows = {
            number: {call["seq"]: call for call in calls if call["group"] == name and not call.get("p2p")}
            for number, calls in records.items()
        }
        rows = {number: row for number, row in rows.items() if row}
        if len(rows) > 1 and (one := _part(name, rows, whole)) is not None:
            found.append(one)
    return min(found, key=lambda one: _position(one, records)) if found else None


def _position(one: Parting, records: dict[int, Sequence[Call]]) -> float:
    """How far into their records the ranks are at a parting: sequence numbers of two groups do not compare."""
    places = [
        index
        for number, call in one.calls.items()
        for index, other in enumerate(records[number])
        if other is call
    ]  # fmt: skip
    return sum(places) / len(places) if places else 0.0


def _part(name: str, calls: dict[int, dict[int, Call]], whole: bool) -> Parting | None:
    rows = {number: {seq: _what(call) for seq, call in row.items()} for number, row in calls.items()}
    first = max(min(row) for row in rows.values())
    last = min(max(row) for row in rows.values())
    own = _recurring(rows, first, last)
    for seq in range(first, last + 1):
        here = {number: row[seq] for number, row in rows.items() if seq in row}
        if len({_key(call, own) for call in here.values()}) < 2:
            continue
        seq = _shifted(rows, first, seq)
        here = {number: row[seq] for number, row in rows.items() if seq in row}
        usual = Counter(here.values()).most_common(1)[0][0]
        odd = tuple(sorted(number for number, call in here.items() if _key(call, own) != _key(usual, own)))
        if not odd:
            odd = tuple(sorted(number for number, call in here.items() if call != usual))
        if not odd or len(odd) == len(here):
            continue
        kind = _kind(rows[odd[0]], rows[next(number for number in here if number not in odd)], seq)
        there = {number: row[seq] for number, row in calls.items() if seq in row}
        return Parting(name, seq, odd, _say(here[odd[0]]), _say(usual), kind, whole, there)
    return None


def _shifted(rows: dict[int, dict[int, What]], first: int, end: int) -> int:
    """Where ranks that differ at `end` began to be one call ahead or behind: at a call site seen once, before it.

    A call that is made twice, or left out, pairs with the same call of the next iteration and seems to fit.
    """
    pairings = Counter(frozenset(row[seq] for row in rows.values() if seq in row) for seq in range(first, end))
    for seq in range(first, end):
        here = {number: row[seq] for number, row in rows.items() if seq in row}
        if len(set(here.values())) != 2 or pairings[frozenset(here.values())] > 1:
            continue
        usual = Counter(here.values()).most_common(1)[0][0]
        odd = [rows[number] for number, call in here.items() if call != usual]
        rest = [rows[number] for number, call in here.items() if call == usual]
        span = range(seq, end)
        extra = all(row.get(at + 1) == rest[0].get(at) for row in odd for at in span)
        skipped = all(row.get(at) == rest[0].get(at + 1) for row in odd for at in span)
        if extra or skipped:
            return seq
    return end


def _compare(case: Case, found: Parting) -> Verdict:
    """What the text says about the two calls at which the records part."""
    parties = []
    for odd in (True, False):
        views = [
            replace(view, waits=(_wait(view, found.calls[view.number]),))
            for view in case.views
            if view.number in found.calls and (view.number in found.odd) is odd
        ]
        parties.append(Party(tuple(views)))
    few, many = sorted(parties, key=lambda party: len(party.views))
    return compare(case.evidence, few, many)


def _wait(view: View, call: Call) -> Wait:
    """The call as if the rank stood there; if it does, with all that its stack tells."""
    users = [frame for frame in call.get("frames", []) if not is_library(frame["file"])]
    path = tuple((frame["file"], frame["name"].rpartition(".")[2], frame["line"]) for frame in reversed(users))
    now = view.wait
    if path and now.communicates and now.path[-len(path) :] == path:
        return now
    if path and path[0][1] != "<module>":  # cut short: the rest is as it is now
        at = next((index for index, spot in enumerate(now.path) if spot[:2] == path[0][:2]), None)
        path = (*now.path[:at], *path) if at is not None else path
    return Wait("call", call["op"], site=users[0] if users else None, path=path)


def _recurring(rows: dict[int, dict[int, What]], first: int, last: int) -> set[frozenset[What]]:
    """Pairings of call sites that are the program's own: there from the start, or followed by agreement."""
    seen: set[frozenset[What]] = set()
    waiting: list[frozenset[What]] = []
    for seq in range(first, last + 1):
        calls = frozenset(row[seq] for row in rows.values() if seq in row)
        if len({op for op, _ in calls}) > 1:
            break
        if len(calls) > 1:
            (seen.add if seq == first else waiting.append)(calls)
        else:
            seen.update(waiting)
            waiting = []
    return seen


def _key(call: What, own: set[frozenset[What]]) -> What:
    """What has to be equal: the operation and the site, where sites that the program pairs count as one."""
    for pairing in own:
        if call in pairing:
            return min(pairing)
    return call


def _kind(odd: dict[int, What], usual: dict[int, What], seq: int) -> str:
    """Skipped where the odd one's call is what the others do next, extra where it is the other way round."""
    later = [usual.get(seq + step) for step in (1, 2, 3)]
    if odd[seq] in later or usual.get(seq + 1) is None:
        return "skipped-collective"
    return "extra-collective" if usual[seq] == odd.get(seq + 1) else "skipped-collective"


def _calls(record: object) -> Sequence[Call]:
    return record.get("calls", []) if isinstance(record, dict) else []


def _what(call: Call) -> What:
    users = [frame for frame in call.get("frames", []) if not is_library(frame["file"])]
    return call["op"], tuple(f"{frame['file'].rpartition('/')[2]}:{frame['line']}" for frame in users)


def _say(call: What) -> str:
    return f"{call[0]} at {call[1][0]}" if call[1] else call[0]
