"""Compiled models: no graph break, the same losses, the planted value found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mldebug import DebugUnderflowOverflow

from .kit import agrees, tiny, tokens, watch

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    environment = dict(os.environ)
    yield
    torch._dynamo.reset()
    for name in set(os.environ) - set(environment):
        del os.environ[name]  # the compiler sets some of its own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: str) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def regional(model: nn.Module, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


WAYS = {"torch.compile": whole, "model.compile": in_place, "regional": regional}


def overflows(model: nn.Module, i: int, at: int) -> None:
    """The bias is the largest number and the weight is large and positive: this layer's own output overflows."""
    if i == at:
        with torch.no_grad():
            nn.init.constant_(model.blocks[1].up.weight, 3e38)
            nn.init.constant_(model.blocks[1].up.bias, 3e38)


def run(
    way: str, backend: str, at: int = -1, steps: int = 4, watched: bool = True, before: bool = True, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = Stack()
    losses: list[float] = []
    recorder = DebugUnderflowOverflow(model, **options) if watched and before else None
    call = WAYS[way](model, backend)
    recorder = DebugUnderflowOverflow(model, **options) if watched and not before else recorder
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    try:
        for i in range(steps):
            overflows(model, i, at)
            opt.zero_grad()
            loss = call(torch.full((3, 4), 0.5 + i)).pow(2).mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        if recorder is not None:
            recorder.poll()
    except ValueError as error:
        return losses, error.report
    finally:
        if recorder is not None:
            recorder.remove()
    return losses, None if recorder is None else recorder.report


@pytest.mark.parametrize("before", [True, False], ids=["attached first", "compiled first"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_same_without_graph_break(way: str, backend: str, before: bool) -> None:
    plain, _ = run(way, backend, watched=False)
    torch._dynamo.reset()
    counters.clear()
    watched, report = run(way, backend, before=before)
    assert report.event is None
    assert watched == pytest.approx(plain, rel=1e-5)
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_planted_overflow_is_found(way: str, backend: str) -> None:
    losses, report = run(way, backend, at=2)
    assert len(losses) == 2
    agrees(report.event, step=2, batch=2, phase="forward", module="blocks.1.up", kind="inf", role="output")
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_not_compiled_again_at_every_step(way: str) -> None:
    run(way, "aot_eager", steps=2)
    few = dict(counters["stats"])
    torch._dynamo.reset()
    counters.clear()
    run(way, "aot_eager", steps=8)
    assert dict(counters["stats"]).get("unique_graphs") == few.get("unique_graphs")


def test_the_compiled_module_may_be_given() -> None:
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    overflows(model, 0, 0)
    event = watch(compiled, lambda: compiled(torch.ones(3, 4)).mean().backward()).event
    agrees(event, module="blocks.1.up", kind="inf")
    assert "_orig_mod" not in event.module


def test_after_removal_the_compiled_model_runs_as_before() -> None:
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    want = compiled(torch.ones(3, 4))
    with DebugUnderflowOverflow(model):
        assert torch.allclose(compiled(torch.ones(3, 4)), want)
    assert torch.equal(compiled(torch.ones(3, 4)), want)
    assert not counters["graph_break"]


def test_a_compiled_transformers_model() -> None:
    model = tiny("gpt2", dropout=0.0, layers=1)
    model.loss_type = "ForCausalLM"  # else transformers logs a warning, which breaks the graph by itself
    batch = tokens()
    want = model(**batch).loss.item()
    with DebugUnderflowOverflow(model, on_event="warn") as recorder:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        loss = compiled(**batch).loss
        loss.backward()
        assert recorder.poll() is None
        assert loss.item() == pytest.approx(want, rel=1e-5)
        with torch.no_grad():
            nn.init.constant_(model.transformer.h[0].mlp.c_fc.bias, 3e38)
            nn.init.constant_(model.transformer.h[0].mlp.c_proj.weight, 3e38)
        compiled(**batch).loss.backward()
        recorder.poll()
    agrees(recorder.report.event, module="transformer.h.0.mlp.c_proj", kind="inf")
    assert not counters["graph_break"]


def test_dynamic_shapes() -> None:
    model = Stack()
    with DebugUnderflowOverflow(model) as recorder:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for n in (2, 3, 5, 7):
            compiled(torch.ones(n, 4)).mean().backward()
    assert recorder.report.event is None
    assert not counters["graph_break"]


def test_compiled_under_no_grad() -> None:
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    overflows(model, 0, 0)

    def run() -> None:
        with torch.no_grad():
            compiled(torch.ones(3, 4))

    agrees(watch(model, run).event, module="blocks.1.up", kind="inf")
