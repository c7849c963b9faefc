"""What doctor finds: one line of its table, and the small helpers that the checks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

LEVELS = ("bad", "warn", "ok", "unseen")

Node = Mapping[str, Any]  # the evidence of one node, plain JSON
K = TypeVar("K")


@dataclass(frozen=True)
class Finding:
    """One result of a check. `level` is bad, warn, ok, or unseen: it could not look, and `says` has the reason.

    `where` is the part ("GPU 3", "mlx5_0 port 1", "rank 5"), "" for the node; `hosts` are all nodes it holds for.
    """

    level: str
    check: str
    says: str
    hint: str = ""
    where: str = ""
    hosts: tuple[str, ...] = ()


def bad(check: str, says: str, hint: str, where: str = "") -> Finding:
    return Finding("bad", check, says, hint, where)


def warn(check: str, says: str, hint: str, where: str = "") -> Finding:
    return Finding("warn", check, says, hint, where)


def fine(check: str, says: str, where: str = "") -> Finding:
    return Finding("ok", check, says, "", where)


def unseen(check: str, why: str, hint: str = "", where: str = "") -> Finding:
    return Finding("unseen", check, f"not visible here: {why}", hint, where)


def settle(check: str, troubles: Iterable[Finding], says: str) -> Iterator[Finding]:
    """The troubles of a check, or one line that all is well."""
    found = list(troubles)
    yield from found
    if not found and says:
        yield fine(check, says)


def part(node: Node, *names: str) -> Any:
    """A part of the evidence, None where it is missing."""
    found: Any = node
    for name in names:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def gpus(node: Node) -> list[Mapping[str, Any]]:
    """The GPUs that answered."""
    return [gpu for gpu in part(node, "gpu", "gpus") or [] if not gpu.get("fatal")]


def hidden(check: str, things: Sequence[Mapping[str, Any]], fact: str) -> Iterator[Finding]:
    """One line where none of these GPUs tells a fact."""
    reasons = Counter(str(thing.get("unseen", {}).get(fact, "")) for thing in things if fact not in thing)
    if things and sum(reasons.values()) == len(things):
        yield unseen(check, reasons.most_common(1)[0][0] or "it was not asked for")


def majority(values: Mapping[K, Hashable]) -> tuple[Any, list[K]]:
    """What more than half of them have, and who has something else; (None, []) where no value has a majority."""
    if not values:
        return None, []
    value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return None, []
    return value, [key for key, one in values.items() if one != value]


def by(things: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Any, list[Any]]:
    """Things in groups, in the order in which they come."""
    groups: dict[Any, list[Any]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def many(count: int, noun: str) -> str:
    """ "1 GPU", "8 GPUs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size(count: float) -> str:
    """Bytes for people: "64 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} {units[0]}" if count >= 10 or count == int(count) else f"{count:.1f} {units[0]}"


def ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
