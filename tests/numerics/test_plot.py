"""The heat map: what is drawn, what never goes missing, and what it says when it cannot draw."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mldebug import Event, MldebugError, NumericsReport
from mldebug.core.extras import how_to_install
from mldebug.numerics.page import _plot
from mldebug.numerics.page._plot import MAX_ROWS, heat_map

from .kit import INF, NAN, Net, train, watch

EVENT = Event(
    step=5, batch=5, micro_batch=0, phase="forward", module="layer.40", module_class="Linear", role="output",
    kind="inf", name="output", dtype="float16", limit=65504.0,
)  # fmt: skip


def made_up(rows: int, batches: int = 6, **event: Any) -> NumericsReport:
    series = {
        f"layer.{i} output": [(b, 2.0 ** ((i * 7 + b) % 15)) for b in range(batches) if b or i % 50]
        for i in range(rows)
    }
    found = replace(EVENT, **event)
    place = f"{found.module} {found.name}"
    if place in series:
        series[place][-1] = (batches - 1, INF if found.kind == "inf" else NAN)
    return NumericsReport(event=found, series=series, batches=batches)


def size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.size


def colors(path: Path) -> set[str]:
    from PIL import Image

    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(1 << 24) or []
    return {"#{:02x}{:02x}{:02x}".format(*color) for count, color in found if count > 20}


def test_inf_and_nan_have_colours_of_their_own(tmp_path: Path) -> None:
    heat_map(made_up(60), tmp_path / "inf.png")
    heat_map(made_up(60, kind="nan"), tmp_path / "nan.png")
    assert _plot._INF in colors(tmp_path / "inf.png")
    assert _plot._NAN not in colors(tmp_path / "inf.png")
    assert _plot._NAN in colors(tmp_path / "nan.png")
    assert _plot._NOTHING in colors(tmp_path / "inf.png")  # layer.0 and layer.50 did not run in batch 0


@pytest.mark.parametrize("rows", [201, 650, 5000])
@pytest.mark.parametrize("at", [0, 40, 200])
def test_many_rows_share_lines_but_the_event_never_does(rows: int, at: int) -> None:
    report = made_up(rows, module=f"layer.{at}")
    lines = _plot._fewer(_plot._rows(report, list(range(6))))
    assert len(lines) <= MAX_ROWS
    (line,) = [line for line in lines if line.is_event]
    assert line.label == f"layer.{at} output"
    assert line.values[-1] == math.inf
    assert sum(int(np.isinf(line.values).sum()) for line in lines) == 1
    assert max(float(np.where(np.isfinite(line.values), line.values, 0).max()) for line in lines) == 2.0**14


def test_modules_that_hand_on_a_tensor_go_first() -> None:
    series = {f"m{i} output": [(0, float(i // 2 + 1))] for i in range(2 * MAX_ROWS)}
    lines = _plot._fewer(_plot._rows(NumericsReport(series=series), [0]))
    assert len(lines) == MAX_ROWS
    assert not any("more" in line.label for line in lines)


def test_a_module_that_runs_twice_in_a_batch_shows_its_larger_value() -> None:
    series = {"a output": [(3, 2.0), (3, 9.0), (4, NAN), (4, 1.0)]}
    (row,) = _plot._rows(NumericsReport(series=series), [3, 4])
    assert row.values[0] == 9.0 and math.isnan(row.values[1])


def test_the_picture_grows_with_its_rows_up_to_a_limit(tmp_path: Path) -> None:
    heights = []
    for rows in (10, 150, 3000):
        heat_map(made_up(rows), tmp_path / "p.png")
        heights.append(size(tmp_path / "p.png")[1])
    assert heights[0] < heights[1] < heights[2] < 4000


@pytest.mark.parametrize(
    "event",
    [
        {"module": None, "role": "loss", "name": "loss"},  # not among the rows
        {"module": "layer.40", "role": "parameter", "name": "weight", "param": "layer.40.weight"},
        {"module": "", "name": "output.logits", "limit": math.inf, "dtype": "int64"},
        {"dtype": "float32", "limit": 3.4e38, "batch": 99},
    ],
)
def test_events_without_a_row_are_drawn(event: dict[str, Any], tmp_path: Path) -> None:
    heat_map(made_up(60, **event), tmp_path / "p.png")
    assert size(tmp_path / "p.png")[0] > 500


@pytest.mark.parametrize("values", [[0.0, 0.0], [NAN, INF], [1e-40, 1e38], [5.0, 5.0]])
def test_any_values_are_drawn(values: list[float], tmp_path: Path) -> None:
    report = NumericsReport(series={"a output": list(enumerate(values))}, batches=2)
    heat_map(report, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_real_run_and_no_figure_is_left_open(tmp_path: Path) -> None:
    model = Net()
    report = watch(model, lambda: train(model, {3: INF}, steps=5))
    heat_map(report, tmp_path / "picture.of.a.run")  # PNG whatever the name
    assert (tmp_path / "picture.of.a.run").read_bytes()[:4] == b"\x89PNG"
    assert any(line.is_event for line in _plot._rows(report, [0, 1, 2, 3]))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MldebugError, match="matplotlib") as caught:
        heat_map(made_up(3), tmp_path / "p.png")
    assert caught.value.hint == how_to_install("plot")


def test_no_data_and_no_folder_are_errors_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(MldebugError, match="nothing to draw"):
        heat_map(NumericsReport(), tmp_path / "p.png")
    with pytest.raises(MldebugError, match="no such file or directory") as caught:
        heat_map(made_up(3), tmp_path / "absent" / "p.png")
    assert caught.value.hint
