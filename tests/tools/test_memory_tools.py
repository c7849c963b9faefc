"""The classic memory tools: their lines, from what the library measures."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_what_distributed_takes_in_the_classic_lines(run_torch: Run) -> None:
    tool = TOOLS / "torch-dist-mem-usage.py"
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    done = run_torch(*launch, tool, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[::2] == [
        f"[0] mp: {name}" for name in ("before barrier", "after barrier", "after 2nd barrier", "after dist destroy")
    ]
    cells = r" \| ".join(rf"{title} \d+\.\d\d GiB" for title in ("MA", "Max_MA", "CA", "Max_CA", "NV"))
    for line in lines[1::2]:
        assert re.fullmatch(rf"\[0\] mp: {cells} \| CPU Virtual Memory:  used = [\d.]+ GiB, percent = [\d.]+%", line), (
            line
        )


def test_the_report_of_a_group_of_one(run_torch: Run) -> None:
    done = run_torch(TOOLS / "torch-dist-mem-usage.py", "--backend", "gloo", "--json")
    report = json.loads(done.stdout)
    names = [stage["name"] for stage in report["stages"]]
    assert names[1:4] == ["init_process_group", "first barrier", "second barrier"]
    assert report["backend"] == "gloo" and report["taken"] == sum(stage["taken"] for stage in report["stages"][:-1])


def test_copies_of_the_hidden_states_for_each_model(run_torch: Run, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tool = TOOLS / "activation-memory-per-layer.py"
    done = run_torch(tool, tmp_path, tmp_path / "none", "--seqlen", "128")
    # Kept of a layer: input of each norm and its two products in float32, q, k, v, both turned, attention and MLP.
    number, _, name = done.stdout.strip().partition(" ")
    assert name == f'"{tmp_path}"' and 15 < float(number) < 30
    assert done.returncode == 2 and "cannot read a config" in done.stderr
