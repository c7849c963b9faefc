"""Gradients of module outputs, trends of gradient norms, underflow, and what optimizers keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError
from mldebug.numerics.gradients._scaler import Scaling
from mldebug.numerics.ring._memory import Memory

from .kit import NAN, agrees, bits, hooks_now, tiny, tokens


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Spoil(nn.Module):
    """Hands its input on, and in backward the gradient times `factor`."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Spoil.apply(x, self.factor)


def steps(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    count: int,
    opt: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Any:
    """Train under a recorder; its report."""
    own = opt or torch.optim.SGD(model.parameters(), 1e-3)
    recorder = DebugUnderflowOverflow(model, **options)
    try:
        with recorder:
            for i in range(count):
                own.zero_grad()
                loss_of(i).backward()
                own.step()
    except NumericsError as error:
        return error.report
    return recorder.report


def spoiled(monkeypatch: pytest.MonkeyPatch, at: int) -> Any:
    """A report where the backward of module 2 goes bad, with no backward to run again, as on a device."""
    monkeypatch.setattr("mldebug.numerics.replay._backward.Backwards.keep", lambda *args: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Spoil(), nn.Linear(4, 4), nn.LayerNorm(4))

    def loss(i: int) -> Tensor:
        model[2].factor = NAN if i == at else 1.0
        return model(torch.randn(3, 4)).pow(2).sum()

    return steps(model, loss, 6, backward=True)


def test_the_module_whose_backward_goes_bad_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooks_now()
    report = spoiled(monkeypatch, 3)
    agrees(report.event, step=3, phase="backward", module="2", module_class="Spoil", role="gradient", kind="nan")
    assert "The gradient that reached the output of 2 (Spoil) was finite" in report.reading
    assert report.series["4 output gradient"] and report.dtypes["4 output gradient"] == "float32"
    assert hooks_now() == before


def test_a_gradient_that_reaches_the_model_bad_is_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mldebug.numerics.replay._backward.Backwards.keep", lambda *args: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(i: int) -> Tensor:
        return _Spoil.apply(model(torch.ones(2, 4)), NAN if i == 1 else 1.0).sum()

    agrees(steps(model, loss, 4, backward=True).event, step=1, phase="backward", module=None, kind="nan")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bits_are_the_same_with_dropout_and_checkpointing(checkpointing: bool) -> None:
    seen = []
    for watched in (False, True):
        model = tiny("gpt2")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        recorder = DebugUnderflowOverflow(model, backward=True) if watched else None
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(1)
        for _ in range(3):
            opt.zero_grad()
            model(**tokens()).loss.backward()
            opt.step()
        if recorder is not None:
            recorder.stop(None)
            assert recorder.report.ok
        seen.append(bits(model))
    assert seen[0] == seen[1]


def test_outputs_are_changed_in_place_and_saved_as_ever(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    kept: list[Tensor] = []

    def loss(i: int) -> Tensor:
        out = model(torch.ones(2, 4))
        kept.append(out)
        torch.save(out, tmp_path / "out.pt")
        return out.mul_(2.0).sum()

    assert steps(model, loss, 3, backward=True).ok
    assert len(kept) == 3


# What optimizers keep.


def half_steps(gain: float, eps: float, count: int = 40) -> Any:
    model = nn.Linear(4, 4).half()
    inputs = torch.ones(2, 4).half()
    opt = torch.optim.Adam(model.parameters(), 1e-5, eps=eps)
    return steps(model, lambda i: (model(inputs).float() * gain).sum(), count, opt)


def test_squares_that_overflow_are_an_event() -> None:
    report = half_steps(5000.0, 1e-4)
    agrees(report.event, phase="optimizer", role="state", name="exp_avg_sq", kind="inf", dtype="float16")
    assert report.event.param in ("weight", "bias") and "no longer trained" in report.reading


def test_squares_that_underflow_and_an_eps_of_zero_are_said() -> None:
    report = half_steps(1e-4, 1e-4)
    assert report.ok and any("exp_avg_sq of weight and 1 more is all zero in float16" in n for n in report.notes)
    report = half_steps(1.0, 1e-8, count=2)
    assert any(note.startswith("Adam's eps 1e-08 is zero in float16") for note in report.notes)


def test_float32_and_bfloat16_have_neither() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(4, 4).to(dtype)
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        report = steps(model, lambda i: (model(torch.ones(2, 4, dtype=dtype)) * 1e-4).float().sum(), 40, opt)  # noqa: B023
        assert report.ok and report.notes == []


# Trends.


def test_gradients_that_explode_are_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    still = torch.optim.SGD(model.parameters(), 0.0)
    report = steps(model, lambda i: (model(torch.ones(2, 4)) * 1.2**i).sum(), 30, still)
    assert [trend["trend"] for trend in report.trends] == ["exploding"]
    module = report.trends[0]["module"]
    assert any(note.startswith(f"gradients are exploding: the norm of {module} went from") for note in report.notes)
    assert report.to_dict()["trends"] == report.trends


def test_gradients_that_vanish_with_depth_are_said() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(14)]
    report = steps(nn.Sequential(*layers), lambda i: nn.Sequential(*layers)(torch.randn(4, 8)).pow(2).sum(), 16)
    assert [trend["trend"] for trend in report.trends] == ["vanish with depth"]
    assert report.trends[0]["module"] == "0.0"


def test_a_layer_that_stops_training_is_said() -> None:
    model = nn.ModuleDict({"slow": nn.Linear(4, 1), "other": nn.Linear(4, 1)})
    x = torch.ones(2, 4)
    report = steps(model, lambda i: (model["slow"](x) * 0.6**i + model["other"](x)).sum(), 40)
    assert [(trend["trend"], trend["module"]) for trend in report.trends] == [("vanishing", "slow")]


@pytest.mark.parametrize("kind", ["converges", "warms up", "spikes", "normed"])
def test_healthy_runs_have_no_trend(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "normed":
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(12)])
        report = steps(model, lambda i: (model(torch.randn(4, 8)) - 1).pow(2).mean(), 40)
    else:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = torch.optim.SGD(model.parameters(), 0.05)

        def loss(i: int) -> Tensor:
            if kind == "warms up":
                opt.param_groups[0]["lr"] = 0.1 * min(1.0, i / 30)
            gain = 1e4 if kind == "spikes" and i % 13 == 12 else 1.0
            return (model(torch.randn(16, 8)) * (1e-3 if gain > 1 else 1.0)).pow(2).mean() * gain

        report = steps(model, loss, 64, opt)
    assert report.ok and report.trends == []


