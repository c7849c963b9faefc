"""The Case that the rules share: views of the ranks, and sentences about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from mldebug.core.hosts import fold_hosts
from mldebug.hang._judge_groups import with_groups
from mldebug.hang._judge_views import View, views

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence
    from mldebug.hang._frames import Wait


@dataclass(frozen=True)
class Case:
    evidence: Evidence
    views: list[View]
    world: int  # how many ranks there should be; 0 where nobody says
    absent: tuple[int, ...]
    unseen: tuple[int, ...]  # ranks of nodes that nobody looked at

    @classmethod
    def of(cls, evidence: Evidence) -> Case:
        found = views(evidence)
        world = max((rank["world_size"] or 0 for rank in evidence["ranks"]), default=0)
        here = {view.number for view in found if view.rank["status"] != "gone"}
        away = set(range(world)) - here
        unseen = away & _other_nodes(evidence, found, world)
        shown = with_groups([view for view in found if view.number in here], world)
        return cls(evidence, shown, world, tuple(sorted(away - unseen)), tuple(sorted(unseen)))

    @property
    def seen(self) -> list[View]:
        """The ranks with a stack, or with a state that makes one needless."""
        return [view for view in self.views if view.waits or view.state in "TtZX"]

    @property
    def waiting(self) -> list[View]:
        return [view for view in self.seen if view.communicates]

    @property
    def outside(self) -> list[View]:
        """Ranks that wait for no other rank."""
        return [view for view in self.seen if not view.communicates]

    @property
    def silent(self) -> list[str]:
        """The nodes that were asked and did not answer."""
        return [host["host"] for host in self.evidence["hosts"] if host["status"] != "ok"]

    def missing_parts(self) -> list[str]:
        """Sentences about what was not seen."""
        hosts = self.silent
        blind = [view.number for view in self.views if not view.waits and view.state not in "TtZX"]
        sentences = []
        if self.unseen:
            sentences.append(f"{cap(name_ranks(self.unseen))} run on other nodes, which nobody looked at.")
        if hosts:
            sentences.append(f"No answer from {fold_hosts(hosts)}.")
        if blind:
            sentences.append(f"No stack of {name_ranks(blind)}.")
        return sentences


def _other_nodes(evidence: Evidence, found: list[View], world: int) -> set[int]:
    """The ranks that a launcher started on nodes that are not in the evidence: it numbers those of a node in a row."""
    sizes = {size for rank in evidence["ranks"] if (size := rank.get("local_world_size"))}
    if len(sizes) != 1:
        return set()
    size = sizes.pop()
    nodes = -(-world // size)
    if size >= world or len(evidence["hosts"]) >= nodes or any(host["status"] != "ok" for host in evidence["hosts"]):
        return set()
    looked = {view.number // size for view in found}
    return {number for number in range(world) if number // size not in looked}


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: `0-6,8-15`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def name_ranks(numbers: Iterable[int]) -> str:
    numbers = sorted(set(numbers))
    text = ranges(numbers)
    if text.count(",") > 7:
        text = f"{','.join(text.split(',')[:6])},... ({len(numbers)} ranks)"
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def place(wait: Wait) -> str:
    """`train.py:88 in train_step`."""
    if wait.site is None:
        return "outside the program's own code"
    return f"{PurePath(wait.site['file']).name}:{wait.site['line']} in {wait.site['name'].rpartition('.')[2]}"


def doing(wait: Wait) -> str:
    """`waits in all_reduce on group "a" at train.py:88 in train_step`."""
    at = f"at {place(wait)}" if wait.site else place(wait)
    group = f' on group "{wait.group}"' if wait.group else ""
    peer = f" {'from' if 'recv' in wait.op else 'to'} rank {wait.peer}" if wait.peer is not None else ""
    words = {
        "collective": f"waits in {wait.op or 'a collective'}{group} {at}",
        "p2p": f"waits in {wait.op}{peer} {at}",
        "backward": f"waits in backward() {at}",
        "init": f"waits in init_process_group {at}",
        "new-group": f"waits in {wait.op} {at}",
        "dataloader": f"waits for its DataLoader {at}",
        "flock": f"waits for a file lock {at}",
        "lock": f"waits for a lock {at}",
        "event": f"waits for an event {at}",
        "queue": f"waits at a queue {at}",
        "join": f"waits for a thread or process to end {at}",
        "subprocess": f"waits for a program it started {at}",
        "pipe": f"waits at a pipe or socket {at}",
        "sleep": f"sleeps {at}",
        "store": f"waits for a key in the store {at}",
        "shutdown": "waits at the end of the program for other threads",
        "busy": f"runs {at}",
        "call": f"called {wait.op}{group} {at}",
    }
    return words.get(wait.kind, f"stands {at}")


def verb(numbers: Iterable[int], sentence: str) -> str:
    """`rank 3 waits ...`, `ranks 0-2 wait ...`."""
    numbers = list(numbers)
    if len(numbers) != 1:
        first, _, rest = sentence.partition(" ")
        plural = {
            "has": "have",
            "is": "are",
            "holds": "hold",
            "asks": "ask",
            "makes": "make",
            "waits": "wait",
            "sleeps": "sleep",
            "runs": "run",
            "stands": "stand",
        }
        sentence = f"{plural.get(first, first)} {rest}"
    return f"{name_ranks(numbers)} {sentence}"


def crowd(found: list[View]) -> str:
    """What a set of ranks does, the largest part of it first."""
    parts: dict[str, list[int]] = {}
    for view in found:
        parts.setdefault(doing(view.wait), []).append(view.number)
    rows = sorted(parts.items(), key=lambda row: -len(row[1]))
    text = "; ".join(verb(numbers, what) for what, numbers in rows[:3])
    return f"{text}; others elsewhere" if len(rows) > 3 else text


def rest(found: list[View]) -> str:
    """A sentence on what other ranks do; "" where there is none."""
    return sentence(crowd(found)) if found else ""


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
