"""compare(): two parties of ranks that wait in different places, and what the text says about the parting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mldebug.hang._frames import COLLECTIVES, way
from mldebug.hang._judge_case import cap, crowd, doing, name_ranks, place, sentence, verb
from mldebug.hang._judge_text import (
    asks_rank,
    counts_only,
    holds,
    is_condition,
    is_loop,
    is_main_guard,
    parts_ranks,
    picks_few,
    same_count,
    sends_away,
    spoken,
)
from mldebug.hang._judge_views import frame_source
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence, Step
    from mldebug.hang._frames import Wait
    from mldebug.hang._judge_views import View

Spot = tuple[str, str, int]


@dataclass(frozen=True)
class Party:
    """Ranks that wait at the same place."""

    views: tuple[View, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(view.number for view in self.views)

    @property
    def wait(self) -> Wait:
        return self.views[0].wait

    @property
    def spans(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Smallest and largest value of the integers that all ranks of the party have, but for the rank itself."""
        tables = [{(function, name): value for function, name, value in view.wait.ints} for view in self.views]
        shared = set.intersection(*(set(table) for table in tables))
        return {
            key: (min(values), max(values))
            for key in shared
            if "rank" not in key[1] and (values := [table[key] for table in tables])
        }


def compare(evidence: Evidence, few: Party, many: Party) -> Verdict:
    """Why two parties stand in different places, `few` being not larger than `many`."""
    side, other = Side(evidence, few, many), Side(evidence, many, few)
    for rule in (_swapped, _guarded, left_loop, _passed_by, _picked):
        verdict = rule(evidence, side, other)
        if verdict is not None:
            return verdict
    text = f"{crowd(list(few.views))}; {crowd(list(many.views))}."
    return Verdict(True, "unknown", few.numbers, cap(text), "low", ("stacks",))


class Side:
    """A party, seen from where its stack parts from that of the other."""

    def __init__(self, evidence: Evidence, party: Party, other: Party) -> None:
        self.party = party
        mine, theirs = way(party.wait), way(other.wait)
        at = 0
        while at < min(len(mine), len(theirs)) and mine[at] == theirs[at]:
            at += 1
        self.path: Sequence[Spot] = mine[at:]  # from the function where they part, inwards
        self.shared: Sequence[Spot] = mine[:at]
        together = bool(self.path) and at < len(theirs) and mine[at][:2] == theirs[at][:2]
        here = guards_at(evidence, self.path[0]) if self.path else []
        there = guards_at(evidence, theirs[at]) if together else []
        common = 0
        while common < min(len(here), len(there)) and here[common] == there[common]:
            common += 1
        self.line = self.path[0][2] if together else 0
        self.around = here[:common]  # what both stand in
        self.head = here[common:]  # guards of this side alone, in the function where they part
        self.tail = [guard for spot in self.path[1:] for guard in guards_at(evidence, spot)]

    @property
    def guards(self) -> list[str]:
        return [*self.head, *self.tail]

    @property
    def loops(self) -> list[str]:
        return [guard for guard in self.guards if is_loop(guard)]

    @property
    def conditions(self) -> list[str]:
        return [guard for guard in self.guards if is_condition(guard)]

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.party.numbers


def _swapped(evidence: Evidence, few: Side, many: Side) -> Verdict | None:
    """Collectives of two groups in another order: in two branches with the same calls, or passed each other."""
    one, two = few.party.wait, many.party.wait
    if one.group == two.group or not few.path or not many.path:
        return None
    steps = _steps(evidence, few.path[0])
    branch = next((guard for guard in [*few.head, *many.head] if is_condition(guard)), "")
    drift = _drift(evidence, few, many)
    if branch and _counts(steps, branch) != _counts(steps, _opposite(branch)):
        return None
    if not branch and (drift or not _both_ways(evidence, few, many)):
        return None
    text = f"two groups are used in another order: {crowd(list(few.party.views))}; {crowd(list(many.party.views))}."
    by_rank = asks_rank(branch)
    rests = ("stacks", "program text") if branch else ("stacks",)
    return Verdict(True, "cross-group-order", few.numbers, cap(text), "high" if by_rank else "medium", rests)


