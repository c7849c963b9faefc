"""The evidence of one node as it is sent: small, since most ranks of a node stand at the same few places.

    {"wire": 1, "host": "node17", "id": "...", "time": ...,
     "texts": [...],                    every string, once
     "spots": [[name, file, line]],     every line of a stack, once (numbers of texts)
     "stacks": [[spot, ...]],           every distinct stack, once
     "locals": [[name, repr, arg]], "sets": [[local, ...]],
     "traces": [[stack, [set, ...]]],   a stack, and which set of local variables each of its frames has (-1: none)
     "ranks": [...], "source": {...}, "notes": [...]}

A thread names its trace, which is mostly the same in all samples. `Decoder` makes evidence of it again and shares what
is equal between all nodes, so ten thousand ranks take little more memory than their differences. Nothing in a document
is believed: each value is checked, and signs that a terminal would obey are escaped.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

from mldebug.hang._remote_shape import CHILD, GROUPS, RANK, SAMPLE, SOURCE, THREAD, Unreadable, cut, fit

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence, Frame, Thread

WIRE = 1
_DEEPEST = 1000  # frames of a stack that are sent: half of them innermost


def encode(evidence: Evidence, calls: int) -> dict[str, Any]:
    """The evidence of this node; of the record of collectives the last `calls` of each rank."""
    return _Encoder(calls).document(evidence)


def identity() -> str:
    """What two names of the same machine share."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot = stream.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"
    except OSError:
        return socket.gethostname()


class _Table:
    """Numbers for things, counted as they come."""

    def __init__(self) -> None:
        self.rows: dict[Hashable, int] = {}

    def __call__(self, row: Hashable) -> int:
        return self.rows.setdefault(row, len(self.rows))


