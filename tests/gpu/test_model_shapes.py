"""On a GPU: the products of a model are measured, and the advice about sizes is true of this card."""

from __future__ import annotations

import pytest
import torch

from mldebug.perf.matmul._advice import advise
from mldebug.perf.matmul._measure import measure
from mldebug.perf.matmul._model import model_shapes
from mldebug.perf.matmul._model_report import model_report, to_measure
from mldebug.perf.matmul._swiglu import best_swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_vocabulary_that_is_padded_as_advised_is_faster() -> None:
    model = model_shapes("gpt2", seq=1024, batch=8)
    (vocab,) = advise(model)
    odd, padded = (8192, vocab.value, 768, 1), (8192, vocab.better, 768, 1)
    rates = measure([odd, padded], seconds=4)
    print(f"gpt2 head, 8192 tokens: {vocab.value} {rates[odd]:.1f} TFLOPS, {vocab.better} {rates[padded]:.1f} TFLOPS")
    assert rates[padded] > 1.1 * rates[odd]


def test_the_products_of_a_model_are_below_the_peak_and_add_up() -> None:
    from mldebug.core.device import find_device

    model = model_shapes("llama-7b", seq=2048)
    device = find_device()
    rates = measure(to_measure(model), seconds=6)
    report = model_report(model, rates, device_name=device.name)
    print(report.text())
    assert report.missing == 0 and report.step_ms is not None
    assert all(one.forward and one.forward > 1 for one in report.products)
    assert report.best_mfu is None or 0.2 < report.best_mfu < 1


def test_the_best_width_is_no_odd_one() -> None:
    report = best_swiglu(2048, 5461, tokens=4096, distance=200, measure=True)
    print(report.text())
    by_size = {one.intermediate: one.tflops for one in report.sizes}
    assert report.best % 8 == 0 and report.best != 5461
    assert 5461 not in by_size or by_size[report.best] > 1.05 * (by_size[5461] or 0)  # type: ignore[operator]
