"""compare() of a CPU with a GPU: they agree, and a switch that makes a difference is named."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from mldebug.numerics import compare, record_run

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_a_cpu_and_a_gpu_agree_and_tf32_is_named(model: nn.Module, tmp_path) -> None:
    ids = torch.randint(0, 1000, (2, 128))
    on_gpu = copy.deepcopy(model).cuda()
    before = torch.get_float32_matmul_precision()
    try:
        for name, net, precision in (("cpu", model, "highest"), ("gpu", on_gpu, "highest"), ("tf32", on_gpu, "high")):
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad(), record_run(tmp_path / name, net):
                net(ids.to(net.device))
    finally:
        torch.set_float32_matmul_precision(before)
    report = compare(tmp_path / "cpu", tmp_path / "gpu")
    print(report.text())
    assert report.ok
    report = compare(tmp_path / "gpu", tmp_path / "tf32")
    print(report.text())
    assert report.module == "model.layers.0.self_attn.q_proj"
    assert "tf32" in report.reading
    assert any("float32 matmul precision" in note for note in report.notes)


def test_bf16_and_inductor_agree_on_a_gpu(model: nn.Module) -> None:
    ids = torch.randint(0, 1000, (2, 128), device="cuda")
    model = model.cuda()
    low = copy.deepcopy(model).bfloat16()
    low.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    for other in (low, torch.compile(model)):
        begin = time.perf_counter()
        report = compare(model, other, ids)
        print(f"{time.perf_counter() - begin:.1f} s", report.text())
        assert report.ok
    report = compare(low, torch.compile(low), ids)
    print(report.text())
    assert report.ok
