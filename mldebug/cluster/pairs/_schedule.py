"""Who is measured with whom, and when: rounds of disjoint pairs, so that a whole round runs at once.

A pair stands for both directions. With k nodes of g GPUs there are (k even ? k-1 : k) * g + (g even ? g-1 : g) rounds:
within all nodes by the circle method, then nodes by the circle method and, for each pair of nodes, rail by rail shift.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from mldebug.core.errors import UsageError

Place = tuple[int, int]  # node, GPU of the node
Round = list[tuple[Place, Place]]


def gpu_rounds(gpus_of: Sequence[int]) -> list[Round]:
    """All pairs of GPUs, each once; `gpus_of` has the number of GPUs of each node, which may differ.

    Raises UsageError for a node without a GPU.

        gpu_rounds([8, 8])  # 15 rounds; the first ones within the nodes
    """
    _check(gpus_of)
    rounds = list(_within(gpus_of))
    for nodes in node_rounds(len(gpus_of)):
        for shift in range(max(gpus_of)):
            turn: Round = []
            for one, other in nodes:
                size = max(gpus_of[one], gpus_of[other])
                if shift < size:
                    turn += [
                        ((one, gpu), (other, (gpu + shift) % size))
                        for gpu in range(gpus_of[one])
                        if (gpu + shift) % size < gpus_of[other]
                    ]
            rounds.append(turn)
    return [turn for turn in rounds if turn]


def node_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """All pairs of nodes, each once, in rounds of disjoint pairs: nodes - 1 of them, or `nodes` if that is odd.

    node_rounds(4)  # [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]] in some order
    """
    size = nodes + nodes % 2  # an odd one out is paired with nobody
    ring = list(range(size))
    rounds = []
    for _ in range(size - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(size // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [turn for turn in rounds if turn]


def sample_rounds(gpus_of: Sequence[int], seed: int = 0) -> list[Round]:
    """A sample for large fleets, whose rounds do not grow with the nodes.

    All pairs within nodes; each node with the next one along the rails; and each node with one at a random distance,
    across the rails by a random shift. `seed` chooses both. Raises UsageError for a node without a GPU.

        sample_rounds([8] * 128)  # 11 rounds or 12, in place of 1,023
    """
    _check(gpus_of)
    nodes, most = len(gpus_of), max(gpus_of)
    rounds = list(_within(gpus_of))
    chance = random.Random(seed)
    shifts = [(1, 0)] if nodes > 1 else []
    far = chance.randint(2, nodes - 2) if nodes > 3 else 1
    across = chance.randint(1, most - 1) if most > 1 else 0
    if nodes > 1 and (far > 1 or across):
        shifts.append((far, across))
    seen: set[frozenset[Place]] = set()
    for distance, rail in shifts:
        for pairs in _cycle_rounds(nodes, distance):
            turn = []
            for one, other in pairs:
                for gpu in range(gpus_of[one]):
                    pair = (one, gpu), (other, (gpu + rail) % most)
                    if pair[1][1] < gpus_of[other] and frozenset(pair) not in seen:
                        seen.add(frozenset(pair))
                        turn.append(pair)
            rounds.append(turn)
    return [turn for turn in rounds if turn]


def _within(gpus_of: Sequence[int]) -> Iterator[Round]:
    """All pairs within nodes; the nodes at the same time."""
    own = [node_rounds(size) for size in gpus_of]
    for turn in range(max(map(len, own))):
        yield [
            ((node, one), (node, other))
            for node, rounds in enumerate(own)
            if turn < len(rounds)
            for one, other in rounds[turn]
        ]


def _cycle_rounds(nodes: int, distance: int) -> Iterator[list[tuple[int, int]]]:
    """The pairs of nodes at `distance` on a ring, in two rounds, or three where the ring's cycles are odd."""
    length = nodes // math.gcd(nodes, distance)
    colours: list[list[tuple[int, int]]] = [[], [], []]
    for start in range(math.gcd(nodes, distance)):
        for step in range(1 if length == 2 else length):
            one = (start + step * distance) % nodes
            last_of_odd = length % 2 and step == length - 1
            colours[2 if last_of_odd else step % 2].append((one, (one + distance) % nodes))
    yield from (pairs for pairs in colours if pairs)


def _check(gpus_of: Sequence[int]) -> None:
    if not gpus_of or min(gpus_of) < 1:
        raise UsageError(f"a node has {min(gpus_of, default=0)} GPUs", "leave nodes without GPUs out")
