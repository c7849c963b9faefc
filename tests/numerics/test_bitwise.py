"""With the recorder a training run has the same bits as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mldebug import DebugUnderflowOverflow

from .kit import bits, tiny, tokens

STEPS = 50


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
            nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class Draws(nn.Module):
    """Takes from all three random generators within forward, as layer-drop code does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = self.a(x)
        return self.b(x * float(numpy.random.rand()) + torch.randn_like(x))


def gpt2_loss(model: nn.Module) -> Tensor:
    return model(**tokens()).loss


def conv_loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 2, 0]))


def plain_loss(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 4)).pow(2).mean()


RUNS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "gpt2": (lambda: tiny("gpt2"), gpt2_loss),
    "t5 bf16": (lambda: tiny("t5").bfloat16(), lambda model: gpt2_loss(model).float()),
    "convnet": (ConvNet, conv_loss),
    "checkpoint reentrant": (lambda: Checkpointed(True), plain_loss),
    "checkpoint": (lambda: Checkpointed(False), plain_loss),
    "random": (Draws, plain_loss),
}


def run(name: str, steps: int, **options: Any) -> tuple[list[bytes], list[bytes], list[Any]]:
    build, loss_of = RUNS[name]
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = build().train()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []

    def loop() -> None:
        for _ in range(steps):
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            opt.step()
            losses.append(loss.detach().numpy().tobytes())

    if options:
        with DebugUnderflowOverflow(model, check=options["check"]) as recorder:
            loop()
        assert recorder.step == recorder.batch_number == steps
        assert recorder.report.event is None
    else:
        loop()
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.random.get_state()[1].tobytes()]
    return losses, bits(model), states


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("check", ["step", "async", "each"])
def test_fifty_steps_have_the_same_bits(name: str, check: str) -> None:
    steps = STEPS if check == "step" else 10
    plain, watched = run(name, steps), run(name, steps, check=check)
    assert plain[0] == watched[0], "losses"
    assert plain[1] == watched[1], "weights and buffers"
    assert plain[2] == watched[2], "random generators"


def test_autocast_and_scaler_have_the_same_bits() -> None:
    def go(watched: bool) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        recorder = DebugUnderflowOverflow(model) if watched else None
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(4, 8))
            opt.zero_grad()
            scaler.scale(out.float().pow(2).mean()).backward()
            scaler.step(opt)
            scaler.update()
        if recorder is not None:
            recorder.remove()
        return bits(model)

    assert go(False) == go(True)


def test_gradients_have_the_same_bits() -> None:
    def go(watched: bool) -> list[Tensor]:
        model = tiny("gpt2")
        torch.manual_seed(1)
        recorder = DebugUnderflowOverflow(model) if watched else None
        for _ in range(3):  # accumulated
            gpt2_loss(model).backward()
        if recorder is not None:
            recorder.remove()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(go(False), go(True), strict=True))


def test_the_graph_is_not_held() -> None:
    """After a step the recorder holds no activation."""
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with DebugUnderflowOverflow(model) as recorder:
        held = []
        for _ in range(3):
            x = torch.randn(2, 4)
            out = model(x)
            held.append(weakref.ref(out))
            out.mean().backward()
            torch.optim.SGD(model.parameters(), 1e-2).step()
            del out, x
        recorder.poll()
        gc.collect()
        assert sum(ref() is not None for ref in held) <= 1
