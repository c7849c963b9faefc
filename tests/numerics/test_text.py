"""The text of a report: 80 columns, nothing said twice, and a table that agrees with the event."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, diagnose
from mldebug.numerics import Event, NumericsReport
from mldebug.numerics._frames import COLUMNS
from mldebug.numerics._history import in_short

from .kit import INF, NAN, Net, train, watch

NAME = "encoder.block.0.layer.0.SelfAttention.a_rather_long_name.relative_attention_bias"
EVENT = Event(
    step=1, batch=1, micro_batch=0, phase="forward", module=NAME, module_class="Embedding", role="output",
    kind="inf", name="output", dtype="float16", limit=65504.0,
)  # fmt: skip


def table(report: NumericsReport) -> list[str]:
    """The rows of the history."""
    lines = report.text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["step", "loss"])
    return lines[start + 1 : lines.index("", start) if "" in lines[start:] else None]


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_fit(width: int) -> None:
    frames = [
        f"{'':>17} {NAME} Embedding\n1.00e+00 2.00e+00 weight\n1.00e+00 2.00e+00 input.{'x' * 70}",
        f"{'':>17} {NAME[:55]} Embedding",
    ]
    rows = [{"step": i, "loss": -1.0, "grad_norm": -1e-30, "absmax": 2.0, "where": f"{NAME} output"} for i in range(3)]
    reason = "its inputs could not be kept (ValueError: " + "long " * 20 + ")"
    text = NumericsReport(
        event=EVENT, frames=frames, frames_from="ring", not_replayed=reason, history=rows, batches=3,
        notes=[f"{NAME} output stands at 63% of the limit of float16"],
    ).text(width=width)  # fmt: skip
    assert max(map(len, text.splitlines())) <= width
    assert text.count("relative_attention_bias output") >= 3
    assert f"{NAME[:55]} Embedding" in text
    assert (f"{NAME} Embedding" in text) == (width == 120)
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_header_of_the_frames_stands_there_once() -> None:
    report = watch(net := Net(), lambda: train(net, {1: INF}))
    assert report.frames_from == "replay"
    assert report.text().count(COLUMNS) == 1
    assert "*** Starting batch number=1 ***" in report.text()
    short = watch(net := Net(), lambda: train(net, {1: INF}), max_frames_to_save=1)
    assert short.text().count(COLUMNS) == 1 and "Starting batch" not in short.text()


class Tower(nn.Module):
    """Layers of one size; the last one overflows when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


@pytest.mark.parametrize("check", ["step", "each"])
def test_the_row_of_the_step_names_the_event(check: Any) -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        model.layers[2].bias.data.fill_(3e38 if i == 3 else 1.0)  # finite: the sum overflows
        model.layers[2].weight.data.fill_(3e38 if i == 3 else 1.0)
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        return loss

    report = diagnose(model, step, steps=5, check=check)
    assert report.event is not None
    assert (report.event.step, report.event.module, report.event.kind) == (3, "layers.2", "inf")
    row = report.history[-1]
    assert (row["step"], row["where"], row["absmax"]) == (3, "layers.2 output", INF)
    assert row["event"] == "inf in layers.2 output"
    assert all("event" not in row for row in report.history[:-1])
    assert table(report)[-1].split()[0] == "3" and table(report)[-1].endswith("inf  layers.2 output")


def test_the_row_of_a_parameter_and_of_a_loss() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def spoil(i: int) -> Tensor:
        loss = net(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        if i == 1:
            net.fc1.bias.data[0] = NAN
        return loss

    row = next(row for row in diagnose(net, spoil, steps=4).history if "event" in row)
    assert row["event"] == "nan in fc1.bias" and row["where"] == "fc1.bias" and math.isnan(row["absmax"])
    net = Net()
    row = diagnose(net, lambda i: net(torch.ones(2, 4)).mean().abs() * (INF if i else 1.0), steps=3).history[-1]
    assert (row["step"], row["where"], row["event"]) == (1, "loss", "inf in loss")


def test_an_event_of_a_gradient_has_a_line_of_its_own_under_the_row() -> None:
    net = Net()
    net.fc1.weight.register_hook(lambda grad: torch.full_like(grad, NAN))

    def step(i: int) -> Tensor:
        loss = net(torch.ones(2, 4)).mean()
        loss.backward()
        return loss

    report = diagnose(net, step, steps=2)
    lines = table(report)
    assert report.history[0]["event"] == "nan in fc1.weight gradient"
    assert lines[0].split()[2] == "nan" and lines[0].split()[3] != "nan", "abs max is that of the outputs"
    assert lines[1].strip() == "nan in fc1.weight gradient"


def test_the_root_has_its_class_for_a_name() -> None:
    model = nn.Linear(4, 1)
    with DebugUnderflowOverflow(model) as recorder:
        model(torch.ones(2, 4)).mean().backward()
    report = recorder.report
    assert report.history[-1]["where"] == "Linear output"
    assert set(report.series) == {"Linear output", "loss"}
    assert table(report)[-1].endswith("  Linear output")


class Same(nn.Module):
    """A residual stream that hardly changes, near the end of float16."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(layers)])
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.weight / 1000


def test_equal_notes_are_one() -> None:
    model = Same(8)
    with DebugUnderflowOverflow(model) as recorder:
        for _ in range(3):
            model(torch.full((2, 2), 4e4, dtype=torch.float16)).sum().backward()
    notes = [note for note in recorder.report.notes if "stands at" in note]
    assert len(notes) == 1
    assert notes[0].startswith("each of layers.0-7 output stands at 61% of the limit of float16; last batches: 4e+04")


@pytest.mark.parametrize(
    ("places", "short"),
    [
        (["a output"], "a output"),
        (["h.3 output", "h.4 output", "h.5 output"], "each of h.3-5 output"),
        (["h.3.x output", "h.3 output"], "each of h.3.x output and h.3 output"),
        (["h.1 output", "h.3 output", "h.5 output"], "each of h.1 output and 2 more, up to h.5 output,"),
        (["h.0.a.0 output", "h.1.a.1 output", "x output[1]"], "each of h.0.a.0 output and 2 more, up to x output[1],"),
    ],
)
def test_many_places_in_short(places: list[str], short: str) -> None:
    assert in_short(places) == short
