"""The text of a frame is that of the transformers class, number for number."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Classic

from mldebug import DebugUnderflowOverflow, NumericsError

from .kit import tiny, tokens

NUMBER = r"(?:[ ]*-?\d\.\d\de[+-]\d\d|[ ]*inf|[ ]*nan)"
LINE = re.compile(rf"^({NUMBER}) ({NUMBER}) \S+.*$|^ +None \S+$")
HEAD = re.compile(r"^(?= {18}| +\S{40}) +(\S*) ([A-Za-z_]\w*)$")  # what would pass 80 columns is indented less
START = re.compile(r"^ +\*\*\* Starting batch number=(\d+) \*\*\*$")


def frames_of(text: str) -> list[tuple[str, str, list[str]]]:
    """(module, class, its lines with figures) of every frame in a printed report, a new list at each batch."""
    found: list[tuple[str, str, list[str]]] = []
    for line in text.splitlines():
        if START.match(line):
            found = []
        elif head := HEAD.match(line):
            found.append((head[1], head[2], []))
        elif found and LINE.match(line):
            found[-1][2].append(line)
    return found


def contains(ours: list[str], old: list[str]) -> bool:
    rest = iter(ours)
    return all(any(line == other for other in rest) for line in old)


def same(old: str, ours: str) -> int:
    """Every frame of the old text is in ours, in its order and with its figures. Returns the count of figures."""
    mine, at, figures = frames_of(ours), 0, 0
    for name, kind, lines in frames_of(old):
        while at < len(mine) and (mine[at][:2] != (name, kind) or not contains(mine[at][2], lines)):
            at += 1
        where = [m for m in frames_of(ours) if m[:2] == (name, kind)]
        assert at < len(mine), f"{name} {kind}\nold: {lines}\nours: {[m[2] for m in where]}"
        at += 1
        figures += len(lines)
    return figures


def run(
    cls: Any, build: Callable[[], nn.Module], steps: int, spoil: Callable[[nn.Module, int], Any], **options: Any
) -> Any:
    model = build()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(5)
    error, recorder = None, None
    try:
        recorder = cls(model, **options)
        for i in range(steps):
            spoil(model, i)
            opt.zero_grad()
            model(**tokens()).loss.float().backward()
            opt.step()
    except ValueError as e:
        error = e
    finally:
        if cls is not Classic and recorder is not None:
            try:
                recorder.remove()
            except NumericsError as e:
                error = error or e
    return error


def both(capsys: Any, build: Callable[[], nn.Module], spoil: Any, steps: int = 3, **options: Any) -> tuple[str, str]:
    capsys.readouterr()
    old = run(Classic, build, steps, spoil)
    old_text = capsys.readouterr().out
    new = run(DebugUnderflowOverflow, build, steps, spoil, **options)
    new_text = capsys.readouterr().out
    assert type(old) is ValueError, "the plant does not work"
    assert isinstance(new, NumericsError) and isinstance(new, ValueError)
    return old_text, new_text


def weight_times(name: str, factor: float, at: int) -> Callable[[nn.Module, int], None]:
    def spoil(model: nn.Module, i: int) -> None:
        if i == at:
            with torch.no_grad():
                model.get_submodule(name).weight.mul_(factor)

    return spoil


# Layers whose own output is the first that overflows once `overflow` has set their weights.
LAYERS = {
    "t5": "encoder.block.1.layer.1.DenseReluDense.wo",
    "gpt2": "transformer.h.1.mlp.c_proj",
    "bert": "bert.encoder.layer.1.intermediate.dense",
    "llama": "model.layers.1.mlp.up_proj",
}


def overflow(model: nn.Module, i: int, name: str, at: int) -> None:
    """The layer's output grows over the limit of its dtype in forward number `at`; the layer's weight stays finite."""
    module = model.get_submodule(name)
    if i == at:
        with torch.no_grad():
            limit = torch.finfo(module.weight.dtype).max
            module.weight.fill_(limit / 2)
            if getattr(module, "bias", None) is not None:
                module.bias.fill_(limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["t5", "gpt2", "bert", "llama"])
@pytest.mark.parametrize("at", [0, 1])
def test_replayed_frames_have_the_same_figures(capsys: Any, kind: str, dtype: torch.dtype, at: int) -> None:
    name = LAYERS[kind]
    old, new = both(capsys, lambda: tiny(kind).to(dtype), lambda m, i: overflow(m, i, name, at), steps=2)
    assert f"Detected inf/nan during batch_number={at}" in old
    assert f"Detected inf/nan during batch_number={at}" in new
    assert re.search(r"^Last \d+ forward frames:$", new, re.M)
    assert re.search(r"^abs min {2}abs max {2}metadata$", new, re.M)
    assert same(old, new) >= 10
    assert name in [module for module, _, _ in frames_of(new)]


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_live_frames_have_the_same_figures(capsys: Any, kind: str) -> None:
    name = LAYERS[kind]
    old, new = both(capsys, lambda: tiny(kind), lambda m, i: overflow(m, i, name, 1), steps=2, check="each")
    assert same(old, new) >= 10
    assert frames_of(old)[-1][:2] == frames_of(new)[-1][:2], "check='each' stops at the very module"


def test_a_nan_weight_is_printed_the_same(capsys: Any) -> None:
    old, new = both(capsys, lambda: tiny("gpt2"), weight_times("transformer.h.0.attn.c_attn", float("nan"), 1))
    assert same(old, new) >= 3
    assert any("nan" in line for _, _, lines in frames_of(new) for line in lines)


def test_max_frames_to_save(capsys: Any) -> None:
    run(
        DebugUnderflowOverflow,
        lambda: tiny("gpt2"),
        1,
        lambda m, i: overflow(m, i, LAYERS["gpt2"], 0),
        max_frames_to_save=3,
    )
    text = capsys.readouterr().out
    assert "Last 3 forward frames:" in text
    assert len(frames_of(text)) == 3


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_traced_batches_are_printed_the_same(capsys: Any, kind: str) -> None:
    texts = []
    for cls in (Classic, DebugUnderflowOverflow):
        assert run(cls, lambda: tiny(kind), 3, lambda m, i: None, trace_batch_nums=[1]) is None
        texts.append(capsys.readouterr().out)
    modules = len(list(tiny(kind).modules()))
    # The old class reads the number after the root has raised it: its root frame comes with the next batch.
    assert len(frames_of(texts[1])) >= len(frames_of(texts[0])) >= modules // 2
    assert same(*texts) > modules


def test_a_traced_batch_is_printed_as_it_runs(capsys: Any) -> None:
    model = tiny("gpt2")
    seen = []
    model.lm_head.register_forward_pre_hook(lambda m, x: seen.append(capsys.readouterr().out))
    with DebugUnderflowOverflow(model, trace_batch_nums=[0]):
        model(**tokens())
    assert "transformer.h.0.attn.c_attn Conv1D" in seen[0]


def test_tracing_is_without_detection(capsys: Any) -> None:
    error = run(
        DebugUnderflowOverflow,
        lambda: tiny("gpt2"),
        1,
        lambda m, i: overflow(m, i, LAYERS["gpt2"], 0),
        trace_batch_nums=[0],
    )
    text = capsys.readouterr().out
    assert "inf output" in text
    assert error is None or "transformer.h.1.mlp.c_proj" in text


@pytest.mark.parametrize("check", ["step", "each"])
def test_abort_after_batch_num(capsys: Any, check: str) -> None:
    done: list[int] = []
    for cls, options in ((Classic, {}), (DebugUnderflowOverflow, {"check": check})):
        seen: list[int] = []
        error = run(cls, lambda: tiny("gpt2"), 4, lambda m, i: seen.append(i), abort_after_batch_num=1, **options)  # noqa: B023
        assert isinstance(error, ValueError)
        assert "abort_after_batch_num=1" in str(error)
        done.append(len(seen))
    assert done == [2, 2], "the batch after which it aborts is the same"


def test_the_error_is_a_value_error() -> None:
    assert issubclass(NumericsError, ValueError)
