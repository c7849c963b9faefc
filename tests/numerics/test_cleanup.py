"""However a run ends, no hook stays and no frame is lost."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, MldebugError, NumericsError, diagnose

from .kit import INF, NAN, Net, agrees, hooks_now, own_hooks, train


class Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.at, self.calls = error, 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.at:
            raise self.error
        return x


ERRORS = [RuntimeError("size mismatch"), KeyboardInterrupt(), SystemExit(2), MemoryError()]


@pytest.mark.parametrize("check", ["step", "async", "each"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_exception_in_forward(error: BaseException, check: str) -> None:
    before = hooks_now()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Fails(error), nn.Linear(4, 1))
    recorder = DebugUnderflowOverflow(model, check=check)
    assert hooks_now() != before
    with pytest.raises(type(error)) as caught, recorder:
        train(model, steps=2)
    assert caught.value is error
    assert hooks_now() == before
    text = "\n".join(recorder.report.frames)
    assert " 0 Linear" in text and " 1 ReLU" in text, "frames of the unfinished batch are kept"
    assert recorder.report.event is None


def test_an_exception_after_a_bad_value_keeps_the_event() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fails(RuntimeError("later")))
    nn.init.constant_(model[0].weight, 3e38)
    model[1].at = 0
    recorder = DebugUnderflowOverflow(model)
    with pytest.raises(RuntimeError, match="later"), recorder:
        model(torch.full((2, 4), 9.0))
    agrees(recorder.report.event, module="0", kind="inf", role="output")


def test_after_an_exception_the_next_forward_is_a_new_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fails(RuntimeError("once")), nn.Linear(4, 1))
    model[1].at = 0
    with DebugUnderflowOverflow(model) as recorder:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4))
        model[1].at = 10**9
        train(model, steps=2)
        assert recorder.step == 2
    assert recorder.report.event is None


def test_an_exception_in_on_step() -> None:
    before = hooks_now()

    def on_step(step: int, scalars: dict[str, float]) -> None:
        raise LookupError("no logger")

    model = Net()
    recorder = DebugUnderflowOverflow(model, on_step=on_step)
    with pytest.raises(LookupError), recorder:
        train(model, steps=3)
    assert hooks_now() == before


def test_an_exception_in_on_event() -> None:
    before = hooks_now()

    def on_event(event: Any) -> None:
        raise LookupError("mine")

    model = Net()
    recorder = DebugUnderflowOverflow(model, on_event=on_event)
    with pytest.raises(LookupError), recorder:
        train(model, {1: NAN}, steps=3)
    assert hooks_now() == before
    agrees(recorder.report.event, step=1, module="plant")
    assert recorder.report.frames


def test_a_raised_event_leaves_nothing() -> None:
    before = hooks_now()
    model = Net()
    with pytest.raises(NumericsError), DebugUnderflowOverflow(model):
        train(model, {1: NAN})
    assert hooks_now() == before and own_hooks(model) == 0


def test_constructing_attaches_and_remove_detaches() -> None:
    before = hooks_now()
    model = Net()
    recorder = DebugUnderflowOverflow(model)
    with pytest.raises(NumericsError):
        train(model, {0: INF})
    recorder.remove()
    assert hooks_now() == before
    recorder.remove()
    train(model, {0: INF}, steps=1)
    agrees(recorder.report.event, step=0, module="plant")


def test_it_keeps_itself_alive() -> None:
    model = Net()
    ref = weakref.ref(DebugUnderflowOverflow(model))
    gc.collect()
    assert ref() is not None
    with pytest.raises(NumericsError):
        train(model, {0: INF})
    ref().remove()


def test_a_collected_model_takes_its_recorder_with_it() -> None:
    before = hooks_now()
    model = Net()
    DebugUnderflowOverflow(model)
    train(model, steps=1)
    ref = weakref.ref(model)
    del model
    gc.collect()
    other = Net()
    train(other, steps=1)  # any call may be the one that cleans up
    gc.collect()
    assert ref() is None
    assert hooks_now() == before


def test_an_id_that_is_used_again_is_not_watched() -> None:
    model = Net()
    recorder = DebugUnderflowOverflow(model)
    with recorder:
        for _ in range(50):
            other = Net()
            other.plant.value = NAN
            other(torch.ones(2, 4))
            model.plant = model.plant.__class__()
        model(torch.ones(2, 4))
        recorder.poll()
    assert recorder.report.event is None


def test_entering_again_after_leaving() -> None:
    model = Net()
    recorder = DebugUnderflowOverflow(model)
    with recorder:
        train(model, steps=1)
    train(model, {0: NAN}, steps=1)
    model = model.requires_grad_()
    with torch.no_grad():
        for p in model.parameters():
            p.nan_to_num_(0.5)
    with recorder:
        train(model, steps=1)
    assert recorder.report.event is None
    with pytest.raises(NumericsError), recorder:
        train(model, {0: NAN}, steps=1)


def test_as_decorator_of_a_function() -> None:
    before, model = hooks_now(), Net()
    recorder = DebugUnderflowOverflow(model)

    @recorder
    def fit(plan: dict[int, float]) -> str:
        """fits"""
        train(model, plan)
        return "fitted"

    assert fit.__name__ == "fit" and fit.__doc__ == "fits"
    assert fit({}) == "fitted"
    assert hooks_now() == before
    with pytest.raises(NumericsError):
        fit({1: NAN})
    assert hooks_now() == before


def test_as_decorator_of_a_generator() -> None:
    before, model = hooks_now(), Net()
    recorder = DebugUnderflowOverflow(model)

    @recorder
    def fit() -> Iterator[int]:
        for i in range(3):
            train(model, steps=1)
            yield i

    assert list(fit()) == [0, 1, 2]
    assert hooks_now() == before
    some = fit()
    next(some)
    some.close()
    assert hooks_now() == before


def test_two_recorders_on_one_model() -> None:
    model = Net()
    first = DebugUnderflowOverflow(model, on_event="warn")
    second = DebugUnderflowOverflow(model, max_frames_to_save=5, on_event="warn")
    train(model, steps=2)
    model.plant.value = NAN
    model(torch.ones(2, 4))
    first.poll()
    first.remove()
    second.poll()
    second.remove()
    for recorder in (first, second):
        agrees(recorder.report.event, step=2, batch=2, module="plant")
    assert len(second.report.frames) <= 5


def test_one_of_two_recorders_leaves_the_other_at_work() -> None:
    model = Net()
    first, second = DebugUnderflowOverflow(model), DebugUnderflowOverflow(model)
    first.remove()
    with pytest.raises(NumericsError), second:
        train(model, {0: NAN})
    assert first.report.event is None


def test_a_model_that_is_no_module_is_refused() -> None:
    before = hooks_now()
    with pytest.raises((MldebugError, TypeError, ValueError)):
        DebugUnderflowOverflow("model")
    assert hooks_now() == before


@pytest.mark.parametrize("how", ["plain", "event", "skip", "compiled", "diagnose"])
def test_what_is_kept_of_a_run_keeps_no_tensor_of_the_model(how: str) -> None:
    def run() -> tuple[Any, list[Any]]:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        called: Any = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        refs: list[Any] = [weakref.ref(thing) for thing in (*model.modules(), *model.parameters(), *model.buffers())]

        def step(i: int) -> Tensor:
            x = torch.full((3, 4), NAN if how != "plain" and i == 2 else 1.0)
            refs.append(weakref.ref(x))
            optimizer.zero_grad()
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if how == "diagnose":
            return diagnose(model, step, steps=3), refs
        recorder = DebugUnderflowOverflow(called, on_event="skip" if how == "skip" else lambda event: None)
        recorder.quiet()
        with recorder:
            for i in range(3):
                step(i)
        return recorder, refs

    kept, refs = run()
    torch._dynamo.reset()
    gc.collect()
    assert kept is not None and [ref() for ref in refs if ref() is not None] == []
