"""Troubles as people report them, made small, and healthy programs that look like them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import INF, NAN, Made
from .cases_ops import Fn, chain, op_healthy, op_trouble, run

# Forward.


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten._log_softmax", cause="fully masked row")
def log_softmax_without_an_allowed_action() -> Made:
    allowed = iter([[True, True, False, False], [False] * 4])
    return run(
        chain(lambda x: x.masked_fill(~torch.tensor(next(allowed)), -INF).log_softmax(-1).exp()),
        lambda i: torch.ones(2, 4),
    )


@op_trouble(2, step=1, phase="forward", module=None, kind="inf", op="aten.log", cause="log of zero", role="loss")
def cross_entropy_of_ones_own_in_fp16_whose_eps_is_lost() -> Made:
    model = nn.Sequential(chain(torch.sigmoid, weight=1.0)[:2]).half()

    def step(i: int) -> Tensor:
        p = model(torch.tensor([[0.5, 1.0, -1.0, [2.0, 15.0][i]]]).half())
        loss = -torch.log(1 - p + 1e-8).mean()
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.log", cause="log of zero")
def gumbel_noise_of_exactly_one() -> Made:
    draws = iter([0.5, 1.0])

    def sample(x: Tensor) -> Tensor:
        u = torch.tensor([0.5, next(draws), 0.5, 0.5])
        return (x - torch.log(-torch.log(u))).softmax(-1)

    return run(chain(sample), lambda i: torch.ones(2, 4))


@op_trouble(2, step=1, phase="forward", module=None, kind="inf", op="aten.log", cause="log of zero", role="loss")
def a_loss_of_minus_inf() -> Made:
    model = nn.Linear(4, 4)

    def step(i: int) -> Tensor:
        loss = torch.log(model(torch.ones(2, 4)).abs() * (1 - i)).sum()
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module=None, kind="inf", op="aten.sum", cause="sum over a masked class")
def label_smoothing_over_masked_logits() -> Made:
    model = nn.Linear(4, 4)

    def step(i: int) -> Tensor:
        logits = model(torch.ones(2, 4)).masked_fill(torch.arange(4) == [9, 3][i], -INF)
        loss = F.cross_entropy(logits, torch.tensor([1, 2]), label_smoothing=0.1)
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.acos", cause="beyond the domain")
def arccos_of_a_cosine_that_was_rounded_up() -> Made:
    return run(chain(torch.acos, weight=1.0), lambda i: torch.full((2, 4), [0.5, 1.0000001][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.logit", cause="beyond the domain")
def logit_of_a_probability_above_one() -> Made:
    return run(chain(torch.logit, weight=1.0), lambda i: torch.full((2, 4), [0.5, 1.5][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.log1p", cause="log of zero")
def log1p_of_minus_one() -> Made:
    return run(chain(torch.log1p, weight=1.0), lambda i: torch.full((2, 4), [0.5, -1.0][i]), lr=0.0)


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten._linalg_solve_ex", cause="singular matrix")
def normal_equations_without_rank() -> Made:
    def solve(x: Tensor) -> Tensor:
        return torch.linalg.solve_ex(x.mT @ x, torch.ones(4, 1))[0].expand(4, 4)

    return run(chain(solve, weight=1.0), lambda i: torch.eye(4) * (1 - i))


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.remainder", cause="division by zero")
def remainder_by_zero() -> Made:
    return run(chain(lambda x: torch.remainder(x + 1, x.detach()), weight=1.0), lambda i: torch.full((2, 4), 1.0 - i))


@op_trouble(2, step=1, phase="forward", module=None, kind="inf", op="aten.mse_loss", cause="square overflow")
def mse_in_fp16() -> Made:
    model = chain(torch.relu, weight=1.0)[:2].half()

    def step(i: int) -> Tensor:
        loss = F.mse_loss(model(torch.full((2, 4), [1.0, 500.0][i]).half()), torch.zeros(2, 4).half())
        loss.backward()
        return loss

    return model, step


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten._to_copy", cause="cast overflow")
def float8_scaled_too_far() -> Made:
    return run(
        chain(lambda x: (x * 100).to(torch.float8_e5m2).float(), weight=1.0),
        lambda i: torch.full((2, 4), 1.0 + 999 * i),
    )


@op_trouble(2, step=1, phase="forward", module="f", kind="nan", op="aten.div_", cause="zero over zero")
def normalised_in_place_by_a_sum_of_zero() -> Made:
    def normal(x: Tensor) -> Tensor:
        y = x.clone()
        return y.div_(y.sum(-1, keepdim=True))

    return run(chain(normal, weight=1.0), lambda i: torch.full((2, 4), 1.0 - i))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.exp_", cause="exp overflow")
def exp_in_place() -> Made:
    return run(chain(lambda x: x.clone().exp_(), weight=1.0), lambda i: torch.full((2, 4), [1.0, 100.0][i]))


@op_trouble(2, step=1, phase="forward", module="f", kind="inf", op="aten.log", cause="log of zero")
def log_under_vmap() -> Made:
    return run(chain(torch.func.vmap(torch.log), weight=1.0), lambda i: torch.full((2, 4), 1.0 - i))


@op_trouble(3, step=1, phase="forward", module="f", kind="nan", op="aten.var.correction", role="buffer")
def a_running_variance_of_one_sample() -> Made:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("variance", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.variance = 0.9 * self.variance + 0.1 * x.detach().var(0)
            return x

    model = chain(torch.relu)
    model.f = Running()
    return run(model, lambda i: torch.randn([3, 1, 3][i], 4))


@op_trouble(3, step=1, phase="forward", module="f", kind="inf", op="aten.native_batch_norm", role="buffer",
            cause="running statistics overflow", param="f.running_var")  # fmt: skip
def a_sample_so_far_off_that_its_variance_overflows() -> Made:
    model = chain(torch.relu)
    model.f = nn.BatchNorm1d(4)
    return run(model, lambda i: torch.randn(3, 4) * (1e25 if i == 1 else 1.0))


@op_trouble(2, step=1, phase="forward", module="attn", kind="nan", cause="fully masked row",
            op=("aten._transformer_encoder_layer_fwd", "aten._softmax"))  # fmt: skip
def encoder_layer_in_eval_over_a_sample_of_padding() -> Made:
    model = nn.Sequential()
    model.add_module("attn", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))
    model.eval()

    def step(i: int) -> Tensor:
        pad = torch.tensor([[False, False, True], [bool(i)] * 3])
        with torch.no_grad():
            return model.attn(torch.randn(2, 3, 8), src_key_padding_mask=pad).mean()

    return model, step


# Data that code of the step makes.


@op_trouble(2, step=1, phase="forward", module="", role="input", kind="inf", op="aten.log", sample=2)
def a_silent_sample_in_a_batch_of_spectrograms() -> Made:
    def data(i: int) -> Tensor:
        power = torch.ones(4, 4)
        power[2] = 1.0 - i
        return torch.log(power)

    return run(chain(torch.relu), data)


@op_trouble(2, step=1, phase="forward", module="", role="input", kind="nan", op="aten.div", sample=0)
def a_constant_image_that_is_standardised() -> Made:
    def data(i: int) -> Tensor:
        image = torch.randn(2, 4)
        if i:
            image[0] = 0.5
        return (image - image.mean(1, keepdim=True)) / image.std(1, keepdim=True)

    return run(chain(torch.relu), data)


@op_trouble(2, step=1, phase="forward", module="", role="input", kind="nan", op="aten.div", sample=1)
def bad_data_by_keyword() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, *, batch: dict[str, Tensor]) -> Tensor:
            return self.fc(batch["x"])

    model = Model()

    def step(i: int) -> Tensor:
        x = torch.ones(2, 4)
        loss = model(batch={"x": x / torch.tensor([[1.0], [1.0 - i]]) - x / torch.tensor([[1.0], [1.0 - i]])}).mean()
        loss.backward()
        return loss

    return model, step


# Backward.


@op_trouble(1, step=0, phase="backward", module="f", kind="nan", op="LogsumexpBackward0", cause="fully masked row")
def logsumexp_of_nothing_behind_where() -> Made:
    def pooled(x: Tensor) -> Tensor:
        z = torch.logsumexp(x + torch.full((4,), -INF), -1, keepdim=True)
        return torch.where(torch.isinf(z), 0.0, z).expand(-1, 4)

    return run(chain(pooled), lambda i: torch.randn(2, 4))


@op_trouble(
    1, step=0, phase="backward", module="f", kind="nan", op="LinalgEighBackward0", cause="repeated singular values"
)
def eigenvectors_of_equal_eigenvalues() -> Made:
    return run(chain(lambda x: torch.linalg.eigh(x.mT @ x)[1].abs(), weight=1.0), lambda i: torch.eye(4))


@op_trouble(1, step=0, phase="backward", module="f", kind="nan", op="DivBackward0",
            cause="gradient of a quotient at zero")  # fmt: skip
def nan_to_num_hides_a_quotient_from_forward_only() -> Made:
    return run(chain(lambda x: torch.nan_to_num(x / x), weight=1.0), lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", kind="nan", op="MulBackward0")
def nan_to_num_hides_a_constant_nan() -> Made:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.nan_to_num(self.weight * torch.tensor([1.0, NAN, 1.0, 1.0]))

    model = chain(torch.relu)
    model.f = Scale()
    return run(model, lambda i: torch.ones(2, 4))


@op_trouble(
    1, step=0, phase="backward", module="f", kind="nan", op="ExpBackward0", cause="gradient of exp behind where"
)
def clamp_hides_an_exp() -> Made:
    return run(chain(lambda x: x.exp().clamp(max=10.0), weight=1.0), lambda i: torch.tensor([[1.0, 100.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", kind="inf", op="SqrtBackward0", cause="gradient of sqrt at zero")
def distance_of_a_point_to_itself() -> Made:
    return run(
        chain(lambda x: (x[:, None] - x).pow(2).sum(-1).sqrt().mean(-1, keepdim=True).expand(-1, 4)),
        lambda i: torch.randn(3, 4),
    )


@op_trouble(2, step=1, phase="backward", module=None, kind="inf", op="SqrtBackward0", cause="gradient of sqrt at zero")
def gradient_penalty_of_a_gradient_of_zero() -> Made:
    model = chain(torch.relu, weight=1.0)

    def step(i: int) -> Tensor:
        x = torch.full((2, 4), 1.0 - 2 * i, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (grad.pow(2).sum(-1).sqrt() - 1).pow(2).mean()
        loss.backward()
        return loss

    return model, step


@op_trouble(1, step=0, phase="backward", module="f", kind="inf", op="StraightBackward", cause="log of zero")
def logarithm_in_a_formula_of_ones_own() -> Made:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.round()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * torch.log(ctx.saved_tensors[0].abs())

    return run(chain(Straight.apply, weight=1.0), lambda i: torch.tensor([[1.0, 0.0, 2.0, 3.0]]))


@op_trouble(1, step=0, phase="backward", module="f", kind="inf", op="MulBackward0", cause="gradient overflow")
def steep_line_under_a_large_gradient() -> Made:
    model = chain(lambda x: x * 1e20, weight=1.0)

    def step(i: int) -> Tensor:
        loss = model(torch.full((2, 4), 1e-10)).mean() * 1e25
        loss.backward()
        return loss

    return model, step


# Parameters.


@op_trouble(
    2, step=1, phase="optimizer", module="fc", role="parameter", kind=("nan", "inf"), cause="learning rate", op="aten."
)
def a_schedule_that_divides_by_zero() -> Made:
    model = chain(torch.relu)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Tensor:
        opt.param_groups[0]["lr"] = [0.1, INF][i]
        opt.zero_grad()
        loss = model(torch.randn(2, 4)).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@op_trouble(
    40, phase="optimizer", module="fc", role="parameter", kind="inf", cause="update beyond the range", op="aten."
)
def weight_decay_times_a_large_learning_rate() -> Made:
    model = chain(torch.tanh)[:2]
    opt = torch.optim.SGD(model.parameters(), 1000.0, weight_decay=1.0)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(2, 4)).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@op_trouble(1, step=0, phase="optimizer", module="fc", role="parameter", kind="inf", op="aten.div", param="fc.weight")
def a_step_of_ones_own_that_divides_by_zero() -> Made:
    model = chain(torch.relu)[:1]

    def step(i: int) -> Tensor:
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad / p.grad.new_zeros(())
        return loss

    return model, step


@op_trouble(2, step=1, phase="optimizer", role="parameter", kind="inf", op="aten.reciprocal", cause="division by zero")
def clipping_of_ones_own_by_a_norm_of_zero() -> Made:
    model = chain(torch.relu)[:1]
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = (model(torch.ones(2, 4)) * (1 - i)).mean()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(1.0 / norm)
        opt.step()
        return loss

    return model, step


# Precision.


@op_trouble(
    1, step=0, phase="forward", module="f", kind="precision", op="aten._to_copy", cause="positions in half precision"
)
def positions_in_bf16_by_autocast() -> Made:
    frequencies = torch.tensor([[1.0, 0.1, 0.01, 0.001]])
    model = chain(lambda x: x * torch.cos(torch.arange(x.shape[0]).float()[:, None] @ frequencies))

    def step(i: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.ones(512, 4)).float().mean()

    return model, step


@op_trouble(
    1, step=0, phase="forward", module="f", kind="precision", op="aten.cumsum", cause="positions in half precision"
)
def positions_summed_up_in_bf16() -> Made:
    def rotary(x: Tensor) -> Tensor:
        at = torch.ones(x.shape[0], dtype=x.dtype).cumsum(0) - 1
        return x * torch.cos(at[:, None] * 0.01)

    return run(chain(rotary).bfloat16(), lambda i: torch.ones(512, 4).bfloat16())


# Healthy.


@op_healthy
def root_of_a_clamp_behind_where() -> Made:
    model = chain(lambda h: torch.where(h > 0, h.clamp(min=0).sqrt(), h), weight=1.0)
    return run(model, lambda i: torch.tensor([[1.0, -1.0, 2.0, 3.0]]))


@op_healthy
def two_wheres_that_fill_with_zero() -> Made:
    def root(x: Tensor) -> Tensor:
        ok = x > 0
        return torch.where(ok, torch.where(ok, x, 0.0).sqrt(), 0.0)

    return run(chain(root, weight=1.0), lambda i: torch.tensor([[1.0, -1.0, 2.0, 3.0]]))


@op_healthy
def gumbel_noise_of_exactly_zero() -> Made:
    u = torch.tensor([0.5, 0.0, 0.5, 0.5])  # the class has a probability of zero
    return run(chain(lambda x: (x - torch.log(-torch.log(u))).softmax(-1)), lambda i: torch.ones(2, 4))


@op_healthy
def lowest_value_added_to_negative_scores_in_fp16() -> Made:
    def attend(x: Tensor) -> Tensor:
        scores = -(x @ x.mT).abs() * 20  # below -32 the sum with -65504 is -inf
        mask = torch.full((4, 4), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        return (scores + mask).softmax(-1) @ x + scores.add_(mask).softmax(-1) @ x

    return run(chain(attend, weight=1.0).half(), lambda i: torch.randn(4, 4).half() * 5, lr=0.0)


@op_healthy
def softmax_over_blocks() -> Made:
    def attend(x: Tensor) -> Tensor:
        highest, total, out = torch.full((4, 1), -INF), torch.zeros(4, 1), torch.zeros(4, 4)
        for block in x.split(2):
            scores = x @ block.mT
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            p, back = torch.exp(scores - new), torch.exp(highest - new)
            total, out, highest = total * back + p.sum(-1, keepdim=True), out * back + p @ block, new
        return out / total

    return run(chain(attend), lambda i: torch.randn(4, 4))


@op_healthy
def forward_algorithm_with_forbidden_transitions() -> Made:
    moves = torch.zeros(4, 4)
    moves[0] = -INF

    def crf(x: Tensor) -> Tensor:
        alpha = torch.full((1, 4), -INF)
        alpha[:, 1] = 0.0
        for row in x:
            alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + row
        return alpha.logsumexp(-1, keepdim=True).expand(4, 4)

    return run(chain(crf), lambda i: torch.randn(4, 4))


@op_healthy
def degrees_of_isolated_nodes() -> Made:
    def normal(x: Tensor) -> Tensor:
        inverse = torch.tensor([0.0, 1.0, 2.0, 3.0]).pow(-0.5)
        inverse.masked_fill_(inverse == INF, 0.0)
        return inverse[:, None] * x

    return run(chain(normal), lambda i: torch.randn(4, 4))


@op_healthy
def padding_of_nan_that_is_cut_off() -> Made:
    def padded(x: Tensor) -> Tensor:
        room = torch.full((6, 4), NAN)
        room[:4] = x
        return room[:4] * 2

    return run(chain(padded), lambda i: torch.randn(4, 4))


@op_healthy
def an_expert_that_averages_no_token() -> Made:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Fn(lambda x: x - x.mean(0)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x) + 0 * self.experts[1](x[:0]).sum()

    model = chain(torch.relu)
    model.f = Mixture()
    return run(model, lambda i: torch.randn(4, 4))


@op_healthy
def precision_and_recall_of_a_class_that_is_not_there() -> Made:
    model = nn.Linear(4, 1)

    def step(i: int) -> dict[str, Tensor]:
        loss = model(torch.randn(2, 4)).mean()
        loss.backward()
        return {"loss": loss, "f1": torch.nan_to_num(torch.zeros(3) / torch.zeros(3)).mean()}

    return model, step


@op_healthy
def nearest_neighbour_without_oneself() -> Made:
    def nearest(x: Tensor) -> Tensor:
        apart = torch.cdist(x, x).masked_fill(torch.eye(4, dtype=torch.bool), INF)
        return x[apart.argmin(-1)] + apart.min(-1).values[:, None]

    return run(chain(nearest), lambda i: torch.randn(4, 4))


@op_healthy
def trust_ratio_of_a_gradient_of_zero() -> Made:
    class Lamb(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    weight, update = p.norm(), p.grad.norm()
                    p.add_(p.grad * torch.where(update > 0, weight / update, torch.ones(())), alpha=-1e-3)

    model = chain(torch.relu)
    opt = Lamb(model.parameters())

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.zeros(2, 4)).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step
