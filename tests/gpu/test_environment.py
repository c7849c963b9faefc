"""`mldebug --version --json` on a machine with GPUs: what torch says of them, without loading it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_the_driver_and_the_cards_are_named() -> None:
    torch = pytest.importorskip("torch")
    command = [sys.executable, "-m", "mldebug", "--version", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert found["gpus"]["driver"] and found["gpus"]["driver_cuda"], found["gpus"]
    assert torch.cuda.get_device_name(0) in found["gpus"]["cards"]
    assert found["torch"]["cuda"] == torch.version.cuda
    assert found["torch"]["version"] == torch.__version__
    assert ".".join(map(str, torch.cuda.nccl.version())) == found["torch"]["nccl"]
