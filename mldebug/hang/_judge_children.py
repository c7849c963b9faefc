"""Rules about what a rank waits for outside of all collectives: file locks, children, pipes; and whether it works."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mldebug.hang._frames import forked, read, source_of
from mldebug.hang._judge_case import Case, cap, crowd, doing, place, rest, verb
from mldebug.hang._judge_text import is_endless, is_loop, is_poll, long_sleep
from mldebug.hang._judge_views import View, child_moved, child_wait, guards_of
from mldebug.hang._verdict import Verdict
from mldebug.hang._watch_moves import stirred

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child


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
            if any(
                re.match(r"with .*lock|if .*acquire", guard, re.I) for guard in guards_of(case.evidence, view.wait.path)
            )
        ]
        rests = ("stacks", "program text")
    if not holders:
        culprits = tuple(view.number for view in wanting)
        text = f"{crowd(wanting)}; no rank of this job is seen to hold it. {rest(case.waiting)}"
        return Verdict(True, "unknown", culprits, cap(text), "low", ("stacks",))
    culprits = tuple(view.number for view in holders)
    if all(not view.communicates and may_go_on(case, view) for view in holders):
        text = f"slow, not hung: {verb(culprits, 'holds a file lock')}, and works: {crowd(holders)}; {crowd(wanting)}."
        return Verdict(False, "straggler", (), cap(text), "medium", rests)
    text = f"{verb(culprits, 'holds a file lock')}: {crowd(holders)}; {crowd(wanting)}."
    return Verdict(True, "lock-barrier-cycle", culprits, cap(text), "high" if wanted else "medium", rests)


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
        if view.wait.kind not in ("subprocess", "join", "pipe", "queue") and not view.polls:
            continue
        writers = [child for child in view.rank["children"] if _writes(case, child)]
        if writers:
            text = (
                f"rank {view.number} {doing(view.wait)}, while {name_child(writers[0])} waits to write into a full "
                f"pipe that nobody reads. {rest(case.waiting)}"
            )
            return Verdict(True, "pipe-deadlock", (view.number,), cap(text), "high", ("wait-for edges", "stacks"))
        if children_work(case, view):
            text = f"slow, not hung: rank {view.number} {doing(view.wait)}, which is at work. {rest(case.waiting)}"
            return Verdict(False, "straggler", (), cap(text), "medium", ("process state",))
        if any(place in _wchan(view) for place in ("pipe_write", "sock_alloc_send")):
            text = f"rank {view.number} waits to write into a full pipe at {place(view.wait)}. {rest(case.waiting)}"
            return Verdict(True, "pipe-deadlock", (view.number,), cap(text), "medium", ("process state",))
    return None


def may_go_on(case: Case, view: View) -> bool:
    """Whether a rank outside of all collectives may just be slow: it computes, or sleeps for a while."""
    text = ""
    if view.wait.site is not None:
        source = source_of(case.evidence, view.wait.site)
        text = source["text"] if source else ""
    if view.wait.kind == "sleep":
        return not long_sleep(text)
    if view.wait.kind in ("pipe", "idle") and not view.polls and stirred(view.rank["samples"]):
        return True  # data still comes
    if view.wait.kind == "dataloader" and _sleepers(case, view):
        return True
    threads = any(wait.kind == "busy" for _, wait in view.threads)
    if view.runs or view.wait.kind == "busy" or threads or children_work(case, view):
        return True
    return view.wait.kind in ("event", "lock", "queue", "join", "idle") and _threads_work(case, view)


def children_work(case: Case, view: View) -> bool:
    waits = view.wait.kind in ("subprocess", "join", "pipe", "queue")
    return any(_works(case, child) or (waits and _comes_and_goes(child, view)) for child in view.rank["children"])


def _comes_and_goes(child: Child, view: View) -> bool:
    """Whether a child was started or has ended between the looks, as those of a compiler do, or was seen running."""
    return len(child["samples"]) < len(view.rank["samples"]) or child["state"] == "R"


def _works(case: Case, child: Child) -> bool:
    """Whether a child is seen to get on, or sleeps for a time that it was told."""
    if child_moved(child, case.evidence):
        return True
    found = child_wait(child, case.evidence)
    if found is None and child["samples"] and "nanosleep" in child["samples"][-1].get("wchan", ""):
        return child["state"] not in "TtZX"
    return (found is None or found[0].kind in ("pipe", "idle")) and stirred(child["samples"])


def _threads_work(case: Case, view: View) -> bool:
    """Whether another thread of the program got on between the looks, and not just around a loop that asks."""
    samples = [sample for sample in view.rank["samples"] if sample["threads"]]
    if len(samples) < 2:
        return False
    before = {thread["tid"]: thread for thread in samples[0]["threads"] if thread["tid"]}
    for thread in samples[-1]["threads"]:
        old = before.get(thread["tid"])
        if thread["name"] == "MainThread" or old is None:
            continue
        then, now = read(old, case.evidence), read(thread, case.evidence)
        ticks = thread.get("ticks", 0) - old.get("ticks", 0)
        wakes = thread.get("switches", 0) - old.get("switches", 0)
        more = thread.get("io", 0) - old.get("io", 0)
        stirs = now.kind in ("pipe", "idle") and (wakes >= 2 or more > 0)
        moved = (then.path, then.ints) != (now.path, now.ints) or ticks > max(3, 5 * view.seconds) or stirs
        if now.path and moved and not _endless(case, now.path):
            return True
    return False


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
        slow = wait.kind in ("busy", "sleep") or _works(case, child)
        if slow and not _endless(case, wait.path):
            continue
        what = f"{name_child(child)} of rank {view.number} {doing(wait)}"
        if wait.kind == "lock" and forked(thread, child, view.rank):
            text = f"{what}: the lock was held by a thread of the parent when it was forked, and has no owner here. "
            return Verdict(True, "fork-with-lock-held", (view.number,), cap(text) + rest(case.waiting), "high", rests)
        if wait.kind == "idle" and forked(thread, child, view.rank) and _in_futex(child):
            text = f"{what}: native code that waits for threads, which a fork does not copy (tokenizers, OpenMP). "
            return Verdict(True, "fork-after-threads", (view.number,), cap(text) + rest(case.waiting), "medium", rests)
        if any("concurrent/futures/" in frame["file"] for frame in thread["frames"]) and _alone(child):
            text = f"{what}: for threads of a pool that was made before the fork, which does not copy them. "
            return Verdict(True, "fork-after-threads", (view.number,), cap(text) + rest(case.waiting), "high", rests)
        if loads:
            text = f"{what} and does not move; rank {view.number} {doing(view.wait)}. {rest(case.waiting)}"
            return Verdict(True, "dataloader-worker", (view.number,), cap(text), "medium", rests)
    dead = [child for child in workers if child["state"] in "ZX"]
    if loads and (dead or not workers):
        text = f"a DataLoader worker of rank {view.number} has ended; rank {view.number} {doing(view.wait)}. "
        return Verdict(
            True, "dataloader-worker", (view.number,), cap(text) + rest(case.waiting), "medium", ("process state",)
        )
    return None


def _alone(child: Child) -> bool:
    """Whether a child has one thread only, so that nobody in it can end what it waits for."""
    return all(len(sample["threads"]) <= 1 for sample in child["samples"])


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


def name_child(child: Child) -> str:
    word = {"dataloader": "DataLoader worker", "multiprocessing": "child process"}.get(child["kind"], "child")
    return f"{word} {child['pid']}"
