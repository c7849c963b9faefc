"""Trains a tiny model on all ranks and stops one in the debugger: `held.py RANKS [k=v ...]`."""

import sys

import torch
import torch.distributed as dist

from mldebug.ranks import breakpoint_on


def step(model, number):
    secret = 1000 * dist.get_rank() + number
    if number == 1:
        breakpoint_on([int(one) for one in sys.argv[1].split(",")], header="look around")
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None
    return loss.item(), secret


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    losses = [step(model, number)[0] for number in range(4)]
    sys.stdout.write(f"rank {dist.get_rank()} losses {losses}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
