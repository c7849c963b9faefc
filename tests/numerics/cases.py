"""Programs with a trouble of the real world, and what a diagnosis of each must say.

A case is a function that returns (model, step). `expect` holds the event, or None where the program is healthy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INF, NAN = float("inf"), float("nan")
Made = tuple[nn.Module, Callable[[int], Any]]


@dataclass
class Case:
    make: Callable[[], Made]
    steps: int
    expect: dict[str, Any] | None = field(default=None)


TROUBLES: dict[str, Case] = {}


def trouble(steps: int, **expect: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        TROUBLES[make.__name__] = Case(make, steps, expect)
        return make

    return keep


def plain(model: nn.Module, data: Callable[[int], Tensor], lr: float = 1e-2) -> Callable[[int], Tensor]:
    opt = torch.optim.SGD(model.parameters(), lr)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(data(i)).float().pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    return step


class FeedForward(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        nn.init.constant_(self.wi.weight, 1.0), nn.init.constant_(self.wo.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(torch.relu(self.wi(x)))


@trouble(4, step=2, phase="forward", module="2.wo", kind="inf", role="output")
def feed_forward_overflows_in_fp16() -> Made:
    model = nn.Sequential(FeedForward(1 / 256), FeedForward(1 / 256), FeedForward(4.0)).half()

    def step(i: int) -> Tensor:
        return model(torch.full((2, 8), 16.0 * 2**i, dtype=torch.float16)).float().mean()  # 1024 * x at the end

    return model, step


@trouble(3, step=1, phase="forward", module="attn", kind="nan", role="output")
def attention_over_a_sample_that_is_all_padding() -> Made:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            pad = torch.arange(x.shape[1])[None] >= length[:, None]
            return self.norm(x + self.attn(x, x, x, key_padding_mask=pad)[0])

    model = Encoder()

    def step(i: int) -> Tensor:
        loss = model(torch.randn(2, 4, 8), torch.tensor([4, 3 - 3 * (i == 1)])).pow(2).mean()
        loss.backward()
        return loss

    return model, step


@trouble(3, step=2, phase="forward", module="stat", kind="nan", role="output")
def deviation_over_a_batch_of_one() -> Made:
    class Stat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x.var(0, keepdim=True).sqrt().expand_as(x)], -1)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.stat, self.head = nn.Linear(4, 4), Stat(), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stat(self.body(x)))

    model = Critic()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    batches = torch.randn(7, 4).split(3)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(batches[i]).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@trouble(4, step=3, phase="forward", module=None, kind="nan", role="loss")
def cross_entropy_without_a_label() -> Made:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

    def step(i: int) -> Tensor:
        labels = torch.tensor([1, 2, 3]).masked_fill(torch.tensor(i == 3), -100)
        loss = F.cross_entropy(model(torch.tensor([1, 2, 3])), labels)
        loss.backward()
        return loss

    return model, step


@trouble(2, step=1, phase="forward", module="ctc", kind="inf", role=("output", "loss"))
def ctc_target_longer_than_its_input() -> Made:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.ctc = nn.Linear(4, 5), nn.CTCLoss(reduction="sum")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            n = x.shape[1]
            lengths = torch.full((n,), x.shape[0]), torch.full((n,), y.shape[1])
            return self.ctc(self.proj(x).log_softmax(-1), y, *lengths)

    model = Speech()

    def step(i: int) -> Tensor:
        loss = model(torch.randn(8 - 6 * i, 2, 4), torch.tensor([[1, 1, 2], [3, 2, 3]]))
        loss.backward()
        return loss

    return model, step


@trouble(4, step=1, phase="forward", module=("", "norm", None), kind="inf", role="input")
def a_sample_with_inf_poisons_batch_norm() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(x))

    model = Model()
    opt = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = torch.randn(6, 4)
        x[2, 1] = INF if i == 1 else 0.0
        model.train(i != 3)
        loss = model(x).mean()
        if i != 3 and bool(loss.isfinite()):
            opt.zero_grad()
            loss.backward()
            opt.step()
        return loss

    return model, step


@trouble(1, step=0, phase="forward", module="attn", kind="nan", role="output")
def padded_queries_under_a_loss_mask() -> Made:
    class Attention(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            scores = (x @ x.mT).masked_fill(~(keep[:, :, None] & keep[:, None, :]), -INF)
            return scores.softmax(-1) @ x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.attn = nn.Linear(4, 4), Attention()

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.attn(self.inp(x), keep)

    model, keep = Model(), torch.tensor([[True, True, True, False]])

    def step(i: int) -> Tensor:
        loss = (model(torch.randn(1, 4, 4), keep).mean(-1) * keep).sum()
        loss.backward()
        return loss

    return model, step