def _both_ways(evidence: Evidence, few: Side, many: Side) -> bool:
    """Whether no text is known, so that two groups with the same operation are all there is to go by."""
    known = frame_source(evidence, few.path[0]) or frame_source(evidence, many.path[0])
    return known is None and few.party.wait.op == many.party.wait.op


def _guarded(evidence: Evidence, few: Side, many: Side) -> Verdict | None:
    """A collective under a condition on the rank."""
    for side, rest in ((few, many), (many, few)):
        guard = next((guard for guard in side.guards if parts_ranks(guard, side.numbers, rest.numbers)), None)
        if guard is None:
            continue
        main, named = is_main_guard(guard), picks_few(guard)
        culprit = few
        if len(few.numbers) == len(many.numbers):  # the guard says which ranks it means
            culprit = side if named else rest
        if main:
            kind = "rank-guarded-collective"
        elif culprit is not side:
            kind = "skipped-collective"
        else:
            kind = "rank-guarded-collective" if len(side.numbers) > 1 else "extra-collective"
        text = (
            f"{name_ranks(side.numbers)} {_plural(doing(side.party.wait), side)} under {spoken(guard)}, which "
            f"{name_ranks(rest.numbers)} cannot pass; {crowd(list(rest.party.views))}."
        )
        return Verdict(True, kind, culprit.numbers, cap(text), "high", ("program text", "stacks"))
    return None


def left_loop(evidence: Evidence, few: Side, many: Side) -> Verdict | None:
    """One party has left a loop in which the other still is."""
    for inside, left in ((few, many), (many, few)):
        if not inside.loops or left.loops:
            continue
        if inside.line and left.line and inside.line > left.line:
            continue  # that loop comes later: the other has not begun it
        culprit = inside if len(inside.numbers) < len(left.numbers) else left
        around = _own_collective(evidence, inside)
        counted = all(map(same_count, [guard for guard in inside.head if is_loop(guard)] or inside.loops))
        own = (around or _tries_again(evidence, inside)) if counted else ""
        way_out = _local_way_out(evidence, inside)
        if way_out:
            kind, why = "rank-local-decision", f"the way out is {spoken(way_out)}, which each rank decides for itself"
        elif own:
            kind = "extra-collective" if culprit is inside else "skipped-collective"
            why = f"all ranks count the same iterations, but {spoken(own)} adds or leaves out a call"
        else:
            kind = "more-iterations" if culprit is inside else "fewer-iterations"
            why = "its number of iterations differs"
        sure = "medium" if around and not way_out and not counted else "high"  # a skipped call looks like that too
        sure = "low" if len(inside.numbers) == len(left.numbers) else sure
        text = (
            f"{verb(left.numbers, f'has left the loop `{inside.loops[0]}`')} and "
            f"{_plural(doing(left.party.wait), left)}; {verb(inside.numbers, 'is still in it')} and "
            f"{_plural(doing(inside.party.wait), inside)}: {why}."
        )
        return Verdict(True, kind, culprit.numbers, cap(text), sure, ("stacks", "program text"))
    return None


def _local_way_out(evidence: Evidence, side: Side) -> str:
    """The condition of a rank's own on which it leaves the loop; "" where only the data ends it."""
    loop = side.loops[0]  # the outermost: that is what the others have left
    if loop.startswith("while ") and not counts_only(loop) and loop not in ("while True", "while 1"):
        return loop
    for spot in side.path:
        for step in _steps(evidence, spot):
            if step["what"] not in ("break", "return") or loop not in step["guards"]:
                continue
            inner = step["guards"][step["guards"].index(loop) + 1 :]
            if step["what"] == "break" and any(is_loop(guard) for guard in inner):
                continue  # leaves a loop inside that one
            conditions = [guard for guard in inner if guard.startswith(("if ", "else "))]
            own = [guard for guard in conditions if not counts_only(guard) or asks_rank(guard)]
            if own:
                return own[-1]
    return ""