# Underflow.


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float().pow(2).mean()


@pytest.mark.parametrize(
    "dtype, gain, said", [(torch.float16, 1e-5, True), (torch.float16, 1e3, False), (torch.bfloat16, 1e-5, False)]
)
def test_the_share_of_gradients_that_underflow(dtype: torch.dtype, gain: float, said: bool) -> None:
    torch.manual_seed(0)
    model = WithLoss()

    def loss(i: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(torch.randn(8, 16)) * gain

    report = steps(model, loss, 4)
    assert report.ok
    notes = [note for note in report.notes if "gradient elements of float16 modules are zero" in note]
    assert len(notes) == said


# A loss scale on a device, whose gradients are read one step late.


def test_on_a_device_a_scale_is_judged_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "on_host", property(lambda self: False))
    events = []
    for gain in (1.0, 1e9):
        model = nn.Linear(8, 8)
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        recorder = DebugUnderflowOverflow(model, on_event="warn")
        for _ in range(30):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(4, 8))
            scaler.scale(out.float().pow(2).mean() * gain).backward()
            scaler.step(opt)
            scaler.update()
        recorder.stop(None)
        events.append(recorder.report.event)
    agrees(events[0], benign=True, step=0)
    agrees(events[1], benign=False, step=23, scaled_down=24, loss_scale=0.5)


def test_a_scale_that_never_fits_is_no_search() -> None:
    """Without a scale below one: a backoff that is too gentle to get there."""

    class Norms:
        scaled, skipped, loss_scale, total = True, True, 2.0**20, float("inf")
        step = 0

        def bad(self) -> Any:
            return object()

    class Judge:
        def from_gradients(self, norms: Any) -> Any:
            from mldebug.numerics._event import Event
            from mldebug.numerics.replay._found import Found

            event = Event(0, 0, 0, "backward", "", "", "gradient", "inf", "weight", "float16", 65504.0, benign=True)
            return Found(event, [], "")

    scaling, norms, benign = Scaling(Judge()), Norms(), []  # type: ignore[arg-type]
    for norms.step in range(45):
        benign.append(scaling.judge(norms, []).event.benign)  # type: ignore[arg-type,union-attr]
    assert benign == [True] * 39 + [False] * 6
    assert scaling.said(45).startswith("GradScaler skipped 45 of 45 steps: 0, 1, 2")


def test_compiled_autograd_goes_on_without_them() -> None:
    """It traces what hooks on tensors do, and would trace all of ours."""
    from torch._dynamo import compiled_autograd

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    compiler = torch.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DebugUnderflowOverflow(model, backward=True) as recorder:
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8)).mean()
                with compiled_autograd._enable(compiler):
                    loss.backward()
                optimizer.step()
    assert recorder.report.ok and recorder.step == 2
    told = [note for note in recorder.report.notes if "not measured under compiled autograd" in note]
    assert len(told) == 1
