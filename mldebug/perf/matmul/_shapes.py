"""One matrix product of a model: its shape, how often a step computes it, and what its backward computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Shape = tuple[int, int, int, int]  # m, n, k, batch


@dataclass(frozen=True)
class Matmul:
    """`batch` products of m x k by k x n at once, computed `count` times in the forward of one step on one rank.

    For a linear layer m are tokens, k features in and n features out. `attention` marks the products of scores and of
    values, which have no weights; `useful` is the part of them that a causal mask or a window leaves. `count` is no
    whole number where experts get a share of the tokens.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    count: float = 1.0
    attention: bool = False
    useful: float = 1.0

    @property
    def shape(self) -> Shape:
        return (self.m, self.n, self.k, self.batch)

    @property
    def flops(self) -> float:
        """Operations of all its calls in a forward, a multiplication and an addition for each term."""
        return 2.0 * self.m * self.n * self.k * self.batch * self.count

    def backward(self) -> tuple[Matmul, Matmul]:
        """The two products of its backward: by the left operand (the input), and by the right one (the weight).

        They have the operations of the forward each, in other shapes: dX = dY Wt is m x k by sum over n, and
        dW = Xt dY is k x n by sum over m.
        """
        left = replace(self, name=f"{self.name}, grad of input", n=self.k, k=self.n)
        right = replace(self, name=f"{self.name}, grad of weight", m=self.k, k=self.m)
        if self.attention:
            left, right = (replace(one, name=one.name.replace("weight", "right input")) for one in (left, right))
        return left, right


def distinct(matmuls: Iterable[Matmul], backward: bool = True) -> list[Shape]:
    """The shapes to measure, each once, in the order of the model; with those of the backward unless told otherwise."""
    found: dict[Shape, None] = {}
    for one in matmuls:
        for each in (one, *(one.backward() if backward else ())):
            found[each.shape] = None
    return list(found)
