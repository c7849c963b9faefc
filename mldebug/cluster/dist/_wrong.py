"""Whose contents were wrong: each wrong part has a sender and a receiver, and a few of them explain all."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mldebug.cluster.dist._evidence import Evidence

_MOST = 64  # ranks that are named: where more are wrong, none of them is the cause


def wrong_contents(evidence: Evidence) -> list[tuple[int | None, str, str]]:
    """(rank, what it did, in which check) for each rank that is to blame, the one that explains most first."""
    # Where it is known whose parts were wrong, the sums that they are in are wrong as well.
    left: list[dict[str, Any]] = [one for one in evidence["wrong"] if one["source"] is not None] or list(
        evidence["wrong"]
    )
    found: list[tuple[int | None, str, str]] = []
    while left and len(found) < _MOST:
        sent = Counter(one["source"] for one in left if one["source"] is not None)
        got = Counter(one["rank"] for one in left)
        sender, most_sent = sent.most_common(1)[0] if sent else (None, 0)
        receiver, most_got = got.most_common(1)[0]
        receivers = {one["rank"] for one in left if one["source"] == sender}
        senders = {one["source"] for one in left if one["rank"] == receiver}
        # Many receivers agree on a sender, or one receiver is wrong about many senders.
        if sender is not None and (len(receivers), most_sent) >= (len(senders), most_got):
            mine, left = _parted(left, "source", sender)
            found.append((sender, f"sent wrong data to {_list(receivers)}: {_example(mine[0])}", mine[0]["check"]))
        else:
            mine, left = _parted(left, "rank", receiver)
            told = _list({one for one in senders if one is not None})
            what = f"got wrong data{f' from {told}' if told else ''}: {_example(mine[0])}"
            found.append((receiver, what, mine[0]["check"]))
    if len(found) > 1 and all(one["source"] is None for one in evidence["wrong"]):
        first, ranks = evidence["wrong"][0], {one["rank"] for one in evidence["wrong"]}
        why = f"sums are wrong on {_list(ranks)}, whose part it is cannot be told: {_example(first)}"
        return [(None, why, first["check"])]
    return found


def _parted(left: list[dict[str, Any]], end: str, rank: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those with this sender or receiver, and the others."""
    return [one for one in left if one[end] == rank], [one for one in left if one[end] != rank]


def _list(ranks: set[Any]) -> str:
    if not ranks:
        return ""
    words = ", ".join(str(rank) for rank in sorted(ranks)[:6])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}{' ...' if len(ranks) > 6 else ''}"


def _example(one: dict[str, Any]) -> str:
    return (
        f"{one['count']} of {one['of']} values wrong, the first at {one['index']} "
        f"is {one['got']:g} and not {one['want']:g}"
    )
