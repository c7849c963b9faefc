"""The report: fields, JSON, the file of lines, the reading, the picture, the callback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mldebug import DebugUnderflowOverflow, NumericsError, diagnose

from .kit import INF, NAN, Net, agrees, train, watch

PROGRAMS = Path(__file__).parents[1] / "programs"
KEYS = {
    "step", "batch", "micro_batch", "phase", "module", "module_class", "role", "kind", "name", "param", "dtype",
    "limit", "rank", "benign", "op",
}  # fmt: skip


def refuse(text: str) -> Any:
    raise AssertionError(f"{text} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def report() -> Any:
    model = Net()
    return watch(model, lambda: train(model, {2: INF}, steps=4))


def test_to_dict_is_strict_json(report: Any) -> None:
    data = strict(json.dumps(report.to_dict(), allow_nan=False))
    assert isinstance(data["schema"], int)
    assert set(data["event"]) >= KEYS
    assert data["event"]["module"] == "plant" and data["event"]["step"] == 2
    assert data["event"]["benign"] is False and data["event"]["op"] is None
    assert data["frames"] and data["reading"] == report.reading
    assert strict(report.json()) == data


def test_to_dict_of_a_healthy_run() -> None:
    model = Net()
    data = strict(watch(model, lambda: train(model)).json())
    assert data["event"] is None
    assert data["ok"] is True


def test_text_has_the_event_and_the_frames(report: Any) -> None:
    text = report.text()
    assert "plant" in text and "inf" in text
    assert report.reading.split()[0] in text
    assert "\x1b" not in text
    assert str(NumericsError("a message", "do this")).endswith("hint: do this")


@pytest.mark.parametrize("value", [NAN, INF])
def test_the_reading_names_the_module_and_a_next_action(value: float) -> None:
    model = Net()
    report = watch(model, lambda: train(model, {1: value}))
    reading = report.reading
    assert "plant" in reading and "\n\n" not in reading.strip()
    assert 60 < len(reading) < 1500
    assert report.hint and report.hint in report.text().replace("\n      ", " "), "what to do next"


def test_the_reading_speaks_of_the_range_of_fp16() -> None:
    from .cases import feed_forward_overflows_in_fp16

    model, step = feed_forward_overflows_in_fp16()
    reading = diagnose(model, step, steps=4).reading
    assert "2.wo" in reading
    assert "65504" in reading or "float16" in reading or "fp16" in reading


def test_error_has_the_report_and_the_message(capsys: Any) -> None:
    model = Net()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        train(model, {1: NAN})
    agrees(caught.value.report.event, module="plant")
    assert "plant" in str(caught.value)


def test_frames_end_at_the_event(report: Any) -> None:
    assert report.frames_from == "replay"
    at = [i for i, frame in enumerate(report.frames) if " plant Plant" in frame]
    assert at and "inf output" in report.frames[at[-1]]
    assert any(" fc1 Linear" in frame and "input[0]" in frame for frame in report.frames[: at[-1]])


def test_lines_file(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    model = Net()
    watch(model, lambda: train(model, {2: INF}, steps=4), output=path)
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 2
    assert all(isinstance(line, dict) for line in lines)
    text = path.read_text()
    assert "plant" in text and "fc1" in text
    assert any("plant" in json.dumps(line.get("event")) for line in lines if line.get("event"))


def test_lines_file_of_a_run_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    child = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "records_and_waits.py"), str(path)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    lines = [strict(line) for line in path.read_text().splitlines()]
    steps = {line["step"] for line in lines if "step" in line}
    assert steps >= {0, 1, 2, 3, 4}


def test_plot_writes_a_picture(report: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    report.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    from matplotlib import pyplot

    assert not pyplot.get_fignums(), "no figure is left open"


def test_plot_of_a_healthy_run(tmp_path: Path) -> None:
    model = Net()
    watch(model, lambda: train(model)).plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_on_step_gets_plain_numbers() -> None:
    calls: list[tuple[int, dict[str, float]]] = []
    model = Net()
    with DebugUnderflowOverflow(model, on_step=lambda step, scalars: calls.append((step, scalars))):
        train(model, steps=4)
    assert [step for step, _ in calls] == [0, 1, 2, 3]
    for _, scalars in calls:
        assert scalars and all(isinstance(k, str) and type(v) in (float, int) for k, v in scalars.items())
    assert any("abs_max" in key or "absmax" in key for key in calls[0][1])


def test_on_step_feeds_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = Net()
    with SummaryWriter(str(tmp_path)) as writer:

        def on_step(step: int, scalars: dict[str, float]) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        watch(model, lambda: train(model, steps=3), on_step=on_step)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()["scalars"]
    assert tags
    assert [event.step for event in read.Scalars(tags[0])] == [0, 1, 2]


def test_loss_spike_before_the_nan_is_reported() -> None:
    model = nn.Linear(4, 1)
    losses = [1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 400.0, NAN]

    def step(i: int) -> Any:
        return model(torch.ones(2, 4)).mean() * 0 + losses[i]

    report = diagnose(model, step, steps=len(losses))
    agrees(report.event, step=7, role="loss")
    text = " ".join(report.notes) + report.reading
    assert "loss" in text.lower() and ("400" in text or "4e+02" in text or "4.00e+02" in text), text


def test_history_holds_the_steps_before(report: Any) -> None:
    assert report.history
    strict(json.dumps(report.to_dict()["history"])) if "history" in report.to_dict() else None


def test_limit_and_dtype_of_the_event() -> None:
    model = Net().half()
    model.plant.value = INF
    event = watch(model, lambda: model(torch.ones(2, 4, dtype=torch.float16))).event
    assert event.limit == 65504.0 and "float16" in str(event.dtype)
    assert event.rank == 0
