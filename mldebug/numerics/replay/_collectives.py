"""What a replay may do in a distributed job: no collective where one rank replays by itself, and no trace with all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class NotReplayable(Exception):
    """Why a forward cannot be run again, in words that go into the report."""


@contextlib.contextmanager
def shards_again(module: nn.Module) -> Iterator[None]:
    """A forward of fully_shard leaves weights unsharded for a backward; here none follows."""
    sharded: list[Any] = [m for m in module.modules() if hasattr(type(m), "reshard") and hasattr(type(m), "unshard")]
    if not sharded:
        yield
        return
    with torch.no_grad():
        try:
            yield
        finally:
            for one in sharded:
                one.reshard()


@contextlib.contextmanager
def refuse_collectives() -> Iterator[None]:
    """Stop a replay at its first collective: the other ranks would not answer, and it would block for ever."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                raise NotReplayable(f"its forward uses a collective ({func.name()}), which needs all ranks")
            return func(*args, **(kwargs or {}))

    with Refuse():  # type: ignore[no-untyped-call,unused-ignore]
        yield
