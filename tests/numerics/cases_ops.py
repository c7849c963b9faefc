"""Troubles that only the operations show, and the operation that a diagnosis must name.

`op` is a prefix of one of the names, `code` a part of the user's line, `cause` the row of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import INF, NAN, Made, plain


@dataclass
class OpCase:
    make: Callable[[], Made]
    steps: int
    expect: dict[str, Any] = field(default_factory=dict)


OP_TROUBLES: dict[str, OpCase] = {}
OP_HEALTHY: dict[str, OpCase] = {}


def op_trouble(steps: int, **expect: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        OP_TROUBLES[make.__name__] = OpCase(make, steps, expect)
        return make

    return keep


def op_healthy(make: Callable[[], Made]) -> Callable[[], Made]:
    OP_HEALTHY[make.__name__] = OpCase(make, 3)
    return make


class Fn(nn.Module):
    """A module around a function, for short cases."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def chain(function: Callable[[Tensor], Tensor], width: int = 4, weight: float | None = None) -> nn.Sequential:
    """fc -> f (the function) -> out."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(width, width, bias=False))
    model.add_module("f", Fn(function))
    model.add_module("out", nn.Linear(width, 1))
    if weight is not None:
        with torch.no_grad():
            model.fc.weight.copy_(torch.eye(width) * weight)
    return model


def run(model: nn.Module, data: Callable[[int], Any], lr: float = 1e-3) -> Made:
    opt = torch.optim.SGD(model.parameters(), lr)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(data(i)).float().mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


# An inf or a -inf that nothing at a module boundary shows.


@op_trouble(2, step=1, phase="forward", module="f", op="aten.pow", kind="inf", cause="square overflow")
def square_overflows_and_rsqrt_swallows_it() -> Made:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = chain(norm, weight=1.0).half()
    return run(model, lambda i: torch.full((2, 4), [1.0, 300.0][i], dtype=torch.float16))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.mul", kind="inf", cause="square overflow")
def square_by_a_product_overflows_under_a_root() -> Made:
    def norm(x: Tensor) -> Tensor:
        return x / (x * x).sum(-1, keepdim=True).sqrt()

    model = chain(norm, weight=1.0).half()
    return run(model, lambda i: torch.full((2, 4), [1.0, 300.0][i], dtype=torch.float16))


@op_trouble(1, step=0, phase="forward", module="f", op="aten.add", kind="inf", cause="mask twice")
def padding_and_causal_mask_added_in_fp16() -> Made:
    low = torch.finfo(torch.float16).min

    def scores(x: Tensor) -> Tensor:
        n = x.shape[-1]
        causal = torch.full((n, n), low, dtype=x.dtype).triu(1)
        padding = torch.tensor([0.0, 0.0, low, low], dtype=x.dtype)
        return (
            (x[:, None] * x[:, :, None] * 0.01 + (causal + padding).to(x.dtype)).float().softmax(-1).to(x.dtype)[:, 0]
        )

    return run(chain(scores).half(), lambda i: torch.ones(2, 4, dtype=torch.float16))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.exp", kind="inf", cause="exp overflow")
def exp_overflows_inside_a_sigmoid_of_ones_own() -> Made:
    model = chain(lambda x: 1 / (1 + torch.exp(-x)), weight=1.0)
    return run(model, lambda i: torch.full((2, 4), [1.0, -100.0][i]))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.sum", kind="inf", cause="sum overflow")
def sum_in_fp16_overflows() -> Made:
    model = chain(lambda x: x / x.sum(-1, keepdim=True), weight=1.0).half()
    return run(model, lambda i: torch.full((2, 4), [1.0, 40000.0][i], dtype=torch.float16))


# Softmax and attention.


@op_trouble(2, step=1, phase="forward", module="f", op="aten._softmax", kind="nan", cause="fully masked row")
def every_key_of_a_row_is_masked_by_a_buffer() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.full((4, 4), -INF).triu(1))

        def forward(self, x: Tensor, open_keys: Tensor) -> Tensor:
            return (x[:, None, :] + self.bias + torch.where(open_keys, 0.0, -INF)).softmax(-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.f, self.out = nn.Linear(4, 4), Masked(), nn.Linear(4, 1)

        def forward(self, x: Tensor, open_keys: Tensor) -> Tensor:
            return self.out(self.f(self.fc(x), open_keys))

    model = Model()

    def step(i: int) -> Tensor:
        loss = model(torch.randn(2, 4), torch.tensor([i == 0, True, True, True])).mean()
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module="f", op="aten._softmax", kind="nan", victim=True)
def softmax_of_plus_inf_from_outside() -> Made:
    temperature = torch.tensor([1.0, INF])
    at = iter(range(2))

    def soft(x: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 0, temperature[next(at)].expand(4), x).softmax(-1)

    return run(chain(soft), lambda i: torch.ones(2, 4))


@op_trouble(1, step=0, phase="forward", module="f", op="aten.mul", kind="nan", cause="0 * inf")
def mask_times_minus_inf() -> Made:
    keep = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return run(chain(lambda x: (x + (1 - keep) * -INF).softmax(-1)), lambda i: torch.ones(2, 4))


# Domains.


@op_trouble(2, step=1, phase="forward", module="f", op="aten.log", kind="inf", cause="log of zero")
def log_of_an_underflowed_probability() -> Made:
    def nll(x: Tensor) -> Tensor:
        return -torch.log(x.softmax(-1))

    return run(chain(nll, weight=1.0), lambda i: torch.tensor([[0.0, 1.0, 2.0, [3.0, 300.0][i]]]))


@op_trouble(2, step=1, phase="forward", module=None, op="aten.log", kind="inf", cause="log of zero", role="loss")
def kl_divergence_of_ones_own_outside() -> Made:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Softmax(-1))
    nn.init.eye_(model[0].weight)

    def step(i: int) -> Tensor:
        p = model(torch.tensor([[0.0, 1.0, [2.0, 250.0][i]]]))
        loss = (p * (p.log() - math.log(1 / 3))).sum()
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module="f", op="aten.sqrt", kind="nan", cause="root of a negative number")
def variance_as_a_difference_of_means() -> Made:
    def std(x: Tensor) -> Tensor:
        return x + (x.mean(-1, keepdim=True) - 1).sqrt()

    return run(chain(std, weight=1.0), lambda i: torch.full((2, 4), [3.0, 0.5][i]))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.div", kind="nan", cause="zero over zero")
def mean_over_an_empty_mask() -> Made:
    def pool(x: Tensor) -> Tensor:
        keep = (x > 0).float()
        return (x * keep).sum(0, keepdim=True) / keep.sum(0, keepdim=True)

    return run(chain(pool, weight=1.0), lambda i: torch.full((2, 4), [1.0, -1.0][i]))


@op_trouble(2, step=1, phase="forward", module=None, op="aten.mean", kind="nan", cause="empty mean", role="loss")
def mean_of_no_element() -> Made:
    model = nn.Linear(4, 1)

    def step(i: int) -> Tensor:
        out = model(torch.ones(3, 4))
        loss = out[torch.tensor([True, True, True]) if i == 0 else torch.tensor([False] * 3)].mean()
        loss.backward()
        return loss

    return model, step


@op_trouble(
    1,
    step=0,
    phase="forward",
    module="f",
    op="aten.div",
    kind=("nan", "inf"),
    cause=("zero over zero", "eps too small"),
)
def eps_is_zero_in_fp16() -> Made:
    def normal(x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + 1e-8)

    return run(chain(normal, weight=1.0).half(), lambda i: torch.zeros(2, 4, dtype=torch.float16))


@op_trouble(1, step=0, phase="forward", module="f", op="aten.rsqrt", kind="inf", cause="eps too small")
def rsqrt_of_an_eps_that_is_zero_in_fp16() -> Made:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-8)

    return run(chain(norm, weight=1.0).half(), lambda i: torch.ones(2, 4, dtype=torch.float16))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.pow", kind="inf", cause="zero to a negative power")
def zero_to_a_negative_power() -> Made:
    return run(chain(lambda x: x.pow(-0.5), weight=1.0), lambda i: torch.full((2, 4), [1.0, 0.0][i]))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.pow", kind="inf", cause="power overflow")
def power_overflows() -> Made:
    return run(chain(lambda x: x.pow(8), weight=1.0), lambda i: torch.full((2, 4), [1.0, 1e6][i]))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.std", kind="nan", cause="std of one sample")
def std_of_a_batch_of_one() -> Made:
    return run(chain(lambda x: x - x.std(0)), lambda i: torch.randn([3, 1][i], 4))


@op_trouble(2, step=1, phase="forward", module="f", op="aten.var", kind="nan", cause="std of one sample")
def variance_of_a_batch_of_one() -> Made:
    return run(chain(lambda x: x / (x.var(0) + 1.0)), lambda i: torch.randn([3, 1][i], 4))


# Losses.


@op_trouble(2, step=1, phase="forward", module=None, op="aten.nll_loss", kind="nan", cause="no label", role="loss")
def a_micro_batch_without_a_label() -> Made:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))

    def step(i: int) -> Tensor:
        total = torch.zeros(())
        for labels in ([1, 2], [[3, 4], [-100, -100]][i]):
            loss = F.cross_entropy(model(torch.tensor([1, 2])), torch.tensor(labels))
            loss.backward()
            total = total + loss.detach()
        return total

    return model, step


@op_trouble(2, step=1, phase="forward", module=None, op="aten.nll_loss", kind="inf", cause="label of a masked class")
def the_label_is_a_masked_class() -> Made:
    model = nn.Linear(4, 4)

    def step(i: int) -> Tensor:
        logits = model(torch.ones(2, 4)).masked_fill(torch.arange(4) == 3, -INF)
        loss = F.cross_entropy(logits, torch.tensor([1, [2, 3][i]]))
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module=None, op="aten._ctc_loss", kind="inf", cause="target too long for CTC")
def ctc_outside_of_the_model() -> Made:
    model = nn.Linear(4, 6)

    def step(i: int) -> Tensor:
        frames = [8, 2][i]
        log_probs = model(torch.randn(frames, 1, 4)).log_softmax(-1)
        loss = F.ctc_loss(log_probs, torch.tensor([[1, 1, 2]]), torch.tensor([frames]), torch.tensor([3]))
        loss.backward()
        return loss

    return model, step


# Backward.


@op_trouble(1, step=0, phase="backward", module="f", op="SqrtBackward0", kind="nan", forward_op="aten.sqrt",
            cause="gradient of sqrt at zero", code="torch.where(x > 0, x.sqrt(), 0.0)")  # fmt: skip
def sqrt_behind_where() -> Made:
    model = chain(lambda x: torch.where(x > 0, x.sqrt(), 0.0), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", op="LogBackward0", kind="nan", cause="gradient of log at zero")
def log_behind_where() -> Made:
    model = chain(lambda x: torch.where(x > 0, x.log(), 0.0), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(
    1, step=0, phase="backward", module="f", op="ExpBackward0", kind="nan", cause="gradient of exp behind where"
)
def exp_behind_where() -> Made:
    model = chain(lambda x: torch.where(x > 20, x, torch.log1p(torch.exp(x))), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, 100.0, 2.0, 3.0]]))


@op_trouble(
    1, step=0, phase="backward", module="f", op="DivBackward0", kind="nan", cause="gradient of a quotient at zero"
)
def quotient_behind_where() -> Made:
    model = chain(lambda x: torch.where(x > 0, x / x, 0.0), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", op="MulBackward0", kind="nan", cause="0 * inf behind where")
def product_with_inf_behind_where() -> Made:
    scale = torch.tensor([1.0, INF, 1.0, 1.0])
    model = chain(lambda x: torch.where(torch.isinf(scale), 0.0, x * scale), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, 1.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", op="SqrtBackward0", kind=("inf", "nan"), forward_op="aten.sqrt")
def length_of_a_zero_vector() -> Made:
    model = chain(lambda x: x + x.pow(2).sum(-1, keepdim=True).sqrt(), weight=0.0)
    return run(model, lambda i: torch.ones(2, 4))


@op_trouble(
    1, step=0, phase="backward", module="f", op="PowBackward0", kind=("inf", "nan"), cause="gradient of a power at zero"
)
def gradient_of_a_root_by_power() -> Made:
    return run(chain(lambda x: x.pow(0.5), weight=1.0), lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", op="AcosBackward0", kind=("inf", "nan"))
def angle_between_equal_vectors() -> Made:
    return run(chain(torch.acos, weight=1.0), lambda i: torch.tensor([[0.5, 1.0, 0.2, 0.3]]))


@op_trouble(1, step=0, phase="backward", module="gain", op="SqrtBackward0", kind="inf", param="gain.s")
def inf_gradient_before_clip_grad_norm() -> Made:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + self.s.sqrt())

    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("gain", Gain())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return model, step


@op_trouble(2, step=1, phase="backward", module=None, kind="inf", op=("aten.linalg_vector_norm", "aten._foreach_norm"),
            cause="norm of the gradients overflows")  # fmt: skip
def norm_of_finite_gradients_overflows() -> Made:
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-30)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = (model(torch.ones(2, 4)) * [1.0, 1e30][i]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return model, step


@op_trouble(1, step=0, phase="backward", module="f", kind="inf", op="MulBackward0", cause="gradient beyond float16")
def gradient_beyond_fp16() -> Made:
    model = chain(lambda x: x * 300.0, weight=1e-3).half()

    def step(i: int) -> Tensor:
        loss = (model(torch.full((2, 4), 0.1, dtype=torch.float16)) * 30000.0).float().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        model.out.weight.fill_(0.1)
    return model, step


@op_trouble(1, step=0, phase="backward", module="f", op="SqrtBackward0", kind=("nan", "inf"), benign=False)
def bad_gradient_that_a_scaler_would_hide() -> Made:
    model = chain(lambda x: torch.where(x > 0, x.sqrt(), 0.0), weight=1.0)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.tensor([[1.0, 0.0, 2.0, 3.0]])).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    return model, step


def _scaled(scale: float, gain: float) -> Made:
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.ones(2, 4))
        loss = (out.float() * gain).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    return model, step


@op_trouble(6, step=0, phase="backward", module=None, op="ToCopyBackward0", kind="inf", benign=True, cause="loss scale")
def loss_scale_is_still_too_large() -> Made:
    return _scaled(2.0**20, 1.0)


@op_trouble(3, step=0, phase="backward", module=None, op="ToCopyBackward0", kind="inf", cause="gradient beyond float16")
def gradient_overflows_whatever_the_loss_scale() -> Made:
    return _scaled(4.0, 1e8)


@op_trouble(3, step=0, phase="backward", module=None, op="ToCopyBackward0", kind="inf", cause="loss scale collapsed")
def loss_scale_has_collapsed() -> Made:
    return _scaled(2.0**-10, 1e10)


# The optimizer, parameters, data.


@op_trouble(2, step=0, phase="optimizer", module="fc", role="parameter", kind=("nan", "inf"),
            op=("aten.addcdiv", "aten.div", "aten._foreach_addcdiv"), cause="eps too small")  # fmt: skip
def adams_eps_is_zero_in_fp16() -> Made:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 1).half())
    opt = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-8)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = (model(torch.ones(2, 4, dtype=torch.float16)) * 1e-4).float().mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@op_trouble(2, step=0, phase="init", module="fc", role="parameter", param="fc.weight", op=None)
def a_parameter_that_was_bad_from_the_start() -> Made:
    model = chain(torch.tanh)
    with torch.no_grad():
        model.fc.weight[0, 0] = NAN
    return run(model, lambda i: torch.ones(2, 4))


@op_trouble(3, step=2, phase="forward", module="", role="input", kind="nan", op=None, sample=1)
def a_bad_sample_of_a_batch() -> Made:
    data = torch.randn(3, 4, 4)
    data[2, 1, 3] = NAN
    return run(chain(torch.tanh), lambda i: data[i])


@op_trouble(2, step=1, phase="forward", module="f", op="aten.stack", kind="nan", victim=True)
def nan_from_a_plain_table() -> Made:
    rows = [torch.zeros(4), torch.full((4,), NAN)]
    at = iter(range(2))
    return run(chain(lambda x: torch.stack([x[0], rows[next(at)]])), lambda i: torch.ones(2, 4))


@op_trouble(
    1, step=0, phase="forward", module="f", kind="precision", op="aten._to_copy", cause="positions in half precision"
)
def positions_cast_to_bf16() -> Made:
    def rotary(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0]).to(x.dtype)
        return x * torch.cos(at[:, None] * 0.01)

    return run(chain(rotary).bfloat16(), lambda i: torch.ones(600, 4, dtype=torch.bfloat16))


@op_trouble(
    1, step=0, phase="forward", module="f", kind="precision", op="aten.arange", cause="positions in half precision"
)
def positions_counted_in_fp16() -> Made:
    def rotary(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0], dtype=x.dtype)
        return x * torch.cos(at[:, None] * 0.01)

    return run(chain(rotary).half(), lambda i: torch.ones(4000, 4, dtype=torch.float16))


# Healthy programs with infs, NaN and garbage inside.


@op_healthy
def ctc_of_a_healthy_batch() -> Made:
    model = nn.Linear(4, 6)

    def step(i: int) -> Tensor:
        log_probs = model(torch.randn(12, 2, 4)).log_softmax(-1)
        targets, frames, lengths = torch.tensor([[1, 1, 2], [3, 4, 0]]), torch.tensor([12, 9]), torch.tensor([3, 2])
        loss = F.ctc_loss(log_probs, targets, frames, lengths)
        loss.backward()
        return loss

    return model, step


@op_healthy
def ctc_that_leaves_out_what_it_cannot_align() -> Made:
    model = nn.Linear(4, 6)

    def step(i: int) -> Tensor:
        log_probs = model(torch.randn(2, 1, 4)).log_softmax(-1)
        lengths = torch.tensor([2]), torch.tensor([3])
        loss = F.ctc_loss(log_probs, torch.tensor([[1, 1, 2]]), *lengths, zero_infinity=True)
        loss.backward()
        return loss

    return model, step


@op_healthy
def uninitialised_buffers_that_are_written_before_they_are_read() -> Made:
    def pooled(x: Tensor) -> Tensor:
        room = torch.empty(x.shape[0], 8, dtype=x.dtype)
        room.view(torch.int32).fill_(0x7FC00001)  # what empty may hold
        room[:, :4] = x
        room[:, 4:].zero_()
        return room[:, :4] + room[:, 4:]

    return run(chain(pooled), lambda i: torch.randn(2, 4))


@op_healthy
def log_of_a_mask_of_ones_and_zeros() -> Made:
    keep = torch.tensor([1.0, 1.0, 0.0, 1.0])
    return run(chain(lambda x: (x + keep.log()).softmax(-1)), lambda i: torch.randn(2, 4))


@op_healthy
def division_by_zero_that_where_leaves_out() -> Made:
    counts = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def mean(x: Tensor) -> Tensor:
        return x + torch.where(counts > 0, 1.0 / counts, 0.0)

    return run(chain(mean), lambda i: torch.randn(2, 4))


@op_healthy
def nan_that_is_taken_out() -> Made:
    zero = torch.zeros(4)
    return run(chain(lambda x: x + torch.nan_to_num(zero / zero)), lambda i: torch.randn(2, 4))


@op_healthy
def both_wheres_are_safe() -> Made:
    def root(x: Tensor) -> Tensor:
        ok = x > 0
        return torch.where(ok, torch.where(ok, x, 1.0).sqrt(), 0.0)

    return run(chain(root, weight=1.0), lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_healthy
def norm_and_std_at_zero_have_safe_gradients() -> Made:
    return run(chain(lambda x: x + x.norm() + x.std(), weight=0.0), lambda i: torch.ones(2, 4))


@op_healthy
def mask_of_minus_1e9_in_fp16() -> Made:
    keep = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float16)
    return run(chain(lambda x: (x + (1 - keep) * -1e9).softmax(-1)).half(), lambda i: torch.ones(2, 4).half())


@op_healthy
def mask_of_float32s_lowest_value_cast_to_fp16() -> Made:
    mask = torch.zeros(4).masked_fill(torch.arange(4) == 2, torch.finfo(torch.float32).min)
    return run(chain(lambda x: (x + mask.to(x.dtype)).softmax(-1)).half(), lambda i: torch.ones(2, 4).half())


@op_healthy
def running_minimum_that_starts_at_inf() -> Made:
    def least(x: Tensor) -> Tensor:
        low = torch.full_like(x[:, 0], INF)
        for column in x.unbind(-1):
            low = torch.minimum(low, column)
        return x - low[:, None]

    return run(chain(least), lambda i: torch.randn(2, 4))


@op_healthy
def perplexity_that_overflows_in_a_log_line() -> Made:
    model = nn.Linear(4, 1)

    def step(i: int) -> Tensor:
        loss = model(torch.ones(2, 4)).pow(2).mean() + 1000.0
        loss.backward()
        assert math.isinf(float(torch.exp(loss.detach())))
        return loss

    return model, step


@op_healthy
def positions_in_bf16_that_are_all_distinct() -> Made:
    def rotary(x: Tensor) -> Tensor:
        return x * torch.cos(torch.arange(x.shape[0]).to(x.dtype)[:, None] * 0.01)

    return run(chain(rotary).bfloat16(), lambda i: torch.ones(200, 4, dtype=torch.bfloat16))


@op_healthy
def adam_with_weight_decay_and_clipping() -> Made:
    model = chain(torch.tanh)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(2, 4)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return model, step


@op_healthy
def a_large_step_of_sgd_with_checkpointing() -> Made:
    from torch.utils.checkpoint import checkpoint

    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = inner, nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(checkpoint(self.inner, x, use_reentrant=False))

    model = Model()
    return model, plain(model, lambda i: torch.randn(2, 4))
