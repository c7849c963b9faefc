"""hung fewer-iterations 1: one rank has fewer batches for a sharded model."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(model, opt, batches):
    for x in batches:
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for m in model:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, opt, [torch.ones(2, 8)] * (3 if dist.get_rank() == 1 else 4))
    dist.barrier()


main()
