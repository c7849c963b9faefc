"""Arithmetic that leaves the range of its dtype or the domain of its function."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cases import Made, plain, trouble


@trouble(3, step=1, phase="forward", module="norm", kind="inf", role="output")
def rms_norm_squares_overflow_in_fp16() -> Made:
    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2).sum(-1, keepdim=True) * x.new_tensor(0.25)

    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4, bias=False))
    model.add_module("norm", RMSNorm())
    nn.init.constant_(model.fc.weight, 1.0)
    model.half()

    def step(i: int) -> Tensor:
        return model(torch.full((2, 4), [1.0, 90.0, 1.0][i], dtype=torch.float16)).float().mean()

    return model, step


@trouble(3, step=2, phase="forward", module="scores", kind="inf", role="output")
def attention_scores_overflow_in_fp16() -> Made:
    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT  # without the division by sqrt(d)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.scores = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), Scores()
            nn.init.constant_(self.q.weight, 1.0), nn.init.constant_(self.k.weight, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(self.q(x), self.k(x)).softmax(-1) @ x

    model = Attention().half()

    def step(i: int) -> Tensor:
        return model(torch.full((1, 3, 8), 4.0 * 2**i, dtype=torch.float16)).float().mean()  # 512 * x * x

    return model, step


@trouble(2, step=1, phase="forward", module="log", kind="inf", role="output")
def log_of_zero_becomes_nan_in_the_next_module() -> Made:
    class Log(nn.Module):
        def forward(self, p: Tensor) -> Tensor:
            return p.log()

    class Entropy(nn.Module):
        def forward(self, p: Tensor, logp: Tensor) -> Tensor:
            return -(p * logp).sum(-1)

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.soft, self.log, self.entropy = nn.Softmax(-1), Log(), Entropy()

        def forward(self, x: Tensor) -> Tensor:
            p = self.soft(x)
            return self.entropy(p, self.log(p))

    model = Policy()

    def step(i: int) -> Tensor:
        return model(torch.tensor([[1.0, 0.0, -1.0]]) * [1.0, 300.0][i]).mean()

    return model, step


@trouble(3, step=1, phase="forward", module="pool", kind="nan", role="output")
def mean_pooling_over_no_token() -> Made:
    class Pool(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.pool, self.head = nn.Embedding(10, 4), Pool(), nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.pool(self.emb(ids), (ids > 0).float()))

    model = Sentence()
    data = [[[1, 2], [3, 0]], [[4, 5], [0, 0]], [[1, 1], [2, 2]]]

    def step(i: int) -> Tensor:
        loss = model(torch.tensor(data[i])).mean()
        loss.backward()
        return loss

    return model, step


@trouble(3, step=2, phase="forward", module="temperature", kind="inf", role="output")
def exp_of_a_temperature() -> Made:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(4.6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.log_scale.exp()

    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("temperature", Temperature())
    nn.init.constant_(model.fc.bias, 5.0)

    def step(i: int) -> Tensor:
        with torch.no_grad():
            model.temperature.log_scale.mul_(5.0)  # 23, 115 (overflows at 88.7)
            model.temperature.log_scale.clamp_(max=[23.0, 80.0, 115.0][i])
        return model(torch.ones(2, 4)).mean()

    return model, step


@trouble(2, step=1, phase="forward", module="blocks.1", kind="inf", role="output")
def a_residual_sum_that_overflows_although_each_part_is_finite() -> Made:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.fc.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(x)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack().half()

    def step(i: int) -> Tensor:
        return model(torch.full((1, 4), [1.0, 20000.0][i], dtype=torch.float16)).float().mean()

    return model, step


@trouble(3, step=1, phase="forward", module="dist", kind="nan", role="output")
def normalising_a_zero_vector() -> Made:
    class Direction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True)

    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4, bias=False))
    model.add_module("dist", Direction())
    return model, plain(model, lambda i: torch.full((2, 4), float(i != 1)))
