"""DoctorReport: the table of what is bad, what is doubtful, what is well, and what could not be seen."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mldebug.cluster.health._finding import LEVELS, Finding
from mldebug.core.cpus import cpu_list
from mldebug.core.hosts import fold_hosts
from mldebug.core.report import Report, jsonable, paint

_LABELS = {"bad": "BAD", "warn": "warn", "ok": "ok", "unseen": "-"}
_COLORS = {"bad": "\x1b[1;31m", "warn": "\x1b[33m", "ok": "\x1b[32m", "unseen": "\x1b[2m"}


@dataclass(frozen=True)
class DoctorReport(Report):
    """What doctor found. `ok` is True where nothing is bad.

        report = doctor(); report.ok or print(report.findings[0].says)

    - `findings`: the bad ones first; each has `level` ("bad", "warn", "ok", or "unseen": it could not look), `check`,
      `says` (with figures and their units), `hint` (what to do), `where` ("GPU 3", "" for the node) and `hosts`
    - `counts`: how many there are of each level
    - `evidence`: what they rest on, plain JSON: `nodes`, one for each host
    """

    findings: tuple[Finding, ...]
    evidence: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether nothing is bad; what is doubtful, or could not be seen, does not count."""
        return not any(one.level == "bad" for one in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each level."""
        counts = Counter(one.level for one in self.findings)
        return {level: counts[level] for level in LEVELS}

    def to_dict(self) -> dict[str, Any]:
        """`schema`, `ok`, `counts`, `culprits` (the bad ones: hosts, where, reason), `findings`, `evidence`."""
        culprits = [
            {"hosts": one.hosts, "where": one.where, "check": one.check, "reason": one.says}
            for one in self.findings
            if one.level == "bad"
        ]
        return {
            "schema": self.schema, "ok": self.ok, "counts": self.counts, "culprits": jsonable(culprits),
            "findings": jsonable(self.findings), "evidence": jsonable(self.evidence),
        }  # fmt: skip

    def text(self, color: bool = False, width: int = 80) -> str:
        """The table, in lines of at most `width` columns."""
        hosts = [_clean(str(node.get("host", "?"))) for node in self.evidence.get("nodes", ())]
        counts = self.counts
        words = {"bad": "bad", "warn": "to look at", "ok": "ok", "unseen": "not visible"}
        shown = ", ".join(f"{counts[level]} {word}" for level, word in words.items())
        head = f"{fold_hosts(hosts) or 'no node'}: {shown}"
        lines = [*textwrap.wrap(head, width), *(f"note: {_clean(note)}" for note in self.evidence.get("notes", ())), ""]
        column = max((len(one.check) for one in self.findings), default=0) + 2
        everybody = set(hosts)
        for one in _shortened(_folded(self.findings)) if len(hosts) > 1 else _folded(self.findings):
            lines += self._lines(one, column, width, everybody, color)
        text = "\n".join(lines).rstrip()
        return text

    def _lines(self, one: Finding, column: int, width: int, everybody: set[str], color: bool) -> list[str]:
        label = f"{_LABELS[one.level]:<6}"
        says = one.says
        places = [] if len(everybody) < 2 or set(one.hosts) == everybody else [fold_hosts(one.hosts)]
        if one.where:
            places.append(one.where)
        if places:
            says = f"{' '.join(places)}: {says}"
        indent = " " * (6 + column)
        rows = textwrap.wrap(
            f"{label}{one.check:<{column}}{says}", max(width, 50), subsequent_indent=indent, break_long_words=False
        )
        if color:
            rows[0] = _COLORS[one.level] + rows[0][:6] + "\x1b[0m" + rows[0][6:]
        if one.hint:
            hint = "\n".join(
                textwrap.wrap(
                    f"hint: {one.hint}", max(width, 50) - len(indent), break_long_words=False, break_on_hyphens=False
                )
            )
            hint = paint(hint) if color else hint
            rows += [indent + row for row in hint.splitlines()]
        return rows


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """For people: the same of several GPUs on one line, "GPU 0-7"; `-i 3` of a hint names all of them."""
    groups: dict[Finding, list[int]] = {}
    for one in findings:
        match = _GPU.fullmatch(one.where)
        number = [int(match.group(1))] if match else []
        alike = replace(one, where="GPU", hint=_INDEX.sub("-i N", one.hint)) if match else one
        groups.setdefault(alike, []).extend(number)
    folded = []
    for one, numbers in groups.items():
        if numbers:
            listed = ",".join(map(str, sorted(set(numbers))))
            one = replace(one, where=f"GPU {cpu_list(numbers)}", hint=one.hint.replace("-i N", f"-i {listed}"))
        folded.append(one)
    return folded


def _shortened(findings: Iterable[Finding]) -> list[Finding]:
    """For people, over many nodes: of what is well one line for each check, of troubles with one hint a few."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.level, one.check, one.hint if one.level in ("bad", "warn") else ""), []).append(one)
    shortened = []
    for (level, _, _), group in groups.items():
        if level in ("ok", "unseen"):
            more = f" (and {len(group) - 1} alike)" if len(group) > 1 else ""
            shortened.append(replace(group[0], says=group[0].says + more, where="", hosts=_hosts(group)))
            continue
        shown, rest = (group, []) if len(group) <= _SHOWN + 1 else (group[:_SHOWN], group[_SHOWN:])
        shortened += shown
        if rest:
            says = f"{len(rest)} more like these"
            shortened.append(replace(rest[0], says=says, where="", hosts=_hosts(rest)))
    return shortened


def _hosts(group: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for one in group for host in one.hosts))


_SHOWN = 3  # troubles with the same hint that are shown
_GPU = re.compile(r"GPU (\d+)")
_INDEX = re.compile(r"-i \d+\b")


def gather(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same finding on many nodes becomes one, the bad ones first; signs that a terminal would obey are escaped."""
    hosts: dict[Finding, list[str]] = {}
    for one in findings:
        bare = replace(
            one, hosts=(), **{name: _clean(getattr(one, name)) for name in ("check", "says", "hint", "where")}
        )
        kept = hosts.setdefault(bare, [])
        kept += [host for host in map(_clean, one.hosts) if host not in kept]
    merged = [replace(one, hosts=tuple(names)) for one, names in hosts.items()]
    return tuple(sorted(merged, key=lambda one: LEVELS.index(one.level)))


def _clean(text: str) -> str:
    text = " ".join(str(text).split())
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)[:600]
