"""More troubles that the operations show: overflows, domains, masks, memory that was never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cases import INF, NAN, Made
from .cases_ops import chain, op_healthy, op_trouble, run


def garbage_in_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with torch.empty filled with NaN, as torch does for deterministic algorithms."""

    def filled(*args: Any) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return function(*args)
        finally:
            torch.use_deterministic_algorithms(before)

    return filled


@op_trouble(1, step=0, phase="forward", module="f", kind="nan", op="aten.empty", cause="uninitialised memory")
def memory_that_was_never_written() -> Made:
    @garbage_in_empty
    def padded(x: Tensor) -> Tensor:
        room = torch.empty(x.shape[0], 4)
        room[:, :3] = x[:, :3]
        return room

    return run(chain(padded), lambda i: torch.ones(2, 4))


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.sub", cause="inf minus inf")
def online_softmax_over_a_block_that_is_all_masked() -> Made:
    hidden = iter([False, True])

    def rescale(x: Tensor) -> Tensor:
        before = torch.full_like(x[:, :1], -INF)
        scores = x.masked_fill(torch.tensor(next(hidden)), -INF)
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        return torch.exp(before - highest) + torch.exp(scores - highest)

    return run(chain(rescale), lambda i: torch.randn(2, 4))


@op_trouble(1, step=0, phase="forward", module="f", kind="nan", op="aten._softmax", cause="inf score")
def mask_with_the_wrong_sign() -> Made:
    mask = torch.tensor([False, False, True, True])
    return run(chain(lambda x: x.masked_fill(mask, INF).softmax(-1)), lambda i: torch.randn(2, 4))


@op_trouble(2, step=1, phase="forward", module="fc", kind="inf", op=("aten.mm", "aten.addmm"), cause="product overflow")
def linear_layer_overflows_in_fp16() -> Made:
    model = chain(torch.tanh, weight=100.0).half()
    return run(model, lambda i: torch.full((2, 4), [1.0, 1000.0][i], dtype=torch.float16))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten._to_copy", cause="cast overflow")