def _tries_again(evidence: Evidence, side: Side) -> str:
    """A condition of a rank's own on which it leaves a loop inside of the one that the others have left."""
    for spot in side.path:
        for step in _steps(evidence, spot):
            loops = [index for index, guard in enumerate(step["guards"]) if is_loop(guard)]
            if step["what"] == "break" and loops and step["guards"][loops[-1]] in side.loops[1:]:
                inner = [guard for guard in step["guards"][loops[-1] + 1 :] if is_condition(guard)]
                if inner and not counts_only(inner[-1]):
                    return inner[-1]
    return ""


def _own_collective(evidence: Evidence, side: Side) -> str:
    """A condition of a rank's own in the loop under which it calls a collective, or passes one by."""
    loop = side.loops[0]
    below = False  # in a function that is called from the loop
    for spot in side.path:
        here = loop in guards_at(evidence, spot)
        for step in _steps(evidence, spot):
            jumps = step["what"] in ("continue", "return")
            calls = step["what"].startswith("call ")
            direct = calls and re.split(r"[. ]", step["what"])[-1] in COLLECTIVES
            if (below or loop in step["guards"]) and (jumps or calls):
                inner = step["guards"] if below else step["guards"][step["guards"].index(loop) + 1 :]
                own = [guard for guard in inner if is_condition(guard) and (asks_rank(guard) or not counts_only(guard))]
                picked = bool(own) and asks_rank(own[-1]) and not is_main_guard(own[-1])
                if own and (jumps or direct or picked):
                    return own[-1]
        below = below or here
    return ""


def _passed_by(evidence: Evidence, few: Side, many: Side) -> Verdict | None:
    """In the same loops, one party is further: it passed the other's collective by, or the other's is one too many."""
    drift = _drift(evidence, few, many)
    order = drift or (few.line > many.line) - (few.line < many.line)
    if not order:
        return None
    behind, ahead = (many, few) if order > 0 else (few, many)
    ways = _skips(evidence, behind)
    conditional = bool(behind.conditions)
    if behind is few and conditional:
        culprit, kind = few, "extra-collective"
    elif ahead is few or ways or conditional:
        culprit, kind = ahead, "skipped-collective"
    else:
        culprit, kind = behind, "extra-collective"
    numbers = singled_out(evidence, culprit.party.wait.path, culprit.numbers, (*few.numbers, *many.numbers))
    if kind == "skipped-collective":
        how = f" ({'an exception' if ways == 'try' else spoken(ways)} leads around it)" if ways else ""
        text = f"{name_ranks(numbers)} never entered {_call(behind)}{how}; {crowd(list(ahead.party.views))}. "
        text += sentence(crowd(list(behind.party.views)))
    else:
        under = f" under {spoken(behind.conditions[-1])}" if behind.conditions else ""
        text = (
            f"{name_ranks(culprit.numbers)} {_plural(doing(behind.party.wait), behind)}{under}, a call that the others "
        )
        text += f"did not make. {sentence(crowd(list(ahead.party.views)))}"
    founded = ways or conditional or drift
    known = any(frame_source(evidence, spot) for side in (few, many) for spot in side.path)
    if known and not founded and numbers == culprit.numbers:
        return None  # nothing in the text leads around a call: who is further may have ended it earlier, no more
    equal = len(few.numbers) == len(many.numbers) and numbers == culprit.numbers
    sure = "low" if equal else "high" if founded else "medium"
    return Verdict(True, kind, numbers, cap(text), sure, ("stacks", "program text"))


def singled_out(
    evidence: Evidence, path: Sequence[Spot], numbers: tuple[int, ...], everyone: tuple[int, ...]
) -> tuple[int, ...]:
    """Those of `numbers` that a condition in the functions of a path picks from everyone, where there is one such."""
    for spot in reversed(path):
        for guard in dict.fromkeys(guard for step in _steps(evidence, spot) for guard in step["guards"]):
            picked = tuple(number for number in everyone if holds(guard, number) is not False)
            if not guard.startswith("if ") or not asks_rank(guard) or is_main_guard(guard):
                continue  # what rank 0 alone does is printing, as a rule
            if picked and set(picked) < set(numbers):
                return picked
    return numbers


