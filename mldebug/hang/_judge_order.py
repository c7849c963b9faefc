"""Rules about order: all ranks that matter wait in some collective, and one took another way through the program.

Two parties of ranks are compared where their stacks part. The text around the two lines says whether one party stands
under a condition on the rank, has left a loop in which the other still is, or passed by a collective of the other.
The size of a party alone decides nothing that the text decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mldebug.hang._frames import main_thread, members_to_be, way
from mldebug.hang._judge_case import Case, cap, crowd, doing, name_ranks, place, sentence, verb
from mldebug.hang._judge_parted import Party, compare, singled_out
from mldebug.hang._judge_text import holds, is_main_guard, parts_ranks
from mldebug.hang._judge_views import View, frame_source, guards_of
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._frames import Wait


def callbacks(case: Case) -> Verdict | None:
    """A collective that a destructor or an exit handler calls, on some ranks only."""
    found = [(view, wait) for view in case.seen for wait in _communications(view) if wait.callback]
    numbers = tuple(sorted({view.number for view, _ in found}))
    if not found or len(numbers) == len(case.seen):
        return None
    others = [view for view in case.seen if view.number not in numbers]
    text = (
        f"{verb(numbers, doing(found[0][1]))}, called from {found[0][1].callback}: destructors and exit "
        f"handlers run when each process likes. {sentence(crowd(others))}"
    )
    if len(others) < len(numbers):  # most let the object go, and these keep it
        numbers = tuple(view.number for view in others)
    return Verdict(True, "collective-in-destructor", numbers, cap(text), "high", ("stacks",))


def group_makers(case: Case) -> Verdict | None:
    """Some ranks make a group, which all ranks have to do together, and in the same order."""
    makers = [view for view in case.seen if view.wait.kind == "new-group"]
    others = [view for view in case.seen if view.wait.kind != "new-group"]
    if not makers or any(not view.communicates and view.runs for view in others):
        return None
    numbered = _group_numbers(makers, others)
    if numbered is not None or not others:
        return numbered
    late = [view.number for view in others]
    members = {number for view in makers for number in _members(view)}
    culprits = tuple(number for number in late if number in members) or tuple(late)
    few = tuple(view.number for view in makers)
    guards = guards_of(case.evidence, makers[0].wait.path)
    if len(few) < len(late) and any(is_main_guard(guard) and parts_ranks(guard, few, late) for guard in guards):
        culprits = few  # what only the main process may do is what is wrong
    text = (
        f"{crowd(makers)}, which every rank of the job has to call, members or not; {name_ranks(late)} did not. "
        f"{sentence(crowd(others))}"
    )
    return Verdict(True, "missing-group-constructor", culprits, cap(text), "high", ("stacks",))


def _group_numbers(makers: list[View], others: list[View]) -> Verdict | None:
    """Ranks that make a group, but not the same one: some have made fewer before.

    One that went on may have joined the smaller number, as the store keeps what a first group left there.
    """
    names: dict[str, list[int]] = {}
    for view in makers:
        names.setdefault(view.wait.group, []).append(view.number)
    if len(names) < 2:
        return None
    counted = all(name.isdecimal() for name in names)
    behind = min(names, key=int) if counted else min(names, key=lambda name: len(names[name]))
    culprits = (*names[behind], *(view.number for view in others))
    members = {number for view in makers if view.wait.group == behind for number in _members(view)}
    awaited = members - set(names[behind])
    if awaited and awaited <= {view.number for view in others}:  # they are late there, and all that follows is late
        culprits = tuple(sorted(awaited))
    groups = "; ".join(verb(numbers, f"makes group {name}") for name, numbers in list(names.items())[:4])
    text = f"{groups}: {name_ranks(culprits)} did not make a group that the others made, as every rank has to."
    return Verdict(
        True, "missing-group-constructor", culprits, cap(text), "high" if counted else "low", ("stacks", "locals")
    )


def _members(view: View) -> tuple[int, ...]:
    samples = [sample for sample in view.rank["samples"] if sample["threads"]]
    thread = main_thread(samples[-1]["threads"]) if samples else None
    return members_to_be(thread) if thread else ()


def two_threads(case: Case) -> Verdict | None:
    """Two threads of a rank in collectives of one group: their order is up to chance."""
    found = [
        view
        for view in case.seen
        if len(rows := _communications(view)) > 1 and len({wait.group for wait in rows}) < len(rows)
    ]
    if not found:
        return None
    numbers = tuple(view.number for view in found)
    waits = _communications(found[0])
    names = ["MainThread", *(name for name, wait in found[0].threads if wait in waits)]
    everyone = tuple(view.number for view in case.seen)
    paths = [*found[0].wait.path, *(spot for wait in waits for spot in wait.path)]
    picked = singled_out(case.evidence, paths, everyone, everyone)
    culprits = numbers if len(found) == 1 else picked if 2 * len(picked) < len(everyone) else ()
    text = (
        f"two threads of {name_ranks(numbers)} use one process group: {names[0]} {doing(waits[0])}, "
        f'"{names[-1]}" {doing(waits[-1])}. Each rank may issue them in another order.'
    )
    return Verdict(True, "two-threads-one-group", culprits, cap(text), "medium", ("stacks",))


def peers(case: Case) -> Verdict | None:
    """Wait-for edges of send and recv: a cycle, or a chain that ends somewhere."""
    edges = {view.number: view.wait.peer for view in case.seen if view.wait.kind == "p2p"}
    known = {number: peer for number, peer in edges.items() if peer is not None}
    if not known:
        return None
    start = min(known)
    for first in sorted(known):
        walk = [first]
        while (step := known.get(walk[-1])) is not None and step not in walk:
            walk.append(step)
        if step is not None:
            return _cycle(case, walk[walk.index(step) :], known)
        start = first
    end = start
    while end in known and known[end] is not None:
        end = known[end]
    view = next((item for item in case.seen if item.number == end), None)
    if view is None:
        return None
    chain = [item for item in case.seen if item.number in known]
    text = f"{crowd(chain)}; at the end of the chain rank {end} {doing(view.wait)}."
    return Verdict(True, "skipped-collective", (end,), cap(text), "medium", ("wait-for edges", "stacks"))


def _cycle(case: Case, ring: list[int], edges: dict[int, int]) -> Verdict:
    shown = ring if len(ring) <= 8 else [*ring[:7], "..."]
    arrows = " -> ".join(map(str, [*shown, ring[0]]))
    view = next(item for item in case.seen if item.number == ring[0])
    rings = {number for number in edges if _returns(number, edges)}
    culprits = () if rings >= {item.number for item in case.seen} or len(rings) == case.world else tuple(ring)
    text = (
        f"a cycle of {len(ring)} ranks, each waiting for the next: {arrows}. Rank {ring[0]} {doing(view.wait)}; "
        "the call that would answer it comes later in the program."
    )
    return Verdict(True, "p2p-cycle", culprits, cap(text), "high", ("wait-for edges", "stacks"))


def _returns(number: int, edges: dict[int, int]) -> bool:
    """Whether a walk along the edges comes back to where it began."""
    at: int | None = edges.get(number)
    for _ in range(len(edges)):
        if at == number:
            return True
        at = edges.get(at) if at is not None else None
    return False


def same_place(case: Case) -> Verdict | None:
    """All ranks at one line: the same call in another iteration, or a network that is silent."""
    parties = _parties(case.waiting)
    if len({(way(party.wait), party.wait.op) for party in parties}) != 1 or len(case.waiting) < 2:
        return None
    split = _split_by_ints(case)
    if split is not None:
        return split
    if len(parties) > 1:
        small = parties[0].numbers
        text = (
            f"all ranks are at {place(parties[0].wait)} in the same step, but in other groups: {crowd(case.waiting)}."
        )
        return Verdict(True, "cross-group-order", small, cap(text), "medium", ("stacks", "integer locals"))
    wait = parties[0].wait
    if case.unseen:
        text = (
            f"all {len(case.waiting)} ranks {_plural(doing(wait))}, for ranks on other nodes as it seems: look there."
        )
        return Verdict(False, "unknown", (), cap(text), "low", ("stacks",))
    if wait.kind == "collective" and not wait.op and _posts_messages(case, wait):
        text = f"all {len(case.waiting)} ranks {_plural(doing(wait))} for a message, and none is sent before it."
        return Verdict(True, "p2p-cycle", (), cap(text), "low", ("stacks", "program text"))
    if _may_differ(case, wait):
        text = (
            f"all {len(case.waiting)} ranks {_plural(doing(wait))} and nobody moves; whether that is one group or "
            "several cannot be seen from outside: run the job under `mldebug watch`, or call mldebug.hang.enable()."
        )
        return Verdict(True, "unknown", (), cap(text), "low", ("stacks",))
    if wait.kind == "init":
        text = f"all {len(case.waiting)} ranks {_plural(doing(wait))} and nobody moves: the address or the network."
    else:
        text = (
            f"all {len(case.waiting)} ranks {_plural(doing(wait))} and nobody moves: no rank is late, so the network."
        )
    return Verdict(True, "network", (), cap(text), "low", ("stacks", "two samples"))


def _may_differ(case: Case, wait: Wait) -> bool:
    """Whether the ranks may be in several groups: the name is that of a loop, and no record tells."""
    if not wait.group or not wait.path:
        return False
    source = frame_source(case.evidence, wait.path[-1])
    loops = [guard for guard in source["guards"] if guard.startswith("for ")] if source else []
    return any(re.search(rf"\b{re.escape(wait.group)}\b", guard.split(" in ")[0]) for guard in loops)


def _posts_messages(case: Case, wait: Wait) -> bool:
    """Whether the function that waits for a request has posted a send or receive."""
    source = frame_source(case.evidence, wait.path[-1]) if wait.path else None
    calls = {re.split(r"[. ]", step["what"])[-1] for step in source["steps"]} if source else set()
    return bool(calls & {"irecv", "isend", "batch_isend_irecv", "P2POp"})


def _split_by_ints(case: Case) -> Verdict | None:
    """Ranks at one line whose counters differ: who is out of step, and in which direction."""
    tables = {view.number: {(f, n): v for f, n, v in view.wait.ints} for view in case.waiting}
    shared = set.intersection(*(set(table) for table in tables.values()))
    for key in sorted(shared, key=lambda key: (not _counter(case, key[1]), key)):
        values: dict[int, list[int]] = {}
        for number, table in tables.items():
            values.setdefault(table[key], []).append(number)
        if len(values) < 2 or (len(values) == len(tables) > 2) or not _steps_like(case, key[1]):
            continue
        sides = sorted(values.items(), key=lambda item: (len(item[1]), -item[0]))
        odd = tuple(sides[0][1])
        sure = "high"
        if len(sides[0][1]) == len(sides[-1][1]):
            odd, sure = _by_text(case, [tuple(side[1]) for side in sides]) or (tuple(values[max(values)]), "low")
        value = tables[odd[0]][key]
        usual, rest = sides[-1] if sides[-1][0] != value else sides[0]
        way = "ahead, so it passed one by" if value > usual else "behind"
        text = (
            f"all ranks wait at {place(case.waiting[0].wait)}, but in another iteration: {key[1]}={value} on "
            f"{name_ranks(odd)} ({way}), {key[1]}={usual} on {name_ranks(rest)}."
        )
        return Verdict(True, "iteration-skew", odd, cap(text), sure, ("integer locals", "stacks"))
    return None


def _counter(case: Case, name: str) -> bool:
    """Whether a name is the variable of a loop around a waiting line."""
    pattern = re.compile(rf"^for .*\b{re.escape(name)}\b.* in ")
    for spot in case.waiting[0].wait.path:
        source = frame_source(case.evidence, spot)
        if source and any(pattern.match(guard) for guard in source["guards"]):
            return True
    return False


def _steps_like(case: Case, name: str) -> bool:
    """Whether a name may count iterations: the variable of a loop, or named like one; never a rank or a peer."""
    return _counter(case, name) or bool(
        re.search(r"(^|_)(step|steps|it|iter|iteration|epoch|batch|batch_idx|micro|count|global_step)(_|$)", name)
    )


def _by_text(case: Case, sides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], str] | None:
    """The side that a condition on the rank singles out in front of a jump."""
    for spot in case.waiting[0].wait.path:
        source = frame_source(case.evidence, spot)
        for step in source["steps"] if source else []:
            for guard in step["guards"] if step["what"] in ("continue", "break", "return", "raise") else []:
                for side in sides:
                    rest = [number for other in sides if other is not side for number in other]
                    if all(holds(guard, number) is not False for number in side) and all(
                        holds(guard, number) is False for number in rest
                    ):
                        return side, "medium"
    return None


def parted(case: Case) -> Verdict | None:
    """Ranks that wait in different places: the smaller parties against the largest, the best founded answer first."""
    parties = _in_one_round(case)
    if len(parties) < 2:
        return None
    found = [compare(case.evidence, party, parties[-1]) for party in parties[:-1]]
    best = max(found, key=lambda verdict: ("low", "medium", "high").index(verdict.sure))
    return best


def _in_one_round(case: Case) -> list[Party]:
    """The waiting ranks by place. Those that are in a later round of a loop than others count to the party ahead.

    They left what the others wait in behind them, at a broadcast for instance, which ends early for some.
    """
    rounds = _rounds(case)
    behind = [view for view in case.waiting if rounds.get(view.number) == min(rounds.values(), default=())]
    parties = _parties(behind)
    ahead = [view for view in case.waiting if view not in behind]
    if not ahead or len(parties) < 2:
        return _parties(case.waiting)
    last = max(parties, key=lambda party: [spot[2] for spot in party.wait.path])
    joined = Party((*last.views, *ahead))
    return sorted([*(party for party in parties if party is not last), joined], key=lambda party: len(party.views))


def _rounds(case: Case) -> dict[int, tuple[int, ...]]:
    """The variables of loops that all waiting ranks are in, outermost first, by rank; {} where there is none."""
    tables: dict[int, dict[tuple[str, str], int]] = {}
    for view in case.waiting:
        values = {(function, name): value for function, name, value in view.wait.ints}
        table = tables.setdefault(view.number, {})
        for spot in view.wait.path:
            source = frame_source(case.evidence, spot)
            for guard in source["guards"] if source else []:
                for name in re.findall(r"\w+", guard.split(" in ")[0][4:]) if guard.startswith("for ") else []:
                    if (spot[1], name) in values:
                        table[spot[1], name] = values[spot[1], name]
    shared = [key for key in next(iter(tables.values()), {}) if all(key in table for table in tables.values())]
    return {number: tuple(table[key] for key in shared) for number, table in tables.items()} if shared else {}


def _parties(found: list[View]) -> list[Party]:
    """The waiting ranks by place, the smallest party first."""
    table: dict[tuple[object, ...], list[View]] = {}
    for view in found:
        table.setdefault((view.wait.op, view.wait.group, way(view.wait)), []).append(view)
    return sorted((Party(tuple(views)) for views in table.values()), key=lambda party: len(party.views))


def _communications(view: View) -> list[Wait]:
    waits = [view.wait, *(wait for _, wait in view.threads)]
    return [wait for wait in waits if wait.kind in ("collective", "p2p", "backward", "new-group")]


def _plural(text: str) -> str:
    return text.replace("waits", "wait", 1)