def cast_to_fp16_overflows() -> Made:
    return run(chain(lambda x: (x * 100).half().float(), weight=1.0), lambda i: torch.full((2, 4), [1.0, 1e3][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.mul", cause="overflow")
def product_of_two_tensors_overflows() -> Made:
    return run(chain(lambda x: x * (x + 1), weight=1.0), lambda i: torch.full((2, 4), [1.0, 1e20][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.div", cause="division by zero")
def division_by_a_length_of_zero() -> Made:
    return run(chain(lambda x: (x + 1) / x.abs().sum(), weight=1.0), lambda i: torch.full((2, 4), float(1 - i)))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.reciprocal", cause="division by zero")
def inverse_of_zero_that_another_inverse_swallows() -> Made:
    return run(chain(lambda x: 1 / (1 + x.reciprocal()), weight=1.0), lambda i: torch.full((2, 4), float(1 - i)))


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.log", cause="log of a negative number")
def log_of_a_negative_number() -> Made:
    return run(chain(torch.log, weight=1.0), lambda i: torch.full((2, 4), [1.0, -1.0][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.pow", cause="power of a negative number")
def power_of_a_negative_number() -> Made:
    return run(chain(lambda x: x.pow(1.5), weight=1.0), lambda i: torch.full((2, 4), [1.0, -1.0][i]))


@op_trouble(1, step=0, phase="backward", module="f", op="AsinBackward0", kind="inf",
            cause="gradient of arccos or arcsin at the edge")  # fmt: skip
def gradient_of_asin_at_one() -> Made:
    return run(chain(torch.asin, weight=1.0), lambda i: torch.tensor([[0.5, 1.0, 0.2, 0.3]]))


@op_trouble(2, step=0, phase="optimizer", module="fc", role="parameter", kind="nan", op="aten.addcdiv",
            cause="zero denominator of the optimizer")  # fmt: skip
def adam_without_eps_and_a_gradient_of_zero() -> Made:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 1))
    opt = torch.optim.Adam(model.parameters(), 1e-3, eps=0.0)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.tensor([[1.0, 0.0, 1.0, 1.0]])).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module=None, role="loss", kind="nan", op="aten.mse_loss", victim=True)
def nan_label_of_a_regression() -> Made:
    model = nn.Linear(4, 1)

    def step(i: int) -> Tensor:
        loss = F.mse_loss(model(torch.ones(2, 4)), torch.tensor([[1.0], [[1.0, NAN][i]]]))
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="backward", module="inner.f", op="SqrtBackward0", kind="nan", forward_op="aten.sqrt")
def sqrt_behind_where_under_reentrant_checkpointing() -> Made:
    return _checkpointed(True)


@op_trouble(2, step=1, phase="backward", module="inner.f", op="SqrtBackward0", kind="nan", forward_op="aten.sqrt")
def sqrt_behind_where_under_checkpointing() -> Made:
    return _checkpointed(False)


def _checkpointed(reentrant: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.inner = chain(lambda x: torch.where(x > 0, x.sqrt(), 0.0), weight=1.0)
            with torch.no_grad():
                self.first.weight.copy_(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model = Model()

    def step(i: int) -> Tensor:
        loss = model(torch.tensor([[1.0, 1.0 - i, 2.0, 3.0]])).mean()
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="backward", module="f", op="BadBackward", kind="inf")
def formula_of_ones_own_that_divides_by_zero() -> Made:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad / x

    return run(chain(Bad.apply, weight=1.0), lambda i: torch.full((2, 4), float(1 - i)))


@op_trouble(3, step=2, phase="forward", module="f", kind="nan", op="aten.div", micro_batch=1)
def one_micro_batch_of_an_accumulation() -> Made:
    model = chain(lambda x: x / x.sum(-1, keepdim=True), weight=1.0)
    opt = torch.optim.SGD(model.parameters(), 1e-6)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        for micro in range(2):
            loss = model(torch.full((1, 4), float(not (i == 2 and micro == 1)))).mean() / 2
            loss.backward()
        opt.step()
        return loss

    return model, step


@op_trouble(1, step=0, phase="forward", module="norm", op="aten.native_layer_norm", kind="nan",
            cause="norm of a constant")  # fmt: skip
def layer_norm_without_eps_of_a_constant() -> Made:
    model = nn.Sequential()
    model.add_module("norm", nn.LayerNorm(4, eps=0.0))
    return run(model, lambda i: torch.ones(2, 4))


@op_trouble(1, step=0, phase="forward", op="aten._weight_norm_interface", kind="nan", cause="weight norm of zero")
def weight_norm_of_a_zero_row() -> Made:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    with torch.no_grad():
        model.parametrizations.weight.original1.zero_()
    return run(model, lambda i: torch.ones(2, 4))


# Healthy.


@op_healthy
def a_cube_that_overflows_inside_of_a_tanh() -> Made:
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.detach().pow(3))))

    return run(chain(gelu, weight=1.0).half(), lambda i: torch.full((2, 4), 60.0, dtype=torch.float16))


@op_healthy
def every_empty_holds_nan_at_first() -> Made:
    model = nn.Sequential(nn.Embedding(8, 4), nn.LSTM(4, 4, batch_first=True))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    @garbage_in_empty
    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = F.scaled_dot_product_attention(*(model(torch.tensor([[1, 2, 3]]))[0][:, None],) * 3).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return model, step


@op_healthy
def attention_with_a_causal_mask_of_booleans() -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + F.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )

    return run(Attention(), lambda i: torch.randn(2, 5, 4))


@op_healthy
def nan_for_missing_that_the_model_replaces() -> Made:
    def impute(x: Tensor) -> Tensor:
        return torch.where(torch.isnan(x), torch.zeros(()), x)

    model = nn.Sequential(nn.Linear(4, 1))

    def step(i: int) -> Tensor:
        x = torch.randn(3, 4)
        x[0, 1] = NAN
        loss = model(impute(x)).mean()
        loss.backward()
        return loss

    return model, step


@op_healthy
def cross_entropy_over_masked_logits() -> Made:
    model = nn.Linear(4, 4)

    def step(i: int) -> Tensor:
        logits = model(torch.randn(2, 4)).masked_fill(torch.arange(4) == 3, -INF)
        loss = F.cross_entropy(logits, torch.tensor([1, -100]))
        loss.backward()
        return loss

    return model, step


@op_healthy
def top_k_sampling_and_an_entropy_by_the_library() -> Made:
    model = nn.Linear(4, 6)

    def step(i: int) -> Tensor:
        logits = model(torch.randn(2, 4)) * 100
        low = logits.topk(2).values[:, -1:]
        policy = torch.distributions.Categorical(logits=logits.masked_fill(logits < low, -INF))
        loss = -policy.log_prob(policy.sample()).mean() - 0.01 * policy.entropy().mean()
        loss.backward()
        return loss

    return model, step
