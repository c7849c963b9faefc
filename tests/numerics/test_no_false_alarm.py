"""Healthy programs give no event; what is only a hazard gives a note."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, diagnose

from .kit import INF, Net, tiny, tokens, watch


def rounds(model: nn.Module, batch: dict[str, Tensor], steps: int = 2, **options: Any) -> Any:
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    def run() -> None:
        for _ in range(steps):
            opt.zero_grad()
            model(**batch).loss.float().backward()
            opt.step()

    return watch(model, run, **options)


@pytest.mark.parametrize("check", ["step", "each"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5", "bert", "gpt2"])
def test_padding_masks(kind: str, dtype: torch.dtype, attention: str, check: str) -> None:
    if kind == "t5" and attention == "sdpa":
        pytest.skip("this model has no such attention")
    model = tiny(kind, attn_implementation=attention).to(dtype)
    assert rounds(model, tokens(pad=3), check=check).event is None


class MaskModule(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.full((n, n), self.fill, dtype=dtype).triu(1)


class Masked(nn.Module):
    """The mask is made by a module, so that it is an output too, and one comes in from outside."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), MaskModule(fill)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8**0.5
        scores = scores + (self.mask(x.shape[1], x.dtype) if mask is None else mask)
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("check", ["step", "each", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["inf", "min"])
@pytest.mark.parametrize("given", [False, True])
def test_additive_masks(how: str, dtype: torch.dtype, given: bool, check: str) -> None:
    fill = -INF if how == "inf" else torch.finfo(dtype).min
    model = Masked(fill).to(dtype)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    mask = torch.full((4, 4), fill, dtype=dtype).triu(1) if given else None

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(2, 4, 8, dtype=dtype), mask).float().pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    report = diagnose(model, step, steps=3, check=check)
    assert report.event is None
    assert report.ok


def test_a_mask_is_noted() -> None:
    model = Masked(-INF)
    report = watch(model, lambda: model(torch.randn(2, 4, 8)))
    assert report.event is None
    assert any("mask" in note for note in report.notes)


def test_a_mask_as_a_buffer() -> None:
    class Causal(Masked):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.register_buffer("bias", torch.full((4, 4), -INF).triu(1))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, self.bias)

    model = Causal()
    assert watch(model, lambda: model(torch.randn(2, 4, 8)).sum().backward()).event is None


def test_logits_masked_before_sampling() -> None:
    class TopK(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < x.topk(2, -1).values[..., -1:], -INF)

    model = nn.Sequential(nn.Linear(4, 8), TopK(), nn.Softmax(-1))
    assert watch(model, lambda: model(torch.randn(2, 4)).sum().backward()).event is None


def test_integer_and_bool_outputs_have_no_limits() -> None:
    class Ids(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            ids = x.argmax(-1)
            return x, ids * 0 + 2**62, x > 0

    model = nn.Sequential(nn.Linear(4, 4), Ids())
    report = watch(model, lambda: model(torch.randn(2, 4)))
    assert report.event is None
    assert not any("overflow" in note for note in report.notes)


def ahead(value: float, dtype: torch.dtype) -> Any:
    class Big(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0 + value

    model = nn.Sequential(nn.Linear(4, 4), Big()).to(dtype)
    return watch(model, lambda: model(torch.ones(2, 4, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_overflow_ahead_is_a_note_and_no_event(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    near = ahead(limit / 3, dtype)
    assert near.event is None and near.ok
    assert any("1" in note and "overflow" in note.lower() for note in near.notes), near.notes
    far = ahead(limit / 5, dtype)
    assert far.event is None
    assert not any("overflow" in note.lower() for note in far.notes), far.notes


def test_the_trend_of_a_growing_tensor_is_in_the_note() -> None:
    class Grows(nn.Module):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * 0 + 1000.0 * self.factor

    model = nn.Sequential(nn.Linear(4, 4), Grows()).half()

    def step(i: int) -> Tensor:
        model[1].factor = 2.0**i
        return model(torch.ones(2, 4, dtype=torch.float16)).float().mean()

    report = diagnose(model, step, steps=6)  # 32000 at the end
    assert report.event is None
    assert any("overflow" in note.lower() for note in report.notes), report.notes


def test_an_underflow_is_noted() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0 + 1e-6  # a subnormal of float16

    model = nn.Sequential(nn.Linear(4, 4), Small()).half()
    report = watch(model, lambda: model(torch.ones(2, 4, dtype=torch.float16)))
    assert report.event is None
    assert any("underflow" in note.lower() or "subnormal" in note.lower() for note in report.notes), report.notes


def test_zeros_of_a_relu_are_no_underflow() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.9), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.fill_(-50.0)
    opt = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(4, 4)).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    assert diagnose(model, step, steps=3).event is None


def test_a_healthy_run_has_a_plain_reading(capsys: Any) -> None:
    from .kit import train

    model = Net()
    report = watch(model, lambda: train(model))
    assert report.ok and report.event is None
    assert isinstance(report.reading, str) and report.reading
    assert "Detected" not in capsys.readouterr().out


def test_the_hazard_of_a_step_is_forgotten_at_the_next() -> None:
    """A NaN three steps after a mask that had -inf in all steps: the NaN is named, not the first mask."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked, self.net = Masked(-INF), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[:, 0, :4]) + self.masked(x).mean()

    model = Late()

    def step(i: int) -> Tensor:
        model.net.plant.value = float("nan") if i == 3 else None
        return model(torch.randn(2, 4, 8)).mean()

    event = diagnose(model, step, steps=5).event
    assert (event.step, event.module, event.kind) == (3, "net.plant", "nan")


def test_attached_and_never_used() -> None:
    with DebugUnderflowOverflow(Net()) as recorder:
        pass
    assert recorder.report.event is None and recorder.report.ok
