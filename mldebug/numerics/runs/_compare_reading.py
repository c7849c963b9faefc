"""What a parting means, in words, and what to do next: a small table."""

from __future__ import annotations

import math
import re
from typing import Any

from mldebug.numerics.runs._compare_parting import Parting
from mldebug.numerics.runs._compare_run import Run
from mldebug.numerics.runs._compare_values import Difference
from mldebug.numerics.runs._recording_tensor import unpacked

_NOT_SWITCHES = ("n", "kind", "format", "rank", "host")
_SHORT = ("bfloat16", "float16")


def read(parting: Parting, weights: list[tuple[str, Difference]], a: Run, b: Run) -> tuple[str, str]:
    """A short reading and a hint. The first row that fits is taken."""
    row, found = parting.row, parting.found
    name = row.module or row.class_name or "it"
    values = [one for one in weights if one[1].error > _rounding(one[1])]
    if parting.kind == "input":
        if row.forward > 0 and found.whole_numbers:
            return (
                f"Forward {row.forward} is given other tokens or labels, though the forwards before agree: a token was"
                " chosen from nearly equal logits, or the data went another way.",
                "compare with the same tokens given to both, or look at the logits of the forward before",
            )
        return "The two runs are given different inputs.", "give both the same batch: same data, order, seed, padding"
    if parting.kind == "random":
        return (
            f"{name} draws random numbers, and they are others in each run: the seeds differ, or an earlier draw, or"
            " the devices' generators (a CPU and a GPU, or other dtypes, draw differently from one seed).",
            "seed both alike before the forward, or compare in model.eval()",
        )
    if parting.kind == "drift":
        return (
            "No single module made it: each one's inputs were already apart, and its outputs a little more. From"
            f" {name} on the error is above what rounding in {_lowest(row.dtypes)} grows to.",
            "compare one forward from the same weights; the table shows where it grows fastest",
        )
    if not all(map(math.isfinite, (row.error,))):
        return (
            f"{name} returns values that are not finite in one run and finite in the other.",
            "mldebug overflow -- train.py names the operation that makes them",
        )
    for text, hint in _rotary(parting, weights):
        return text, hint
    if cancels := _cancels(parting):
        return cancels
    if values:
        listed = ", ".join(f"{weight} ({one.error:.2g})" for weight, one in values)
        text = f"The weights of {name} differ: {listed}."
        if row.forward > 0:
            return text + " So it was the backward or the optimizer step before.", "compare the gradients of that step"
        return text, "load the same checkpoint into both"
    if parting.kind == "choice":
        return (
            f"{name} chooses (an argmax, a top-k, a router), and nearly equal numbers were ordered differently.",
            "give both the same choice to see whether the rest agrees",
        )
    if parting.kind == "between":
        return (
            f"What {name} is given differs, though what the calls before it returned agrees: it was made by the code"
            f" of {_parent(parting)} before that call.",
            "record with ops=True to see the operation",
        )
    training = [call.about.get("training") for call in (parting.a, parting.b)]
    if training[0] != training[1]:
        return f"{name} is in training mode in one run, and in eval mode in the other.", "model.eval() in both"
    if set(row.dtypes) == {"float32"} and 5e-5 < row.error < 5e-3 and _multiplies(row.class_name):
        return (
            f"An error of {row.error:.1g} in float32 is what products in tf32 or bfloat16 give: one side multiplies in"
            " a shorter format.",
            'torch.set_float32_matmul_precision("highest"), and no autocast, in both',
        )
    if parting.op and not row.class_name:
        text = f"The operands of aten.{parting.op} agree within {_number(parting.before)}, and its results do not."
        return text, "look at that line of the two functions"
    tail = " The devices or versions below may compute it differently." if _elsewhere(a, b) else ""
    return (
        f"{name} itself computes something else: its inputs agree within {_number(parting.before)}." + tail,
        "record with ops=True to see the operation" if not parting.op else f"look at aten.{parting.op} in {name}",
    )


def environment_differences(a: Run, b: Run) -> list[str]:
    """The versions, devices and switches that are not the same, as `torch: 2.11.0, 2.13.0`."""
    found = []
    for key in dict.fromkeys([*a.head, *b.head]):
        if key not in _NOT_SWITCHES and a.head.get(key) != b.head.get(key):
            found.append(f"{key}: {a.head.get(key, '-')} in a, {b.head.get(key, '-')} in b")
    for ours, theirs in zip(a.first.models, b.first.models, strict=False):
        if ours.get("attention") != theirs.get("attention"):
            found.append(f"attention: {ours.get('attention')} in a, {theirs.get('attention')} in b")
    return found


def _rotary(parting: Parting, weights: list[tuple[str, Difference]]) -> list[tuple[str, str]]:
    name = f"{parting.row.module} {parting.row.class_name}".lower()
    if not re.search(r"rotary|rope|position|timestep", name):
        return []
    found = [f"{weight} is {_each(one.dtypes)}" for weight, one in weights if one.dtypes[0] != one.dtypes[1]]
    for path, piece in parting.a.inputs.items():
        other = parting.b.inputs.get(path)
        if other is not None and other.line["dtype"] != piece.line["dtype"] and "position" in path:
            found.append(f"{path} is {_each((piece.line['dtype'], other.line['dtype']))}")
    if not found and not any(dtype in _SHORT for dtype in parting.row.dtypes):
        return []
    return [
        (
            "Angles are position x inverse frequency: in bfloat16 whole numbers above 256 are no longer distinct"
            " (float16: 2048) and frequencies have 3 digits, so the error grows with the position."
            + (f" {'; '.join(found)}." if found else ""),
            "keep positions and inv_freq in float32, and cast only cos and sin",
        )
    ]


def _cancels(parting: Parting) -> tuple[str, str] | None:
    """A norm whose values are large beside their spread: the mean takes away the digits that a short dtype has."""
    row = parting.row
    if "norm" not in row.class_name.lower() or not any(dtype in _SHORT for dtype in row.dtypes):
        return None
    for piece in parting.a.inputs.values():
        values = unpacked(piece.line["sample"], piece.line["wide"]).double() if "sample" in piece.line else None
        if values is None or values.numel() < 2 or not bool(values.isfinite().all()):
            continue
        mean, spread = float(values.mean()), float(values.std())
        if spread < 0.05 * abs(mean):
            return (
                f"{row.module or row.class_name} subtracts the mean, {mean:.3g}, of values that are only"
                f" {spread:.2g} apart: {_lowest(row.dtypes)} has too few digits for what is left.",
                "compute in float32 what goes into this norm, or take the large part away before",
            )
    return None


def _each(dtypes: tuple[str, str]) -> str:
    return f"{dtypes[0]} in a and {dtypes[1]} in b"


def _rounding(found: Difference) -> float:
    return 0.0 if found.whole_numbers else 1e-2 if any(one in _SHORT for one in found.dtypes) else 1e-6


def _lowest(dtypes: tuple[str, str]) -> str:
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in dtypes), dtypes[0])


def _multiplies(class_name: str) -> bool:
    return any(word in class_name for word in ("Linear", "Conv", "Attention", "LSTM", "GRU"))


def _parent(parting: Parting) -> str:
    parent = parting.a.parent or parting.b.parent
    return "the model" if parent is None else parent.key[2] or f"the model ({parent.about['class']})"


def _elsewhere(a: Run, b: Run) -> bool:
    keys: tuple[Any, ...] = ("torch", "transformers", "device", "cuda", "cpu")
    return any(a.head.get(key) != b.head.get(key) for key in keys)


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1g}"
