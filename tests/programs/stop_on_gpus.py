"""Two ranks on NCCL, NaN in the data of rank 1: FOLDER. Writes FOLDER/rank<r>.json as stop_together.py does."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mldebug


def main() -> None:
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    told: dict[str, Any] = {"rank": rank, "losses": []}
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    watched = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(watched.parameters(), 0.01)
    mldebug.DebugUnderflowOverflow(watched, output=folder / "lines.jsonl")
    try:
        for step in range(200):
            x = torch.randn(64, 256, device="cuda")
            if step == 20 and rank == 1:
                x[0] = float("nan")
                told["event"] = time.time()
            optimizer.zero_grad()
            loss = watched(x).square().mean()
            loss.backward()
            optimizer.step()
            told["losses"].append(loss.item())
    except mldebug.NumericsError as error:
        told["raised"] = error.report.to_dict()
        raise
    finally:
        told["end"] = time.time()
        (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
