"""The callback for TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug import DebugUnderflowOverflow, MldebugError, scalar_logger
from mldebug.core.errors import UsageError

from .kit import Net, train


class Run:
    """Like a wandb run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


class Writer:
    """Like a SummaryWriter, of which only add_scalar is asked."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))


def record(on_step: Any, steps: int = 4) -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_step=on_step):
        train(model, steps=steps)


def read_back(folder: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.parametrize("where", ["tensorboard", None])
def test_tensorboard_reads_back_what_was_logged(where: str | None, tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int, dict[str, float]]] = []
    log = scalar_logger(where)

    def both(step: int, scalars: dict[str, float]) -> None:
        seen.append((step, scalars))
        log(step, scalars)

    record(both)
    (folder,) = (tmp_path / "runs").iterdir()
    events = read_back(folder)
    names = events.Tags()["scalars"]
    assert set(names) == {f"mldebug/{name}" for _, scalars in seen for name in scalars}
    assert {"mldebug/absmax", "mldebug/grad_norm"} <= set(names)
    points = events.Scalars("mldebug/absmax")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert [point.value for point in points] == pytest.approx([scalars["absmax"] for _, scalars in seen])


def test_a_writer_of_ones_own_and_a_prefix() -> None:
    writer = Writer()
    record(scalar_logger(writer, prefix="numerics/"), steps=2)
    assert {name for name, _, _ in writer.points} >= {"numerics/absmax"}
    assert {step for _, _, step in writer.points} == {0, 1}


def test_wandb_takes_the_active_run(monkeypatch: Any) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    record(scalar_logger(), steps=3)
    assert [row["mldebug/step"] for row in run.rows] == [0, 1, 2]
    assert all("mldebug/absmax" in row for row in run.rows)
    assert run.metrics == [("mldebug/step", {}), ("mldebug/*", {"step_metric": "mldebug/step"})]


def test_a_run_can_be_passed_itself_or_by_name(monkeypatch: Any) -> None:
    run = Run()
    scalar_logger(run)(5, {"loss": 1.0})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    scalar_logger("wandb")(6, {"loss": 2.0})
    assert run.rows == [{"mldebug/step": 5, "mldebug/loss": 1.0}, {"mldebug/step": 6, "mldebug/loss": 2.0}]


def test_nothing_to_log_to_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MldebugError, match="neither") as caught:
        scalar_logger()
    assert "pip install tensorboard" in caught.value.hint
    with pytest.raises(MldebugError, match="not installed"):
        scalar_logger("tensorboard")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(MldebugError, match="no active wandb run"):
        scalar_logger("wandb")
    with pytest.raises(UsageError, match="cannot log to 'mlflow'"):
        scalar_logger("mlflow")
