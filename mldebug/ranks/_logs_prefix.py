"""Whose line is it: the prefixes that launchers put before the lines of ranks, and how a log is seen to have them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.ranks._logs_normal import STAMP

_DATE = rb"(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? )?"
# A host has a letter in it and is no source file: `[trainer.py:96]` is the mark of a logger.
_HOST = r"(?![\w.-]*\.(?:py|cpp|cc|cu|cuh|h|hpp|c|rs|go)\b)[\w.-]*[A-Za-z][\w.-]*"
_FIELDS = {
    "rank": r"\d{1,6}",
    "local": r"\d{1,6}",
    "host": _HOST,
    "pod": r"[\w.-]+",
    "node": r"node\d+",
    "worker": r"[^()\n]+ pid=\d+(?:, ip=[\d.]+)?",
}
_WORDS = re.compile(rb"(?i)^(?:\w*(?:error|warning|exception|interrupt)|info|debug|warn|note|hint|fatal|critical|https?"
                    rb"|(?:std)?(?:out|err)|file|usage|loss|epoch|step)$")  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A prefix as some launcher writes it; a `weak` one could be ordinary text, and counts where most lines have it."""

    name: str
    pattern: str  # a regular expression with <rank>, <local>, <host>, <pod> and <worker> in it
    weak: bool = False

    def compiled(self) -> re.Pattern[bytes]:
        return re.compile(_filled(self.pattern, named=True).encode())

    def plain(self) -> bytes:
        return _filled(self.pattern, named=False).encode()


FORMATS = (
    Format("[rank3]:", r"\[[Rr]ank ?<rank>\]:? ?"),
    Format("[1,3]<stdout>:", r"\[(?:[^\]\s,]*@)?\d+,<rank>\]<std(?:out|err|diag)>: ?"),
    Format("[default3]:", r"\[(?![Rr]ank\d)[A-Za-z_][A-Za-z_-]*<local>\]: ?"),
    Format("[host:3]", r"\[<host>:<rank>\] ?"),
    Format("[node0]", r"\[<node>\] ?"),  # of `mldebug emulate`
    Format("[pod/x-3/container]", r"\[pod/<pod>/[\w.-]+\] ?"),
    Format("(Worker pid=4711)", r"\(<worker>\) ?"),
    Format("[3]:", r"\[<rank>\]:? ?", weak=True),
    Format("3:", r" *<rank>:(?: |$)", weak=True),
    Format("host 3:", r"<host> <rank>:(?: |$)", weak=True),
    Format("host:", r"<host>:(?: |$)", weak=True),
)

# Lines that name their rank inside: the text stays as it is.
_INSIDE = re.compile(rb"(?:\[[^\]]*\] ?){0,4}\[(?:PG [^\]]*?)?[Rr]ank (?P<rank>\d+)\]"
                     rb"|(?P<host>[\w.-]+):\d+:\d+ \[(?P<local>\d+)\] NCCL ")  # fmt: skip


@dataclass(frozen=True)
class Who:
    """What a prefix says. `outer` is all of it but the rank: a host, a pod, a local rank of some node."""

    rank: int | None = None
    local: int | None = None
    outer: tuple[str, ...] = ()


class Prefixes:
    """The prefixes of one log: `match(line)` is a match whose group 1 is the prefix, `who(prefix)` what it says;
    `lines(data)` are prefix, time and rest of all lines."""

    def __init__(self, formats: Iterable[Format], outer_is_node: bool = False, dated: bool = True) -> None:
        self.formats = tuple(formats)
        self._outer_is_node = outer_is_node
        self._parts = [(one, one.compiled()) for one in self.formats]
        weak, strong = (_either(one for one in self.formats if one.weak is kind) for kind in (True, False))
        both = rb"(?:%b)(?:%b){0,2}|(?:%b){1,3}" % (weak, strong, strong)  # the weak one stands outermost
        self.match = re.compile((_DATE if dated else b"") + b"(" + both + b")").match
        self.stem = b""  # how a prefix of this log begins
        start = b"(?:" + _DATE + b"(?=" + both + b"))?" if dated else b""
        self.lines: Callable[[bytes], list[Any]] = re.compile(
            b"(?m)^" + start + b"((?:" + both + b")?)((?:" + STAMP.pattern + b")?)(.*)$"
        ).findall
        self.within = re.compile(rb"(?<=\S)(?:" + strong + b")(?=.)").search

    def who(self, prefix: bytes) -> Who:
        levels: list[tuple[Format, dict[str, bytes]]] = []
        at = 0
        while at < len(prefix):
            for one, pattern in self._parts:
                found = pattern.match(prefix, at)
                if found and found.end() > at and not (one.weak and at):
                    levels.append((one, found.groupdict()))
                    at = found.end()
                    break
            else:
                break
        rank = local = None
        outer: list[str] = []
        for number, (one, fields) in enumerate(levels):
            last = number == len(levels) - 1
            if "rank" in fields and not (one.weak and (self._outer_is_node or not last)):
                rank = int(fields["rank"])
                local = local if last else None
            elif "local" in fields:
                local = int(fields["local"])
            elif "rank" in fields:
                outer.append(fields["rank"].decode())
            outer += [fields[name].decode() for name in ("host", "node", "pod", "worker") if name in fields]
        return Who(rank, local, tuple(outer))


