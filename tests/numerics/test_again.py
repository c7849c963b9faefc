"""In a loop of one's own: an event is explained by a replay, and what comes of the replay is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError, diagnose

from .cases_ops import Fn, chain
from .kit import INF, NAN, agrees, tiny, tokens, watch


def loop(
    model: nn.Module, data: Callable[[int], Tensor], steps: int = 3, micro: int = 1,
    loss_of: Callable[[Tensor], Tensor] = lambda out: out.float().mean(), model_call: Any = None,
) -> Callable[[], None]:  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def run() -> None:
        for i in range(steps):
            optimizer.zero_grad()
            for j in range(micro):
                loss_of((model_call or model)(data(i * micro + j))).backward()
            optimizer.step()

    return run


def root_behind_where(dropout: float = 0.0) -> nn.Sequential:
    model = chain(lambda x: torch.where(x > 0, x.sqrt(), 0.0), weight=1.0)
    model.add_module("drop", nn.Dropout(dropout))
    return model


def test_the_operation_of_a_bad_forward() -> None:
    model = chain(lambda x: x / x.sum(-1, keepdim=True), weight=1.0)
    report = watch(model, loop(model, lambda i: torch.full((2, 4), float(i < 2))))
    event = report.event
    agrees(event, step=2, phase="forward", module="f", kind="nan", op="aten.div.Tensor", again="shown", role="output")
    assert event.operation.cause == "zero over zero" and "x / x.sum(-1" in event.operation.code
    assert [operand.name for operand in event.operation.operands] == ["self", "other"]
    text = report.text()
    assert "operation: aten.div.Tensor" in text and "test_again.py" in text and "0 / 0" in report.reading
    assert report.to_dict()["event"]["operation"]["cause"] == "zero over zero"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_bad_gradient_is_explained_before_the_optimizer_steps(dropout: float) -> None:
    model = root_behind_where(dropout)
    rng: list[Tensor] = []
    grads: list[Any] = []

    def data(i: int) -> Tensor:
        if i == 2:
            rng.append(torch.get_rng_state())
        return torch.tensor([[1.0, float(i < 2), 2.0, 3.0]] * 4)

    recorder = DebugUnderflowOverflow(model)
    model.fc.weight.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.clone()))
    with recorder, pytest.raises(NumericsError) as caught:
        loop(model, data)()
    event = caught.value.report.event
    agrees(event, step=2, phase="backward", module="f", op="SqrtBackward0", again="shown", kind=("nan", "inf"))
    assert event.operation.forward_op == "aten.sqrt" and "x.sqrt()" in event.operation.code
    assert bool(torch.isfinite(model.fc.weight).all()), "the optimizer did not step"
    assert len(grads) == 3, "the backward that ran again left no gradient"
    assert torch.equal(model.fc.weight.grad.nan_to_num(), grads[-1].nan_to_num())
    torch.set_rng_state(rng[0])
    model(data(0))
    after = torch.get_rng_state()
    torch.set_rng_state(rng[0])
    nn.functional.dropout(torch.ones(4, 1), dropout)
    assert torch.equal(after, torch.get_rng_state()) or dropout == 0.0


def test_a_flipped_bit_in_an_activation_does_not_reproduce() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(0.4)
        model[0].bias.fill_(0.1)
    calls = [0]

    def flip(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] != 2:
            return out
        bits = out.detach().clone().view(torch.int32)  # 1.7 is 0x3fd9999a: with the highest bit of the exponent, nan
        bits.view(-1)[3] ^= 0x40000000
        return out + (bits.view(torch.float32) - out).detach()

    model[0].register_forward_hook(flip)
    report = watch(model, loop(model, lambda i: torch.ones(2, 4)))
    agrees(report.event, step=1, phase="forward", module=("0", "1"), again="did not reproduce")
    assert "did not reproduce" in report.reading and "another device" in report.hint


def test_a_flipped_bit_in_a_gradient_does_not_reproduce() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    once = [True]

    def flip(grad: Tensor) -> Tensor:
        bad = grad.clone()
        bad.view(-1)[1] = INF
        return bad

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        if once:
            once.pop()
            out.register_hook(flip)

    model[1].register_forward_hook(hook)
    report = watch(model, loop(model, lambda i: torch.ones(2, 4)))
    agrees(report.event, step=0, phase="backward", role="parameter", again="did not reproduce")
    assert "forward and backward" in report.reading


def test_only_when_compiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def wrong(graph: torch.fx.GraphModule, example: Any) -> Any:
        def call(*args: Any) -> Any:
            return [t * INF if isinstance(t, Tensor) and t.is_floating_point() else t for t in graph(*args)]

        return call

    compiled = torch.compile(model, backend=wrong)
    report = watch(model, loop(model, lambda i: torch.ones(2, 4), model_call=compiled))
    agrees(report.event, step=0, again="only when compiled")
    assert "compiled" in report.reading


def test_an_input_that_is_changed_afterwards_is_not_replayable() -> None:
    model = root_behind_where()
    data = torch.tensor([[1.0, 0.0, 2.0, 3.0]])

    def loss_of(out: Tensor) -> Tensor:
        data.add_(1.0)
        return out.mean()

    model.fc.weight.requires_grad_(True)
    inner = nn.Sequential(Fn(lambda x: x * 1.0), *model)
    report = watch(inner, loop(inner, lambda i: data, loss_of=loss_of))
    agrees(report.event, step=0, phase="backward", again="not replayable")
    assert "changed in place" in report.not_replayed


def test_a_loss_outside_of_the_model_makes_the_bad_gradient() -> None:
    model = nn.Linear(4, 4)

    def loss_of(out: Tensor) -> Tensor:
        return (out - out.detach()).abs().sqrt().mean()

    report = watch(model, loop(model, lambda i: torch.ones(2, 4), loss_of=loss_of))
    agrees(report.event, step=0, phase="backward", module=None, op="SqrtBackward0", role="gradient")


def test_a_loss_outside_of_a_model_that_is_watched_in_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_of(out: Tensor) -> Tensor:
        return (out - out.detach()).abs().sqrt().mean()

    report = watch(model, loop(model, lambda i: torch.ones(2, 4), loss_of=loss_of), exclude=["0"])
    agrees(report.event, step=0, phase="backward", module=None, op=None, role="gradient")
    assert "outside" in report.not_replayed and "reached the model" in report.reading
    assert "None" not in report.text() and "diagnose(model" in report.hint


def test_the_micro_batch_of_a_bad_gradient() -> None:
    model = root_behind_where()
    report = watch(model, loop(model, lambda i: torch.tensor([[1.0, float(i != 3), 2.0, 3.0]]), micro=2))
    agrees(report.event, step=1, micro_batch=1, batch=3, phase="backward", module="f", op="SqrtBackward0")


def test_the_loss_inside_and_logits_are_differentiated_once() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = root_behind_where()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": logits.mean(), "logits": logits}

    model = WithLoss()
    report = watch(model, loop(model, lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]), loss_of=lambda out: out["loss"]))
    agrees(report.event, step=0, phase="backward", module="body.f", op="SqrtBackward0", again="shown")


def test_nothing_is_left_on_the_outputs() -> None:
    model = nn.Linear(4, 1)
    kept: list[Tensor] = []

    def loss_of(out: Tensor) -> Tensor:
        kept.append(out)
        return out.mean()

    assert watch(model, loop(model, lambda i: torch.ones(2, 4), loss_of=loss_of)).event is None
    assert all(not out._backward_hooks for out in kept)


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_value_planted_in_any_layer_is_found_there(value: float) -> None:
    model = tiny("gpt2", dropout=0.0)

    def run() -> None:
        model(**tokens()).loss.backward()

    for name, layer in model.named_modules():
        if ".h." not in name or getattr(layer, "weight", None) is None:
            continue
        forward = layer.forward

        def planted(x: Tensor, forward: Any = forward) -> Tensor:
            out = forward(x).clone()
            out.view(-1)[out.numel() // 2] = value
            return out

        layer.forward = planted
        try:
            event = watch(model, run).event
        finally:
            del layer.forward
        agrees(event, module=name, phase="forward", again="shown")


def test_diagnose_of_a_compiled_model_runs_it_compiled() -> None:
    model = chain(lambda x: x / x.sum(-1, keepdim=True), weight=1.0)
    compiled = torch.compile(model, backend="eager")
    ran = []

    def step(i: int) -> Tensor:
        ran.append(i)
        loss = compiled(torch.full((2, 4), float(i < 1))).mean()
        loss.backward()
        return loss

    agrees(diagnose(compiled, step, steps=3).event, step=1, module="f", op="aten.div.Tensor", again="shown")
    assert ran == [0, 1]


def test_the_operation_is_named_where_anomaly_detection_stops_the_step() -> None:
    model = root_behind_where()

    def step(i: int) -> Tensor:
        with torch.autograd.detect_anomaly():
            loss = model(torch.tensor([[1.0, 0.0, 2.0, 3.0]])).mean()
            loss.backward()
        return loss

    agrees(diagnose(model, step, steps=2).event, step=0, phase="backward", module="f", op="SqrtBackward0")
