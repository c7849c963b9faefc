"""dump_dir on a GPU: repro.py runs on the card, and on a machine without one; random states are those of the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mldebug import diagnose

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.dropout(self.fc(x), 0.5, True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def test_the_program_runs_on_the_card_and_without_one(tmp_path: Path) -> None:
    model = Squares().half().cuda()
    data = torch.full((4, 8), 3e3, dtype=torch.float16, device="cuda")
    report = diagnose(model, lambda i: model(data).float().mean(), steps=1, dump_dir=tmp_path)
    assert str(report.event.op).startswith("aten.pow"), report.text()
    folder = tmp_path / "step0-rank0"
    on_card = [sys.executable, str(folder / "repro.py")]
    shown = subprocess.run(on_card, check=False, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 1 and "on cuda (it was cuda:0)" in shown.stdout, shown.stdout + shown.stderr
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run(on_card, check=False, capture_output=True, text=True, timeout=120, env=without)
    assert shown.returncode == 1 and "on cpu (it was cuda:0)" in shown.stdout, shown.stdout + shown.stderr
    states = load_file(folder / "rng.safetensors")
    squares = load_file(folder / "operands.safetensors")["self"]
    torch.cuda.set_rng_state(states["torch.cuda.0"])
    again = torch.dropout(model.fc(load_file(folder / "inputs.safetensors")["input[0]"].cuda()), 0.5, True)
    assert torch.equal(again.cpu(), squares)
