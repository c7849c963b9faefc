"""In a loop of one's own: what the code after the model does, in its loss and in its backward: operation and cause."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, diagnose

from .kit import INF, agrees, watch

Loss = Callable[[Tensor], Tensor]


class Sign(torch.autograd.Function):
    """A loss of somebody's own, whose formula divides by what may be 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x / x.abs())


def trained(loss: Loss, steps: int = 1, rows: int = 3, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4) if model is None else model
    opt = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        made = loss(model(torch.randn(rows, 4)))
        made.backward()  # type: ignore[no-untyped-call]
        opt.step()
        return made

    return model, step


def event_of(loss: Loss, **options: Any) -> Any:
    model, step = trained(loss, **options)
    return watch(model, lambda: step(0)).event


def equal(y: Tensor) -> Tensor:
    """0, with a gradient."""
    return y - y.detach()


BACKWARD: dict[str, tuple[Loss, str, str]] = {
    "root": (lambda y: equal(y).pow(2).mean().sqrt(), "SqrtBackward0", "gradient of sqrt at zero"),
    "power": (lambda y: (equal(y).abs() ** 0.5).sum(), "PowBackward0", "gradient of a power at zero"),
    "quotient": (
        lambda y: torch.where(equal(y) != 0, y / equal(y), y).sum(), "DivBackward0", "gradient of a quotient at zero"
    ),
    "acos": (lambda y: torch.acos((equal(y) + 1).clamp(-1, 1)).mean(), "AcosBackward0",
             "gradient of arccos or arcsin at the edge"),
    "exp": (lambda y: torch.where(y < 50, y, (equal(y) + 100).exp()).sum(), "ExpBackward0",
            "gradient of exp behind where"),
    "inverse": (lambda y: torch.linalg.inv(equal(y).T @ equal(y) + torch.eye(4) * 1e-30).sum(), "LinalgInvExBackward0",
                "gradient of a singular matrix"),
    "own formula": (lambda y: Sign.apply(equal(y)).mean(), "SignBackward", "zero over zero"),
    "eigenvectors": (
        lambda y: torch.linalg.eigh(equal(y).T @ equal(y) + torch.eye(4))[1].sum(), "LinalgEighBackward0",
        "repeated singular values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_that_the_loss_makes_bad(name: str) -> None:
    loss, op, cause = BACKWARD[name]
    event = event_of(loss)
    agrees(event, step=0, phase="backward", module=None, role="gradient", op=op, again="shown")
    assert event.operation.cause == cause and event.operation.operands
    model, step = trained(loss)
    looked = diagnose(model, step, steps=1).event
    assert looked is not None and looked.operation is not None
    assert (looked.op, looked.operation.cause) == (event.op, event.operation.cause), "diagnose() says the same"


def test_a_finite_branch_that_is_left_out_is_no_event() -> None:
    assert event_of(lambda y: y.pow(2).clamp(min=1e-3).sqrt().mean()) is None


def test_a_penalty_before_a_second_forward() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (grad.pow(2).sum(1).sqrt() - 1).pow(2).mean()
        (penalty + model(x).mean()).backward()
        opt.step()

    agrees(watch(model, run).event, phase="backward", module=None, op="SqrtBackward0", again="shown")


def test_a_hook_of_the_users_own_on_what_the_model_returned() -> None:
    kept: list[Tensor] = []

    def loss(y: Tensor) -> Tensor:
        kept.append(y)
        y.register_hook(lambda grad: grad / grad.norm())
        return (y * 0.0).sum()

    event = event_of(loss)
    agrees(event, phase="backward", module="", role="gradient", op="a hook", again="shown")
    assert event.operation.file == __file__ and "grad.norm()" in event.operation.code
    model, step = trained(loss)
    looked: Any = diagnose(model, step, steps=1).event
    agrees(looked, phase="backward", module="", role="gradient", op="aten.div.Tensor")
    assert looked.operation.cause == "zero over zero" and "grad.norm()" in looked.operation.code


def test_a_hook_that_scales_a_gradient_is_taken_as_it_is() -> None:
    """The backward that runs again has the gradient that the node had: with the hook's factor it overflows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 1e30)

    def loss(y: Tensor) -> Tensor:
        y.register_hook(lambda grad: grad * 1e20)
        return y.mean()

    model, step = trained(loss, model=model)
    agrees(watch(model, lambda: step(0)).event, phase="backward", module="1", op="AddmmBackward0", again="shown")


def test_a_hook_on_a_parameter_is_named_with_its_line() -> None:
    model, step = trained(lambda y: y.mean())
    model.weight.register_hook(lambda grad: grad / (grad.norm() * 0))  # type: ignore[operator,union-attr]
    event: Any = diagnose(model, step, steps=1).event
    agrees(event, phase="backward", module="", param="weight", op="aten.div.Tensor", kind="inf")
    assert event.operation.cause == "division by zero" and "grad.norm()" in event.operation.code


def singular(y: Tensor) -> Tensor:
    return -torch.linalg.slogdet(equal(y).T @ equal(y))[1]


def masked(fill: Loss) -> Loss:
    return lambda y: -(torch.log_softmax(fill(y), -1).exp() * torch.ones_like(y)).sum(-1).mean()


def ctc(y: Tensor) -> Tensor:
    lengths = torch.tensor([3]), torch.tensor([3])
    return F.ctc_loss(y.log_softmax(-1)[:, None], torch.ones(1, 3, dtype=torch.long), *lengths)


def policy(y: Tensor) -> Tensor:
    rewards = torch.tensor([1.5])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    return -(y.log_softmax(-1)[:, 0] * advantages).mean()


FORWARD: dict[str, tuple[Loss, str, str]] = {
    "slogdet": (singular, "aten._linalg_slogdet", "singular matrix"),
    "masked_fill": (
        masked(lambda y: y.masked_fill(torch.ones(3, 4, dtype=torch.bool), -INF)), "aten._log_softmax",
        "fully masked row",
    ),
    "where": (
        masked(lambda y: torch.where(torch.zeros(4, dtype=torch.bool), y, -INF)), "aten._log_softmax",
        "fully masked row",
    ),
    "ctc": (ctc, "aten._ctc_loss", "target too long for CTC"),
    "product": (lambda y: (y.half() * 1e3 @ (y.half() * 1e3).T).sum().float(), "aten.mm", "product overflow"),
    "advantages": (policy, "aten.mul.Tensor", "bad before the graph"),
    "weights": (lambda y: (y.mean(-1) * torch.tensor([0.0, 1.0, 0.0]).log().sub(1).exp().log().neg()).mean(),
                "aten.mul.Tensor", "bad before the graph"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_a_loss_that_is_bad(name: str) -> None:
    loss, op, cause = FORWARD[name]
    event = event_of(loss, rows=1 if name == "advantages" else 3)
    agrees(event, step=0, phase="forward", module=None, role="loss", op=op)
    assert event.operation.cause == cause
    assert event.operation.victim == (cause == "bad before the graph")


def test_the_line_of_what_was_bad_before_the_graph() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def run() -> None:
        rewards = torch.tensor([1.5])
        advantages = rewards - 1.0
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        loss = -(model(torch.randn(1, 4)).log_softmax(-1)[:, 0] * advantages).mean()
        loss.backward()
        advantages = rewards

    report = watch(model, run)
    agrees(report.event, phase="forward", role="loss", op="aten.mul.Tensor")
    assert "rewards.std()" in report.event.operation.code and report.event.operation.file == __file__
    assert "it was made at" in report.text()


def scaled(loss: Loss, scale: float) -> Any:
    torch.manual_seed(0)
    model, events = nn.Linear(4, 4), []
    opt, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=scale)
    with DebugUnderflowOverflow(model, on_event=events.append) as recorder:
        opt.zero_grad()
        scaler.scale(loss(model(torch.randn(3, 4)))).backward()
        scaler.step(opt)
        scaler.update()
    return events[0] if events else recorder.report.event


def test_a_gradient_that_is_bad_at_any_loss_scale_is_told_of_at_once() -> None:
    event = scaled(BACKWARD["root"][0], 1024.0)
    agrees(event, step=0, phase="backward", module=None, op="SqrtBackward0", benign=False, again="shown")
    assert event.loss_scale == 1024.0


def test_one_that_the_loss_scale_alone_takes_out_of_the_range_is_benign() -> None:
    event = scaled(lambda y: (y * 1e25).sum() * 1e-20, 2.0**120)
    agrees(event, step=0, phase="backward", module=None, kind="inf", benign=True)


def test_a_graph_is_freed_with_its_step() -> None:
    """The nodes that are watched are held by the recorder until the step is over, and by nobody else."""
    model, alive = nn.Linear(4, 4), []
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    with DebugUnderflowOverflow(model):
        for _ in range(3):
            y = model(torch.ones(3, 4))
            loss = y.pow(2).exp().sqrt().sum()
            alive.append(weakref.ref(y))
            loss.backward(retain_graph=True)
            del y, loss
            opt.step()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_losses_and_gradients_are_the_same_bit_for_bit() -> None:
    def run(recorded: bool) -> list[Tensor]:
        model, step = trained(lambda y: (y.exp().log1p().sqrt() / y.std()).norm() + Sign.apply(y).sum())
        if not recorded:
            return [step(i).detach() for i in range(3)] + [p.detach() for p in model.parameters()]
        with DebugUnderflowOverflow(model):
            return [step(i).detach() for i in range(3)] + [p.detach() for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(False), run(True), strict=True))


class Normed(torch.optim.Optimizer):
    """Divides by the norm of the gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.norm())


ZERO = "zero denominator of the optimizer"
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "RMSprop": (lambda p: torch.optim.RMSprop(p, eps=0), ZERO),
    "centered": (lambda p: torch.optim.RMSprop(p, eps=0, centered=True), ZERO),
    "Adam": (lambda p: torch.optim.Adam(p, eps=0), ZERO),
    "foreach": (lambda p: torch.optim.AdamW(p, eps=0, foreach=True), ZERO),
    "fused": (lambda p: torch.optim.Adam(p, eps=0, fused=True), ZERO),
    "AMSGrad": (lambda p: torch.optim.AdamW(p, eps=0, amsgrad=True), ZERO),
    "NAdam": (lambda p: torch.optim.NAdam(p, eps=0), ZERO),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, eps=0), ZERO),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, eps=0), ZERO),
    "Adamax": (lambda p: torch.optim.Adamax(p, eps=0), ZERO),
    "own": (lambda p: Normed(p, {}), ZERO),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("looked", [False, True], ids=["own loop", "diagnose"])
