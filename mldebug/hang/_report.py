"""SpyReport: the verdict, the merged tree and the state of each rank, for people and as JSON."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mldebug.core.hosts import fold_hosts
from mldebug.core.report import Report, jsonable, paint
from mldebug.hang._evidence import ALL_LOCALS, Evidence
from mldebug.hang._frames import own_frames, read
from mldebug.hang._judge_case import Case, name_ranks, place, ranges
from mldebug.hang._merge import Node, chains, merge_stacks
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._judge_views import View

Spot = tuple[str, str, int]  # file, function, line
_TREE, _TROUBLE, _CHILDREN, _NOTES, _LOCALS = 24, 8, 6, 4, 10  # the most lines of each part: 60 in all

_LINES = 59


@dataclass(frozen=True)
class SpyReport(Report):
    """What `spy()` found: `verdict`, and the `evidence` that it rests on.

    `ok` is true unless the job hangs; a job that is slow is ok. `text()` is under 60 lines at any number of ranks.

        report = spy()
        report.verdict.kind, report.verdict.culprits
    """

    verdict: Verdict
    evidence: Evidence
    since: str = ""  # what moved since an earlier report, from --diff

    @property
    def ok(self) -> bool:
        """Whether it does not hang. Where none of the nodes that were asked has answered, nobody knows."""
        return not self.verdict.hung and not self._unanswered

    @property
    def _unanswered(self) -> bool:
        hosts = self.evidence["hosts"]
        return bool(hosts) and all(host["status"] != "ok" for host in hosts)

    @property
    def headline(self) -> str:
        """The verdict in a few words: `hung: gil-held, rank 1`."""
        verdict = self.verdict
        words = "hung" if verdict.hung else "no node answered" if self._unanswered else "not hung"
        words += f": {verdict.kind}" if verdict.kind != "unknown" else ""
        return f"{words}, {name_ranks(verdict.culprits)}" if verdict.culprits else words

    @property
    def size(self) -> str:
        """What was looked at: `4 ranks on 1 host (pids 4711-4714 of alice on node7)`."""
        case = self._case
        here = len(case.views)
        total = f" of {case.world}" if case.world > here else ""
        hosts = {rank["host"] for rank in self.evidence["ranks"]}
        ranks = "ranks" if total or here != 1 else "rank"
        words = f"{here}{total} {ranks} on {len(hosts)} host{'s' if len(hosts) != 1 else ''}"
        if len(hosts) != 1:
            return words
        pids = ranges(rank["pid"] for rank in self.evidence["ranks"])
        pids = pids if len(pids) < 40 else f"{pids[:36].rpartition(',')[0]},..."
        users = sorted({user for rank in self.evidence["ranks"] if (user := rank.get("user"))})
        owner = f" of {', '.join(users[:3])}" if users else ""
        return f"{words} (pid{'s' if here != 1 else ''} {pids}{owner} on {hosts.pop()})"

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that should be there and have no process."""
        return self._case.absent

    @cached_property
    def _case(self) -> Case:
        return Case.of(self.evidence)

    def to_dict(self) -> dict[str, Any]:
        case = self._case
        document = {
            "schema": self.schema,
            "ok": self.ok,
            "verdict": {**jsonable(self.verdict), "hint": self.verdict.hint},
            "ranks": [*map(_entry, case.views), *map(_nameless, _unnumbered(self.evidence, case))],
            "absent": list(case.absent),
            "hosts": jsonable(self.evidence["hosts"]),
            "notes": list(self.evidence["notes"]),
        }
        if self.since:
            document["since"] = self.since
        return document

    def text(self, color: bool = False, width: int = 80) -> str:
        case = self._case
        lines = [
            *self._verdict_lines(width),
            "",
            *_wrapped(self.size, width, 2),
            *_tree_lines(case, self.verdict, width),
        ]
        if self.since:
            lines += ["", *_wrapped(self.since, width, 2)]
        lines += _child_lines(case, self.verdict, width)
        if ALL_LOCALS in self.evidence["notes"]:
            lines += _local_lines(case, self.verdict, width)
        lines += _trouble_lines(self.evidence, case, width)
        if len(lines) > _LINES:
            lines = [*lines[: _LINES - 1], "... (--json has all)"]
        text = "\n".join(lines)
        return paint(text) if color else text

    def _verdict_lines(self, width: int) -> list[str]:
        verdict = self.verdict
        rests = ", from ".join([f"sure: {verdict.sure}", *([", ".join(verdict.rests_on)] if verdict.rests_on else [])])
        lines = [*_wrapped(self.headline, width, 2), *_wrapped(verdict.text, width, 2)]
        shown = lines if len(lines) <= 11 else [*lines[:10], "  ..."]
        hint = _wrapped(f"hint: {verdict.hint}", width, 2) if verdict.hint else []
        return [*shown, *hint, *_wrapped(rests, width, 2)[:2]]


