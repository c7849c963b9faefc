"""All stacks as one tree with rank sets: `[0-6,8-15] all_reduce train.py:88`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mldebug.hang._judge_case import ranges

Spot = TypeVar("Spot", bound=Hashable)


@dataclass
class Node(Generic[Spot]):
    """A frame that some ranks share, under the frames that called it."""

    spot: Spot | None
    ranks: list[int] = field(default_factory=list)
    children: dict[Spot, Node[Spot]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"[{ranges(self.ranks)}]"


def merge_stacks(stacks: Iterable[tuple[int, Sequence[Spot]]]) -> Node[Spot]:
    """The tree of (rank, frames outermost first).

    Equal stacks are grouped first, so 10,000 ranks in a few places cost little more than those places.

        tree = merge_stacks([(0, ("main", "save")), (1, ("main", "step"))])
        tree.children["main"].label  # "[0-1]"
    """
    groups: dict[tuple[Spot, ...], list[int]] = {}
    for rank, frames in stacks:
        groups.setdefault(tuple(frames), []).append(rank)
    root: Node[Spot] = Node(None)
    for path, ranks in groups.items():
        root.ranks += ranks
        node = root
        for spot in path:
            below = node.children.get(spot)
            if below is None:
                below = node.children[spot] = Node(spot)
            below.ranks += ranks
            node = below
    return root


def chains(root: Node[Spot], first: Collection[int] = ()) -> list[tuple[int, Node[Spot], list[Spot]]]:
    """The tree as rows (depth, last node, the frames of a run without a fork).

    Branches with a rank of `first` come first, then the smaller rank sets.
    """
    wanted = set(first)
    rows: list[tuple[int, Node[Spot], list[Spot]]] = []
    stack = [(0, child) for child in _by_size(root, wanted)]
    while stack:
        depth, node = stack.pop()
        run = [node.spot] if node.spot is not None else []
        while len(node.children) == 1:
            (below,) = node.children.values()
            if len(below.ranks) != len(node.ranks):
                break
            node = below
            if node.spot is not None:
                run.append(node.spot)
        rows.append((depth, node, run))
        stack += [(depth + 1, child) for child in _by_size(node, wanted)]
    return rows


def _by_size(node: Node[Spot], wanted: set[int]) -> list[Node[Spot]]:
    """The children, the largest first: the rows are taken from the end."""
    return sorted(
        node.children.values(),
        key=lambda child: (not wanted.isdisjoint(child.ranks), -len(child.ranks), -min(child.ranks)),
    )
