"""hung fewer-iterations 2: one rank of a 2 x 2 mesh leaves its loop early."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def train(n, tp, dp):
    for _i in range(n):
        x = torch.ones(4)
        dist.all_reduce(x, group=tp)
        dist.all_reduce(x, group=dp)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train(3 if rank == 2 else 4, mesh.get_group("tp"), mesh.get_group("dp"))
    dist.barrier()


main()