def _tree_lines(case: Case, verdict: Verdict, width: int) -> list[str]:
    """The merged tree of the program's own frames, outliers first."""
    stacks = [(view.number, spots(view)) for view in case.seen]
    rows = chains(merge_stacks(stacks), verdict.culprits)
    blocks: list[list[str]] = []
    for depth, node, run in rows:
        label = _label(node)
        steps = " > ".join(_spot(spot) for spot in run)
        indent = "  " * min(depth + 1, 6)
        hang = " " * (len(indent) + 2)
        blocks.append(
            textwrap.wrap(f"{label} {steps}", width, initial_indent=indent, subsequent_indent=hang) or [label]
        )
    shown: list[str] = []
    for index, block in enumerate(blocks):
        if len(shown) + len(block) > _TREE:
            shown.append(f"  ... and {len(blocks) - index} more places (--json has all)")
            break
        shown += block
    return shown


def _label(node: Node[Spot]) -> str:
    label = node.label
    if len(label) > 40:
        label = f"{label[:28].rpartition(',')[0]},... {len(node.ranks)} ranks]"
    return label


def spots(view: View) -> tuple[Spot, ...]:
    """The program's frames, and what the innermost one waits for."""
    wait = view.wait
    state = {"T": "stopped", "t": "traced", "Z": "zombie", "X": "dead"}.get(view.state, "")
    what = state or wait.op or wait.kind
    group = f" {wait.group}" if wait.group else ""
    return (*wait.path, ("", f"{what}{group}", 0))


def _spot(spot: Spot) -> str:
    file, function, line = spot
    return f"{function} {PurePath(file).name}:{line}" if file else function


def _child_lines(case: Case, verdict: Verdict, width: int) -> list[str]:
    """Children of the culprits that are stopped, dead or have a stack."""
    lines: list[str] = []
    for view in case.views:
        for child in view.rank["children"]:
            if view.number not in verdict.culprits and child["state"] not in "TtZX":
                continue
            at = ""
            if child["samples"] and child["samples"][-1]["threads"]:
                threads = child["samples"][-1]["threads"]
                thread = next((one for one in threads if one["name"] == "MainThread"), threads[0])
                if own_frames(thread):
                    at = f", {place(read(thread, case.evidence))}"
            state = {"T": "stopped", "t": "traced", "Z": "zombie", "X": "dead"}.get(child["state"], "")
            words = [f"rank {view.number}: {child['kind']} child {child['pid']}", *([state] if state else [])]
            lines.append(textwrap.shorten(f"  {', '.join(words)}{at}", width, placeholder="..."))
    return _capped("children", lines, _CHILDREN)


