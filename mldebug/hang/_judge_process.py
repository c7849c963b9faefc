"""Rules about processes: who is there, who is stopped or ended, who owns the GIL, and what children hold."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from mldebug.core.hosts import fold_hosts
from mldebug.hang._frames import main_thread, source_of
from mldebug.hang._judge_case import Case, cap, crowd, doing, name_ranks, place, rest, sentence, verb
from mldebug.hang._judge_children import children_work, may_go_on, name_child
from mldebug.hang._judge_left import among_the_left, left_a_loop
from mldebug.hang._judge_text import is_loop
from mldebug.hang._judge_views import View, guards_of
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Frame, Thread


_LONG = 60.0  # seconds that one call in C may take, and keep the GIL


def nobody(case: Case) -> Verdict | None:
    if case.views:
        return None
    silent = case.silent
    where = f" on the nodes that answered; {fold_hosts(silent)} did not answer" if silent else ""
    return Verdict(False, "unknown", (), f"No rank was found{where}.", "low", ("roll-call",))


def blind(case: Case) -> Verdict | None:
    if case.seen:
        return None
    reasons = [why for view in case.views if (why := view.rank.get("why"))]
    text = f"no stack could be read: {reasons[0] if reasons else 'the ranks were not looked at in time'}"
    return Verdict(False, "unknown", (), sentence(text.rstrip(".")), "low", ("roll-call",))


def never_came(case: Case) -> Verdict | None:
    """A rank that is absent while the others wait for the job to form."""
    if not case.absent or not case.waiting or any(view.moved for view in case.seen):
        return None
    if any(view.wait.kind != "init" for view in case.waiting):
        return None
    return _absent(case, "never came up")


def left_early(case: Case) -> Verdict | None:
    """A rank that has ended while others wait: by itself, or because it was through with the program and they are not.

    Who has ended has passed by all that the others wait in. So a call that only those who wait can reach is the answer,
    and so is a parting among those who are there.
    """
    if not case.absent or not case.waiting or any(view.moved for view in case.seen):
        return None
    if any(may_go_on(case, view) and not view.polls for view in case.outside):
        return None  # the others may wait for that one
    return among_the_left(case.evidence, case.waiting, case.absent) or _absent(case, "is not there any more")


def _absent(case: Case, what: str) -> Verdict:
    """No process has these ranks; nodes that did not answer may have them."""
    many, silent = len(case.absent) > 1, [host for host in case.evidence["hosts"] if host["status"] != "ok"]
    if not silent:
        what = what.replace("is ", "are ") if many else what
        text = f"{name_ranks(case.absent)} of {case.world} {what}: no process has that rank. {rest(case.waiting)}"
        return Verdict(True, "missing-rank", case.absent, cap(text), "high", ("roll-call",))
    reasons: dict[str, list[str]] = {}
    for host in silent:
        reasons.setdefault(host.get("why") or host["status"], []).append(host["host"])
    told = [f"{fold_hosts(names)} ({why})" for why, names in reasons.items()]
    hosts = f"{', '.join(told[:3])}{' and others' if len(told) > 3 else ''}"
    text = (
        f"{name_ranks(case.absent)} of {case.world} {'are' if many else 'is'} missing, and {hosts}, where "
        f"{'they' if many else 'it'} may be, did not answer. {rest(case.waiting)}"
    )
    room = len(silent) * max(Counter(view.rank["host"] for view in case.views).values())
    return Verdict(
        True, "missing-rank", case.absent, cap(text), "medium" if len(case.absent) <= room else "low", ("roll-call",)
    )


def stopped(case: Case) -> Verdict | None:
    found = [view for view in case.seen if view.state in "Tt"]
    culprits = [view.number for view in found]
    if found:
        how = "is stopped (state T" if len(found) == 1 else "are stopped (state T"
        at = f" at {place(found[0].wait)}" if found[0].wait.site else ""
        text = f"{name_ranks(culprits)} {how}{at}): by a signal, a debugger or job control; `kill -CONT PID` resumes. "
        others = [view for view in case.waiting if view not in found]
        return Verdict(True, "process-stopped", tuple(culprits), cap(text) + rest(others), "high", ("process state",))
    for view in case.outside:
        for child in view.rank["children"]:
            if child["state"] in ("T", "t"):
                text = f"{name_child(child)} of rank {view.number} is stopped (state T). {sentence(crowd([view]))}"
                return Verdict(True, "process-stopped", (view.number,), cap(text), "high", ("process state",))
    return None


def zombies(case: Case) -> Verdict | None:
    found = [view for view in case.seen if view.state in "ZX"]
    if not found:
        return None
    culprits = tuple(view.number for view in found)
    text = f"{verb(culprits, 'has ended')}, which the launcher has not noticed (state Z). {rest(case.waiting)}"
    return Verdict(True, "missing-rank", culprits, cap(text), "high", ("process state",))


def ended_main_thread(case: Case) -> Verdict | None:
    found = [view for view in case.outside if view.wait.kind == "shutdown"]
    if not found or not case.waiting:
        return None
    culprits = tuple(view.number for view in found)
    names = sorted({name for view in found for name, wait in view.threads if wait.site})
    others = f'the thread "{names[0]}", which is no daemon' if names else "its other threads"
    text = (
        f"the main thread of {name_ranks(culprits)} has ended (an exception, or the end of the script) and waits for "
        f"{others}: so the process lives on. {rest(case.waiting)}"
    )
    return Verdict(True, "dead-main-thread", culprits, cap(text), "high", ("process state", "stacks"))


def gil_held(case: Case) -> Verdict | None:
    """A thread that owns the GIL in each sample, at the same place, while the rest of the rank waits for it."""
    for view in case.outside:
        owners = [
            next(((thread["name"], _top(thread), thread) for thread in sample["threads"] if thread["gil"]), None)
            for sample in view.rank["samples"]
            if sample["threads"]
        ]
        if len(owners) < 2 or owners[0] is None or view.state in "Tt":
            continue
        name, top, thread = owners[0]
        same = all(owner is not None and owner[:2] == (name, top) for owner in owners)
        beats = view.rank.get("progress", {}).get("heartbeat", [])
        known = len(beats) > 1
        beating = known and beats[0] != beats[-1]
        asleep = not any(owner[2]["active"] for owner in owners if owner)  # whoever waits lets go of it, as a rule
        alone = name != "MainThread" or "/re/" in top[0] or view.seconds > _LONG
        held = bool(thread["frames"]) and (asleep or (alone and view.runs))
        if same and held and not beating and not view.moved and (known or asleep or _wants_gil(view)):
            frames = thread["frames"]
            site = next((frame for frame in frames if source_of(case.evidence, frame)), frames[0] if frames else None)
            at = f" at {_site(site)}" if site else ""
            main = name == "MainThread"
            others = "no other thread of it can run" if main else f"the main thread cannot run ({doing(view.wait)})"
            text = (
                f'thread "{name}" of rank {view.number} holds the GIL{at} and does not let go; {others}. '
                f"{rest(case.waiting)}"
            )
            return Verdict(True, "gil-held", (view.number,), cap(text), "high", ("process state", "two samples"))
    return None


def _wants_gil(view: View) -> bool:
    """Whether the main thread would run if it could, and does not wait for something that another thread does."""
    threads = [thread for sample in view.rank["samples"][-1:] if (thread := main_thread(sample["threads"]))]
    frames = [frame for thread in threads for frame in thread["frames"] if frame["file"].endswith("threading.py")]
    starts = any(frame["name"].endswith("start") for frame in frames)  # it waits for a new thread to run
    return starts or view.wait.kind not in ("join", "queue", "lock", "event", "dataloader", "subprocess", "pipe")


def moving(case: Case) -> Verdict | None:
    """What advances between the samples is slow, not hung."""
    moved = [view for view in case.seen if view.moved]
    if not moved:
        return None
    late = [view for view in case.outside if not view.polls]
    if late and case.waiting:
        text = f"slow, not hung: {crowd(late)}, and it advances. {rest(case.waiting)}"
        return Verdict(False, "straggler", (), cap(text), "medium", ("two samples",))
    text = f"not hung: {name_ranks(view.number for view in moved)} moved between the samples."
    return Verdict(False, "unknown" if not case.waiting else "straggler", (), cap(text), "medium", ("two samples",))


def polling(case: Case) -> Verdict | None:
    found = [
        view for view in case.outside if (view.polls or view.wait.kind == "store") and not children_work(case, view)
    ]
    if not found or not case.waiting:
        return None
    entering = {one for view in found for spot in view.wait.path if (one := _entered(case, spot))}
    holders = [view for view in case.waiting if entering & set(map(_bare, guards_of(case.evidence, view.wait.path)))]
    if holders:
        held = tuple(view.number for view in holders)
        text = f"{verb(held, 'holds a lock')} that others ask for again and again: {crowd(holders)}; {crowd(found)}."
        return Verdict(True, "lock-barrier-cycle", held, cap(text), "medium", ("stacks", "program text"))
    others = [view for view in case.outside if view not in found and may_go_on(case, view)]
    if others:
        text = f"slow, not hung as far as can be seen: {crowd(others)}; {crowd(found)}. {rest(case.waiting)}"
        return Verdict(False, "straggler", (), cap(text), "low", ("process state", "stacks"))
    culprits = tuple(view.number for view in found)
    if not any(view.polls for view in found):
        text = f"{crowd(found)}, which nobody sets. {rest(case.waiting)}"
        return Verdict(True, "poll-loop", culprits, cap(text), "medium", ("stacks", "program text"))
    guards = [guard for guard in guards_of(case.evidence, found[0].wait.path) if is_loop(guard)]
    loop = f" (`{guards[-1]}`)" if guards else ""
    asks = verb(culprits, f"asks again and again at {place(found[0].wait)}{loop}")
    text = f"{asks} without an answer. "
    return Verdict(True, "poll-loop", culprits, cap(text) + rest(case.waiting), "medium", ("stacks", "program text"))


def _entered(case: Case, spot: tuple[str, str, int]) -> str:
    """The `with` that a line is about to enter, without what two ways to write it may differ in; "" for none."""
    source = case.evidence.get("source", {}).get(f"{spot[0]}:{spot[2]}")
    text = source["text"] if source else ""
    return _bare(text.rstrip(":")) if text.startswith("with ") else ""


def _bare(guard: str) -> str:
    return re.sub(r"[\s\"']", "", guard)


def elsewhere(case: Case) -> Verdict | None:
    """Ranks that are in no collective while others wait in one: they are late, or stuck by themselves."""
    late = case.outside
    if not late:
        return None
    if not case.waiting:
        return Verdict(False, "unknown", (), sentence(f"no rank waits for another: {crowd(late)}"), "low", ("stacks",))
    culprits = tuple(view.number for view in late)
    stuck = [view for view in late if not may_go_on(case, view)]
    if not stuck:
        text = f"slow, not hung as far as can be seen: {crowd(late)}. {rest(case.waiting)}"
        return Verdict(False, "straggler", (), cap(text), "low", ("process state", "stacks"))
    numbers = tuple(view.number for view in stuck)
    left = left_a_loop(case.evidence, stuck, case.waiting)
    if left is not None:
        return left
    text = f"{crowd(stuck)}, without moving. {rest(case.waiting)}"
    return Verdict(True, "unknown", numbers or culprits, cap(text), "medium", ("stacks",))


def _top(thread: Thread) -> tuple[str, int]:
    return (thread["frames"][0]["file"], thread["frames"][0]["line"]) if thread["frames"] else ("", 0)


def _site(frame: Frame) -> str:
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['name']}"
