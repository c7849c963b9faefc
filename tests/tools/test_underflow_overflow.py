"""tools/underflow_overflow.py beside the class and the functions of transformers, which have its names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
classic = pytest.importorskip("transformers.debug_utils")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "underflow_overflow.py"
FRAME = re.compile(r"^ *\S*\d\.\d\de[+-]\d\d +(\S*\d\.\d\de[+-]\d\d|inf|nan) \S+$|^ {18}\S* \w+$")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("underflow_overflow", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overflowing() -> torch.nn.Module:
    """The second layer makes inf of what the first returns."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(3e38)
    return model


def test_it_stops_at_the_first_overflow_with_its_frames(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for module in (classic, tool):
        model = overflowing()
        kept = module.DebugUnderflowOverflow(model, max_frames_to_save=5)
        with pytest.raises(ValueError, match="DebugUnderflowOverflow"), torch.no_grad():
            model(torch.full((2, 4), 9.0))
        said.append(capsys.readouterr().out)
        getattr(kept, "remove", lambda: None)()
    for text in said:
        assert re.search(r"^Detected inf/nan during batch_number=0\nLast \d+ forward frames:$", text, re.M)
        assert "\nabs min  abs max  metadata\n" in text
    frames = [[line for line in text.splitlines() if FRAME.match(line)] for text in said]
    assert len(frames[0]) > 6 and set(frames[0]) <= set(frames[1])


def test_a_batch_is_traced_and_the_run_ended_where_asked(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (classic, tool):
        model = torch.nn.Linear(2, 2)
        kept = module.DebugUnderflowOverflow(model, trace_batch_nums=[1], abort_after_batch_num=1)
        model(torch.ones(1, 2))
        with pytest.raises(ValueError, match="abort_after_batch_num=1"):
            model(torch.ones(1, 2))
        text = capsys.readouterr().out
        assert re.search(r"^ +\*\*\* Starting batch number=1 \*\*\*\nabs min  abs max  metadata\n", text, re.M)
        assert text.count("weight\n") == 1
        getattr(kept, "remove", lambda: None)()


@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0], [0.0, float("inf")], [float("-inf"), float("nan")], [7, -3]],
    ids=["fine", "inf", "both", "int"],
)
def test_detect_overflow(tool: ModuleType, capsys: pytest.CaptureFixture[str], values: list[float]) -> None:
    tensor = torch.tensor(values)
    found = []
    for module in (classic, tool):
        found.append((module.detect_overflow(tensor, "after norm"), module.get_abs_min_max(tensor, "x")))
        found.append(capsys.readouterr().out)
    assert found[:2] == found[2:]


def test_the_options_of_the_trainer(tool: ModuleType) -> None:
    assert {one.name: one.value for one in tool.DebugOption} == {one.name: one.value for one in classic.DebugOption}
    with pytest.raises(ValueError, match="is not a valid DebugOption"):
        tool.DebugOption("x")
