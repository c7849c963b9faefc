"""record_run: what it writes, that it survives, and that the run is what it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mldebug.cli._compare as command
from mldebug.core.errors import MldebugError, UsageError
from mldebug.numerics import NumericsWarning, compare, record_run

ROOT = Path(__file__).resolve().parents[2]


def lines(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    return [line for line in found if not kind or line["kind"] == kind]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def test_the_run_is_what_it_was(tmp_path: Path) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return [weight.detach() for weight in model.parameters()]

    plain = train()
    with record_run(tmp_path / "a"):
        recorded = train()
    with record_run(tmp_path / "b", ops=True):
        with_ops = train()
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(plain, recorded, with_ops, strict=True))
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".jsonl", ".safetensors"}
    assert len(lines(tmp_path / "a", "call")) == 3 * 4
    assert compare(tmp_path / "a", tmp_path / "b").ok


def test_whole_tensors_and_the_limit_of_bytes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30))), torch.randn(64, 64)
    with record_run(tmp_path / "a", model, full_bytes=64 * 64 * 4):
        y = model(x)
    kept = load_file(tmp_path / "a" / "rank0-0.safetensors")
    assert any(torch.equal(value, y) for value in kept.values())
    with record_run(tmp_path / "b", model, max_bytes=200_000):
        model(x)
    assert sum(path.stat().st_size for path in (tmp_path / "b").iterdir()) <= 205_000
    assert lines(tmp_path / "b")[-1]["kind"] == "full"
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.ok
    assert any("ended at max_bytes" in note for note in report.notes)
    with record_run(tmp_path / "b", model, forwards=1):  # takes the place of the first
        model(x)
        model(x + 1)
    assert compare(tmp_path / "a", tmp_path / "b").notes == []


def test_it_survives_kill(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from torch import nn; from mldebug.numerics import record_run\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())\n"
        "with record_run(sys.argv[1], model):\n"
        "    for i in range(10**6):\n"
        "        model(torch.ones(2, 4))\n"
        "        if i == 5: print(flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    report = compare(tmp_path, tmp_path)
    assert report.ok
    assert report.compared >= 5 * 3


def test_our_failure_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    with (
        pytest.warns(NumericsWarning, match="stopped recording: OSError: no space"),
        record_run(tmp_path, model) as run,
    ):
        monkeypatch.setattr(run._recorder.writer, "line", lambda *a: (_ for _ in ()).throw(OSError("no space")))
        assert model(torch.ones(1, 8)).shape == (1, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(MldebugError, match="cannot record"), record_run(tmp_path / "file", model):
        pass


def test_exceptions_and_checkpointing(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails:
                raise ValueError("too large")
            return x * 2

    fails = True

    model = nn.Sequential(nn.Linear(4, 4), Fails())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    with record_run(tmp_path / "a", model):
        with pytest.raises(ValueError):
            model(torch.ones(1, 4))
        fails = False
        model(torch.zeros(1, 4))
    calls = lines(tmp_path / "a", "call")
    assert [call["forward"] for call in calls if call["module"] == ""] == [0, 1]
    assert all(call["parent"] is not None for call in calls if call["module"])
    with record_run(tmp_path / "b"):
        Checkpointed()(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(lines(tmp_path / "b", "call")) == 2


def run(*words: str) -> int:
    parser = command.PARSER(prog="mldebug compare")
    command.add_arguments(parser)
    args = parser.parse_args(list(words))
    args.own_process = False
    return command.run(args)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch; from torch import nn\n"
        "torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())\n"
        "model(torch.ones(1, 4) + float(sys.argv[1])); sys.exit(int(sys.argv[2]))\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run("--record", a, "--", str(script), "0", "0") == 0
    assert run("--record", b, "--ops", "--", str(script), "0.5", "3") == 3
    assert f"recorded 1 forwards to {a} (" in capsys.readouterr().err
    assert run("--record", a, "--json", "--", str(script), "0", "0") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["folder"], document["forwards"], document["is_full"]) == (a, 1, False)
    assert document["nbytes"] == sum(path.stat().st_size for path in Path(a).glob("*.jsonl")) + 2 * 4 * 4 + 4 * 4
    assert run(a, a) == 0
    assert "part nowhere" in capsys.readouterr().out
    assert run(a, b, "--json", "-o", str(tmp_path / "report.json")) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["parted"], document["kind"], document["module"]) == (True, "input", "")
    assert json.loads((tmp_path / "report.json").read_text()) == document
    assert run(a, b, "--tolerance", "10") == 0
    for words in ([], [a], [a, b, "--", "x.py"], ["--record", a], ["--record", a, b, "--", "x.py"]):
        with pytest.raises(UsageError):
            run(*words)
