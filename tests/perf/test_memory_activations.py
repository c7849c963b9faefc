"""activation_memory: meta says what a real forward keeps, and a module is left as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mldebug.core.errors import UsageError
from mldebug.perf.memory._activations import activation_memory
from mldebug.perf.memory._live import LiveTensors, kinds_of

transformers = pytest.importorskip("transformers")
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=256),
    "t5": lambda: transformers.T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=256),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_meta_is_what_a_real_forward_keeps(kind: str, checkpointing: bool) -> None:
    told = activation_memory(CONFIGS[kind](), batch=2, sequence=64, like="cpu", checkpointing=checkpointing)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS[kind](), dtype=torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.zeros(2, 64, dtype=torch.long)
    given = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if kind == "t5":
        given["decoder_input_ids"] = ids.clone()
    live = LiveTensors(lambda: "")
    assert live.begin()
    try:
        loss = model(**given).loss
    finally:
        live.end()
    gc.collect()
    alive = sum(one.nbytes for one in live.look(kinds_of([model], [])) if one.kind == "tensor")
    assert loss.requires_grad
    # A checkpoint also keeps, beside what autograd saves, the positions that all layers are given by name.
    assert told.total - told.inputs == pytest.approx(alive, rel=0.02 if checkpointing else 0.002)
    measured = activation_memory(model, batch=2, sequence=64, checkpointing=checkpointing)
    assert told.total == pytest.approx(measured.total, rel=0.003)
    assert [layer.name for layer in told.layers] == [layer.name for layer in measured.layers]


def test_checkpointing_leaves_the_hidden_states_alone() -> None:
    report = activation_memory(CONFIGS["llama"](), batch=2, sequence=64, checkpointing=True)
    assert [layer.copies for layer in report.layers] == [1.0, 1.0, 1.0]
    assert report.copies == 1.0 and report.to_dict()["copies"] == 1.0
    assert "a layer keeps 1.0 times its hidden states (16.0KiB)" in report.text()
    assert max(map(len, report.text().splitlines())) <= 80


def test_a_module_of_ones_own_and_what_is_counted_once() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()  # relu saves its output, which is the next layer's input: one piece of memory
            return x.sum()

    net = Net().eval()
    report = activation_memory(net, {"x": torch.ones(8, 16)})
    assert report.total == 4 * 8 * 16 * 4 and report.inputs == 8 * 16 * 4
    assert not net.training and not any(module._forward_hooks for module in net.modules())
    assert report.by_module == {"Net": 3 * 8 * 16 * 4, "Linear": 8 * 16 * 4}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: activation_memory(torch.nn.Linear(4, 4)), "has no config to make inputs from"),
        (lambda: activation_memory(torch.nn.Linear(4, 4), {"input": torch.ones(3, 3)}), "the forward of Linear failed"),
        (lambda: activation_memory("llama", dtype="float17"), "no such dtype"),
        (lambda: activation_memory(CONFIGS["llama"](), sequence=8, like="tpu"), "like is 'tpu'"),
    ],
    ids=["no config", "wrong shape", "dtype", "like"],
)
def test_usage(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()
