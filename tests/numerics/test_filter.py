"""A run is called clean only if what was asked for was watched: patterns that match nothing, gradients that are bad."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError, diagnose
from mldebug.core.errors import UsageError
from mldebug.numerics import NumericsReport, NumericsWarning

from .kit import Net, train

HEALTHY = Path(__file__).parents[1] / "programs" / "healthy_loop.py"
CLEAN = "Nothing bad was seen"


def run(model: nn.Module, **options: Any) -> NumericsReport:
    with DebugUnderflowOverflow(model, on_event="warn", **options) as recorder:
        train(model, steps=2)
    return recorder.report


@pytest.mark.parametrize(
    ("options", "what", "near"),
    [
        ({"include": ["encoder.*"]}, "include pattern 'encoder.*' matches none of the 4 modules", "fc1, plant, fc2"),
        ({"include": ["FC1", "blocks.*"]}, "include pattern 'FC1', include pattern 'blocks.*' match none", "fc1"),
        ({"exclude": ["*"]}, "include and exclude leave none of the 4 modules", "fc1"),
    ],
)
def test_patterns_that_leave_nothing_are_wrong_usage(options: dict[str, Any], what: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        DebugUnderflowOverflow(Net(), **options)
    assert caught.value.message.startswith(f"nothing would be watched: {what}")
    assert near in caught.value.hint


def test_a_container_that_is_never_called_is_nothing_to_watch() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(UsageError, match=r"'blocks' matches none of the 2 modules that can be called") as caught:
        DebugUnderflowOverflow(model, include="blocks")
    assert caught.value.hint == "the nearest names are blocks.0, blocks.1"


@pytest.mark.parametrize("options", [{"include": ["fc*", "plnt"]}, {"exclude": ["plnt"]}])
def test_a_pattern_that_matches_nothing_is_a_warning_at_once(options: dict[str, Any]) -> None:
    model = Net()
    with pytest.warns(NumericsWarning, match=r"pattern 'plnt' matches none of the 4 modules") as seen:
        recorder = DebugUnderflowOverflow(model, **options)
    recorder.remove()
    (message,) = [str(w.message) for w in seen if "plnt" in str(w.message)]
    assert "hint: the nearest names are plant" in message


def test_a_run_that_did_not_watch_what_was_asked_for_is_not_clean() -> None:
    report = run(Net(), include=["fc*", "plnt"])
    assert report.event is None and not report.ok
    assert report.verdict.startswith("no nan, no inf in what was watched, 2 of 4 modules, but include pattern 'plnt'")
    assert CLEAN not in report.text()
    assert json.loads(report.json())["unsure"] == report.unsure == report.verdict


def test_an_exclude_pattern_that_matches_nothing_leaves_the_run_clean_and_says_so() -> None:
    report = run(Net(), exclude=["plnt"])
    assert report.ok and not report.unsure
    assert CLEAN not in report.text()
    assert "exclude pattern 'plnt' matches none of the 4 modules" in report.reading


def test_patterns_that_match_are_clean_and_say_what_was_watched() -> None:
    report = run(Net(), include=["fc*"])
    assert report.ok
    assert report.reading == f"{CLEAN} in 2 forward passes. 2 of 4 modules were watched."
    assert run(Net()).reading == f"{CLEAN} in 2 forward passes."


def test_a_recorder_that_is_attached_again_counts_anew() -> None:
    model = Net()
    recorder = DebugUnderflowOverflow(model, include="fc*")
    recorder.remove()
    with recorder:
        train(model, steps=1)
    assert recorder.report.reading.endswith("2 of 4 modules were watched.")


def test_the_command_says_so_after_the_first_step(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python("-m", "mldebug", "overflow", "--json", "--include", "encodr.*", "--", str(HEALTHY))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["ok"] is False and document["event"] is None
    assert document["verdict"].startswith("nothing was watched: include pattern 'encodr.*' matches none of")
    assert done.stderr.count("NumericsWarning: mldebug: include pattern 'encodr.*' matches none") == 1


class Slope(nn.Module):
    """Its gradient is `slope`, whatever it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = 1.0
        self.weight = nn.Parameter(torch.zeros(3))
        self.weight.register_hook(lambda grad: torch.full_like(grad, self.slope))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("slope", [math.nan, math.inf])
def test_a_bad_gradient_at_the_end_of_a_run_is_not_clean(slope: float) -> None:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    recorder = DebugUnderflowOverflow(model)
    with pytest.raises(NumericsError) as raised, recorder:
        for i in range(3):
            model.slope = slope if i == 2 else 1.0
            optimizer.zero_grad()
            model(torch.ones(3)).backward()
            optimizer.step()
        seen = recorder.report
        assert seen.event is None and not seen.ok  # the optimizer's last step is looked at when the scope ends
        assert seen.verdict == f"no nan, no inf in any forward, but the gradient norm is {slope} in step 2"
        assert CLEAN not in seen.text()
    event = raised.value.report.event
    assert (event.step, event.phase, event.param, event.kind) == (2, "backward", "weight", str(slope))


@pytest.mark.parametrize("unscale", [False, True])
def test_the_start_of_a_scaler_is_fine_and_is_said(unscale: bool) -> None:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with DebugUnderflowOverflow(model) as recorder:
        for i in range(3):
            model.slope = math.inf if i == 0 else 1.0
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3))).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    report = recorder.report
    assert report.ok and not report.unsure
    assert CLEAN not in report.text()
    assert report.event is not None and report.event.benign
    assert "GradScaler skips this step" in report.reading
    assert any(note.startswith("GradScaler skipped 1 of 3 steps: 0") for note in report.notes)


def test_a_step_that_is_unscaled_and_clipped_is_benign_for_diagnose_too() -> None:
    model = Slope()
    model.slope = math.inf
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(3))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = diagnose(model, step, steps=3)
    assert report.event is not None and report.event.benign and report.ok


def test_a_run_without_a_model_is_not_called_good() -> None:
    report = diagnose(Net(), lambda i: None, steps=2)
    assert report.verdict == "no model was called in this process: nothing was watched"
    assert CLEAN not in report.text()
