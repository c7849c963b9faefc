"""Parts of a step that are compiled beside the model: the whole step, the optimizer, branches, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

from .kit import NAN, Net, agrees


def net() -> Net:
    model = Net()
    model.plant = nn.ReLU()
    return model


def overflow(model: nn.Module) -> None:
    with torch.no_grad():
        model.fc1.weight.fill_(3e38)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_the_whole_step_compiled() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model) as recorder:
        step = torch.compile(step_of(model, optimizer), backend="aot_eager")
        for _ in range(3):
            step(torch.ones(2, 4))
        assert (recorder.step, recorder.batch_number) == (3, 3)
        overflow(model)
        before = [p.detach().clone() for p in model.parameters()]
        step(torch.full((2, 4), 9.0))
    agrees(caught.value.report.event, module="fc1", kind="inf", role="output", step=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the step was not made"


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_the_step_of_the_optimizer_compiled(cls: Any) -> None:
    model = net()
    optimizer = cls(model.parameters(), lr=0.01)
    with DebugUnderflowOverflow(model, on_event=lambda event: None) as recorder:

        @torch.compile(backend="aot_eager")
        def step() -> None:
            optimizer.step()

        for i in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if i == 2:
                model.fc1.weight.grad.fill_(NAN)
            step()
            optimizer.zero_grad()
        assert recorder.step == 3
        model(torch.ones(2, 4))
    agrees(recorder.report.event, module="fc1", kind="nan", role="parameter", param="fc1.weight", step=2)


def test_a_scaler_in_a_compiled_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: Tensor) -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with DebugUnderflowOverflow(model) as recorder:
        compiled = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            compiled(torch.ones(2, 4))
        assert recorder.step == 3


@pytest.mark.parametrize("way", ["function", "in place", "module"])
def test_any_model_that_is_compiled_is_found(way: str) -> None:
    model = net()
    compiled: Any = model
    if way == "in place":
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model if way == "module" else lambda x: model(x) * 1, backend="aot_eager")
    with DebugUnderflowOverflow(None, on_event=lambda event: None) as recorder:
        for _ in range(3):
            compiled(torch.ones(2, 4)).sum().backward()
        assert recorder.batch_number == 3
        overflow(model)
        compiled(torch.full((2, 4), 9.0))
    agrees(recorder.report.event, module="fc1", kind="inf", role="output", batch=3)


def test_a_module_added_before_it_is_compiled() -> None:
    model = net()
    with DebugUnderflowOverflow(model, on_event=lambda event: None) as recorder:
        model.plant = nn.Sequential(nn.Linear(8, 8))
        nn.init.constant_(model.plant[0].bias, float("inf"))
        torch.compile(model, backend="aot_eager")(torch.ones(2, 4))
    agrees(recorder.report.event, module=("plant.0", ""), role=("output", "parameter"))


def compiled_in(way: str, model: nn.Module) -> nn.Module:
    if way == "whole":
        return torch.compile(model, backend="aot_eager")
    for module in [model] if way == "in place" else [model.fc1, model.fc2]:
        module.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("way", ["whole", "in place", "regional"])
def test_each_sees_the_modules_inside(way: str) -> None:
    model = net()
    compiled = compiled_in(way, model)
    with DebugUnderflowOverflow(model, check="each", on_event=lambda event: None) as recorder:
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
        assert recorder.batch_number == 2
        overflow(model)
        compiled(torch.full((2, 4), 9.0))
    agrees(recorder.report.event, module="fc1", kind="inf", role="output", batch=2)
    assert torch.compiler.is_compiling() is False
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("way", ["whole", "in place", "regional"])
def test_traced_batches_are_printed_whole(way: str, capsys: Any) -> None:
    model = net()
    compiled = compiled_in(way, model)
    with DebugUnderflowOverflow(model, trace_batch_nums=[1]) as recorder:
        for _ in range(3):
            compiled(torch.ones(2, 4)).sum().backward()
        assert recorder.batch_number == 3
    assert torch._dynamo.eval_frame._stance.stance == "default"
    said = "".join(capsys.readouterr())
    assert [line.split()[-1] for line in said.splitlines() if line.startswith(" " * 17)] == [
        "***", "Linear", "ReLU", "Linear", "Net",
    ]  # fmt: skip


def test_a_forward_that_raises_under_each_leaves_the_compiler_as_it_was() -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    with DebugUnderflowOverflow(model, check="each"), pytest.raises(RuntimeError):
        compiled(torch.ones(2, 5))
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x) * 1, lambda x: self.b(x) * 1, (x,))


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, x: (c + self.a(x), c * 1.0), torch.zeros(4), x)[1]


class While(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.a(x)), (torch.tensor(0), x))[1]


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.region = torch.compiler.nested_compile_region(lambda x: self.a(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.region(self.region(x))


class Vmap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: self.a(x).pow(2).sum()))(x)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Autograd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Function.apply(x, self.a)


@pytest.mark.parametrize("cls", [Cond, Scan, While, Region, Vmap, Autograd], ids=lambda cls: cls.__name__)
def test_modules_in_bodies_of_higher_order_operators(cls: Any) -> None:
    model = cls()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 4)
    want = compiled(x)
    with DebugUnderflowOverflow(model, on_event=lambda event: None) as recorder:
        assert torch.allclose(compiled(x), want)
        assert torch.allclose(compiled(x), want)
        assert recorder.batch_number == 2
        assert recorder.report.event is None
        compiled(torch.full((2, 4), NAN))
    agrees(recorder.report.event, module="", kind="nan")
