"""What has come back from the nodes of a job, and why from the others not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mldebug.core.hosts import fold_hosts
from mldebug.hang._evidence import merge_evidence
from mldebug.hang._remote_frames import Damaged, unpack
from mldebug.hang._remote_shape import Unreadable
from mldebug.hang._remote_wire import WIRE, Decoder

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence, Host

Progress = Callable[[int, int], None]  # nodes that have answered, nodes that were asked
INTERRUPTED = "interrupted: what had answered until then is judged"


class Trouble(NamedTuple):
    """Why a node gave nothing."""

    status: str  # unreachable, timeout, failed
    why: str  # the reason and the exact fix
    final: bool = False  # it has answered: to ask it in another way is of no use


class Sink(Protocol):
    """Where answers go: into a Gathering, or further up from a gateway."""

    names: Sequence[str]
    troubles: dict[str, Trouble]

    def take(self, name: str, packed: bytes) -> None: ...

    def fail(self, name: str, trouble: Trouble) -> None: ...

    def settled(self, name: str) -> bool: ...


class Gathering:
    """The near end of all calls: turns answers into evidence as they come."""

    def __init__(self, names: Sequence[str], progress: Progress | None = None) -> None:
        self.names = names
        self.progress = progress
        self.answers: dict[str, Evidence] = {}
        self.troubles: dict[str, Trouble] = {}
        self.interrupted = False
        self._decoder = Decoder()
        self._machines: dict[str, str] = {}
        self._same: list[str] = []

    def take(self, name: str, packed: bytes) -> None:
        if name in self.answers:
            return
        try:
            document = unpack(packed)
            if isinstance(document, dict) and "error" in document:
                self.fail(name, self._said(document))
                return
            evidence = self._decoder.evidence(name, document)
            machine = self._decoder.text(document["id"])
        except (Damaged, Unreadable, KeyError) as exc:
            reason = f"its answer is not the evidence of this version of mldebug: {exc}"
            self.fail(name, Trouble("failed", f"{reason}. Install the same version there", True))
            return
        first = self._machines.setdefault(machine, name)
        if first != name:
            evidence["ranks"] = []
            self._same.append(f"{first} and {name} are the same host: its ranks are counted once")
        self.answers[name] = evidence
        self.troubles.pop(name, None)
        self._tell()

    def _said(self, document: dict[str, Any]) -> Trouble:
        text = self._decoder.text
        if "status" in document and document.get("wire") == WIRE:  # a gateway on a host below it
            status = text(document["status"])
            return Trouble(status if status in ("unreachable", "timeout") else "failed", text(document["error"])[:600])
        hint = text(document.get("hint", ""))
        return Trouble("failed", f"{text(document['error'])[:400]}{f' ({hint[:300]})' if hint else ''}", True)

    def fail(self, name: str, trouble: Trouble) -> None:
        if name not in self.answers:
            self.troubles[name] = trouble
            self._tell()

    def settled(self, name: str) -> bool:
        """Whether there is no use in asking this node again."""
        return name in self.answers or (name in self.troubles and self.troubles[name].final)

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(len(self.answers), len(self.names))

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def evidence(self) -> Evidence:
        """All of it as one."""
        hosts: list[Host] = []
        by_note: dict[str, list[str]] = {}
        for name in self.names:
            trouble = self.troubles.get(name) or Trouble("timeout", "it was not asked to the end: no time was left")
            if name in self.answers:
                hosts.append({"host": name, "status": "ok"})
                for note in self.answers[name]["notes"]:
                    by_note.setdefault(note, []).append(name)
            else:
                hosts.append({"host": name, "status": trouble.status, "why": trouble.why})
        merged = merge_evidence({**answer, "hosts": [], "notes": []} for answer in self.answers.values())
        merged["hosts"] = hosts
        merged["notes"] = [INTERRUPTED] if self.interrupted else []
        merged["notes"] += self._same[:5] + self._one_job(merged)
        merged["notes"] += [f"{fold_hosts(names)}: {note}" for note, names in by_note.items()]
        return merged

    def _one_job(self, merged: Evidence) -> list[str]:
        """Keep the job that has most ranks; each node could choose only among its own."""
        counts = Counter(rank["job"] for rank in merged["ranks"])
        named = {job: count for job, count in counts.items() if not job.startswith("pid ")}
        if not named or len(counts) < 2:
            return []
        chosen = max(named, key=lambda job: named[job])
        others = [rank for rank in merged["ranks"] if rank["job"] != chosen]
        merged["ranks"] = [rank for rank in merged["ranks"] if rank["job"] == chosen]
        where = fold_hosts(dict.fromkeys(rank["host"] for rank in others))
        return [f"{len(others)} ranks of another job on {where} are left out: leave these hosts out, or look there"]


def unanswered(sink: Sink, names: Sequence[str]) -> list[str]:
    return [name for name in names if not sink.settled(name)]


def trouble_document(trouble: Trouble) -> dict[str, Any]:
    """What a gateway says of a host below it that it cannot get an answer from."""
    return cast("dict[str, Any]", {"wire": WIRE, "status": trouble.status, "error": trouble.why})
