"""NCCL's own counts of the operations that each rank issued: they tell where the ranks part with no code in the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mldebug.hang._judge_case import Case, crowd, name_ranks, sentence
from mldebug.hang._verdict import Verdict

# What the stacks alone often cannot tell from one another.
_LIKELY = ("skipped-collective", "extra-collective", "iteration-skew", "cross-group-order", "network", "unknown")


def settle(case: Case, verdict: Verdict) -> Verdict:
    """A verdict from stacks with what NCCL counts: confirmed, or corrected where it was only likely."""
    found = counts(case) if verdict.hung and verdict.kind != "process-stopped" else None
    if found is None:
        return verdict
    odd, kind, text = found
    rests = ("counts of NCCL", *verdict.rests_on)
    both = f"{verdict.text} {sentence(text)}"
    if tuple(sorted(verdict.culprits)) == odd:
        kind = kind if verdict.kind in _LIKELY else verdict.kind
        return replace(verdict, kind=kind, text=both, sure="high", rests_on=rests)
    if verdict.sure == "high" or verdict.kind not in _LIKELY:
        return replace(verdict, text=both, rests_on=rests)
    return Verdict(True, kind, odd, f"{sentence(text)} {sentence(crowd(case.seen))}", "medium", rests)


def counts(case: Case) -> tuple[tuple[int, ...], str, str] | None:
    """Where NCCL's counts of operations part: the ranks that differ, the kind, and a sentence about it.

    None where they are equal or where no rank stands apart. A rank that left a communicator in which others wait has
    ended its part: the others issued more than it ever will.
    """
    tables: dict[str, dict[int, tuple[tuple[str, int], ...]]] = {}
    left: dict[str, list[int]] = {}
    for view in case.views:
        for group in view.rank.get("nccl", []):
            issued = group.get("issued", [])
            if issued:
                tables.setdefault(group["name"], {})[view.number] = tuple(sorted(issued[-1].items()))
            elif group["status"] == "left":
                left.setdefault(group["name"], []).append(view.number)
    waiting = {view.number for view in case.waiting}
    answers = []
    for name, table in tables.items():
        away = [number for number in left.get(name, []) if number not in table]
        if away and waiting & set(table):
            verbs = ("has" if len(away) == 1 else "have"), ("waits" if len(table) == 1 else "wait")
            text = f"NCCL: {name_ranks(away)} {verbs[0]} left a communicator in which {name_ranks(table)} {verbs[1]}"
            return tuple(sorted(away)), "skipped-collective", text
        found = _apart(case, table)
        if found is not None:
            elsewhere = [other for key, other in tables.items() if key != name]
            answers.append((all(_ahead(number, elsewhere) for number in found[0]), len(found[0]), found))
    return min(answers)[2] if answers else None


def _ahead(number: int, tables: Sequence[dict[int, tuple[tuple[str, int], ...]]]) -> bool:
    """Whether a rank waits for others in some communicator, having issued more there: it is a victim then."""
    totals = [{rank: sum(count for _, count in row) for rank, row in table.items()} for table in tables]
    return any(number in total and total[number] > min(total.values()) for total in totals)


def _apart(case: Case, table: dict[int, tuple[tuple[str, int], ...]]) -> tuple[tuple[int, ...], str, str] | None:
    rows = Counter(table.values()).most_common()
    if len(rows) < 2:
        return None
    usual = dict(rows[0][0])
    if rows[0][1] == rows[1][1]:  # as many on one side as on the other: those wait who issued more
        ahead = [dict(row) for row, _ in rows if all(_covers(dict(row), dict(other)) for other, _ in rows)]
        if not ahead:
            return None
        usual = ahead[0]
    odd = tuple(sorted(number for number, row in table.items() if dict(row) != usual))
    theirs = dict(table[odd[0]])
    names = sorted(name for name in {*usual, *theirs} if usual.get(name, 0) != theirs.get(name, 0))
    fewer = any(theirs.get(name, 0) < usual.get(name, 0) for name in names)
    further, uneven = _further(case, odd, table), len(names) < len({*usual, *theirs})
    # Ahead by a step in one operation and not in another: that other was left out.
    skew = "skipped-collective" if uneven else "iteration-skew"
    kind = "skipped-collective" if fewer else skew if further else "extra-collective"
    said = ", ".join(f"{theirs.get(name, 0)} {name} against {usual.get(name, 0)}" for name in names)
    text = f"NCCL counts for {name_ranks(odd)}: {said} of the other ranks of that communicator"
    return odd, kind, text


def _covers(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one.get(name, 0) >= count for name, count in other.items())


def _further(case: Case, odd: Sequence[int], table: dict[int, tuple[tuple[str, int], ...]]) -> bool:
    """Whether a rank's integers (`step`) are ahead of the others', at a place where both stand."""
    views = {view.number: view for view in case.views}
    first = {(function, name): value for function, name, value in views[odd[0]].wait.ints}
    for number in table:
        if number not in odd:
            for function, name, value in views[number].wait.ints:
                if "rank" not in name and first.get((function, name), value) > value:
                    return True
    return False
