"""What the recorder must see: one planted value per place where a value can hide."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutput

from mldebug import DebugUnderflowOverflow, NumericsError, diagnose

from .kit import INF, NAN, Net, agrees, train, watch


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


SHAPES = {
    "tensor": lambda good, bad: bad,
    "tuple": lambda good, bad: (good, bad),
    "list": lambda good, bad: [good, [good, bad]],
    "deep tuple": lambda good, bad: (good, (good, (good, (bad,)))),
    "dict": lambda good, bad: {"a": good, "b": {"c": bad}},
    "dataclass": Pair,
    "dataclass in list": lambda good, bad: [Pair(good, (good, {"x": bad}))],
    "ModelOutput": lambda good, bad: BaseModelOutput(last_hidden_state=good, hidden_states=(good, bad)),
    "mixed": lambda good, bad: (None, "text", 3, [Pair(None, BaseModelOutput(last_hidden_state=bad))]),
}


class Nest(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape, self.bad = shape, False

    def forward(self, x: Tensor) -> Any:
        return SHAPES[self.shape](x, x * INF if self.bad else x * 2.0)


class HasNest(nn.Module):
    """The bad tensor leaves `nest` and is not used again: only that module's output shows it."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.fc, self.nest = nn.Linear(4, 4), Nest(shape)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).abs() + 1.0
        self.nest(y)
        return y


