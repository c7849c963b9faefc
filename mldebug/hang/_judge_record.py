"""The record of collectives: the first call in which the ranks differ, and what the stacks' verdict gains by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mldebug.hang._judge_case import Case, name_ranks, sentence
from mldebug.hang._judge_nccl import counts
from mldebug.hang._source import is_library
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Call

_ORDERS = ("skipped-collective", "extra-collective", "iteration-skew", "cross-group-order", "network", "unknown")


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


def settle(case: Case, verdict: Verdict) -> Verdict:
    """A verdict from stacks, with what the records say: confirmed, or corrected where it was only likely."""
    if not verdict.hung or (verdict.sure == "high" and verdict.rests_on[:1] == ("process state",)):
        return verdict
    found = parting(case)
    if found is None:
        return _with_counts(case, verdict)
    since = "" if found.whole else " (the record does not reach back to the start)"
    who, rest = (name_ranks(found.odd), "the others") if found.odd else ("some ranks", "as many others")
    text = (
        f"in the record, call {found.seq} of group {found.group or 'default'} is {found.theirs} on {who} and "
        f"{found.usual} on {rest}{since}"
    )
    rests = ("record of collectives", *verdict.rests_on)
    if not found.odd:  # as many ranks on one side as on the other
        return replace(verdict, text=f"{verdict.text} {sentence(text)}", rests_on=rests)
    if tuple(sorted(verdict.culprits)) == found.odd:
        return replace(verdict, text=f"{verdict.text} {sentence(text)}", sure="high", rests_on=rests)
    if verdict.kind == "two-threads-one-group" and not verdict.culprits:
        return replace(verdict, culprits=found.odd, text=f"{verdict.text} {sentence(text)}", rests_on=rests)
    if verdict.sure == "high" or verdict.kind not in _ORDERS:
        return replace(verdict, text=f"{verdict.text} {sentence(text)}", rests_on=rests)
    return Verdict(True, found.kind, found.odd, sentence(text), "medium", rests)


def _with_counts(case: Case, verdict: Verdict) -> Verdict:
    """A verdict from stacks with what NCCL counts, where no record of the calls themselves tells more."""
    found = counts(case)
    if found is None:
        return verdict
    odd, kind, text = found
    rests = ("counts of NCCL", *verdict.rests_on)
    text = f"{verdict.text} {sentence(text)}"
    if tuple(sorted(verdict.culprits)) == odd:
        kind = kind if verdict.kind in ("unknown", "iteration-skew") else verdict.kind
        return replace(verdict, kind=kind, text=text, sure="high", rests_on=rests)
    if verdict.sure == "high" or verdict.kind not in _ORDERS:
        return replace(verdict, text=text, rests_on=rests)
    return Verdict(True, kind, odd, text, "medium", rests)


def parting(case: Case) -> Parting | None:
    """The earliest call, over all groups, in which the operations or the call sites part for good."""
    found = []
    names = {call["group"] for view in case.views for call in _calls(view.rank.get("record"))}
    for name in sorted(names):
        rows = {
            view.number: {call["seq"]: _what(call) for call in calls if call["group"] == name and not call.get("p2p")}
            for view in case.views
            if (calls := _calls(view.rank.get("record")))
        }
        rows = {number: row for number, row in rows.items() if row}
        whole = all(view.rank.get("record", {}).get("whole", False) for view in case.views if view.number in rows)
        if len(rows) > 1 and (one := _part(name, rows, whole)) is not None:
            found.append(one)
    return min(found, key=lambda one: one.seq) if found else None


def _part(name: str, rows: dict[int, dict[int, tuple[str, str]]], whole: bool) -> Parting | None:
    first = max(min(row) for row in rows.values())
    last = min(max(row) for row in rows.values())
    own = _recurring(rows, first, last)
    for seq in range(first, last + 1):
        calls = {number: row[seq] for number, row in rows.items() if seq in row}
        if len({_key(call, own) for call in calls.values()}) < 2:
            continue
        usual = Counter(calls.values()).most_common(1)[0][0]
        odd = tuple(sorted(number for number, call in calls.items() if _key(call, own) != _key(usual, own)))
        if not odd or len(odd) == len(calls):
            continue
        if 2 * len(odd) == len(calls):
            theirs = _say(calls[odd[0]])
            return Parting(name, seq, (), theirs, _say(usual), "unknown", whole)
        kind = _kind(rows[odd[0]], rows[next(number for number in calls if number not in odd)], seq)
        return Parting(name, seq, odd, _say(calls[odd[0]]), _say(usual), kind, whole)
    return None


def _recurring(rows: dict[int, dict[int, tuple[str, str]]], first: int, last: int) -> set[frozenset[tuple[str, str]]]:
    """Pairings of call sites that are the program's own: there from the start, or followed by agreement."""
    seen: set[frozenset[tuple[str, str]]] = set()
    waiting: list[frozenset[tuple[str, str]]] = []
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


def _key(call: tuple[str, str], own: set[frozenset[tuple[str, str]]]) -> tuple[str, str]:
    """What has to be equal: the operation and the site, where sites that the program pairs count as one."""
    for pairing in own:
        if call in pairing:
            return min(pairing)
    return call


def _kind(odd: dict[int, tuple[str, str]], usual: dict[int, tuple[str, str]], seq: int) -> str:
    """Skipped where the odd one's call is what the others do next, extra where it is the other way round."""
    later = [usual.get(seq + step) for step in (1, 2, 3)]
    if odd[seq] in later or usual.get(seq + 1) is None:
        return "skipped-collective"
    return "extra-collective" if usual[seq] == odd.get(seq + 1) else "skipped-collective"


def _calls(record: object) -> Sequence[Call]:
    return record.get("calls", []) if isinstance(record, dict) else []


def _what(call: Call) -> tuple[str, str]:
    site = next((frame for frame in call.get("frames", []) if not is_library(frame["file"])), None)
    return call["op"], f"{site['file'].rpartition('/')[2]}:{site['line']}" if site else ""


def _say(call: tuple[str, str]) -> str:
    return f"{call[0]} at {call[1]}" if call[1] else call[0]
