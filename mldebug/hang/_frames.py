"""From frames to meaning: what a thread waits for, in which group, and from which line of the program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mldebug.hang._source import is_library

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child, Evidence, Frame, Rank, Source, Thread

COLLECTIVES = {
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_gather_coalesced", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object", "scatter", "scatter_object_list", "barrier",
    "monitored_barrier", "batch_isend_irecv", "send", "recv", "isend", "irecv", "send_object_list",
    "recv_object_list", "all_gather_single", "_all_gather_base", "_reduce_scatter_base", "permute_tensor",
}  # fmt: skip
# Python functions whose collective is in C++ below them, and what it is.
_INSIDE = {
    "_sync_module_states": "broadcast",
    "_sync_params_and_buffers": "broadcast",
    "_sync_buffers": "broadcast",
    "_distributed_broadcast_coalesced": "broadcast",
    "_verify_param_shape_across_processes": "all_gather",
    "_verify_params_across_processes": "all_gather",
    "wait_tensor": "wait",
    "trigger_wait": "wait",
}
_GROUP_MAKERS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"}
_INITS = {"init_process_group", "_store_based_barrier", "rendezvous", "_create_c10d_store"}
_DISTRIBUTED = "torch/distributed/"
_BACKWARD = {"_engine_run_backward", "backward", "run_backward"}
_POINTER = re.compile(r"ProcessGroup\w* at (0x[0-9a-f]+)")
_ADDRESS = re.compile(r"(?:Tensor|Work|Options) at (0x[0-9a-f]+)")
_PEER = {"recv": "src", "irecv": "src", "send": "dst", "isend": "dst", "recv_object_list": "src"}
_CALLBACKS = {"__del__", "_run_exitfuncs", "_exitfunc", "finalize.__call__", "_run_finalizers"}

# Below these frames of a forked child stands what its parent did when it forked, or only the machinery of threads.
_BOTTOM = ("_bootstrap", "_bootstrap_inner", "BaseProcess._bootstrap", "spawn_main")


@dataclass(frozen=True)
class Wait:
    """What a thread does at the innermost: `kind` says what sort of wait, `site` is the innermost line of the program.

    kind: collective, p2p, init, new-group, dataloader, flock, lock, event, queue, join, subprocess, pipe, sleep, poll,
    shutdown (the main thread has ended), store, backward, busy, idle; call: no wait, but a call of the record
    """

    kind: str
    op: str = ""  # all_reduce, recv, ...
    group: str = ""  # "" is the default group; else the name that the program has for it
    peer: int | None = None  # of send and recv
    site: Frame | None = None
    path: tuple[tuple[str, str, int], ...] = ()  # (file, function, line) of the program, outermost first
    ints: tuple[tuple[str, str, int], ...] = ()  # (function, name, value) of integer locals of the program
    callback: str = ""  # a destructor or exit handler that it was called from
    through: tuple[tuple[str, str, int], ...] = ()  # the library frames from there to the call, outermost first
    objects: str = ""  # addresses of the objects in the frames: another call has others

    @property
    def communicates(self) -> bool:
        """Whether it waits for other ranks."""
        return self.kind in COMMUNICATION


COMMUNICATION = ("collective", "p2p", "backward", "new-group", "init")


def way(wait: Wait) -> tuple[tuple[str, str, int], ...]:
    """All frames from the outermost to the call."""
    return wait.path + wait.through


def main_thread(threads: list[Thread]) -> Thread | None:
    for thread in threads:
        if thread["name"] == "MainThread":
            return thread
    for thread in threads:
        if thread["frames"] and thread["frames"][-1]["name"] == "<module>":
            return thread
    return None


def own_frames(thread: Thread) -> list[Frame]:
    """The frames of a thread without what a forked child inherited from its parent."""
    frames = thread["frames"]
    for index, frame in enumerate(frames):
        if frame["name"].endswith(("_bootstrap", "spawn_main")):
            return frames[: index + 1]
    return frames


def forked(thread: Thread, child: Child, parent: Rank) -> bool:
    """Whether a child was forked, not started anew: its stack goes on in its parent's, or its command is the same."""
    same = child["command"] == parent["command"] and bool(child["command"])
    return same or any("popen_fork" in frame["file"] for frame in thread["frames"])


def source_of(evidence: Evidence, frame: Frame) -> Source | None:
    return evidence.get("source", {}).get(f"{frame['file']}:{frame['line']}")