def inside(line: bytes) -> tuple[bytes, Who] | None:
    """Who wrote a line that names its rank inside, as loggers of torch, DeepSpeed and NCCL do, and a key for it."""
    if b"ank " not in line and b"] NCCL " not in line:
        return None
    found = _INSIDE.match(line)
    if found is None:
        return None
    if found["rank"] is not None:
        return b"rank " + found["rank"], Who(rank=int(found["rank"]))
    return found["host"] + b" " + found["local"], Who(local=int(found["local"]), outer=(found["host"].decode(),))


def recognise(sample: list[bytes]) -> Prefixes:
    """The prefixes that these lines of a log have."""
    lines = [line for line in sample if line.strip()]
    strong = [one for one in FORMATS if not one.weak]
    strong = [_spaced(one, lines) for one in strong]
    chosen = list(strong)
    node = False
    for one in FORMATS:
        if one.weak and len(lines) > 1 and (found := _mostly(lines, one)):
            node = _are_nodes(found, Prefixes(strong))
            if node or one.name == "host:" or len({int(hit["rank"]) for hit in found}) > 1:
                chosen.append(_spaced(one, lines))
                break  # one of these at most: `host:` would also match what `host 3:` does
    prefixes = Prefixes(chosen, outer_is_node=node)
    if not any((hit := prefixes.match(line)) and hit.start(1) > 0 for line in lines):
        prefixes = Prefixes(chosen, outer_is_node=node, dated=False)
    first = next((hit[1] for line in lines if (hit := prefixes.match(line))), b"")
    prefixes.stem = re.split(rb"\d", first)[0]
    return prefixes


def from_user(text: str) -> Prefixes:
    """The prefix that a user describes: a format such as `<{host}/{rank}> `, or a regular expression whose group `rank`
    (or first group) is the rank."""
    if "{rank}" in text or "{local_rank}" in text or "{host}" in text:
        pattern = re.escape(text)
        for name, field in (("rank", "rank"), ("local_rank", "local"), ("host", "host")):
            pattern = pattern.replace(re.escape("{" + name + "}"), f"<{field}>")
        return Prefixes([Format(text, pattern.rstrip("\\ ") + " ?")])
    try:
        own = re.compile(text)
    except re.error as exc:
        hint = "a regular expression with (?P<rank>\\d+) in it, or a format such as '[{host}:{rank}] '"
        raise UsageError(f"--prefix {text!r} is no regular expression: {exc}", hint) from exc
    if not own.groups:
        hint = "put the rank in a group: --prefix 'worker-(\\d+) \\| ', or write --prefix 'worker-{rank} | '"
        raise UsageError(f"--prefix {text!r} does not say where the rank is", hint)
    return _Own(own, text)


