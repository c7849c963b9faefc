"""Models on several ranks, each of which meets 0 / 0 in step 2 of its training: FOLDER KIND...

KIND is ddp, fsdp (fully_shard; NaN on rank 1 only), tp (parallelize_module), fsdp-gone (the inputs of rank 0 are
changed afterwards), fsdp-flip (a bit of an activation flips once on rank 1, whose side channel is slow) or fsdp-skip
(with on_event="skip", which does not run a sharded forward again). Each rank writes FOLDER/<kind>.rank<r>.json with
what its report says.
CASE:MODE runs a case of stop_together.py in the same job, which writes into FOLDER/CASE-MODE.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stop_together
import torch
import torch.distributed as dist
from torch import nn

import mldebug
from mldebug.numerics.distributed._channel import Channel


class Share(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.drop = nn.Linear(8, width, bias=False), nn.ReLU(), nn.Dropout(0.1)
        self.down, self.share, self.head = nn.Linear(width, 8, bias=False), Share(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.share(self.down(self.drop(self.act(self.up(x)))).abs()))


def sharded(kind: str, model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tp":
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in (model.up, model.down, model.head):  # the head has one row: the shards of the other ranks are empty
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    name, _, what = kind.partition("-")
    model: nn.Module = Net(8 if name == "tp" else 6)
    with torch.no_grad():
        model.up.weight.abs_()
    model = sharded(name, model)
    flips = [rank == 1 and what == "flip"]
    inner = model.module if name == "ddp" else model
    inner.act.register_forward_hook(lambda module, args, out: flip(out) if step == 2 and flips[0] else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recorder = mldebug.DebugUnderflowOverflow(model, on_event="skip" if what == "skip" else "raise")
    recorder.quiet()
    grads: list[float] = []
    try:
        for step in range(4):
            bad = step == 2 and (rank == 1 or name == "tp") and what != "flip"
            x = torch.zeros(4, 8) if bad else torch.rand(4, 8, generator=torch.Generator().manual_seed(step)) + 0.1
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step == 2 and what == "flip":
                flips[0] = False
            if step == 2 and what == "gone" and rank == 0:
                x.add_(1.0)
            optimizer.step()
        report = recorder.report
    except mldebug.NumericsError as error:
        report = error.report
        grads = [float(getattr(p, "_local_tensor", p).sum()) for p in model.parameters()]
    finally:
        recorder.remove()
    return {**report.to_dict(), "text": report.text(), "weights": grads, "caught": bool(grads)}


def flip(out: torch.Tensor) -> torch.Tensor:
    bits = out.detach().clone()
    bits.view(-1)[3] = float("nan")
    return out + (bits - out).detach()


@contextlib.contextmanager
def slow_channel() -> Iterator[None]:
    """As on a machine that is busy: what a rank has to say comes to the others late."""
    write = Channel._write

    def late(self: Channel, store: Any, entry: dict[str, Any]) -> None:
        time.sleep(0.5)
        write(self, store, entry)

    Channel._write = late
    try:
        yield
    finally:
        Channel._write = write


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    for kind in kinds:
        if ":" in kind:
            case, mode = kind.split(":")
            stop_together.run(case, Path(folder) / f"{case}-{mode}", mode)
            continue
        with slow_channel() if kind == "fsdp-flip" and dist.get_rank() == 1 else contextlib.nullcontext():
            told = run(kind)
        (Path(folder) / f"{kind}.rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


main()