class _Encoder:
    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.texts, self.spots, self.stacks, self.locals, self.sets, self.traces = (_Table() for _ in range(6))

    def document(self, evidence: Evidence) -> dict[str, Any]:
        ranks = [self._process(cast("dict[str, Any]", rank), RANK) for rank in evidence["ranks"]]
        return {
            "wire": WIRE,
            "host": evidence["hosts"][0]["host"],
            "id": identity(),
            "time": evidence["time"],
            "ranks": ranks,
            "texts": list(self.texts.rows),
            "spots": list(self.spots.rows),
            "stacks": list(self.stacks.rows),
            "locals": list(self.locals.rows),
            "sets": list(self.sets.rows),
            "traces": list(self.traces.rows),
            # As text: most nodes say the same of a line, and it is read only once.
            "source": {place: json.dumps(source) for place, source in evidence.get("source", {}).items()},
            "notes": evidence["notes"],
        }

    def _process(self, process: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
        sent = cut(process, shape)
        sent["samples"] = [self._sample(sample) for sample in process["samples"]]
        if process.get("children"):
            sent["children"] = [self._process(child, CHILD) for child in process["children"]]
        if process.get("native"):
            sent["native"] = [self._thread(thread) for thread in process["native"]]
        if "record" in process:
            sent["record"] = self._record(process["record"])
        return sent

    def _sample(self, sample: dict[str, Any]) -> list[Any]:
        threads = [self._thread(thread) for thread in sample["threads"]]
        wchan = self.texts(sample.get("wchan", ""))
        return [sample["time"], sample["state"], sample["ticks"], wchan, threads, cut(sample, SAMPLE)]

    def _thread(self, thread: dict[str, Any]) -> list[Any]:
        flags = int(thread["active"]) + 2 * int(thread["gil"])
        trace, ticks = self._trace(thread["frames"]), thread.get("ticks", -1)
        return [self.texts(thread["name"]), thread["tid"], flags, ticks, trace, cut(thread, THREAD)]

    def _trace(self, frames: list[dict[str, Any]]) -> int:
        if len(frames) > _DEEPEST:
            frames = frames[: _DEEPEST // 2] + frames[-_DEEPEST // 2 :]
        spots = tuple(
            self.spots((self.texts(frame["name"]), self.texts(frame["file"]), frame["line"])) for frame in frames
        )
        sets = [self._set(frame.get("locals") or ()) for frame in frames]
        while sets and sets[-1] < 0:
            sets.pop()
        return self.traces((self.stacks(spots), tuple(sets)))

    def _set(self, found: Any) -> int:
        if not found:
            return -1
        row = tuple(self.locals((self.texts(x["name"]), self.texts(x["repr"]), int(x["arg"]))) for x in found)
        return self.sets(row)

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        calls = record["calls"][-self.calls :] if self.calls else []
        rows = []
        for call in calls:
            trace = self._trace(call["frames"]) if call.get("frames") else -1
            flags = int(call["done"]) + 2 * int(call.get("p2p", False))
            rows.append(
                [self.texts(call["group"]), call["seq"], self.texts(call["op"]), flags, call.get("sizes"), trace]
            )
        whole = record["whole"] and len(calls) == len(record["calls"])
        return {"calls": rows, "whole": whole, "groups": record.get("groups", {})}


class Decoder:
    """Makes evidence of the documents of many nodes, which share what is equal."""

    def __init__(self) -> None:
        self._frames: dict[Any, Frame] = {}
        self._stacks: dict[tuple[int, ...], list[Frame]] = {}
        self._locals: dict[tuple[str, str, bool], Any] = {}
        self._lists: dict[tuple[int, ...], list[Any]] = {}
        self._texts: dict[str, str] = {}
        self._source: dict[str, Any] = {}

    def evidence(self, name: str, document: Any) -> Evidence:
        """The evidence of the node that is called `name` here; raises Unreadable."""
        try:
            return _Reading(self, name, _mapping(document)).evidence()
        except Unreadable:
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as exc:
            raise Unreadable(f"{type(exc).__name__}: {str(exc)[:100]}") from exc

    def text(self, value: Any) -> str:
        if type(value) is not str:
            raise Unreadable(f"{str(value)[:40]!r} is no text")
        found = self._texts.get(value)
        if found is None:
            found = self._texts[value] = value if value.isprintable() else _escaped(value)
        return found

    def source(self, place: Any, text: Any) -> tuple[str, Any]:
        place = self.text(place)
        if place not in self._source:
            self._source[place] = fit(json.loads(text), SOURCE, self.text)
        return place, self._source[place]

    def local(self, name: str, text: str, arg: bool) -> Any:
        key = (name, text, arg)
        found = self._locals.get(key)
        if found is None:
            found = self._locals[key] = {"name": name, "repr": text, "arg": arg}
        return found

    def frame(self, name: str, file: str, line: int, variables: list[Any] | None) -> Frame:
        key = (name, file, line, id(variables))
        found = self._frames.get(key)
        if found is None:
            found = {"name": name, "file": file, "line": line}
            if variables is not None:
                found["locals"] = variables
            self._frames[key] = found
        return found

    def stack(self, frames: list[Frame]) -> list[Frame]:
        return self._stacks.setdefault(tuple(map(id, frames)), frames)

    def variables(self, found: list[Any]) -> list[Any]:
        return self._lists.setdefault(tuple(map(id, found)), found)


class _Reading:
    """One document on its way to evidence."""

    def __init__(self, shared: Decoder, name: str, document: dict[str, Any]) -> None:
        if document.get("wire") != WIRE:
            raise Unreadable(f"its layout is {str(document.get('wire'))[:20]}, and this version reads {WIRE}")
        self.shared, self.name, self.document = shared, name, document
        # Numbers of rows are used as they come: a wrong one finds another row of the same document, or none.
        self.texts = texts = [shared.text(one) for one in _list(document["texts"])]
        self.spots = [(texts[name], texts[file], _int(line)) for name, file, line in _list(document["spots"])]
        rows = [shared.local(texts[name], texts[value], bool(arg)) for name, value, arg in _list(document["locals"])]
        self.sets = [shared.variables([rows[one] for one in _list(row)]) for row in _list(document["sets"])]
        self.stacks: list[list[int]] = [_list(row) for row in _list(document["stacks"])]
        if any(len(row) > _DEEPEST for row in self.stacks):
            raise Unreadable("a stack is too deep")
        self.bare = [shared.stack([shared.frame(*self.spots[one], None) for one in row]) for row in self.stacks]
        self.left = 4_000_000  # frames that this document may have
        self.traces = [self.frames(stack, _list(sets)) for stack, sets in _list(document["traces"])]

    def evidence(self) -> Evidence:
        document, text = self.document, self.shared.text
        return {
            "schema": 1,
            "time": _number(document["time"]),
            "hosts": [{"host": self.name, "status": "ok"}],
            "ranks": [self.rank(_mapping(rank)) for rank in _list(document["ranks"])],
            "notes": [text(note)[:500] for note in _list(document["notes"])[:20]],
            "source": dict(self.shared.source(*item) for item in _mapping(document["source"]).items()),
        }

    def rank(self, raw: dict[str, Any]) -> Any:
        rank = fit(raw, RANK, self.shared.text)
        rank["host"] = self.name
        rank["samples"] = self.samples(raw)
        rank["children"] = [self.child(_mapping(child)) for child in _list(raw.get("children", []))]
        if not rank["samples"]:
            raise Unreadable("a rank has no sample")
        if "native" in raw:
            rank["native"] = [self.thread(_list(thread)) for thread in _list(raw["native"])]
        if "record" in raw:
            rank["record"] = self.record(_mapping(raw["record"]))
        return rank

    def child(self, raw: dict[str, Any]) -> dict[str, Any]:
        child: dict[str, Any] = fit(raw, CHILD, self.shared.text)
        child["samples"] = self.samples(raw)
        return child

    def samples(self, raw: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for time, state, ticks, wchan, threads, more in _list(raw["samples"]):
            sample = {"time": _number(time), "state": self.shared.text(state), "ticks": _int(ticks)}
            sample["threads"] = [self.thread(_list(thread)) for thread in _list(threads)]
            sample["wchan"] = self.texts[wchan]
            found.append({**sample, **fit(more, SAMPLE, self.shared.text)} if more else sample)
        return found

    def thread(self, row: list[Any]) -> Thread:
        name, tid, flags, ticks, trace, more = row
        thread: Thread = {
            "name": self.texts[name], "tid": _index(tid), "active": bool(_int(flags) & 1), "gil": bool(flags & 2),
            "frames": self.traces[trace],
        }  # fmt: skip
        if _int(ticks) >= 0:
            thread["ticks"] = ticks
        if more:
            thread.update(fit(more, THREAD, self.shared.text))
        return thread

    def frames(self, stack: int, sets: list[int]) -> list[Frame]:
        bare = self.bare[stack]
        if not sets:
            return bare
        self.left -= len(bare)
        if self.left < 0 or len(sets) > len(bare):
            raise Unreadable("it has too many frames")
        frames, spots = bare.copy(), self.stacks[stack]
        for position, number in enumerate(sets):
            if number >= 0:
                frames[position] = self.shared.frame(*self.spots[spots[position]], self.sets[number])
        return frames

    def record(self, raw: dict[str, Any]) -> dict[str, Any]:
        text = self.shared.text
        calls = []
        for group, seq, op, flags, sizes, trace in _list(raw["calls"]):
            call: dict[str, Any] = {
                "group": self.texts[group], "seq": _int(seq), "op": self.texts[op], "done": bool(_int(flags) & 1),
            }  # fmt: skip
            if flags & 2:
                call["p2p"] = True
            if sizes is not None:
                call["sizes"] = [[_int(one) for one in _list(size)] for size in _list(sizes)]
            if trace >= 0:
                call["frames"] = self.traces[trace]
            calls.append(call)
        groups = fit(raw.get("groups", {}), GROUPS, text)
        return {"calls": calls, "whole": bool(raw["whole"]), "groups": groups}


def _escaped(text: str) -> str:
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise Unreadable(f"{str(value)[:40]!r} is no object")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Unreadable(f"{str(value)[:40]!r} is no list")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Unreadable(f"{str(value)[:40]!r} is no whole number")
    return value


def _index(value: Any) -> int:
    if _int(value) < 0:
        raise Unreadable(f"{value} is below 0")
    return int(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e12:
        raise Unreadable(f"{str(value)[:40]!r} is no time")
    return float(value)
