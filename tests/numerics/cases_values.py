"""Bad weights, buffers, inputs, labels and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import INF, NAN, Made, plain, trouble


@trouble(2, step=0, phase="init", module="1", kind="nan", role="parameter", param="1.bias")
def a_parameter_nan_before_training() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].bias.fill_(NAN)
    return model, plain(model, lambda i: torch.randn(2, 4))


@trouble(2, step=0, phase="init", module="scale", kind=("nan", "inf"), role="buffer")
def a_buffer_of_uninitialised_memory() -> Made:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            junk = torch.tensor([0x3F800000, 0x7FC00001, 0x7FC00001], dtype=torch.int32)
            self.register_buffer("factor", junk.view(torch.float32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    model = nn.Sequential()
    model.add_module("fc", nn.Linear(3, 3))
    model.add_module("scale", Scale())
    return model, plain(model, lambda i: torch.randn(2, 3))


@trouble(4, step=2, phase="forward", module="", kind="nan", role="input")
def a_nan_feature_by_keyword() -> Made:
    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, *, features: dict[str, Tensor]) -> Tensor:
            return self.fc(torch.cat([features["numbers"], features["flags"]], -1))

    model = Tabular()

    def step(i: int) -> Tensor:
        numbers = torch.tensor([[1.0, NAN if i == 2 else 2.0]])
        loss = model(features={"numbers": numbers, "flags": torch.ones(1, 2)}).mean()
        loss.backward()
        return loss

    return model, step


@trouble(4, step=2, phase="forward", module="emb", kind="nan", role="output")
def a_row_of_an_embedding_looked_up_outside_its_parameters() -> Made:
    class Cached(nn.Module):
        """Rows come from a plain tensor, which is neither a parameter nor a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.rows = [torch.zeros(4) + i for i in range(8)]
            self.rows[7] = torch.full((4,), NAN)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.stack([self.rows[i] for i in ids.tolist()])

    model = nn.Sequential()
    model.add_module("emb", Cached())
    model.add_module("fc", nn.Linear(4, 1))
    return model, plain(model, lambda i: torch.tensor([i, 7 if i == 2 else 1]))


@trouble(2, step=0, phase="init", module="0", kind="nan", role="parameter", param="0.weight")
def a_row_of_an_embedding_that_is_not_looked_up_yet() -> Made:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight[7] = NAN
    return model, plain(model, lambda i: torch.tensor([1, 7 if i else 2]))


@trouble(4, step=(0, 1), phase="optimizer", role="parameter", kind=("inf", "nan"))
def a_learning_rate_that_blows_the_weights_up() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, plain(model, lambda i: torch.ones(2, 4) * 10, lr=1e38)


@trouble(3, step=1, phase="optimizer", role="parameter", kind="nan", module="0", param="0.weight")
def an_optimizer_that_writes_nan() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    class Divides(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.calls = 0

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"][:1]:
                        p.mul_(0.0).div_(0.0) if self.calls == 2 else p.mul_(0.9)

    opt = Divides(model.parameters())

    def step(i: int) -> Tensor:
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        opt.step()
        return loss

    return model, step


@trouble(5, step=3, phase="forward", module="", kind="inf", role="input")
def a_sample_with_inf() -> Made:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 1))
    data = torch.randn(5, 3, 2, 8)
    data[3, 1, 0, 5] = INF
    return model, plain(model, lambda i: data[i])


@trouble(3, step=1, phase="forward", module=None, kind="nan", role="loss")
def a_nan_label() -> Made:
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    labels = [1.0, NAN, 1.0]

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(torch.randn(2, 4)), torch.full((2, 1), labels[i]))
        loss.backward()
        opt.step()
        return loss

    return model, step