def read(thread: Thread, evidence: Evidence) -> Wait:
    """What a thread waits for."""
    frames = own_frames(thread)
    users = [frame for frame in frames if not is_library(frame["file"])]
    kind, op, frame = _kind(frames, users, thread, evidence)
    path = tuple((user["file"], _plain(user["name"]), user["line"]) for user in reversed(users))
    group, peer, pointers = "", None, ""
    if kind in ("collective", "p2p", "backward"):
        pointers = _pointers(frames)
    if kind in ("collective", "p2p", "new-group"):
        group = _new_group(frames) if kind == "new-group" else _group(frames)
    if kind == "p2p" and frame is not None:
        peer = _peer(op, frames)
    site = users[0] if users else None
    return Wait(
        kind,
        op,
        group,
        peer,
        site,
        path,
        _ints(users),
        _callback(frames, thread),
        _through(frames, site, frame) if kind in ("collective", "p2p", "backward") else (),
        pointers,
    )


def _through(frames: list[Frame], site: Frame | None, call: Frame | None) -> tuple[tuple[str, str, int], ...]:
    """The way from the program's line to the call, as a framework goes to it: train or validate, say."""
    if call is None:
        return ()
    end = next((index for index, frame in enumerate(frames) if frame is site), len(frames))
    start = next((index for index, frame in enumerate(frames) if frame is call), end)
    return tuple((frame["file"], _plain(frame["name"]), frame["line"]) for frame in frames[start + 1 : end][::-1])


def _kind(frames: list[Frame], users: list[Frame], thread: Thread, evidence: Evidence) -> tuple[str, str, Frame | None]:
    """Kind and operation, by the outermost call below the program's own innermost line."""
    if not frames:
        return "idle", "", None
    names = [_plain(frame["name"]) for frame in frames]
    # The call nearest to the program is what the program asked for: barrier, and not the all_reduce inside it.
    inner = frames.index(users[0]) if users else len(frames)
    library = list(zip(names[:inner], frames[:inner], strict=True))[::-1]
    for name, frame in library:
        if _DISTRIBUTED in frame["file"] or "c10d" in frame["file"]:
            if name in _GROUP_MAKERS:
                return "new-group", name, frame
            if name in _INITS:
                return "init", "init_process_group", frame
            if name == "destroy_process_group":
                return "collective", name, frame
            if name in COLLECTIVES:
                return ("p2p" if name in _PEER else "collective"), name, frame
        if name in _INSIDE and "/torch/" in frame["file"]:
            return "collective", _INSIDE[name], frame
    for name, frame in library:
        file = frame["file"]
        if "torch/utils/data/dataloader" in file and name in ("_try_get_data", "_get_data", "_shutdown_workers"):
            return "dataloader", name, frame
        if name in ("_engine_run_backward", "run_backward") and "torch/autograd" in file:
            return ("busy" if thread["active"] else "backward"), "backward", frame
        if any(part in file for part in ("filelock/", "portalocker/", "fasteners/", "torch/utils/file_baton.py")):
            return "flock", name, frame
        if "subprocess.py" in file and name in ("wait", "_wait", "communicate", "_communicate", "_try_wait", "run"):
            return "subprocess", name, frame
        if "multiprocessing/" in file:
            if name in ("join", "wait", "poll") and ("process.py" in file or "popen_" in file):
                return "join", name, frame
            if name in ("get", "put") and "queues.py" in file:
                return "queue", name, frame
            if name in ("recv", "recv_bytes", "send", "send_bytes", "_send", "_recv") and "connection.py" in file:
                return "pipe", name, frame
            if name in ("_exit_function", "_finalize_join", "_join_exited_workers"):
                return "join", name, frame
        if file.endswith(("threading.py", "concurrent/futures/thread.py")) and name in ("_shutdown", "_python_exit"):
            return "shutdown", name, frame
    if not users and any(name in ("_shutdown", "_python_exit") for name in names):
        return "shutdown", "_shutdown", frames[-1]
    if library and not thread["active"]:  # in C++ below: DistributedDataParallel sends its buckets, say
        name, frame = library[-1]
        if "/torch/nn/parallel/distributed.py" in frame["file"]:
            return "collective", "broadcast", frame
        if "/torch/distributed/" in frame["file"] and "/elastic/" not in frame["file"]:
            return "collective", name, frame
    return _plain_wait(library, users, thread, evidence)


def _plain_wait(
    library: list[tuple[str, Frame]], users: list[Frame], thread: Thread, evidence: Evidence
) -> tuple[str, str, Frame | None]:
    """Waits of Python itself, by the innermost frames or the text of the line."""
    if library and _takes_lock(*library[-1]):
        return "lock", *library[-1]
    for name, frame in library:
        if frame["file"].endswith("threading.py"):
            if name in ("join", "_wait_for_tstate_lock"):
                return "join", name, frame
            if name == "wait":
                return "event", name, frame
            if name in ("acquire", "__enter__"):
                return "lock", name, frame
        if frame["file"].endswith("queue.py") and name in ("get", "put"):
            return "queue", name, frame
        if frame["file"].endswith("socket.py") and name in ("accept", "recv", "recv_into", "readinto"):
            return "pipe", name, frame
    if not users or library:
        return ("busy" if thread["active"] else "idle"), "", None
    source = source_of(evidence, users[0])
    return _by_text(source["text"] if source else "", thread), "", users[0]


