"""Others who replace what the recorder replaces, and odd ways to call a model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow
from mldebug.numerics import _hub

from .kit import INF, Net, agrees, hooks_now, train

CALL = nn.Module.__call__


def replace_call(seen: list[nn.Module]) -> Callable[..., Any]:
    """Put a function around nn.Module.__call__, as others do; returns what was there."""
    inner = nn.Module.__call__

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return inner(self, *args, **kwargs)

    nn.Module.__call__ = patched
    return inner


@pytest.fixture(autouse=True)
def call_as_it_was() -> Any:
    yield
    nn.Module.__call__ = CALL


def test_a_call_replaced_while_attached_and_put_back_after() -> None:
    model, seen = Net(), []
    recorder = DebugUnderflowOverflow(model)
    inner = replace_call(seen)
    train(model, steps=1)
    assert len(seen) == 4
    recorder.remove()
    train(model, steps=1)
    with DebugUnderflowOverflow(model) as recorder:  # theirs is still there, around ours
        train(model, steps=2)
        assert recorder.batch_number == 2
    assert len(seen) == 16
    nn.Module.__call__ = inner
    train(model, steps=1)
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=2)
        assert recorder.batch_number == 2
    assert len(seen) == 16
    assert nn.Module.__call__ is CALL


def test_every_call_passes_by_one_replaced_before() -> None:
    model, seen = Net(), []
    inner = replace_call(seen)
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=1)
        assert len(seen) == 4
        nn.Module.__call__ = inner  # put back in the middle
        train(model, steps=1)
        assert recorder.batch_number == 2
    assert nn.Module.__call__ is CALL


@pytest.mark.parametrize("when", ["before", "while"])
def test_call_impl_replaced_for_all(when: str) -> None:
    inner, seen = nn.Module._call_impl, []

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return inner(self, *args, **kwargs)

    model = Net()
    try:
        if when == "before":
            nn.Module._call_impl = patched
        with DebugUnderflowOverflow(model) as recorder:
            nn.Module._call_impl = patched
            train(model, steps=1)
            assert recorder.batch_number == 1
    finally:
        nn.Module._call_impl = inner
    assert len(seen) == 4


def test_a_class_with_a_call_impl_of_its_own() -> None:
    class Twice(nn.Linear):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_impl(*args, **kwargs)

    model = nn.Sequential(Twice(4, 4), nn.Linear(4, 1))
    x = torch.ones(2, 4)
    want = model(x)
    with DebugUnderflowOverflow(model):
        assert torch.equal(model(x), want)
        assert torch.allclose(torch.compile(model, backend="aot_eager")(x), want)


def test_a_scaler_step_replaced_while_attached() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    original = torch.amp.GradScaler.step

    def steps() -> int:
        with DebugUnderflowOverflow(model) as recorder:
            for _ in range(3):
                scaler.scale(model(torch.ones(2, 4)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            return recorder.step

    recorder = DebugUnderflowOverflow(model)
    inner = torch.amp.GradScaler.step

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    try:
        torch.amp.GradScaler.step = patched
        recorder.remove()
        assert torch.amp.GradScaler.step is patched
        assert steps() == 3
        torch.amp.GradScaler.step = inner
        assert steps() == 3
    finally:
        torch.amp.GradScaler.step = original


def test_a_filter_of_the_user_stays() -> None:
    warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
    before = list(warnings.filters)
    DebugUnderflowOverflow(Net()).remove()
    assert list(warnings.filters) == before


def test_interrupted_while_it_attaches() -> None:
    before = hooks_now()
    model = Net()
    DebugUnderflowOverflow(model).remove()
    lines = 10**9
    for stop in range(1, 10**4, 7):
        if stop > lines:
            break
        lines, attached = _interrupted(lambda: DebugUnderflowOverflow(model), stop)
        if attached is not None:
            attached.remove()
        assert hooks_now() == before, stop
        assert not _hub.RECORDERS, stop
    assert 100 < lines < stop


def _interrupted(function: Callable[[], Any], stop: int) -> tuple[int, Any]:
    """Call a function, with Ctrl-C at a line of the package; (lines run, result or None)."""
    count, result = 0, None

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if "mldebug" not in frame.f_globals.get("__name__", ""):
            return None
        if event == "line":
            count += 1
            if count == stop:
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function()
    except KeyboardInterrupt:
        count = 10**9
    finally:
        sys.settrace(old)
    return count, result


def test_what_the_code_of_the_root_made_is_not_called_bad_data() -> None:
    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(x) * INF)

    model = Root()
    with DebugUnderflowOverflow(model, on_event=lambda event: None) as recorder:
        model(torch.ones(2, 4))
    agrees(recorder.report.event, module="", role="input", name="input[0] of fc2")
    assert "that the code of the model itself (Root) made" in recorder.report.reading
    assert "data set" not in recorder.report.hint