@pytest.mark.parametrize("check_mode", ["step", "each"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nested_outputs(shape: str, check_mode: str) -> None:
    model = HasNest(shape)

    def step(i: int) -> Tensor:
        model.nest.bad = i == 1
        return model(torch.ones(2, 4)).mean()

    event = diagnose(model, step, steps=3, check=check_mode).event
    agrees(event, step=1, phase="forward", module="nest", module_class="Nest", role="output", kind="inf", benign=False)
    assert event.name.startswith("output")
    assert event.dtype in ("torch.float32", "float32", torch.float32)
    assert event.limit == torch.finfo(torch.float32).max


def test_the_name_of_an_element_says_where_it_is() -> None:
    model = HasNest("tuple")
    model.nest.bad = True
    event = watch(model, lambda: model(torch.ones(2, 4))).event
    assert event.name == "output[1]"


@pytest.mark.parametrize("value, kind", [(NAN, "nan"), (INF, "inf")])
def test_an_output_of_a_module(value: float, kind: str) -> None:
    model = Net()
    report = watch(model, lambda: train(model, {1: value}))
    agrees(report.event, step=1, batch=1, micro_batch=0, phase="forward", module="plant", module_class="Plant")
    agrees(report.event, role="output", kind=kind, rank=0, benign=False, op=None)
    assert not report.ok


def test_minus_inf_that_becomes_nan() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    class Times(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    class Entropy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.times = Log(), Times()

        def forward(self, p: Tensor) -> Tensor:
            return self.times(p, self.log(p))

    model = Entropy()
    report = watch(model, lambda: model(torch.tensor([0.0, 1.0])))
    agrees(report.event, module="log", kind="inf", role="output", phase="forward")


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.uses_extra = True

    def forward(self, x: Tensor, extra: Any = None, **more: Any) -> Tensor:
        out = self.fc(x)
        for value in tree_leaves(extra) if self.uses_extra and extra is not None else []:
            out = out + value.sum()
        return out


@pytest.mark.parametrize(
    "args, kwargs, name",
    [
        ((torch.full((2, 4), NAN),), {}, "input[0]"),
        ((), {"x": torch.full((2, 4), NAN)}, "x"),
        ((torch.ones(2, 4),), {"extra": torch.tensor([1.0, NAN])}, "extra"),
        ((torch.ones(2, 4),), {"extra": {"a": [torch.tensor([1.0, NAN])]}}, "extra"),
        ((torch.ones(2, 4), (torch.tensor([NAN]),)), {}, "input[1]"),
    ],
    ids=["positional", "keyword", "other keyword", "nested keyword", "nested positional"],
)
def test_inputs_of_the_root(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    model = Root()
    event = watch(model, lambda: model(*args, **kwargs)).event
    agrees(event, step=0, phase="forward", module="", role="input", kind="nan", module_class="Root")
    assert name in event.name


def test_a_bad_input_that_the_model_masks_away_is_a_note_and_no_event() -> None:
    model = Root()
    model.uses_extra = False
    report = watch(model, lambda: model(torch.ones(2, 4), extra=torch.tensor([1.0, NAN])))
    assert report.event is None
    assert any("input.extra" in note and "nothing bad followed" in note for note in report.notes)


def test_a_linear_that_overflows_to_minus_inf() -> None:
    class Clamps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(-1.0, 1.0)

    model = nn.Sequential(nn.Linear(4, 4), Clamps())
    nn.init.constant_(model[0].weight, -1e38)
    event = watch(model, lambda: model(torch.full((2, 4), 100.0))).event
    agrees(event, module="0", role="output", kind="inf")


def test_a_parameter_that_becomes_minus_inf_behind_a_relu() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model[0].weight.grad[0, 0] = INF
            optimizer.step()

    agrees(watch(model, run).event, module="0", role="parameter", kind="inf", param="0.weight", step=0)


def test_a_nan_parameter_before_the_first_step() -> None:
    model = Net()
    with torch.no_grad():
        model.fc2.weight[0, 3] = NAN
    agrees(
        watch(model, lambda: train(model)).event,
        step=0, phase="init", module="fc2", role="parameter", kind="nan", param="fc2.weight", module_class="Linear",
    )  # fmt: skip


def test_a_nan_buffer_before_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean[2] = NAN
    model.eval()
    event = watch(model, lambda: model(torch.ones(3, 4))).event
    agrees(event, step=0, phase="init", module="1", role="buffer", kind="nan")
    assert "running_mean" in f"{event.name} {event.param}"


def test_a_buffer_that_turns_bad_while_outputs_stay_good() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.level.mul_(1e30)
            return x

    model = nn.Sequential(nn.Linear(4, 1), Ema())
    event = watch(model, lambda: train(model, steps=5)).event
    agrees(event, module="1", role="buffer", kind="inf", step=(1, 2))


def test_a_parameter_used_without_calling_its_module() -> None:
    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(self.fc(x) * self.scale, self.head.weight)

    for name in ("head.weight", "scale"):
        model = Borrowed()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] = INF
        event = watch(model, lambda m=model: train(m)).event
        agrees(event, module=name.rpartition(".")[0], role="parameter", kind="inf", param=name, phase="init")


def test_shared_modules_are_named_once_and_seen_at_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = self.first
            nn.init.constant_(self.first.weight, 1e20)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Twice()
    report = watch(model, lambda: model(torch.ones(2, 4)))
    agrees(report.event, module="first", role="output", kind="inf")
    assert sum(" first Linear" in frame for frame in report.frames) == 2


def test_two_models_two_recorders() -> None:
    gen, dis = nn.Sequential(nn.Linear(4, 4)), Net()
    opt_g, opt_d = (torch.optim.SGD(m.parameters(), 1e-2) for m in (gen, dis))
    with DebugUnderflowOverflow(gen) as watch_g:
        watch_d = DebugUnderflowOverflow(dis)
        with pytest.raises(NumericsError) as caught:
            for i in range(3):
                dis.plant.value = NAN if i == 1 else None
                opt_d.zero_grad()
                dis(gen(torch.ones(2, 4)).detach()).mean().backward()
                opt_d.step()
                opt_g.zero_grad()
                (-dis(gen(torch.ones(2, 4))).mean()).backward()
                opt_g.step()
        watch_d.remove()
    agrees(caught.value.report.event, module="plant", kind="nan", role="output")
    assert watch_d.report.event is not None
    assert watch_g.report.event is None


def test_a_container_that_is_never_called() -> None:
    model = nn.ModuleDict({"gen": nn.Sequential(nn.Linear(4, 4)), "dis": Net()})

    def step(i: int) -> Tensor:
        model["dis"].plant.value = INF if i == 1 else None
        return model["dis"](model["gen"](torch.ones(2, 4))).mean()

    agrees(diagnose(model, step, steps=3).event, step=1, module="dis.plant", kind="inf", role="output", phase="forward")


def test_no_model_given_watches_every_root() -> None:
    first, second = nn.Sequential(nn.Linear(4, 4)), Net()
    second.plant.value = INF

    def run() -> None:
        first(torch.ones(2, 4))
        second(torch.ones(2, 4))

    event = watch(None, run).event
    agrees(event, module_class="Plant", kind="inf", role="output")
    assert event.module.endswith("plant")


def test_include_and_exclude_patterns() -> None:
    def event(**options: Any) -> Any:
        model = Net()
        return watch(model, lambda: train(model, {0: NAN}, steps=1), **options).event

    assert event(exclude=["plant"]).module == "fc2"
    assert event(include=["fc*"]).module == "fc2"
    assert event(include=["pl*"]).module == "plant"
    assert event(include=["fc1"]) is None or event(include=["fc1"]).module is None
