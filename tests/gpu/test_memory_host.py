"""On a real GPU: growth of the host's memory beside the card's, models that stay, and forwards alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROGRAM = Path(__file__).parents[1] / "perf" / "programs" / "grow_host.py"


def test_what_grows_beside_the_steps(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    kinds = ("numpy=150", "models=30", "optimizers=30", "graphs=30", "results=30", "rollout=1500")
    done = run_python(PROGRAM, *kinds, timeout=150)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    seen: dict[str, Any] = {told["kind"]: told for told in map(json.loads, done.stdout.splitlines())}
    assert all(told["device"].startswith("cuda:") for told in seen.values())
    numpy = seen["numpy"]
    assert numpy["leak"] is None and numpy["host_leak"]["name"] == "`history['arrays']` in run()"
    for kind in ("models", "optimizers"):
        assert seen[kind]["leak"] is not None and seen[kind]["steps"] == 30, kind
    assert seen["graphs"]["leak"]["holder"]["graph"] and seen["graphs"]["step_is"] == "forward"
    assert seen["results"]["ok"] and seen["results"]["results"] == 64 * 64 * 4
    assert seen["rollout"]["ok"] and seen["rollout"]["judged"] >= 20
