"""Reentrant activation checkpointing in a backward that runs again: it is left out, as it keeps no graph to follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from mldebug.numerics.replay._collectives import NotReplayable

_NODES = 200_000  # of a graph that are looked at


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Run what is in a reentrant checkpoint as it stands: the same values, with a graph of its own.

    `torch.autograd.grad` passes by a checkpoint of that kind without a word: its parameters are in no graph.
    """
    home: Any = torch.utils.checkpoint
    original = home.CheckpointFunction
    home.CheckpointFunction = _Plain
    try:
        yield
    finally:
        home.CheckpointFunction = original


def refuse_other_checkpoints(outputs: Sequence[Tensor]) -> None:
    """Raise NotReplayable if one of another library is in the graph: its backward would be left out."""
    stack: list[Any] = [tensor.grad_fn for tensor in outputs]
    seen: set[Any] = set()
    while stack and len(seen) < _NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Checkpoint" in type(node).__name__:
            raise NotReplayable(f"its activation checkpointing ({type(node).__name__}) has no graph to go back through")
        stack += [following for following, _ in node.next_functions]


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)
