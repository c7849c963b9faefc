"""What a replay comes to: what is not replayable is not blamed on hardware; dropout, checkpoints, compilers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mldebug import DebugUnderflowOverflow

from .kit import NAN, agrees, watch


class Cache:
    """What a model that generates keeps between its calls."""

    def __init__(self) -> None:
        self.kept = torch.zeros(4)


class Spoils(nn.Module):
    """Returns NaN in its third call and in no other: a replay, if there is one, is fine."""

    def __init__(self, replay: BaseException | None = None) -> None:
        super().__init__()
        self.fc, self.calls, self.replay = nn.Linear(4, 4), 0, replay

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        self.calls += 1
        if self.calls == 4 and self.replay is not None:
            raise self.replay
        if cache is not None:
            cache.kept.add_(x.detach().mean(0))
        out = self.fc(x)
        return torch.where(torch.ones_like(out) > 0, NAN, out) if self.calls == 3 else out


def train(model: nn.Module, steps: int = 5, **more: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4), **more).square().mean().backward()
        optimizer.step()


def test_a_cache_that_the_forward_changes() -> None:
    model = Spoils()
    report = watch(model, functools.partial(train, model, cache=Cache()))
    agrees(report.event, step=2, phase="forward", again="not replayable", op=None)
    assert "input.cache (Cache) was changed by the forward" in report.not_replayed
    assert "did not reproduce" not in report.text()


def test_out_of_memory_in_the_replay() -> None:
    model = Spoils(torch.OutOfMemoryError("CUDA out of memory"))
    report = watch(model, functools.partial(train, model))
    agrees(report.event, step=2, again="not replayable", op=None)
    assert report.not_replayed == "out of memory" and "did not reproduce" not in report.text()


def test_any_other_error_in_the_replay() -> None:
    model = Spoils(ValueError("a batch is missing"))
    report = watch(model, functools.partial(train, model))
    agrees(report.event, step=2, again="not replayable", op=None)
    assert "a batch is missing" in report.not_replayed and "did not reproduce" not in report.text()


def test_a_verdict_that_is_read_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with check="async": the weights are no longer those of the forward."""
    from mldebug.numerics.ring._memory import Memory

    flags, asked = Memory.flags, []

    def late(self: Memory, wait: bool) -> Any:
        seen = flags(self, wait)
        if seen is not None and seen[0] is not None and len(asked) < 1:
            asked.append(seen)
            return None
        return seen

    monkeypatch.setattr(Memory, "on_host", property(lambda self: False))
    monkeypatch.setattr(Memory, "flags", late)
    model = Spoils()
    report = watch(model, functools.partial(train, model), check="async")
    assert len(asked) == 1
    agrees(report.event, step=2, again="not replayable", op=None)
    assert "the weights have changed since" in report.not_replayed and "did not reproduce" not in report.text()


def test_an_activation_flips_once_and_for_good() -> None:
    once, always = Spoils(), Spoils()
    once_report = watch(once, functools.partial(train, once))
    agrees(once_report.event, step=2, again="did not reproduce", op=None)
    assert "flipped bit" in once_report.reading and "another device" in once_report.hint

    def stuck(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 1, out / torch.zeros(()), out)  # one lane of a device is broken

    always.fc.register_forward_hook(stuck)
    report = watch(always, functools.partial(train, always))
    agrees(report.event, step=0, phase="forward", again="shown")
    assert report.event.op is not None and "did not reproduce" not in report.text()


class Deep(nn.Module):
    """Dropout and a division, inside activation checkpointing or not; 0 / 0 or 0 * inf once the input is 0."""

    def __init__(self, how: str, backward: bool) -> None:
        super().__init__()
        self.how, self.backward = how, backward
        self.fc, self.drop, self.act = nn.Linear(4, 4, bias=False), nn.Dropout(0.5), Act(backward)
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            self.fc.weight.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "none":
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.how == "reentrant"))

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.fc(x)) + 0.01 * x)


class Act(nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0) if self.backward else x / x.sum(-1, keepdim=True)


def bad_in_step_two(model: nn.Module, call: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(4):
        optimizer.zero_grad()
        call(torch.full((2, 4), float(step != 2)).requires_grad_()).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_dropout_and_checkpointing(how: str, backward: bool) -> None:
    model = Deep(how, backward)
    event = watch(model, functools.partial(bad_in_step_two, model, model)).event
    op = "SqrtBackward0" if backward else "aten.div.Tensor"
    phase = "backward" if backward else "forward"
    agrees(event, step=2, phase=phase, module="act", op=op, again="shown")


class OthersCheckpointFunction(torch.autograd.Function):
    """As libraries bring their own: the graph of what is inside is made in backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(again), grad)
        return None, again.grad


def test_a_checkpoint_of_another_library_is_not_replayable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep("none", backward=True)
    model.forward = lambda x: model.head(OthersCheckpointFunction.apply(model.body, x))
    report = watch(model, functools.partial(bad_in_step_two, model, model))
    agrees(report.event, step=2, phase="backward", again="not replayable", op=None)
    assert "its activation checkpointing (OthersCheckpointFunctionBackward)" in report.not_replayed


@pytest.mark.parametrize("how", ["none", "not reentrant"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_compiled_whole_it_runs_again_as_it_is_written(how: str, backward: bool) -> None:
    torch._dynamo.reset()
    model = Deep(how, backward)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    event = watch(model, functools.partial(bad_in_step_two, model, compiled)).event
    op = "SqrtBackward0" if backward else "aten.div.Tensor"
    agrees(event, step=2, phase="backward" if backward else "forward", module="act", op=op, again="shown")


@pytest.mark.parametrize("how", ["none", "not reentrant"])
def test_only_when_compiled_with_dropout(how: str) -> None:
    torch._dynamo.reset()
    calls = [0]

    def wrong(graph: torch.fx.GraphModule, example: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[0] += 1
            scale = NAN if calls[0] == 3 else 1.0
            return [t * scale if isinstance(t, Tensor) and t.is_floating_point() else t for t in graph(*args)]

        return call

    model = Deep(how, backward=True)
    compiled = torch.compile(model, backend=wrong, fullgraph=True)

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            compiled(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    report = watch(model, run)
    agrees(report.event, step=2, phase="forward", again="only when compiled")
    assert "as it is written" in report.reading


def test_a_healthy_compiled_model_with_dropout_is_left_alone() -> None:
    torch._dynamo.reset()
    model = Deep("not reentrant", backward=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with DebugUnderflowOverflow(model) as recorder:
        for _ in range(2):
            compiled(torch.ones(2, 4)).mean().backward()
    assert recorder.report.ok
