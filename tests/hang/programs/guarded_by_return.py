"""hung rank-guarded-collective 0: all ranks but one return before a barrier."""

import torch
import torch.distributed as dist


def save_checkpoint(state):
    if dist.get_rank() != 0:
        return
    torch.save(state, "/tmp/mldebug_z.pt")
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        if step == 3:
            save_checkpoint({})


main()
