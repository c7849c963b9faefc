"""Failures of half precision, loss scaling, gradients and optimizers as people report them, and healthy look-alikes.

Each is judged twice: by diagnose(), and by the recorder in the loop of the user (`own`, where it differs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import NAN, Made

Step = Callable[[int], Any]


@dataclass
class Training:
    make: Callable[[], Made]
    steps: int
    expect: dict[str, Any] | None
    own: dict[str, Any] | None  # what the recorder says in a loop of one's own


CASES: dict[str, Training] = {}
BENIGN = {"benign": True, "phase": "backward"}


def case(steps: int, expect: dict[str, Any] | None, **own: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        CASES[make.__name__] = Training(make, steps, expect, {**expect, **own} if expect else own or None)
        return make

    return keep


class Do(nn.Module):
    """A linear layer, then a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8, weight: float | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.function = function
        if weight is not None:
            nn.init.constant_(self.fc.weight, weight)
            nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def loop(
    model: nn.Module, batch: Callable[[int], Tensor], loss_of: Callable[[Tensor], Tensor], scaler: Any = None,
    opt: torch.optim.Optimizer | None = None, unscale: bool = False, between: Callable[[], None] | None = None,
    autocast: torch.dtype | None = None,
) -> Step:  # fmt: skip
    own = opt or torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        own.zero_grad()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(batch(i))
        loss = loss_of(out)
        if scaler is None:
            loss.backward()
            own.step()
            return loss
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(own)
        if between is not None:
            between()
        scaler.step(own)
        scaler.update()
        return loss

    return step


def scaler(scale: float, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def ones(i: int) -> Tensor:
    return torch.ones(4, 8)


def noise(i: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i))


