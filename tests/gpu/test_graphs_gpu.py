"""The recorder and CUDA graphs: captured steps have the same bits, and a replay that goes bad names the module."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Gate(nn.Module):
    """Overflows where its input is large; what it returns is large with `high`."""

    high = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e4 if self.high else x + torch.exp(x.abs().amax() - 60)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Gate()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(16, 64), nn.Linear(64, 1)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net().cuda()


def spoil(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = float("inf")


class Captured:
    """A training step in one graph; the optimizer in it, or after it."""

    def __init__(self, model: nn.Module, whole: bool) -> None:
        self.model, self.whole = model, whole
        self.opt = torch.optim.AdamW(model.parameters(), 1e-3, capturable=whole)
        self.x = torch.zeros(8, 16, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.once(self.opt.step)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.once(self.opt.step if whole else lambda: None)

    def once(self, step: Any) -> Tensor:
        self.opt.zero_grad(set_to_none=True)
        loss = self.model(self.x).pow(2).mean()
        loss.backward()
        step()
        return loss.detach()

    def step(self, i: int) -> Tensor:
        self.x.copy_(torch.full((8, 16), 0.1 * i + 0.1))
        self.graph.replay()
        if not self.whole:
            self.opt.step()
        return self.loss.clone()


def bits(model: nn.Module, losses: list[Tensor]) -> list[bytes]:
    return [t.detach().cpu().numpy().tobytes() for t in [*losses, *model.state_dict().values()]]


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "step outside"])
def test_healthy_replays_have_the_same_bits(whole: bool) -> None:
    plain, watched = make(), make()
    job = Captured(plain, whole)
    want = bits(plain, [job.step(i) for i in range(12)])
    with DebugUnderflowOverflow(watched) as recorder:
        job = Captured(watched, whole)
        before, batches = recorder.step, recorder.batch_number
        have = bits(watched, [job.step(i) for i in range(12)])
    assert have == want
    report = recorder.report
    assert report.event is None
    assert (before, recorder.step, batches, recorder.batch_number) == (3, 15, 3, 15)


@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "step outside"])
@pytest.mark.parametrize("check", ["step", "async"])
def test_a_bad_replay_names_its_module(whole: bool, check: Any) -> None:
    model = make()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model, check=check) as recorder:
        job = Captured(model, whole)
        for i in range(8):
            if i == 4:
                spoil(model)
            job.step(i)
    event = caught.value.report.event
    assert event is recorder.report.event and event is not None
    assert (event.step, event.phase, event.module) == (7, "forward", "blocks.1.up")
    assert event.again == "not replayable" and "CUDA graph" in caught.value.report.text()
    assert i in ((4, 5, 6) if check == "async" else (5,) if whole else (4,))


def test_a_loss_that_is_made_in_the_graph() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    torch.manual_seed(0)
    model, x = Root().cuda(), torch.ones(4, 16, device="cuda")
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                (model(x).abs() + 1).log().sum().backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = (model(x).abs() - model.fc.bias.abs()).log().sum()
            loss.backward()
        x.zero_()
        graph.replay()
    event = caught.value.report.event
    assert event is not None and (event.module, event.kind, event.name) == (None, "inf", "loss")


def test_graphed_callables() -> None:
    model: Any = make()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        model.blocks[1] = torch.cuda.make_graphed_callables(
            model.blocks[1], (torch.zeros(8, 64, device="cuda", requires_grad=True),)
        )
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        for i in range(6):
            model.blocks[0].gate.high = i == 3
            opt.zero_grad()
            model(torch.full((8, 16), 0.1 * i, device="cuda")).pow(2).mean().backward()
            opt.step()
    event = caught.value.report.event
    assert event is not None and (event.step, event.module, event.kind) == (3, "blocks.1.gate", "inf")


def test_reduce_overhead() -> None:
    def go(watched: bool, bad: int) -> tuple[list[float], Any]:
        torch._dynamo.reset()
        model = make()
        recorder = DebugUnderflowOverflow(model) if watched else None
        call, losses = torch.compile(model, mode="reduce-overhead"), []
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        try:
            for i in range(10):
                opt.zero_grad()
                loss = call(torch.full((8, 16), 1e4 if i == bad else 0.1 * i, device="cuda")).pow(2).mean()
                loss.backward()
                opt.step()
                losses.append(loss.item())
        except NumericsError as error:
            return losses, error.report
        finally:
            if recorder is not None:
                recorder.remove()
        return losses, None if recorder is None else recorder.report

    plain, _ = go(False, -1)
    losses, report = go(True, -1)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert report.event is None and not any("not measured" in note for note in report.notes)
    losses, report = go(True, 7)
    assert len(losses) == 7
    assert (report.event.step, report.event.module, report.event.kind) == (7, "blocks.0.gate", "inf")


def test_a_graph_outlives_the_recorder_and_keeps_nothing_else_of_it() -> None:
    model = make()
    recorder = DebugUnderflowOverflow(model)
    job = Captured(model, True)
    job.step(0)
    recorder.remove()
    gone = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert gone() is None
    assert torch.isfinite(torch.stack([job.step(i) for i in range(5)])).all()
    assert torch.cuda.CUDAGraph.replay.__module__ == "torch.cuda.graphs"
    with DebugUnderflowOverflow(model) as second:
        job.step(1)
    assert second.report.event is None