def _takes_lock(name: str, frame: Frame) -> bool:
    """Whether a frame of Python's own library waits for a lock and not for what the lock guards: in a queue, a log."""
    file = frame["file"]
    if file.endswith("logging/__init__.py"):
        return name in ("acquire", "_acquireLock", "handle", "flush")
    return name in ("acquire", "__enter__") and (file.endswith("threading.py") or "importlib._bootstrap" in file)


_TEXTS = (
    ("flock", re.compile(r"\b(flock|lockf)\(")),
    ("sleep", re.compile(r"\bsleep\(")),
    ("lock", re.compile(r"(^with\s.*(lock|mutex|sem|cond)|\.acquire\()", re.IGNORECASE)),
    ("subprocess", re.compile(r"(\bwaitpid\(|\bos\.wait\(|\.communicate\()")),
    ("pipe", re.compile(r"(\bos\.(read|write)\(|\.read\(|\.readline\(|\.recv\(|\.send\(|\.write\(|\.flush\()")),
    ("store", re.compile(r"\bstore\.(get|wait|set|add)\(")),
    ("queue", re.compile(r"\.(get|put)\(")),
    ("collective", re.compile(r"\.wait\(")),
)


def _by_text(text: str, thread: Thread) -> str:
    if thread["active"]:
        return "busy"
    return next((kind for kind, pattern in _TEXTS if pattern.search(text)), "idle")


@lru_cache(maxsize=8192)
def _plain(name: str) -> str:
    return name.rpartition("<locals>.")[2].rpartition(".")[2] or name


def _locals(frame: Frame) -> dict[str, str]:
    found = frame.get("locals")
    return {local["name"]: local["repr"] for local in found} if found else {}


def _group(frames: list[Frame]) -> str:
    """The program's name of the group: `a`, `groups[1]`; "" for the default group."""
    pointer = None
    for frame in frames:
        if frame["file"].endswith("c10d_logger.py"):
            values = _locals(frame)
            found = _POINTER.search(values.get("kwargs", "") + values.get("args", ""))
            pointer = found.group(1) if found else None
            if pointer is None:
                return ""
            break
    else:
        return ""
    name = "another group"
    for frame in frames:  # the outermost name wins: nearest to where the group was made
        if is_library(frame["file"]):
            continue
        found_in = {
            variable: pointers.index(pointer) if text.startswith(("[", "(", "{")) else -1
            for variable, text in _locals(frame).items()
            if pointer in (pointers := _POINTER.findall(text))
        }
        for variable, index in sorted(found_in.items(), key=lambda item: item[1] < 0):  # a name of its own is better
            name = variable if index < 0 else f"{variable}[{index}]"
    return name


def _new_group(frames: list[Frame]) -> str:
    """The name that a group in the making has in the store; the ranks have to agree on it."""
    for frame in frames:
        name = _locals(frame).get("group_name", "").strip("'\"")
        if name not in ("", "None"):
            return name
    return ""


def members_to_be(thread: Thread) -> tuple[int, ...]:
    """The ranks that a call of new_group names; () where it names none."""
    for frame in thread["frames"]:
        if _plain(frame["name"]) in _GROUP_MAKERS or _plain(frame["name"]) == "_new_group_with_tag":
            text = _locals(frame).get("ranks", "")
            if re.fullmatch(r"\[[\d, ]+\]", text):
                return tuple(int(word) for word in re.findall(r"\d+", text))
    return ()


def _peer(op: str, frames: list[Frame]) -> int | None:
    for frame in frames:
        if _plain(frame["name"]) == op:
            values = _locals(frame)
            for key in (_PEER[op], f"group_{_PEER[op]}"):
                if values.get(key, "").lstrip("-").isdecimal():
                    return int(values[key])
    return None


def _ints(users: list[Frame]) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (_plain(frame["name"]), name, int(text))
        for frame in users
        for name, text in _locals(frame).items()
        if re.fullmatch(r"-?\d{1,18}", text)
    )


def _pointers(frames: list[Frame]) -> str:
    texts = " ".join(local["repr"] for frame in frames if "locals" in frame for local in frame["locals"])
    return " ".join(_ADDRESS.findall(texts))


def _callback(frames: list[Frame], thread: Thread) -> str:
    """The destructor or exit handler under which the thread stands."""
    bottom = frames[-1] if frames and thread["name"] == "MainThread" else None
    if bottom is not None and not is_library(bottom["file"]) and bottom["name"] != "<module>":
        return "an exit handler"  # no code of the program is left below it
    for frame in frames:
        name = _plain(frame["name"])
        if name in _CALLBACKS or (name == "__call__" and frame["file"].endswith("weakref.py")):
            return name
    return ""
