"""`mldebug memory` on small trainings: same numbers and status, phases, leaks with their lines, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mldebug.cli import main
from mldebug.core.script import run_script

pytestmark = pytest.mark.usefixtures("small_heap")
PROGRAM = Path(__file__).parent / "programs" / "train_memory.py"
FORKED = Path(__file__).parents[1] / "forked.py"
GROWING = PROGRAM.with_name("grow_memory.py")
SOURCE = PROGRAM.read_text().splitlines()
Run = Callable[..., subprocess.CompletedProcess[str]]
Capture = pytest.CaptureFixture[str]


def line_with(text: str) -> str:
    return f"train_memory.py:{next(number for number, line in enumerate(SOURCE, 1) if text in line)}"


def watched(capsys: Capture, kind: str, steps: int, *options: str, program: Path = PROGRAM) -> SimpleNamespace:
    """The command in this process: its status, what went to stdout and stderr, and its document."""
    capsys.readouterr()
    status = main(["memory", *options, "--", str(program), kind, str(steps)])
    seen = capsys.readouterr()
    document: dict[str, Any] = json.loads(seen.out) if "--json" in options else {}
    return SimpleNamespace(status=status, out=seen.out, err=seen.err, document=document)


@pytest.mark.parametrize("kind", ["healthy", "losses"])
def test_output_and_losses_are_bit_for_bit_the_same(capsys: Capture, kind: str) -> None:
    run_script([str(PROGRAM), kind, "50"])
    plain = capsys.readouterr().out
    assert plain.count("\n") == 50
    done = watched(capsys, kind, 50)
    assert done.out == plain
    assert done.status == (1 if kind == "losses" else 0), done.err


def test_a_line_for_each_phase_and_what_was_alive(capsys: Capture) -> None:
    done = watched(capsys, "healthy", 30, "--json")
    lines = [line for line in done.err.splitlines() if line.startswith("mldebug memory: rank=0/1 ")]
    names = ["init", '"first forward"', '"first backward"', '"first optimizer step"', "steady"]
    assert [line.partition(" at=")[2].partition(" tensors")[0].partition(" steps")[0] for line in lines] == names
    report = done.document
    phases = {phase["name"]: phase for phase in report["phases"]}
    weights = 4 * (4 * (64 * 64 + 64) + 65)
    assert phases["init"]["kinds"]["parameter"] == pytest.approx(weights, abs=8)
    assert phases["first backward"]["kinds"]["gradient"] == weights
    assert phases["first optimizer step"]["kinds"]["optimizer state"] == 2 * weights + 4 * 10  # and a count for each
    # Four outputs of relu (autograd keeps no others of a Linear), the batch, the head's output.
    assert phases["first forward"]["kinds"]["tensor"] == pytest.approx(5 * 64 * 64 * 4 + 64 * 4, abs=600)
    (relus,) = [live for live in phases["first forward"]["largest"] if live["nbytes"] == 4 * 64 * 64 * 4]
    assert relus["site"]["line"].endswith(line_with("torch.relu")) and relus["site"]["module"] == "Net"
    assert report["ok"] and report["steps"] == 30 and report["judged"] == 29 and report["leak"] is None


@pytest.mark.parametrize(
    ("kind", "line", "per_step"),
    [("losses", "torch.relu", 80 * 1024), ("cache", "torch.cat", 16 * 1024)],
)
def test_a_leak_is_named_with_its_line(capsys: Capture, kind: str, line: str, per_step: int) -> None:
    done = watched(capsys, kind, 30, "--json")
    report = done.document
    assert done.status == 1 and not report["ok"]
    leak = report["leak"]
    assert leak["per_step"] == pytest.approx(per_step, rel=0.02)
    assert leak["growths"][0]["where"]["site"]["line"].endswith(line_with(line))
    if kind == "losses":
        assert leak["holder"]["name"] == "`losses`" and leak["holder"]["graph"]
    assert f"memory grows by {80 if kind == 'losses' else 16}." in done.err  # said while it runs


@pytest.mark.parametrize("kind", ["healthy", "variable", "accumulation", "lazy", "logged"])
def test_no_false_alarm(capsys: Capture, kind: str) -> None:
    done = watched(capsys, kind, 45, "--json")
    assert (done.status, done.document["leak"], done.document["judged"]) == (0, None, 39), done.err


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("deque", 45), ("bounded list", 130), ("emptied", 130), ("cycles", 45), ("filled", 120)],
)
def test_what_has_a_bound_is_no_leak(capsys: Capture, kind: str, steps: int) -> None:
    done = watched(capsys, kind, steps, "--json", program=GROWING)
    assert (done.status, done.document["leak"]) == (0, None), done.err
    assert len(done.document["notes"]) == (kind != "filled"), done.document["notes"]


@pytest.mark.parametrize(
    ("kind", "steps", "holder"),
    [("every ten", 45, None), ("closures", 45, "`kept`"), ("late", 140, "`kept`"), ("second optimizer", 60, "`kept`")],
)
def test_leaks_that_are_slow_or_hidden_or_late(capsys: Capture, kind: str, steps: int, holder: str | None) -> None:
    done = watched(capsys, kind, steps, "--json", program=GROWING)
    assert done.status == 1, done.err
    leak = done.document["leak"]
    assert (
        "x = torch.randn"
        in GROWING.read_text().splitlines()[int(leak["growths"][0]["where"]["site"]["line"].rpartition(":")[2]) - 1]
    )
    assert (leak["holder"] or {}).get("name") == holder


def test_a_buffer_does_not_hide_a_leak_beside_it(capsys: Capture) -> None:
    done = watched(capsys, "both", 45, "--json", program=GROWING)
    leak = done.document["leak"]
    assert done.status == 1 and leak["per_step"] == 64 * 64 * 4 and leak["holder"]["name"] == "`more`", done.err
    assert "fills up to 100 in `kept`" in done.document["notes"][0]


def test_ctrl_c_ends_with_the_report(capsys: Capture) -> None:
    done = watched(capsys, "ctrl-c", 30, "--json")
    report = done.document
    assert done.status == 130 and report["steps"] == 12 and report["phases"][-1]["name"] == "steady"
    assert "KeyboardInterrupt" in done.err


def test_what_was_seen_is_on_disk_after_kill_9(run_torch: Run, tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    done = run_torch("-m", "mldebug", "memory", "-o", file, "--", PROGRAM, "killed", "30")
    assert done.returncode == -9
    records = [json.loads(line) for line in file.read_text().splitlines()]
    names = ["init", "first forward", "first backward", "first optimizer step"]
    assert [record["name"] for record in records if record["kind"] == "phase"] == names
    assert all(f'at="{name}"' in done.stderr for name in names[1:])


def test_sigterm_has_the_report_and_ends_it_as_it_would(run_torch: Run) -> None:
    """A forked child that is ended so is none of ours, and an `except` that catches all cannot hold it up."""
    done = run_torch("-m", "mldebug", "memory", "--json", "--", PROGRAM, "sigterm", "30", timeout=60)
    report = json.loads(done.stdout)
    assert done.returncode == -signal.SIGTERM and report["steps"] == 12
    assert "child: 15" in done.stderr and "went on" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it for CUDA")
def test_out_of_memory_says_where_and_what_was_alive(capsys: Capture) -> None:
    done = watched(capsys, "oom", 30, "--json")
    seen = done.document["out_of_memory"]
    assert done.status == 1 and "can't allocate memory" in done.err.lower()
    assert (seen["phase"], seen["step"]) == ("steady", 2)
    assert seen["kinds"]["optimizer state"] > seen["kinds"]["parameter"] > 0
    assert seen["advice"][0].startswith("optimizer states")
    assert "_live.py" not in done.err and "_ops.py" not in done.err, "the script's traceback shows frames of ours"


def test_two_ranks_say_who_they_are(run_torch: Run, tmp_path: Path) -> None:
    done = run_torch(
        *(FORKED, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("-m", "mldebug", "memory", "-q"),
        *("-o", tmp_path / "{rank}.jsonl", "--", PROGRAM, "healthy", "10"),
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        last = json.loads((tmp_path / f"{rank}.jsonl").read_text().splitlines()[-1])
        assert (last["kind"], last["rank"], last["world_size"], last["steps"]) == ("report", rank, 2, 10)


def test_a_compiled_model_compiles_once_and_is_watched(run_torch: Run) -> None:
    program = (
        "import sys, torch\nfrom mldebug.perf.memory._watch import memory_watch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))\n"
        "model, opt = torch.compile(net, backend='aot_eager'), torch.optim.SGD(net.parameters(), 0.1)\n"
        "with memory_watch(quiet=True) as watch:\n"
        "    for _ in range(50):\n"
        "        model(torch.ones(4, 8)).sum().backward(); opt.step(); opt.zero_grad()\n"
        "print(torch._dynamo.utils.counters['stats']['unique_graphs'], watch.report.ok, watch.report.steps)\n"
    )
    done = run_torch(program, timeout=110)
    assert done.stdout == "1 True 50\n" and not done.stderr, done.stderr


def test_usage(run_torch: Run, tmp_path: Path) -> None:
    done = run_torch("-m", "mldebug", "memory", "-o", tmp_path / "no" / "f", "--", PROGRAM, "healthy", "1")
    assert done.returncode == 2 and "there is no folder" in done.stderr
    shown = run_torch("-m", "mldebug", "memory", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
