"""Rules about processes: who is there, who is stopped or ended, who owns the GIL, and what children hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mldebug.hang._frames import forked, source_of
from mldebug.hang._judge_case import Case, crowd, doing, name_ranks, place, sentence, verb
from mldebug.hang._judge_parted import left_a_loop
from mldebug.hang._judge_text import is_endless, is_loop, is_poll, long_sleep
from mldebug.hang._judge_views import View, child_moved, child_wait, guards_of
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child, Frame, Thread


def nobody(case: Case) -> Verdict | None:
    if case.views:
        return None
    return Verdict(False, "unknown", (), "No rank was found.", "low", ("roll-call",))


def roll_call(case: Case) -> Verdict | None:
    """An absent rank is the answer, once every node has answered."""
    if not case.absent or not case.waiting or any(view.moved for view in case.seen):
        return None
    silent = [host["host"] for host in case.evidence["hosts"] if host["status"] != "ok"]
    early = all(view.wait.kind == "init" for view in case.waiting)
    what = "never came up" if early else "is not there any more"
    text = f"{name_ranks(case.absent)} of {case.world} {what}: no process has that rank. {_rest(case.waiting)}"
    return Verdict(True, "missing-rank", case.absent, _cap(text), "low" if silent else "high", ("roll-call",))


def stopped(case: Case) -> Verdict | None:
    found = [view for view in case.seen if view.state in "Tt"]
    culprits = [view.number for view in found]
    if found:
        how = "is stopped (state T" if len(found) == 1 else "are stopped (state T"
        at = f" at {place(found[0].wait)}" if found[0].wait.site else ""
        text = f"{name_ranks(culprits)} {how}{at}): by a signal, a debugger or job control; `kill -CONT PID` resumes. "
        others = [view for view in case.waiting if view not in found]
        return Verdict(True, "process-stopped", tuple(culprits), _cap(text) + _rest(others), "high", ("process state",))
    for view in case.outside:
        for child in view.rank["children"]:
            if child["state"] in ("T", "t"):
                text = f"{_child(child)} of rank {view.number} is stopped (state T). {sentence(crowd([view]))}"
                return Verdict(True, "process-stopped", (view.number,), _cap(text), "high", ("process state",))
    return None


def zombies(case: Case) -> Verdict | None:
    found = [view for view in case.seen if view.state in "ZX"]
    if not found:
        return None
    culprits = tuple(view.number for view in found)
    text = f"{verb(culprits, 'has ended')}, which the launcher has not noticed (state Z). {_rest(case.waiting)}"
    return Verdict(True, "missing-rank", culprits, _cap(text), "high", ("process state",))


def ended_main_thread(case: Case) -> Verdict | None:
    found = [view for view in case.outside if view.wait.kind == "shutdown"]
    if not found or not case.waiting:
        return None
    culprits = tuple(view.number for view in found)
    names = sorted({name for view in found for name, wait in view.threads if wait.site})
    thread = f' "{names[0]}"' if names else ""
    text = (
        f"the main thread of {name_ranks(culprits)} has ended (an exception, or the end of the script) and waits for "
        f"the thread{thread}, which is no daemon: so the process lives on. {_rest(case.waiting)}"
    )
    return Verdict(True, "dead-main-thread", culprits, _cap(text), "high", ("process state", "stacks"))


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
        still = len(beats) > 1 and beats[0] == beats[-1]
        held = still or (bool(thread["frames"]) and (name != "MainThread" or "/re/" in top[0]))
        if same and held and view.runs and not view.moved:
            frames = thread["frames"]
            site = next((frame for frame in frames if source_of(case.evidence, frame)), frames[0] if frames else None)
            at = f" at {_site(site)}" if site else ""
            text = (
                f'thread "{name}" of rank {view.number} holds the GIL{at} and does not let go; '
                f"the main thread cannot run ({doing(view.wait)}). {_rest(case.waiting)}"
            )
            return Verdict(True, "gil-held", (view.number,), _cap(text), "high", ("process state", "two samples"))
    return None


def moving(case: Case) -> Verdict | None:
    """What advances between the samples is slow, not hung."""
    moved = [view for view in case.seen if view.moved]
    if not moved:
        return None
    late = [view for view in case.outside if not view.polls]
    if late and case.waiting:
        text = f"slow, not hung: {crowd(late)}, and it advances. {_rest(case.waiting)}"
        return Verdict(False, "straggler", (), _cap(text), "medium", ("two samples",))
    text = f"not hung: {name_ranks(view.number for view in moved)} moved between the samples."
    return Verdict(False, "unknown" if not case.waiting else "straggler", (), _cap(text), "medium", ("two samples",))


def locks(case: Case) -> Verdict | None:
    """A file lock that one rank holds and others want."""
    wanting = [view for view in case.outside if view.wait.kind == "flock"]
    if not wanting:
        return None
    wanted = {lock["inode"] for view in wanting for lock in view.rank["locks"] if lock["waits"]}
    holders = [
        view
        for view in case.seen
        if any(not lock["waits"] and (lock["inode"] in wanted or not wanted) for lock in view.rank["locks"])
        and view not in wanting
    ]
    rests = ("wait-for edges", "stacks")
    if not holders:  # a lock that /proc/locks does not show: the one who waits inside such a block
        holders = [
            view
            for view in case.waiting
            if any(re.match(r"with .*lock", guard, re.I) for guard in guards_of(case.evidence, view.wait.path))
        ]
        rests = ("stacks", "program text")
    if not holders:
        culprits = tuple(view.number for view in wanting)
        text = f"{crowd(wanting)}; no rank of this job is seen to hold it. {_rest(case.waiting)}"
        return Verdict(True, "unknown", culprits, _cap(text), "low", ("stacks",))
    culprits = tuple(view.number for view in holders)
    if all(not view.communicates and _may_go_on(case, view) for view in holders):
        text = f"slow, not hung: {verb(culprits, 'holds a file lock')}, and works: {crowd(holders)}; {crowd(wanting)}."
        return Verdict(False, "straggler", (), _cap(text), "medium", rests)
    text = f"{verb(culprits, 'holds a file lock')}: {crowd(holders)}; {crowd(wanting)}."
    return Verdict(True, "lock-barrier-cycle", culprits, _cap(text), "high" if wanted else "medium", rests)


def children(case: Case) -> Verdict | None:
    """A rank that waits for its DataLoader or another child which is stuck itself."""
    for view in case.outside:
        if view.wait.kind not in ("dataloader", "join", "queue", "pipe", "subprocess", "event", "idle"):
            continue
        verdict = _stuck_child(case, view)
        if verdict is not None:
            return verdict
    return None


def pipes(case: Case) -> Verdict | None:
    """A full pipe: the child writes where nobody reads, and the rank waits for the child to end."""
    for view in case.outside:
        if view.wait.kind not in ("subprocess", "join", "pipe", "queue"):
            continue
        writers = [child for child in view.rank["children"] if _writes(case, child)]
        if writers:
            text = (
                f"rank {view.number} {doing(view.wait)}, while {_child(writers[0])} waits to write into a full pipe "
                f"that nobody reads. {_rest(case.waiting)}"
            )
            return Verdict(True, "pipe-deadlock", (view.number,), _cap(text), "high", ("wait-for edges", "stacks"))
        if _children_work(case, view):
            text = f"slow, not hung: rank {view.number} {doing(view.wait)}, which is at work. {_rest(case.waiting)}"
            return Verdict(False, "straggler", (), _cap(text), "medium", ("process state",))
        if any(place in _wchan(view) for place in ("pipe_write", "sock_alloc_send")):
            text = f"rank {view.number} waits to write into a full pipe at {place(view.wait)}. {_rest(case.waiting)}"
            return Verdict(True, "pipe-deadlock", (view.number,), _cap(text), "medium", ("process state",))
    return None


def polling(case: Case) -> Verdict | None:
    found = [view for view in case.outside if view.polls and not _children_work(case, view)]
    if not found or not case.waiting:
        return None
    culprits = tuple(view.number for view in found)
    guards = [guard for guard in guards_of(case.evidence, found[0].wait.path) if is_loop(guard)]
    loop = f" (`{guards[-1]}`)" if guards else ""
    asks = verb(culprits, f"asks again and again at {place(found[0].wait)}{loop}")
    text = f"{asks} without an answer. "
    return Verdict(True, "poll-loop", culprits, _cap(text) + _rest(case.waiting), "medium", ("stacks", "program text"))


def elsewhere(case: Case) -> Verdict | None:
    """Ranks that are in no collective while others wait in one: they are late, or stuck by themselves."""
    late = case.outside
    if not late:
        return None
    if not case.waiting:
        return Verdict(False, "unknown", (), sentence(f"no rank waits for another: {crowd(late)}"), "low", ("stacks",))
    culprits = tuple(view.number for view in late)
    stuck = [view for view in late if not _may_go_on(case, view)]
    if not stuck:
        text = f"slow, not hung as far as can be seen: {crowd(late)}. {_rest(case.waiting)}"
        return Verdict(False, "straggler", (), _cap(text), "low", ("process state", "stacks"))
    numbers = tuple(view.number for view in stuck)
    left = left_a_loop(case.evidence, stuck, case.waiting)
    if left is not None:
        return left
    text = f"{crowd(stuck)} and does not move. {_rest(case.waiting)}"
    return Verdict(True, "unknown", numbers or culprits, _cap(text), "medium", ("stacks",))


def _may_go_on(case: Case, view: View) -> bool:
    """Whether a rank outside of all collectives may just be slow: it computes, or sleeps for a while."""
    text = ""
    if view.wait.site is not None:
        source = source_of(case.evidence, view.wait.site)
        text = source["text"] if source else ""
    if view.wait.kind == "sleep":
        return not long_sleep(text)
    if view.wait.kind == "dataloader" and _sleepers(case, view):
        return True
    threads = any(wait.kind == "busy" for _, wait in view.threads)
    return view.runs or view.wait.kind == "busy" or threads or _children_work(case, view)


def _children_work(case: Case, view: View) -> bool:
    return any(child_moved(child, case.evidence) for child in view.rank["children"])


def _sleepers(case: Case, view: View) -> bool:
    """Whether a child sleeps for a while, outside of any loop that asks."""
    for child in view.rank["children"]:
        found = child_wait(child, case.evidence)
        if found is not None and found[0].kind == "sleep" and not _endless(case, found[0].path):
            return True
    return False


def _endless(case: Case, path: tuple[tuple[str, str, int], ...]) -> bool:
    source = case.evidence.get("source", {}).get(f"{path[-1][0]}:{path[-1][2]}") if path else None
    if source is None:
        return False
    loops = [guard for guard in source["guards"] if is_loop(guard)]
    steps = " ".join(step["what"] for step in source["steps"])
    ways_out = [step["guards"] for step in source["steps"] if step["what"] in ("break", "return", "raise")]
    polls = any(is_poll(loop, source["text"], steps) for loop in loops)
    return long_sleep(source["text"]) or polls or is_endless(source["guards"], ways_out)


def _stuck_child(case: Case, view: View) -> Verdict | None:
    loads = view.wait.kind == "dataloader"
    rests = ("stacks", "process state")
    workers = view.rank["children"]
    for child in workers:
        found = child_wait(child, case.evidence)
        if found is None:
            continue
        wait, thread = found
        if _writes(case, child) or (wait.kind == "queue" and wait.site is None):
            continue  # it has no work
        slow = wait.kind in ("busy", "sleep") or child_moved(child, case.evidence)
        if slow and not _endless(case, wait.path):
            continue
        what = f"{_child(child)} of rank {view.number} {doing(wait)}"
        if wait.kind == "lock" and forked(thread, child, view.rank):
            text = f"{what}: the lock was held by a thread of the parent when it was forked, and has no owner here. "
            return Verdict(True, "fork-with-lock-held", (view.number,), _cap(text) + _rest(case.waiting), "high", rests)
        if wait.kind == "idle" and forked(thread, child, view.rank) and _in_futex(child):
            text = f"{what}: native code that waits for threads, which a fork does not copy (tokenizers, OpenMP). "
            return Verdict(
                True, "fork-after-threads", (view.number,), _cap(text) + _rest(case.waiting), "medium", rests
            )
        if loads:
            text = f"{what} and does not move; rank {view.number} {doing(view.wait)}. {_rest(case.waiting)}"
            return Verdict(True, "dataloader-worker", (view.number,), _cap(text), "medium", rests)
    dead = [child for child in workers if child["state"] in "ZX"]
    if loads and (dead or not workers):
        text = f"a DataLoader worker of rank {view.number} has ended; rank {view.number} {doing(view.wait)}. "
        return Verdict(
            True, "dataloader-worker", (view.number,), _cap(text) + _rest(case.waiting), "medium", ("process state",)
        )
    return None


def _in_futex(child: Child) -> bool:
    """Whether a child waits for a thread, and not for a file, a pipe or the network, as far as the kernel says."""
    places = [sample.get("wchan", "") for sample in child["samples"]]
    return child["state"] == "S" and all("futex" in where or where in ("", "0") for where in places)


def _writes(case: Case, child: Child) -> bool:
    """Whether a child waits to write into a pipe."""
    for sample in child["samples"]:
        if any(place in sample.get("wchan", "") for place in ("pipe_write", "sock_alloc_send")):
            return True
        for thread in sample["threads"]:
            names = [frame["name"].rpartition(".")[2] for frame in thread["frames"][:4]]
            if "_send" in names and any("connection.py" in frame["file"] for frame in thread["frames"][:4]):
                return True
    return False


def _wchan(view: View) -> str:
    return view.rank["samples"][-1].get("wchan", "") if view.rank["samples"] else ""


def _top(thread: Thread) -> tuple[str, int]:
    return (thread["frames"][0]["file"], thread["frames"][0]["line"]) if thread["frames"] else ("", 0)


def _site(frame: Frame) -> str:
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['name']}"


def _child(child: Child) -> str:
    word = {"dataloader": "DataLoader worker", "multiprocessing": "child process"}.get(child["kind"], "child")
    return f"{word} {child['pid']}"


def _rest(found: list[View]) -> str:
    return sentence(crowd(found)) if found else ""


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]