def mean_square(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


# Half precision in the forward.


@case(2, dict(step=0, phase="forward", module="", kind=("inf", "nan"), benign=False))
def attention_scores_without_their_scale_in_fp16() -> Made:
    model = Do(lambda h: torch.softmax(h @ h.mT, -1) @ h, weight=20.0).half()
    return model, loop(model, lambda i: ones(i).half() * 4, mean_square)


@case(2, dict(step=0, phase="forward", module="", kind="nan", benign=False))
def normalize_of_a_zero_vector_in_fp16() -> Made:
    """The eps of 1e-12 is zero in float16."""
    model = Do(lambda h: h / h.norm(dim=-1, keepdim=True).clamp(min=1e-12), weight=0.0).half()
    return model, loop(model, lambda i: ones(i).half(), mean_square)


@case(2, dict(step=0, phase="forward", module=None, kind="inf", benign=False, role="loss"))
def a_sum_of_squares_as_the_loss_in_fp16() -> Made:
    model = Do(torch.relu, weight=8.0).half()
    step = loop(model, lambda i: ones(i).half(), check_sum)
    return model, step


def check_sum(out: Tensor) -> Tensor:
    import mldebug

    return mldebug.check((out * 4).pow(2).sum(), "loss")


# The loss scale.


@case(12, BENIGN)
def a_scale_that_is_looked_for() -> Made:
    model = nn.Linear(8, 8)
    return model, loop(model, noise, mean_square, scaler(2.0**24), autocast=torch.float16)


@case(12, BENIGN)
def a_scale_that_is_looked_for_unscaled_and_clipped() -> Made:
    model = nn.Linear(8, 8)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    own = torch.optim.AdamW(model.parameters(), 1e-3)
    step = loop(model, noise, mean_square, scaler(2.0**24), own, unscale=True, between=clip, autocast=torch.float16)
    return model, step


@case(12, BENIGN)
def a_scale_that_grows_until_it_is_too_large_again() -> Made:
    model = nn.Linear(8, 8)
    growing = scaler(2.0**14, growth_interval=1)
    return model, loop(model, noise, mean_square, growing, autocast=torch.float16)


@case(30, dict(step=0, phase="backward", module=None, kind=("inf", "nan"), benign=False), step=17, scaled_down=18)
def a_loss_whose_gradient_is_beyond_fp16_at_any_scale() -> Made:
    model = nn.Linear(8, 8)
    step = loop(model, noise, lambda out: out.float().mean() * 1e9, scaler(2.0**16), autocast=torch.float16)
    return model, step


@case(3, dict(step=0, phase="backward", module="", op="SqrtBackward0", kind=("nan", "inf"), benign=False))
def a_root_of_zero_that_a_scaler_hides() -> Made:
    model = Do(lambda h: torch.sqrt(h * h), weight=0.0)
    return model, loop(model, ones, mean_square, scaler(1024.0))


@case(3, dict(step=1, phase="backward", kind="nan", benign=False))
def a_gradient_that_is_spoiled_after_unscale() -> Made:
    model = nn.Linear(8, 8)
    state = {"step": -1}

    def spoil() -> None:
        state["step"] += 1
        if state["step"] == 1:
            with torch.no_grad():
                model.weight.grad[0, 0] = NAN  # type: ignore[index]

    step = loop(model, noise, mean_square, scaler(8.0), unscale=True, between=spoil, autocast=torch.float16)
    return model, step


@case(6, None)
def clipping_gradients_that_are_still_scaled() -> Made:
    model = nn.Linear(8, 8)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    return model, loop(model, noise, mean_square, scaler(2.0**10), between=clip, autocast=torch.float16)


@case(6, None)
def a_scaler_that_is_switched_off() -> Made:
    model = nn.Linear(8, 8)
    off = torch.amp.GradScaler("cpu", enabled=False)
    return model, loop(model, noise, mean_square, off, autocast=torch.bfloat16)


@case(8, BENIGN)
def two_optimizers_and_one_scaler() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opts = [torch.optim.SGD(part.parameters(), 1e-3) for part in model]
    one = scaler(2.0**22)

    def step(i: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(noise(i))
        loss = mean_square(out)
        one.scale(loss).backward()
        for opt in opts:
            one.step(opt)
        one.update()
        model.zero_grad()
        return loss

    return model, step


# Gradients.


@case(2, dict(step=0, phase="backward", module="", kind="nan", benign=False))
def the_deviation_of_equal_numbers() -> Made:
    model = Do(lambda h: h - torch.sqrt(((h - h.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)), weight=0.0)
    return model, loop(model, ones, mean_square)


@case(2, dict(step=0, phase="backward", kind=("nan", "inf"), benign=False))
def a_gradient_penalty_at_a_gradient_of_zero() -> Made:
    model = Do(torch.relu, weight=-1.0)

    def penalty(out: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(out.sum(), model.fc.weight, create_graph=True)
        return out.mean() + (torch.sqrt((grad * model.fc.weight).pow(2).sum()) - 1).pow(2)

    return model, loop(model, ones, penalty)


# Optimizers.


@case(40, dict(step=0, phase="optimizer", kind="inf", benign=False), role="state", name="exp_avg_sq")
def squares_of_gradients_overflow_in_fp16_states() -> Made:
    model = nn.Linear(8, 8).half()
    own = torch.optim.Adam(model.parameters(), 1e-4, eps=1e-4)
    return model, loop(model, lambda i: ones(i).half(), lambda out: (out * 2500).float().sum(), opt=own)


@case(3, dict(step=0, phase="optimizer", module="fc", kind=("nan", "inf"), benign=False))
def a_learning_rate_beyond_the_range_of_the_weights() -> Made:
    model = Do(torch.relu, weight=1.0).half()
    own = torch.optim.SGD(model.parameters(), 6e4)
    return model, loop(model, lambda i: ones(i).half(), mean_square, opt=own)


@case(40, None)
def a_warm_up_of_the_learning_rate() -> Made:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    own = torch.optim.AdamW(model.parameters(), 1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(own, lambda i: min(1.0, (i + 1) / 40))
    once = loop(model, noise, lambda out: F.mse_loss(out, torch.ones_like(out)), opt=own)

    def step(i: int) -> Any:
        loss = once(i)
        warm.step()
        return loss

    return model, step


@case(40, None)
def adam_in_bfloat16() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
    own = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, loop(model, lambda i: noise(i).bfloat16(), mean_square, opt=own)
