"""Which group a rank waits in, as the record of collectives knows it: a program may call two groups by one name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldebug.hang._evidence import Call
    from mldebug.hang._judge_views import View


def with_groups(found: list[View], world: int) -> list[View]:
    """The views, with one name for each group of all ranks in which some wait, where the record tells the groups.

    Groups of some ranks keep the program's name: those of one dimension of a mesh are one thing to the program.
    """
    users: dict[str, int] = {}
    records = [record for view in found if (record := view.rank.get("record"))]
    for record in records:
        for used in {call["group"] for call in record["calls"]}:
            users[used] = users.get(used, 0) + 1
    everyone = {name for name, count in users.items() if count == len(records)}
    groups = {view.number: name for view in found if (name := _group_of(view, world, everyone)) is not None}
    words: dict[str, Counter[str]] = {}
    for view in found:
        if view.number in groups:
            words.setdefault(groups[view.number], Counter())[view.wait.group] += 1
    names = {group: ("" if group == "0" else counts.most_common(1)[0][0]) for group, counts in words.items()}
    twice = {name for name, count in Counter(names.values()).items() if count > 1}
    names = {group: f"{name} ({group})".strip() if name in twice else name for group, name in names.items()}
    return [_renamed(view, names[groups[view.number]]) if view.number in groups else view for view in found]


def _group_of(view: View, world: int, everyone: set[str]) -> str | None:
    """The record's name of the group in which a rank waits, if it has all ranks; else None."""
    record = view.rank.get("record")
    if record is None or view.wait.kind != "collective":
        return None
    pending = [call for call in record["calls"] if not call["done"] and not call.get("p2p")]
    here = [call for call in pending if _stands_at(view, call)]
    names = {call["group"] for call in here or pending}
    if len(names) != 1:
        return None
    name = names.pop()
    ranks = record.get("groups", {}).get(name, {"desc": "", "ranks": []})["ranks"]
    return name if len(ranks) == world or (not ranks and (name in everyone or name == "0")) else None


def _stands_at(view: View, call: Call) -> bool:
    site = view.wait.site
    return site is not None and any(
        (frame["file"], frame["line"]) == (site["file"], site["line"]) for frame in call.get("frames", [])
    )


def _renamed(view: View, name: str) -> View:
    return replace(view, waits=(*view.waits[:-1], replace(view.wait, group=name)))
