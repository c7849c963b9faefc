"""A small model, trained for two steps in one process or sharded in several, and recorded: FOLDER KIND...

KIND is one, ddp, turns (DDP, where rank r has every n-th sample), fsdp or tp; with "-bad" rank 1 has a changed weight,
with ":samples" no tensor is kept whole.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from mldebug.numerics import record_run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(50, 32), nn.Sequential(Block(), Block()), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.emb(ids)))


def sharded(kind: str, model: nn.Module, ids: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if kind == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model, ids
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), ids.chunk(size)[rank]
    return nn.parallel.DistributedDataParallel(model), ids[rank::size] if kind == "turns" else ids.chunk(size)[rank]


def record(kind: str, folder: str, full_bytes: int) -> None:
    kind, _, bad = kind.partition("-")
    torch.manual_seed(0)
    model: nn.Module = Net()
    up = model.blocks[1].up
    ids = torch.randint(0, 50, (4, 6))
    if kind != "one":
        model, ids = sharded(kind, model, ids)
        if bad and dist.get_rank() == 1:
            with torch.no_grad():
                getattr(up.weight, "_local_tensor", up.weight)[0] *= 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_run(folder, model, full_bytes=full_bytes):
        for _ in range(2):
            logits = model(ids)
            nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(ids.numel(), dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, *kinds = sys.argv[1:]
    if kinds != ["one"]:
        dist.init_process_group("gloo")
    for kind in kinds:
        name, _, samples = kind.partition(":")
        record(name, f"{folder}/{kind}", 0 if samples else 1 << 20)
    if kinds != ["one"]:
        dist.destroy_process_group()


main()