def _local_lines(case: Case, verdict: Verdict, width: int) -> list[str]:
    """The local variables where the culprits stand, or the first rank where there is none."""
    lines: list[str] = []
    chosen = [view for view in case.seen if view.number in verdict.culprits] or case.seen[:1]
    for view in chosen[:2]:
        if view.wait.site is not None:
            lines.append(f"rank {view.number} at {place(view.wait)}:")
            for local in view.wait.site.get("locals", []):
                text, most = " ".join(f"{local['name']} = {local['repr']}".split()), width - 4
                lines.append(text if len(text) <= most else f"{text[: most - 3]}...")
    shown = [line if line.startswith("rank ") else f"    {line}" for line in lines]
    return _capped("local variables", shown, _LOCALS)


def _trouble_lines(evidence: Evidence, case: Case, width: int) -> list[str]:
    """Hosts and ranks that could not be read, with the remedy, and the notes."""
    lines: list[str] = []
    silent: dict[tuple[str, str], list[str]] = {}
    for host in evidence["hosts"]:
        if host["status"] != "ok":  # the remedy names the host: equal ones are one, for any of them
            name = rf"(?<![\w.-]){re.escape(host['host'])}(?![\w.-])"
            silent.setdefault((host["status"], re.sub(name, "HOST", host.get("why", ""))), []).append(host["host"])
    for (status, why), hosts in sorted(silent.items(), key=lambda item: -len(item[1])):
        reason = why.replace("HOST", hosts[0]) if len(hosts) == 1 else why
        lines += _wrapped(f"{fold_hosts(hosts)}: host {status}: {reason}".rstrip(": "), width, 4)
    reasons: dict[str, list[str]] = {}
    for rank in evidence["ranks"]:
        if rank["status"] != "ok":
            who = str(rank["rank"]) if rank["rank"] is not None else f"pid {rank['pid']}"
            reasons.setdefault(f"{rank['status']}: {rank.get('why', '')}".rstrip(": "), []).append(who)
    for reason, them in reasons.items():
        names = ranges(map(int, them)) if all(one.isdecimal() for one in them) else ", ".join(them[:6])
        names = names if len(them) <= 6 or len(names) < 40 else f"{len(them)} of them"
        lines += _wrapped(f"{names}: {reason}", width, 4)
    for note in evidence["notes"][:_NOTES]:
        lines += _wrapped(note, width, 4)[:2]
    return _capped("could not be read, and notes", lines, _TROUBLE)


def _capped(title: str, lines: list[str], most: int) -> list[str]:
    if not lines:
        return []
    rest = len(lines) - most
    shown = [*lines[:most], *([f"  ... and {rest} more lines"] if rest > 0 else [])]
    return ["", title, *(line if line.startswith(" ") else f"  {line}" for line in shown)]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width - 2, subsequent_indent=" " * indent, break_on_hyphens=False)  # `ssh-add` is whole


def _entry(view: View) -> dict[str, Any]:
    wait = view.wait
    rank = view.rank
    return {
        "rank": view.number,
        "local_rank": rank["local_rank"],
        "pid": rank["pid"],
        "host": rank["host"],
        "status": rank["status"],
        "why": rank.get("why", ""),
        "state": rank["state"],
        "waits": wait.kind if view.waits else None,
        "op": wait.op,
        "group": wait.group,
        "file": wait.site["file"] if wait.site else None,
        "line": wait.site["line"] if wait.site else None,
        "function": wait.site["name"] if wait.site else None,
        "moved": view.moved,
        "children": [
            {"pid": child["pid"], "kind": child["kind"], "state": child["state"]} for child in rank["children"]
        ],
    }


def _unnumbered(evidence: Evidence, case: Case) -> list[Any]:
    known = {(view.rank["host"], view.rank["pid"]) for view in case.views}
    return [rank for rank in evidence["ranks"] if (rank["host"], rank["pid"]) not in known]


def _nameless(rank: Any) -> dict[str, Any]:
    keys = ("rank", "local_rank", "pid", "host", "status", "state")
    return {**{key: rank[key] for key in keys}, "why": rank.get("why", "")}
