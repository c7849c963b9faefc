"""Inductor partitions a watched model as if nobody watched it, and the recorder still sees every tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import partitioners

from mldebug import DebugUnderflowOverflow

from .kit import agrees


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    environment = dict(os.environ)
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
    for name in set(os.environ) - set(environment):
        del os.environ[name]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Of each partition: what is saved for backward, and how many ops of the recorder the partitioner saw."""
    seen: list[tuple[list[str], int]] = []
    original = partitioners.min_cut_rematerialization_partition

    def spy(gm: Any, inputs: Any, **options: Any) -> Any:
        ours = sum("mldebug.record" in str(node.args[:1]) for node in gm.graph.nodes)
        forward, backward = original(gm, inputs, **options)
        outputs = next(iter(reversed(forward.graph.nodes))).args[0][options["num_fwd_outputs"] :]
        kept = sorted(str(node.meta["val"].shape) for node in outputs if node.op != "placeholder")
        seen.append((kept, ours))
        return forward, backward

    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", spy)
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "min_cut_rematerialization_partition", spy)
    return seen


class Net(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()
        self.down, self.unused = nn.Linear(2 * width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)  # its output goes nowhere; it is a module output all the same
        return x + self.down(self.act(self.up(self.norm(x))))


def steps(model: nn.Module, count: int = 3, dtype: torch.dtype | None = None) -> list[float]:
    torch.manual_seed(0)
    call = torch.compile(model, fullgraph=True)
    losses = []
    for i in range(count):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = call(torch.randn(4, 128) * (i + 1)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_same_is_saved_for_backward(saved: list[Any], dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = steps(model, dtype=dtype)
    with DebugUnderflowOverflow(model) as recorder:
        watched = steps(model, dtype=dtype)
    (without, _), (with_, ours) = saved
    assert with_ == without
    assert ours == 1  # the unused output stays where it was: nobody else keeps it alive
    assert watched == pytest.approx(plain, rel=1e-6 if dtype is None else 1e-2)
    assert recorder.report.event is None


def test_magnitudes_are_those_of_eager_mode() -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(4, 128)

    def magnitudes(call: Any) -> dict[str, float]:
        with DebugUnderflowOverflow(model) as recorder:
            call(x).sum().backward()
            memory = recorder.memory
            first = recorder.memory.calls[-1].first
            numbers = range(first, memory.sequence)
            named = {f"{memory.site(n).module} {memory.site(n).path}": n for n in numbers}
            return {name: memory.stats([n])[0].absmax for name, n in named.items() if "output" in name}

    eager, compiled = magnitudes(model), magnitudes(torch.compile(model))
    assert set(eager) <= set(compiled)
    assert {name: compiled[name] for name in eager} == pytest.approx(eager, rel=1e-5)


def test_what_the_root_returns_is_measured_once() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(128, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return self.head(torch.relu(x)), 1

    model = Root()
    with DebugUnderflowOverflow(model) as recorder:
        torch.compile(model)(torch.randn(64, 128))
        memory = recorder.memory
        root = memory.sequence - 1
        inner = next(n for n in range(root - 1, -1, -1) if memory.site(n).module == "head")
        assert (memory.site(root).module, memory.site(root).path) == ("", "output[0]")
        assert memory._source[root] == memory._source[inner]
        assert memory.stats([root]) == memory.stats([inner])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_one_bad_element_alarms(value: float, dtype: torch.dtype | None) -> None:
    class Plant(nn.Module):
        def forward(self, x: Tensor, where: Tensor) -> Tensor:
            return torch.where(where, value, x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.plant, self.out = nn.Linear(128, 128), Plant(), nn.Linear(128, 1)

        def forward(self, x: Tensor, where: Tensor) -> Tensor:
            y = self.plant(self.lin(x).to(dtype or x.dtype), where)
            return self.out(torch.where(where, 0.0, y).float())

    model = Root()
    with DebugUnderflowOverflow(model, on_event="warn") as recorder:
        call = torch.compile(model)
        where = torch.zeros(4, 128, dtype=torch.bool)
        call(torch.randn(4, 128), where).sum().backward()
        assert recorder.poll() is None
        where[2, 77] = True
        call(torch.randn(4, 128), where).sum().backward()
        recorder.poll()
    if value == float("-inf"):  # as masks are written; it does no harm here
        assert recorder.report.event is None
    else:
        agrees(recorder.report.event, module="plant", kind="nan" if value != value else "inf")


def test_minus_inf_out_of_a_layer_alarms() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1))
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    with DebugUnderflowOverflow(model, on_event="warn") as recorder:
        torch.compile(model)(torch.full((2, 128), -1.0)).sum().backward()
        recorder.poll()
    agrees(recorder.report.event, module="0", kind="inf")


def test_a_partitioner_of_the_user_stays() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Mine(CustomPartitionerFn):
        def __call__(self, gm: Any, inputs: Any, **options: Any) -> Any:
            return partitioners.min_cut_rematerialization_partition(gm, inputs, **options)

        def uuid(self) -> Any:
            return None

    mine = Mine()
    config.custom_partitioner_fn = mine
    try:
        model = Net()
        with DebugUnderflowOverflow(model):
            steps(model, 1)
            assert config.custom_partitioner_fn is mine
        assert config.custom_partitioner_fn is mine
    finally:
        config.custom_partitioner_fn = None


def test_nothing_is_left_in_the_compiler() -> None:
    from torch._dynamo import utils
    from torch._inductor import config

    model = Net()
    with DebugUnderflowOverflow(model):
        steps(model, 1)
        assert config.custom_partitioner_fn is not None
    assert config.custom_partitioner_fn is None
    assert utils.unpatched_nn_module_call is nn.Module.__call__
