"""compare(): what parts, and where; and healthy pairs, which do not."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from mldebug.core.errors import MldebugError, UsageError
from mldebug.numerics import compare, record_run

transformers = pytest.importorskip("transformers")
IDS = torch.arange(48).reshape(2, 24) % 37


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **more
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def in_bf16(model: nn.Module) -> nn.Module:
    """As from_pretrained(dtype=torch.bfloat16) makes it: the frequencies of rotary positions stay float32."""
    other = copy.deepcopy(model).bfloat16()
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        if hasattr(ours, "inv_freq"):
            theirs.inv_freq = ours.inv_freq.clone()
    return other


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize("build", [llama, gpt2, t5], ids=["llama", "gpt2", "t5"])
def test_fp32_and_bf16_part_nowhere(build: Any, training: bool) -> None:
    model = build().train(training)
    inputs = {"input_ids": IDS, "labels": IDS}
    report = compare(model, in_bf16(model), inputs)
    assert report.ok, report.text()
    assert report.compared > 60
    assert 1e-4 < report.error < 0.02
    assert report.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("first", [False, True], ids=["b", "a"])
def test_what_a_module_rounds_before_it_hands_it_on(dtype: torch.dtype, first: bool) -> None:
    model = llama()
    other = copy.deepcopy(model)
    mlp = other.model.layers[1].mlp
    as_written = mlp.forward
    mlp.forward = lambda x: as_written(x.to(dtype).float())
    report = compare(other, model, IDS) if first else compare(model, other, IDS)
    assert (report.kind, report.module) == ("between", "model.layers.1.mlp.gate_proj"), report.text()


def test_bf16_rotary_positions() -> None:
    model, ids = llama(max_position_embeddings=1024), torch.randint(0, 64, (1, 512))
    right = in_bf16(model)
    assert compare(model, right, ids).ok
    wrong = copy.deepcopy(right)
    rotary = wrong.model.rotary_emb

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[..., None].to(x.dtype) * rotary.inv_freq.to(x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward
    for other in (model, right):
        report = compare(other, wrong, ids)
        assert (report.kind, report.module, report.class_name) == ("jump", "model.rotary_emb", "LlamaRotaryEmbedding")
        assert "whole numbers above 256" in report.reading
        assert "> " in report.text()


def test_dropout_in_training_against_eval_is_no_matter_of_seeds() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    for pair in ((model, copy.deepcopy(model).eval()), (copy.deepcopy(model).eval(), model)):
        report = compare(*pair, torch.ones(4, 8))
        assert (report.kind, report.module) == ("jump", "1") and "in training mode in one run" in report.reading


@pytest.mark.parametrize("length", [150, 512, 1500])
def test_frequencies_cast_to_bf16(length: int) -> None:
    model, ids = llama(max_position_embeddings=2048), torch.randint(0, 64, (1, length))
    assert compare(model, in_bf16(model), ids).ok
    report = compare(model, copy.deepcopy(model).bfloat16(), ids)  # casts the buffer as well
    assert report.module == "model.rotary_emb"
    assert "inv_freq is float32 in a and bfloat16 in b" in report.reading


def test_eager_and_compiled_part_nowhere_and_a_bad_kernel_is_named() -> None:
    model = llama()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    report = compare(compiled, model, IDS)
    assert report.ok, report.text()
    assert report.compared > 30
    torch._dynamo.reset()

    def wrong(graph: Any, inputs: Any) -> Any:
        silus = [node for node in graph.graph.nodes if node.target is nn.functional.silu]
        silus[-1].target = nn.functional.gelu
        silus[-1].kwargs = {}
        graph.recompile()
        return graph

    report = compare(model, torch.compile(model, backend=wrong), IDS)
    torch._dynamo.reset()
    assert report.module == "model.layers.1.mlp.act_fn", report.text()


def test_attention_implementations_agree() -> None:
    model = llama()
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    report = compare(model, other, IDS)
    assert report.ok, report.text()
    assert "attention: sdpa in a, eager in b" in report.notes


def test_rows_of_padding_are_left_out_and_those_of_tokens_are_not() -> None:
    model, mask = llama(), torch.ones_like(IDS)
    mask[0, :9] = 0  # on the left: rows that may attend to nothing
    other = in_bf16(model)
    other.set_attn_implementation("eager")
    report = compare(model, other, {"input_ids": IDS, "attention_mask": mask})
    assert report.ok, report.text()
    assert "rows of padding, by attention_mask, were left out" in report.notes
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3] *= 9
    report = compare(model, other, {"input_ids": IDS, "attention_mask": mask})
    assert report.module == "model.layers.1.mlp.up_proj"


def test_a_router_that_chooses_others() -> None:
    class Top(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.topk(2, dim=-1).indices

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.top = nn.Linear(8, 4, bias=False), Top()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(self.gate(x))

    model, x = Experts(), torch.randn(512, 8)
    low = copy.deepcopy(model).bfloat16()
    report = compare(lambda: model(x), lambda: low(x.bfloat16()))
    assert (report.kind, report.module, report.tolerance) == ("choice", "top", 0)


def test_seeds_and_inputs_and_modes() -> None:
    model = gpt2().train()

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return model(IDS).logits

    assert compare(lambda: run(0), lambda: run(0)).ok
    report = compare(lambda: run(0), lambda: run(1))
    assert (report.kind, report.module) == ("random", "transformer.drop")
    assert "seeds differ" in report.reading
    report = compare(lambda: model(IDS), lambda: model(IDS.flip(1)))
    assert (report.kind, report.module, report.path) == ("input", "", "input[0]")
    report = compare(model, copy.deepcopy(model).eval(), IDS)
    assert report.module == "transformer.drop"


def test_code_between_modules_and_its_operation() -> None:
    class Net(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.one, self.two, self.factor = nn.Linear(8, 8), nn.Linear(8, 8), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x) * self.factor)

    a, b = Net(1.0), Net(1.01)
    b.load_state_dict(a.state_dict())
    report = compare(a, b, torch.randn(4, 8))
    assert (report.kind, report.module, report.path) == ("between", "two", "input[0]")
    assert "by the code of the model (Net)" in report.reading
    c = copy.deepcopy(a)
    c.one.forward = lambda x: nn.functional.linear(x, c.one.weight, c.one.bias).relu()
    report = compare(a, c, torch.randn(4, 8))
    assert (report.kind, report.module) == ("jump", "one")


def test_functions_without_modules_part_at_an_operation() -> None:
    x = torch.randn(64, 64)
    low = x.bfloat16()
    report = compare(lambda: (x @ x).softmax(-1) * 2, lambda: (low @ low).softmax(-1) * 3)
    assert (report.kind, report.module, report.op) == ("jump", "", "mul")
    assert compare(lambda: (x @ x).tanh() * 2, lambda: ((low @ low).tanh() * 2).to(torch.float32)).ok
    report = compare(x.relu, (x + 1).relu)
    assert not report.ok


def test_operations_inside_of_a_module(tmp_path: Any) -> None:
    class Odd(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.exp() + 1).pow(self.p).log()

    report = compare(Odd(2.0), Odd(2.5), torch.randn(4, 8), ops=True)
    assert (report.kind, report.class_name, report.op) == ("jump", "Odd", "pow")


def test_other_names_and_missing_modules(tmp_path: Any) -> None:
    first = nn.Sequential()
    first.add_module("old", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    second = nn.Sequential()
    second.add_module("new", copy.deepcopy(first.old))
    second.add_module("extra", nn.Identity())
    report = compare(first, second, torch.randn(3, 8))
    assert report.ok, report.text()
    assert report.only_b == ["extra"]
    with torch.no_grad():
        second.new[2].bias += 1
    report = compare(first, second, torch.randn(3, 8))
    assert (report.module, report.other_name) == ("old.2", "new.2")
    assert "weights of old.2 differ: bias" in report.reading


def test_small_errors_that_grow_are_a_drift_and_no_jump() -> None:
    class Logistic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3.9 * x * (1 - x)  # chaotic: an error doubles or so in each of them

    net = nn.Sequential(*(Logistic() for _ in range(40)))
    x = torch.rand(64, dtype=torch.float64)
    assert compare(lambda: net(x), lambda: net(x + 1e-22), tolerance=1e-9).ok
    report = compare(lambda: net(x), lambda: net(x + 1e-12), tolerance=1e-9)
    assert report.kind == "drift", report.text()
    assert 5 < int(report.module) < 30
    assert "No single module" in report.reading


def test_training_steps_are_forwards_of_their_own(tmp_path: Any) -> None:
    def train(folder: Any, rate: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with record_run(folder, model):
            for _ in range(3):
                model(torch.ones(4, 8)).mean().backward()
                optimizer.step()

    train(tmp_path / "a", 0.1)
    train(tmp_path / "b", 0.2)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert (report.forward, report.module) == (1, "0")
    assert "backward or the optimizer step before" in report.reading


def test_two_runs_of_one_model_begin_alike() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2.0) + random.random() + numpy.random.rand()

    model = nn.Sequential(Noise(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, before = torch.ones(8, 4), copy.deepcopy(model[2].running_mean)
    report = compare(model, model, x)
    assert report.ok and report.exact == report.compared > 6, report.text()
    assert bool((x == 1).all()) and torch.equal(model[2].running_mean, before)


def test_a_norm_of_large_values_that_lie_close_together() -> None:
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), 100 + torch.randn(4, 16) * 0.1
    other = copy.deepcopy(model).bfloat16()
    report = compare(lambda: model(x), lambda: other(x.bfloat16()))
    assert report.module == "0" and "subtracts the mean, 100, of values" in report.reading
    with pytest.raises(UsageError, match="not in the dtype of a model") as refused:
        compare(model, other, x)
    assert "lambda: b(x.bfloat16())" in refused.value.hint


def test_a_recording_with_damage(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for name in ("a", "b"):
        with record_run(tmp_path / name, model):
            model(torch.ones(2, 8))
        with torch.no_grad():
            model[0].weight[0] += 0.1
    lines, tensors = tmp_path / "b" / "rank0.jsonl", tmp_path / "b" / "rank0-0.safetensors"
    whole = lines.read_text()
    lines.write_text(whole + "null\n[3]\n")
    with pytest.raises(MldebugError, match=r"rank0\.jsonl is damaged: line \d+ cannot be read"):
        compare(tmp_path / "a", tmp_path / "b")
    lines.write_text(whole + '{"n": 3, "ki')  # as a killed process leaves it
    assert compare(tmp_path / "a", tmp_path / "b").module == "0"
    last = max(json.loads(line)["n"] for line in whole.splitlines() if '"same"' not in line and '"role"' in line)
    lost = [
        line for line in whole.splitlines() if json.loads(line)["n"] != last
    ]  # others may say that they are the same
    lines.write_text("\n".join(lost) + "\n")
    assert compare(tmp_path / "a", tmp_path / "b").parted
    tensors.write_bytes(tensors.read_bytes()[:50])
    with pytest.raises(MldebugError, match=r"rank0-0\.safetensors cannot be read"):
        compare(tmp_path / "a", tmp_path / "b")
    tensors.unlink()
    assert compare(tmp_path / "a", tmp_path / "b").parted  # by samples


def test_wrong_usage(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no folder"):
        compare(tmp_path / "x", tmp_path / "y")
    with pytest.raises(UsageError, match="need inputs"):
        compare(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match="for two models"):
        compare(lambda: 1, lambda: 2, inputs=3)
    with pytest.raises(UsageError, match="tolerance"):
        compare(lambda: 1, lambda: 2, tolerance=-1)
