"""Ranks that have left: a loop in which others wait, or the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.hang._frames import way
from mldebug.hang._judge_case import cap, doing, name_ranks, verb
from mldebug.hang._judge_parted import Party, Side, compare, guards_at, left_loop
from mldebug.hang._judge_text import is_main_guard, parts_ranks, spoken
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence
    from mldebug.hang._judge_views import View


def left_a_loop(evidence: Evidence, away: list[View], waiting: list[View]) -> Verdict | None:
    """A verdict on ranks that stand outside of all collectives, if they have left a loop in which others wait."""
    places = {(view.wait.op, view.wait.path) for view in waiting}
    if len(places) != 1 or len({view.wait.path for view in away}) != 1 or not away[0].wait.path:
        return None
    side, other = (
        Side(evidence, Party(tuple(away)), Party(tuple(waiting))),
        Side(evidence, Party(tuple(waiting)), Party(tuple(away))),
    )
    if side.loops or not other.loops or not side.line or side.line <= other.line:
        return None
    return left_loop(evidence, side, other)


def among_the_left(evidence: Evidence, waiting: list[View], gone: tuple[int, ...]) -> Verdict | None:
    """A verdict on ranks that wait while others have ended: these have passed by all that is under a guard."""
    table: dict[tuple[object, ...], list[View]] = {}
    for view in waiting:
        table.setdefault((view.wait.op, view.wait.group, way(view.wait)), []).append(view)
    parties = sorted((Party(tuple(views)) for views in table.values()), key=lambda party: len(party.views))
    for party in parties:
        others = (*gone, *(number for other in parties if other is not party for number in other.numbers))
        found = [guard for spot in party.wait.path for guard in guards_at(evidence, spot)]
        guard = next((guard for guard in found if parts_ranks(guard, party.numbers, others)), None)
        if guard is not None:
            one = len(party.numbers) == 1 and not is_main_guard(guard)
            kind = "extra-collective" if one else "rank-guarded-collective"
            text = (
                f"{verb(party.numbers, doing(party.wait))} under {spoken(guard)}, which {name_ranks(others)} cannot "
                f"pass; {verb(gone, 'has ended')}."
            )
            return Verdict(True, kind, party.numbers, cap(text), "high", ("program text", "stacks", "roll-call"))
    if len(parties) < 2:
        return None
    found_between = [compare(evidence, party, parties[-1]) for party in parties[:-1]]
    return next((verdict for verdict in found_between if verdict.sure == "high"), None)