def test_an_optimizer_that_divides_by_zero(name: str, looked: bool) -> None:
    make, cause = OPTIMIZERS[name]
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    opt = make(model[:1].parameters())

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.tensor([1, 2])).mean() * (0.0 if name == "own" else 1.0)
        loss.backward()
        opt.step()
        return loss

    event: Any = diagnose(model, step, steps=2).event if looked else watch(model, lambda: step(0)).event
    agrees(event, step=0, phase="optimizer", module="0", kind="nan", param="0.weight")
    assert (event.operation.cause if looked else event.cause) == cause


def test_a_variance_that_rounding_makes_negative() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-8, centered=True, alpha=0.5)
    x = torch.rand(1, 4) * 1000.3

    def run() -> None:
        for _ in range(60):
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()

    event = watch(model, run).event
    agrees(event, phase="optimizer", kind="nan", param="weight")
    assert event is not None and event.cause == "negative variance of the optimizer"


def test_the_gradients_of_a_bad_loss_are_no_second_event() -> None:
    def loss(y: Tensor) -> Tensor:
        y.register_hook(lambda grad: grad * 0.5)
        return (y / 0.0).sum()

    model, step = trained(loss)
    events: list[Any] = []
    watch(model, lambda: step(0), on_event=events.append)
    assert [(event.role, event.phase) for event in events] == [("loss", "forward")]
