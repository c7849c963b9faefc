"""A small job of several ranks in which one meets NaN: CASE FOLDER [MODE].

CASE: `train` NaN in the data of rank 2 (of two ranks: 1) at step 3 (`train0`: of rank 0); `reduce` the others wait in
an all_reduce, `sync` in a barrier while rank 2 evaluates; `two` ranks 1 and 2 at once; `stopped` rank 1 is frozen by
then; `dead` it is gone, and the others evaluate by themselves; `masked` rank 2's forward is bad and its gradients are
fine; `healthy`. MODE is what on_event is, or off. Each rank writes FOLDER/rank<r>.json: the times of event and end,
losses and what its report says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mldebug

STEP, STEPS = 3, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)
        self.masked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.body(x).log() if self.training and bool((x < -90).any()) else self.body(x))
        if self.masked:  # bad to look at, but left out of the loss
            out = torch.cat([out[1:], torch.full_like(out[:1], float("nan")) * out[:1].detach()])
        return out


def run(case: str, folder: Path, mode: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    told: dict[str, Any] = {"rank": rank, "losses": []}
    bad = {"train0": (0,), "two": (1, 2), "healthy": ()}.get(case, (min(2, dist.get_world_size() - 1),))
    model = Net()
    options: dict[str, Any] = {"output": folder / "lines.jsonl"} if mode != "off" else {}
    watched = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(watched.parameters(), 0.05)
    recorder = None if mode == "off" else mldebug.DebugUnderflowOverflow(watched, on_event=mode, **options)
    try:
        for step in range(STEPS):
            x = torch.randn(4, 8)
            here = step == STEP and rank in bad
            if step == STEP and case in ("stopped", "dead") and rank == 1:
                told["event"] = time.time()
                write(folder, told)
                os.kill(os.getpid(), signal.SIGSTOP if case == "stopped" else signal.SIGKILL)
            if here:
                told["event"] = time.time()
            if here and case in ("train", "train0", "two"):
                x[0] = -100.0
            if step == STEP and case == "dead":
                evaluate_alone(model, here, told)
            if step == STEP and case in ("reduce", "sync", "stopped"):
                model.eval()
                if here:
                    time.sleep(1.0)
                    told["event"] = time.time()
                    write(folder, told)  # torchrun ends this rank as soon as another one has gone
                    with torch.no_grad():
                        model.body[0].weight[0, 0] = float("nan")
                        watched.module(x)
                        watched.module(x)
                dist.all_reduce(torch.ones(1)) if case != "sync" else dist.barrier()
                model.train()
            model.masked = here and case == "masked"
            optimizer.zero_grad()
            out = watched(x)
            loss = out[:-1].square().mean() if case == "masked" else out.square().mean()
            loss.backward()
            optimizer.step()
            told["losses"].append(loss.item().hex())
    except mldebug.NumericsError as error:
        told["raised"] = error.report.to_dict()
        told["text"] = error.report.text()
        raise
    finally:
        told["end"] = time.time()
        told["weights"] = [float(p.detach().double().sum()).hex() for p in model.parameters()]
        told["buffers"] = [float(b.double().sum()).hex() for b in model.buffers()]
        write(folder, told)
    if recorder is not None:
        recorder.remove()
        told["report"] = recorder.report.to_dict()
    told["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    write(folder, told)


def evaluate_alone(model: Net, here: bool, told: dict[str, Any]) -> None:
    model.eval()
    with torch.no_grad():
        for batch in range(600):
            if here and batch == 10:
                told["event"] = time.time()
                model.body[0].weight.fill_(float("nan"))
            model(torch.ones(4, 8))
            time.sleep(0.1)


def write(folder: Path, told: dict[str, Any]) -> None:
    (folder / f"rank{told['rank']}.json").write_text(json.dumps(told))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(sys.argv[1], Path(sys.argv[2]), (*sys.argv[3:], "raise")[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
