"""hung rank-guarded-collective 0: rank 0 alone gathers the full state of a sharded model."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(model, path):
    sd = {k: v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(sd, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    for m in model:
        if isinstance(m, torch.nn.Linear):
            fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 2:
            if rank == 0:
                save(model, "/tmp/mldebug_x.pt")
            dist.barrier()


main()
