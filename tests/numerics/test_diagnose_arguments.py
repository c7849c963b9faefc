"""diagnose() says what is wrong with what it was given, before it runs anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mldebug import diagnose
from mldebug.core.errors import UsageError

from .kit import INF, NAN, Net


async def asynchronous(i: int) -> None:
    raise AssertionError("not to be run")


def generator(i: int) -> Iterator[int]:
    yield i


class Trainer:
    """Something with a step of its own."""

    async def __call__(self, i: int) -> None:
        raise AssertionError("not to be run")

    def step(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: 1, r"diagnose\(\) calls <lambda>\(i\) with the number of the step, which it does not take"),
        (lambda i, batch: 1, r"which it does not take"),
        (1, r"step is 1, and not a function of one step"),
        (None, r"step is None, and not a function of one step"),
        (Net(), r"step is a Net, and not a function of one step"),
        (asynchronous, r"asynchronous is async or a generator: calling it runs nothing"),
        (generator, r"generator is async or a generator"),
        (Trainer(), r"Trainer is async or a generator"),
    ],
)
def test_what_cannot_be_a_step(step: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        diagnose(Net(), step, steps=2)
    assert "def step(i): ..." in caught.value.hint


@pytest.mark.parametrize("lazy", [asynchronous, generator])
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_step_that_returns_what_has_not_run(lazy: Callable[[int], Any]) -> None:
    with pytest.raises(UsageError, match=r"step returned a (coroutine|generator), which has not run"):
        diagnose(Net(), lambda i: lazy(i + 1), steps=2)


def test_no_model() -> None:
    with pytest.raises(UsageError, match="no model to watch"):
        diagnose(None, lambda i: None, steps=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"needs a torch\.nn\.Module, got function"):
        diagnose(lambda i: None, lambda i: None, steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [Trainer().step, print, lambda *args: None, lambda i=0: None, max])
def test_what_can_be_called_is_called(step: Any) -> None:
    if step is max:
        with pytest.raises(TypeError, match="not iterable"):  # its own error
            diagnose(Net(), step, steps=1)
    else:
        assert diagnose(Net(), step, steps=1).event is None


def test_the_hint_for_a_loss_fits_what_happened_to_it() -> None:
    def hint(factor: float, dtype: torch.dtype = torch.float32) -> str:
        net = Net()

        def step(i: int) -> Tensor:
            return net(torch.ones(2, 4)).abs().mean().to(dtype) * factor

        report = diagnose(net, step, steps=1)
        assert report.event is not None and report.event.module is None
        return report.hint

    assert "labels" in hint(NAN) and "labels" not in hint(INF)
    assert "exp or a square of large outputs" in hint(INF)
    assert hint(INF, torch.float16).startswith("make it in float32, where float16 ends at 6.55e+04")
