"""judge(): from evidence to a verdict, by rules in the order of their weight.

A rule is a function that takes the Case and returns a Verdict or None; the first answer stands. What the rules know:

    _judge_process.py   roll-call, stopped and ended processes, who owns the GIL, children, locks, polling
    _judge_record.py    the record of collectives, where an agent or NCCL kept one
    _judge_nccl.py      how many operations NCCL counts for each rank, where it runs
    _judge_order.py     who waits in which collective, and whose way through the program parted from the others'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mldebug.hang import _judge_children, _judge_nccl, _judge_order, _judge_process, _judge_record
from mldebug.hang._judge_case import Case, ranges
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence
    from mldebug.hang._frames import Wait
    from mldebug.hang._judge_views import View

_RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    _judge_process.nobody,
    _judge_process.blind,
    _judge_process.stopped,
    _judge_process.never_came,
    _judge_process.zombies,
    _judge_process.gil_held,
    _judge_process.moving,
    _judge_process.ended_main_thread,
    _judge_order.callbacks,
    _judge_children.locks,
    _judge_children.children,
    _judge_children.pipes,
    _judge_order.group_makers,
    _judge_order.two_threads,
    _judge_process.left_early,
    _judge_process.polling,
    _judge_process.elsewhere,
    _judge_order.peers,
    _judge_order.same_place,
    _judge_order.parted,
)


def judge(evidence: Evidence) -> Verdict:
    """Who holds the job up: the rules, strongest first.

    Nothing is read but the evidence, so a recorded job gives the verdict of the live one. `evidence` is what
    `collect()` returns, plain JSON. It always answers: where no rule holds, `hung` is False, or `kind` is "unknown".

        verdict = judge(collect())
        verdict.hung, verdict.kind, verdict.culprits
    """
    return judge_case(Case.of(evidence))


def judge_case(case: Case) -> Verdict:
    """The same, where the evidence is read already."""
    for rule in _RULES:
        verdict = rule(case)
        if verdict is not None:
            settled = _judge_record.settle(case, verdict)
            return _finish(settled if settled is not verdict else _judge_nccl.settle(case, verdict), case)
    return _finish(Verdict(True, "unknown", (), "Nothing tells which rank holds the others up."), case)


def _finish(verdict: Verdict, case: Case) -> Verdict:
    text = " ".join([verdict.text, *case.missing_parts()])
    sure = verdict.sure if not case.missing_parts() or verdict.sure == "low" else "medium"
    culprits = tuple(sorted(set(verdict.culprits)))
    return replace(
        verdict, culprits=culprits, text=text.strip(), sure=sure, where=tuple(_where(case, verdict.kind, culprits))
    )


def _where(case: Case, kind: str, culprits: tuple[int, ...]) -> list[dict[str, Any]]:
    """One entry for each set of ranks that stand at the same place, culprits first, then the smaller sets."""
    places: dict[tuple[object, ...], list[int]] = {}
    for view in case.views:
        guilty = view.number in culprits
        thread, wait = _thread(view, kind) if guilty else ("MainThread", view.wait)
        site = wait.site
        place = (site["file"], site["line"], site["name"]) if site else ("", 0, "")
        places.setdefault((*place, wait.kind, wait.op, wait.group, guilty, thread), []).append(view.number)
    rows = [
        {
            "ranks": ranges(numbers),
            "count": len(numbers),
            "file": file,
            "line": line,
            "function": name,
            "thread": thread,
            "waits": waits,
            "op": op,
            "group": group,
            "culprit": guilty,
        }
        for (file, line, name, waits, op, group, guilty, thread), numbers in places.items()
    ]
    return sorted(rows, key=lambda row: (not row["culprit"], row["count"]))


def _thread(view: View, kind: str) -> tuple[str, Wait]:
    """The thread of a culprit that the verdict is about, and what it does."""
    if kind == "gil-held":
        owners = {
            thread["name"] for sample in view.rank["samples"][-1:] for thread in sample["threads"] if thread["gil"]
        }
        found = [row for row in view.threads if row[0] in owners]
    elif kind == "dead-main-thread":
        found = [row for row in view.threads if row[1].site]
    elif kind == "collective-in-destructor":
        found = [row for row in view.threads if row[1].callback]
    else:
        found = []
    return found[0] if found else ("MainThread", view.wait)