class _Own(Prefixes):
    """A user's own regular expression."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        super().__init__([])
        self.formats = (Format(text, ""),)
        self._groups = pattern.groupindex
        self._pattern = re.compile(text.encode(), pattern.flags & ~re.UNICODE)
        flags = pattern.flags & ~re.UNICODE
        self.match = re.compile(b"(" + text.encode() + b")", flags).match
        self.lines = self._lines

    def _lines(self, data: bytes) -> list[tuple[bytes, bytes, bytes]]:
        found = []
        for line in data.split(b"\n"):
            hit = self.match(line)
            found.append((hit[1], b"", line[hit.end() :]) if hit else (b"", b"", line))
        return found

    def who(self, prefix: bytes) -> Who:
        found = self._pattern.match(prefix)
        if found is None:
            return Who()
        fields = {name: value.decode("utf-8", "replace") for name, value in found.groupdict().items() if value}
        rank = fields.get("rank") or ("" if "host" in fields or "local_rank" in fields else (found[1] or b"").decode())
        local = fields.get("local_rank", "")
        host = (fields["host"],) if "host" in fields else ()
        return Who(int(rank) if rank.isdecimal() else None, int(local) if local.isdecimal() else None,
                   host if rank.isdecimal() or host or local else (rank,))  # fmt: skip


def _either(formats: Iterable[Format]) -> bytes:
    return b"|".join(b"(?:" + one.plain() + b")" for one in formats) or b"(?!)"


def _spaced(one: Format, lines: list[bytes]) -> Format:
    """The space behind a prefix belongs to it, unless it is followed by other things as well: then it is an indent."""
    if not one.pattern.endswith(" ?"):
        return one
    tight = Format(one.name, one.pattern[:-2], one.weak)
    match = tight.compiled().match
    followed = {line[hit.end() : hit.end() + 1] for line in lines if (hit := match(line))}
    return one if followed <= {b" ", b"", b"["} else tight  # torch writes `[rank3]: text` and `[rank3]:[E1128 ...`


def _filled(pattern: str, named: bool) -> str:
    for name, field in _FIELDS.items():
        pattern = pattern.replace(f"<{name}>", f"(?P<{name}>{field})" if named else field)
    return pattern


def _mostly(lines: list[bytes], one: Format) -> list[re.Match[bytes]]:
    """The matches of a weak prefix, if it is one: most lines have it, and what it says comes again and again."""
    match = one.compiled().match
    found = [hit for line in lines if (hit := match(line))]
    if len(found) < max(2, 0.6 * len(lines)):
        return []
    if one.name == "host:":
        hosts = {hit["host"] for hit in found}
        return found if len(hosts) * 2 <= len(found) and not any(_WORDS.match(host) for host in hosts) else []
    if one.name == "host 3:" and not all(re.search(rb"\d", hit["host"]) for hit in found):
        return []  # `Epoch 3:`
    numbers = [int(hit["rank"]) for hit in found]
    if numbers == sorted(numbers) and len(numbers) < 5 * len(set(numbers)):
        return []  # they count: items, steps, rows of a table
    return found


def _are_nodes(found: list[re.Match[bytes]], inner: Prefixes) -> bool:
    """Whether the numbers that srun puts in front are those of nodes: what comes then names other ranks."""
    for hit in found:
        within = inner.match(hit.string[hit.end() :])
        if within is not None and ("rank" not in hit.groupdict() or inner.who(within[1]).rank != int(hit["rank"])):
            return True
    return False


def ranks_of_names(paths: list[str]) -> list[int | None]:
    """The rank that each file name tells: `attempt_0/3/stderr.log`, `rank3.log`, or the number in which they differ.

    What the paths have in common says nothing: a folder may be called `rank0` for any reason.
    """
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [os.path.relpath(os.path.abspath(path), common) for path in paths]
    ranks = [_told_by(path, name) for path, name in zip(paths, names, strict=True)]
    if any(rank is not None for rank in ranks) or len(paths) == 1:
        return ranks
    shapes: dict[tuple[str, ...], list[int]] = {}
    for index, name in enumerate(names):
        shapes.setdefault(tuple(re.split(r"\d+", name)), []).append(index)
    for members in shapes.values():
        numbers = [re.findall(r"\d+", names[index]) for index in members]
        varying = [place for place in range(len(numbers[0])) if len({row[place] for row in numbers}) > 1]
        if varying and len({row[varying[-1]] for row in numbers}) == len(numbers):
            for index, row in zip(members, numbers, strict=True):
                ranks[index] = int(row[varying[-1]])
    return ranks


def _told_by(path: str, name: str) -> int | None:
    found = re.search(r"attempt_\d+[/\\](\d+)[/\\][^/\\]+$", path)
    found = found or re.search(r"(?i)rank[-_.]?(\d+)(?!.*rank[-_.]?\d)", name)
    return int(found[1]) if found else None