def _picked(evidence: Evidence, few: Side, many: Side) -> Verdict | None:
    """Ranks that part inside one line: a call elsewhere in these functions that only the few make explains it."""
    for spot in reversed([*few.shared, *few.path[:1]]):
        for step in _steps(evidence, spot):
            guard = next((guard for guard in step["guards"] if parts_ranks(guard, few.numbers, many.numbers)), None)
            if guard is None or not step["what"].startswith("call ") or _HARMLESS.search(step["what"]):
                continue
            text = (
                f"{crowd(list(few.party.views))}; {crowd(list(many.party.views))}. Only {name_ranks(few.numbers)} "
                f"reaches `{step['what'][5:]}` at line {step['line']}, under {spoken(guard)}: if that calls a "
                "collective, the ranks are out of step since then."
            )
            kind = "rank-guarded-collective" if is_main_guard(guard) else "extra-collective"
            return Verdict(True, kind, few.numbers, cap(text), "medium", ("program text", "stacks"))
    return None


# Calls that rank 0 makes alone, as a rule, and that are no collectives.
_HARMLESS = re.compile(r"print|log|info|debug|warn|save|write|format|makedirs|mkdir|len|range|get_rank|sleep|time|path")


def _skips(evidence: Evidence, side: Side) -> str:
    """A condition before the call of a party, in its own functions, that leads around the call."""
    for index, spot in enumerate(side.path):
        for step in _steps(evidence, spot):
            jump = step["what"] in ("return", "continue", "break") and step["line"] <= spot[2]
            conditions = [guard for guard in step["guards"] if is_condition(guard)]
            if jump and conditions and (index or side.around or step["what"] != "return"):
                return conditions[-1]
    return "try" if "try" in side.head else ""


def _drift(evidence: Evidence, few: Side, many: Side) -> int:
    """+1 where the few are in a later iteration of a loop that both are in, -1 in an earlier one, else 0."""
    one, two = few.party.spans, many.party.spans
    loops = [*(guard for spot in few.shared for guard in guards_at(evidence, spot)), *few.around]
    targets = {
        name for guard in loops if guard.startswith("for ") for name in re.findall(r"\w+", guard.split(" in ")[0])
    }
    places = {spot[1] for spot in few.shared} | ({few.path[0][1]} if few.path else set())
    for key in sorted(one.keys() & two.keys()):
        counts = key[1] in targets or re.search(r"(^|_)(step|iter|iteration|epoch|batch)(_|$|s$)", key[1])
        if key[0] in places and counts and (one[key][0] > two[key][1] or one[key][1] < two[key][0]):
            return 1 if one[key][0] > two[key][1] else -1
    return 0


def guards_at(evidence: Evidence, spot: Spot) -> list[str]:
    """What is around a line, and which ranks a jump before it has sent away (`if rank != 0: return`)."""
    source = frame_source(evidence, spot)
    if source is None:
        return []
    around = source["guards"]
    passed = [
        _opposite(step["guards"][-1])
        for step in source["steps"]
        if step["what"] in ("return", "continue", "break", "raise")
        and step["line"] < spot[2]
        and step["guards"]
        and step["guards"][:-1] == around[: len(step["guards"]) - 1]
        and step["guards"][-1] not in around
        and sends_away(step["guards"][-1])
    ]
    return [*around, *passed]


def _steps(evidence: Evidence, spot: Spot) -> list[Step]:
    source = frame_source(evidence, spot)
    return source["steps"] if source else []


def _opposite(guard: str) -> str:
    word, _, test = guard.partition(" ")
    return f"{'if' if word == 'else' else 'else'} {test}"


def _counts(steps: list[Step], guard: str) -> Counter[str]:
    return Counter(step["what"] for step in steps if guard in step["guards"] and step["what"].startswith("call "))


def _call(side: Side) -> str:
    wait = side.party.wait
    return f"{wait.op or wait.kind} at {place(wait)}"


def _plural(text: str, side: Side) -> str:
    return text.replace("waits", "wait", 1).replace("runs", "run", 1) if len(side.numbers) > 1 else text
