"""Memory on a real GPU: what the allocator, the driver and torch's memory snapshot tell, and activations on meta."""

from __future__ import annotations

import gc
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mldebug.cli import main
from mldebug.core.script import run_script
from mldebug.perf.memory._activations import activation_memory
from mldebug.perf.memory._memory_report import memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROGRAM = Path(__file__).parents[1] / "perf" / "programs" / "train_memory.py"
MIB = 1 << 20
Capture = pytest.CaptureFixture[str]
Run = Callable[..., subprocess.CompletedProcess[str]]


def watch(capsys: Capture, kind: str, steps: int = 45) -> SimpleNamespace:
    """The command in this process, as each start of torch and CUDA takes seconds."""
    capsys.readouterr()
    status = main(["memory", "--json", "--", str(PROGRAM), kind, str(steps)])
    seen = capsys.readouterr()
    return SimpleNamespace(status=status, err=seen.err, report=json.loads(seen.out))


def line_with(text: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    return f"train_memory.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_a_scope_on_the_card() -> None:
    torch.zeros(1, device="cuda")
    out = io.StringIO()
    with memory_report("scope", file=out) as report:
        kept = torch.ones(16 * MIB // 4, device="cuda")
        passing = torch.ones(256 * MIB // 4, device="cuda")
        del passing
    print(out.getvalue())
    now, before = report.now.card, report.before and report.before.card
    assert kept is not None and before is not None
    assert (now.allocated or 0) - (before.allocated or 0) == 16 * MIB
    assert (now.peak or 0) - (before.allocated or 0) == 272 * MIB
    assert now.physical is not None and now.used and now.total and now.used > (now.reserved or 0)
    assert now.other_processes is not None


def test_it_makes_no_context(run_python: Run) -> None:
    done = run_python(
        "import torch, os\nfrom mldebug.perf.memory._memory_report import memory_report\n"
        "with memory_report('x') as r: pass\nprint(torch.cuda.is_initialized(), r.now.card.total > 0)\n"
        "from mldebug.perf.memory._watch import memory_watch\n"
        "with memory_watch(quiet=True): print(torch.cuda.is_initialized())\n"
    )
    assert done.stdout == "False True\nFalse\n", done.stderr


def test_healthy_and_bit_for_bit_the_same(capsys: Capture) -> None:
    run_script([str(PROGRAM), "healthy", "45"])
    plain = capsys.readouterr().out
    done = watch(capsys, "healthy")
    lines = [line for line in done.err.splitlines(keepends=True) if line[0].isdigit()]
    assert "".join(lines) == plain and done.status == 0, done.err


@pytest.mark.parametrize("kind", ["variable", "lazy"])
def test_no_false_alarm(capsys: Capture, kind: str) -> None:
    done = watch(capsys, kind)
    assert done.status == 0 and done.report["leak"] is None and done.report["judged"] == 39, done.err


@pytest.mark.parametrize(("kind", "line"), [("losses", "torch.relu"), ("cache", "torch.cat")])
def test_a_leak_is_named(capsys: Capture, kind: str, line: str) -> None:
    done = watch(capsys, kind)
    assert done.status == 1, done.err
    first = done.report["leak"]["growths"][0]["where"]["site"]
    assert first["line"].endswith(line_with(line)) and first["module"] == "Net"
    assert kind != "losses" or done.report["leak"]["holder"]["name"] == "`losses`"


def test_out_of_memory(capsys: Capture) -> None:
    done = watch(capsys, "oom", 4)
    seen = done.report["out_of_memory"]
    assert done.status == 1 and seen["asked"] >= 4 << 40 and seen["step"] == 2
    assert seen["kinds"]["optimizer state"] > 0 and seen["advice"]


@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("llama", True), ("gpt2", False), ("t5", True)])
def test_activations_on_meta_are_those_of_the_card(kind: str, checkpointing: bool) -> None:
    import transformers

    config = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=1024,
        ),
        "gpt2": lambda: transformers.GPT2Config(n_embd=512, n_layer=3, n_head=8, vocab_size=1024),
        "t5": lambda: transformers.T5Config(d_model=512, d_ff=1024, num_layers=2, num_heads=8, vocab_size=1024),
    }[kind]()  # fmt: skip
    told = activation_memory(config, batch=2, sequence=512, checkpointing=checkpointing)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16).cuda().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.zeros(2, 512, dtype=torch.long, device="cuda")
    given = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if kind == "t5":
        given["decoder_input_ids"] = ids.clone()
    model(**given).loss.backward()  # what is made once (workspaces) is there
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = model(**given).loss
    took = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    print(f"{kind} checkpointing={checkpointing}: meta {told.total - told.inputs}, card {took}, {loss.item():.3f}")
    assert told.total - told.inputs == pytest.approx(took, rel=0.03)


def test_what_distributed_takes(run_python: Run) -> None:
    done = run_python(
        "from mldebug.perf.memory._distributed import distributed_memory as d\nr = d()\nprint(r.text(), '|', r.taken)"
    )
    print(done.stdout)
    assert int(done.stdout.rpartition("|")[2]) > 0, done.stderr
