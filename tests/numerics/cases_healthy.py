"""Healthy programs that look like trouble."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import INF, Case, Made, plain

HEALTHY: dict[str, Case] = {}


def healthy(steps: int) -> Any:
    def keep(make: Any) -> Any:
        HEALTHY[make.__name__] = Case(make, steps)
        return make

    return keep


@healthy(2)
def causal_mask_of_inf_from_outside() -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(4, 8)

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, -1)
            return (q @ k.mT + bias).softmax(-1) @ x

    model = Attention()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = model(torch.randn(2, 5, 4), torch.full((5, 5), -INF).triu(1)).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@healthy(2)
def finfo_min_in_bf16() -> Made:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.full_like(x, torch.finfo(x.dtype).min).triu(1)

    model = nn.Sequential(nn.Linear(4, 4), Adds(), nn.Softmax(-1)).bfloat16()
    return model, plain(model, lambda i: torch.randn(4, 4, dtype=torch.bfloat16))


@healthy(3)
def an_expert_without_tokens() -> Made:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.frozen = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            to, y = torch.arange(len(x)) % 2, torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                y[to == k] = expert(x[to == k])
            return self.frozen(y)

    model = Experts()
    return model, plain(model, lambda i: torch.randn(5, 4))


@healthy(4)
def accumulation_eval_and_scaler() -> Made:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(i: int) -> Tensor:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 4)).float().pow(2).mean() / 3
            scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        with torch.no_grad():
            model(torch.randn(2, 4))
        return loss

    return model, step


@healthy(2)
def logits_masked_and_sampled() -> Made:
    class Sampler(nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            kept = logits.masked_fill(logits < logits.max(-1, keepdim=True).values - 0.5, -INF)
            return kept, torch.multinomial(kept.softmax(-1), 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.sampler = nn.Linear(4, 6), Sampler()

        def forward(self, x: Tensor) -> Tensor:
            logits = self.fc(x)
            self.sampler(logits.detach())
            return logits

    model = Model()
    return model, plain(model, lambda i: torch.randn(2, 4))


@healthy(2)
def alibi_with_a_causal_mask() -> Made:
    class Alibi(nn.Module):
        def forward(self, n: int) -> Tensor:
            at = torch.arange(n, dtype=torch.float32)
            return -0.5 * (at[:, None] - at[None, :]).abs() + torch.full((n, n), -INF).triu(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.alibi = nn.Linear(4, 4), Alibi()

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return (y @ y.mT + self.alibi(x.shape[1])).softmax(-1) @ y

    model = Model()
    return model, plain(model, lambda i: torch.randn(2, 5, 4))


@healthy(2)
def max_pooling_padded_with_minus_inf() -> Made:
    class Pad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x, (1, 1), value=-INF)

    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), Pad(), nn.MaxPool1d(3, 2), nn.Flatten(), nn.Linear(12, 1))
    return model, plain(model, lambda i: torch.randn(2, 2, 8))


@healthy(3)
def a_large_loss_that_is_finite() -> Made:
    model = nn.Linear(4, 1)
    return model, plain(model, lambda i: torch.randn(2, 4) * 1e4, lr=1e-12)


@healthy(3)
def beam_scores_start_at_minus_1e9() -> Made:
    class Beam(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = torch.full_like(x, -1e9)
            scores[:, 0] = 0.0
            return x + scores

    model = nn.Sequential(nn.Linear(4, 4), Beam(), nn.Softmax(-1))
    return model, plain(model, lambda i: torch.randn(2, 4))


@healthy(3)
def a_scratch_buffer_that_is_never_read() -> Made:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("room", torch.full((4,), float("nan")))

        def forward(self, x: Tensor) -> Tensor:
            self.room[:2] = x.detach().mean(0)[:2]
            return x + self.room[:2].sum()

    model = nn.Sequential(nn.Linear(4, 4), Scratch())
    return model, plain(model, lambda i: torch.randn(2, 4))
