"""An event in plain words, and what to do about it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mldebug.numerics._event import MANY, Event, Operation
from mldebug.numerics.ops._cause import fits
from mldebug.numerics.ops._causes import CAUSES

if TYPE_CHECKING:
    from mldebug.numerics._filter import Filter
    from mldebug.numerics.gradients._gradients import GradientNorms

_HALF = ("float16", "bfloat16")


def read(event: Event, history: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """(one paragraph, hint): what happened, what was seen before it, and the next thing to do."""
    if event.again in _AGAIN:
        sentence, hint = _AGAIN[event.again]
        if event.phase == "backward":
            sentence = sentence.replace("the same forward", "the same forward and backward")
            sentence += " Code that changes gradients between backward and the optimizer step is not run again."
        return " ".join([_opening(event), sentence, *_before(event, history)]), hint
    if event.operation is not None:
        return _of_operation(event, event.operation, history)
    cause = next((row for row in CAUSES if row.key == event.cause), None) if event.cause else None
    sentences = [_opening(event), *([] if cause is None else [cause.reading])]
    if event.sample is not None:
        sentences.append(f"The first bad sample is number {event.sample} of the batch, counted from 0.")
    if event.role in ("output", "loss") and event.kind == "inf" and event.absmax:
        sentences.append(f"The largest finite value in that tensor is {event.absmax:.2e}.")
    if not event.training and event.role != "parameter":
        sentences.append("The model was in eval mode.")
    sentences += _before(event, history)
    return " ".join(sentences), _hint(event) if cause is None else cause.remedy


_AGAIN = {
    "did not reproduce": (
        "It did not reproduce: the same forward, from the same inputs, weights and random state, was finite when it "
        "ran again. Suspect the hardware (a flipped bit) or an operation that is not deterministic.",
        "run again on another device; if it comes back there, look for custom kernels and races",
    ),
    "only when compiled": (
        "It only happens in the compiled model: the same forward as it is written, from the same inputs and weights, "
        "is finite.",
        'compile with backend="aot_eager" and then "inductor" to see which of the two does it, and report it to torch',
    ),
}


def operation_lines(event: Event, width: int) -> list[str]:
    """The operation behind an event: its name and line, then a line for each operand."""
    made = event.operation
    assert made is not None
    hook, of = "a hook" in made.facts, made.forward_op
    name = f"{made.node}, of {of or 'no operation of the forward'}" if made.node else made.op
    name = f"{made.op}, in a hook on the gradient of {of or 'a parameter'}" if hook and made.node else name
    lines = textwrap.wrap(f"operation: {name}", width, subsequent_indent="  ")
    if made.file:
        lines.append(_place(made, width))
        lines.append(f"    {made.code}"[:width])
    if made.node and not hook:
        lines.append(f"  the gradient was computed by {made.op}:"[:width])
    lines += [f"    {operand.text()}"[:width] for operand in (*made.operands, *made.results)]
    return [line.rstrip() for line in lines]


def _place(made: Operation, width: int) -> str:
    """File, line and function; a long path loses its front."""
    end = f":{made.line}, in {made.function.split('<locals>.')[-1]}"
    at = "  it was made at " if "no graph" in made.facts else "  at "  # then the line is that of the operand
    room = max(width - len(at) - len(end), 12)
    file = made.file if len(made.file) <= room else f"...{made.file[-(room - 3) :]}"
    return f"{at}{file}{end}"[:width]


def _of_operation(event: Event, made: Operation, history: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """(reading, hint) of an event whose operation is known: from the table of causes where a row fits."""
    phases = (event.phase, "forward") if event.phase == "optimizer" else (event.phase,)
    rows = [row for phase in phases for row in CAUSES if row.key == made.cause and fits(row, made, phase)]
    cause = rows[0] if rows else None
    where = f" in {event.where}" if event.module is not None else ", outside any module,"
    where = f", before the forward, for its {event.name}," if _is_data(event) else where
    where = f", in the update of {event.param}," if event.phase == "optimizer" and event.param else where
    if event.kind == "precision":
        opening = f"After {made.op}{where} values that differ are one."
    elif event.op is None:
        opening = f"{_opening(event)} {made.op}{where} wrote it, as a constant."
    elif made.victim:
        opening = f"{made.op}{where} is the first operation that took a value which was bad already."
    elif "a hook" in made.facts:
        opening = f"Forward was finite; a hook on the gradient{where} made it {event.kind}"
        opening += "." if made.op == "a hook" else f": {made.op}."
    elif made.node:
        formula = f"the gradient of {made.forward_op or 'an operation'} ({made.node}){where}"
        opening = f"Forward was finite; {formula} is {event.kind}."
    else:
        share = f"{event.bad} of {event.numel} elements" if event.bad and event.numel else "elements"
        opening = f"{made.op}{where} made {share} {event.kind}; nothing before it was."
    sentences = [opening, cause.reading if cause is not None else "", *_before(event, history)]
    if event.sample is not None:
        sentences.insert(1, f"The first bad sample is number {event.sample} of the batch, counted from 0.")
    if made.victim and cause is not None:
        return " ".join(filter(None, sentences)), cause.remedy
    if made.victim and event.module is None:
        return " ".join(filter(None, sentences)), _hint(event)
    if made.victim:
        hint = "look at the operand that is bad: a table, a constant or a label from outside the model"
    else:
        hint = cause.remedy if cause is not None else _hint(event)
    if not event.training and event.role != "parameter":
        sentences.append("The model was in eval mode.")
    return " ".join(filter(None, sentences)), hint


def doubt(watched: Filter, gradients: Sequence[GradientNorms]) -> tuple[str, str]:
    """(verdict, hint) of a run without event that cannot be called clean; ("", "") if it can.

    `gradients` are those of the steps whose norm is not finite.
    """
    if text := watched.nothing_left:
        return f"nothing was watched: {text}", watched.hint()
    if text := watched.unmatched("include"):
        share = f"{watched.measured} of {watched.modules} modules"
        return f"no nan, no inf in what was watched, {share}, but {text}", watched.hint()
    bad = [norms for norms in gradients if not norms.scaled]
    if bad:
        steps = _some([str(norms.step) for norms in bad])
        seen = f"no nan, no inf in any forward, but the gradient norm is {bad[-1].total:g} in step {steps}"
        return seen, "torch.autograd.detect_anomaly() names the line; diagnose() names the parameter"
    return "", ""


def clean(watched: Filter, forwards: int, gradients: Sequence[GradientNorms]) -> str:
    """What there is to say of a run without event. `gradients` are those that a GradScaler found not finite."""
    if not forwards:
        return ""
    sentences = [f"Nothing bad was seen in {forwards} forward passes."]
    text = watched.unmatched()
    if text or gradients:
        sentences = [f"There was no nan and no inf in {forwards} forward passes."]
    if watched.measured < watched.modules:
        sentences.append(f"{watched.measured} of {watched.modules} modules were watched.")
    if text:
        sentences.append(f"The {text}.")
    if gradients:
        steps = _some([str(norms.step) for norms in gradients])
        sentences.append(f"Gradients were not finite in step {steps}, which GradScaler skips: it looks for its scale.")
    return " ".join(sentences)


def _some(words: list[str]) -> str:
    return f"{', '.join(words[:5])} and {len(words) - 5} more" if len(words) > 5 else ", ".join(words)


def _opening(event: Event) -> str:
    limit = f"{event.dtype}'s largest value {event.limit:.4g}"
    bad = f"{event.bad} of {event.numel} elements" if event.bad and event.numel else "Elements"
    name = "" if event.name == event.role else f" ({event.name})"
    if _is_data(event):
        return f"{bad} of the model's input{name} are {event.kind} before the first layer runs: the data is bad."
    if event.role == "input":
        return (
            f"{bad} of a tensor that the code of {event.where} made{name} are {event.kind}; "
            "every module output before it was finite."
        )
    if event.role == "parameter" and event.phase == "init":
        return f"The parameter {event.param} is {event.kind} before the first forward: it was initialised or loaded so."
    if event.role == "parameter" and event.phase == "backward":
        return (
            f"Parameters became {event.kind} in the optimizer step {event.step}: their gradients were not finite, the "
            f"forward was. Of these {event.param} is the nearest to the loss, so it began there in backward or later."
        )
    if event.role == "parameter":
        return (
            f"The parameter {event.param} became {event.kind} in the optimizer step {event.step}; "
            "the forward before it was finite."
        )
    if event.role == "state":
        return (
            f"{event.name}, which the optimizer keeps of {event.param}, is {event.kind} in {event.dtype} (largest "
            f"value {event.limit:.4g}); the parameter and every forward were finite. {_of_state(event)}"
        )
    if event.role == "buffer":
        when = "before the first forward" if event.phase == "init" else "in a forward"
        return f"The buffer {event.param} became {event.kind} {when}."
    if event.kind == "underflow":
        return (
            f"The gradient of {event.param} is exactly zero everywhere, while gradients above it are at the small end "
            "of float16: it has underflowed, and this layer does not train."
        )
    if event.role == "gradient" and event.benign:
        of = f"The gradient of {event.param}" if event.param is not None else "The gradient that reached the model"
        return (
            f"{of} overflowed because of the loss scale. GradScaler skips this step and "
            "lowers the scale: this is how it finds its scale, and no fault of the model."
        )
    if event.role == "gradient" and event.loss_scale is not None:
        of = f"The gradient of {event.param}" if event.param is not None else "The gradient that reached the model"
        return f"{of} is {event.kind}; the forward was finite. {_of_scale(event)}"
    if event.role == "gradient" and event.param is None and event.module is not None:
        return (
            f"The gradient that reached the output of {event.where} was finite, and what went back from there is "
            f"{event.kind}: its own backward, or the code between it and the module before, made it. The forward was "
            "finite."
        )
    if event.role == "gradient" and event.param is None:
        return (
            f"The gradient that reached the model was {event.kind} already; the forward was finite: code outside of "
            "the model, the loss most likely, has it in its backward."
        )
    if event.role == "gradient":
        return f"The gradient of {event.param} is {event.kind}; the forward was finite: it began in backward."
    if event.module is None:
        what = "loss" if event.name == "loss" else f"{event.role} {event.name}"
        return (
            f"The {what} is {event.kind}, and every module output before it was finite: "
            "it was made by code outside any module."
        )
    if event.kind == "inf":
        return f"{bad} of the {event.role} of {event.where} exceed {limit}; everything before it was finite."
    return f"{bad} of the {event.role} of {event.where} are nan; everything before it was finite."


def _of_state(event: Event) -> str:
    if event.kind == "inf" and "sq" in event.name:
        return "An average of squares that is inf makes each later update zero: the parameter is no longer trained."
    return f"The next update makes the parameter {event.kind}, or nan."


def _collapsed(event: Event) -> bool:
    return event.loss_scale is not None and not event.benign and (event.loss_scale < 1.0 or event.scaled_down >= MANY)


def _of_scale(event: Event) -> str:
    """What the loss scale has to do with a gradient that is no benign overflow."""
    if not _collapsed(event):
        return "It became so after unscale_(), where GradScaler had looked: it does not skip this step."
    row = f", after {event.scaled_down} steps in a row that it skipped" if event.scaled_down > 1 else ""
    return (
        f"The loss scale of GradScaler is down at {event.loss_scale:.3g}{row}: a smaller scale does not help, and as "
        "long as gradients are like this no step is made."
    )


def _is_data(event: Event) -> bool:
    """Whether the model was called with it; else its own code made it and handed it to a module inside."""
    return event.role == "input" and event.module == "" and " of " not in event.name


def _before(event: Event, history: Sequence[dict[str, Any]]) -> list[str]:
    """A spike of the loss or the gradient norm before the event, if there was one."""
    found = []
    past = [row for row in history if row["step"] < event.step + (event.phase == "optimizer")]
    for key, words in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        rows = [row for row in past if row.get(key) is not None]
        values = [row[key] for row in rows]
        if len(values) >= 4:
            usual = sorted(values[:-1])[len(values[:-1]) // 2]
            last = values[-1]
            if math.isfinite(usual) and not abs(last) <= 5 * abs(usual):
                found.append(f"{words} jumped from about {usual:.3g} to {last:.3g} in step {rows[-1]['step']}.")
    return found


def _hint(event: Event) -> str:
    if event.benign:
        return "nothing to do, unless it goes on for more than some dozen steps"
    if _collapsed(event):
        return (
            "diagnose(model, step, steps=...) names the operation: the loss or a gradient is beyond float16, or nan, "
            "by itself; bfloat16 has the range of float32 and needs no scale"
        )
    if event.kind == "underflow":
        return "scale the loss (torch.amp.GradScaler) or train in bfloat16"
    if _is_data(event):
        return "look at this batch: check the data set for nan/inf and the preprocessing for divisions and logs"
    if event.role == "parameter" and event.phase == "init":
        return "check the checkpoint and the initialisation of this parameter (torch.empty leaves garbage)"
    if event.phase == "backward" and event.module is None:
        return "look at the loss for sqrt(0), x/0 or log(0); diagnose(model, step, steps=...) names its operation"
    if event.phase == "backward":
        return (
            "look for sqrt(0), x/0 or log(0) under a torch.where or a mask: their gradients are not finite; "
            "torch.autograd.detect_anomaly() names the line"
        )
    if event.role == "state":
        return (
            "keep the parameters, and with them the states of the optimizer, in float32 (under autocast), or clip "
            "gradients; a state does not recover by itself: load a checkpoint from before"
        )
    if event.role == "parameter":
        return (
            "lower the learning rate, clip gradients, look at the optimizer's eps in this dtype, and at code that "
            "changes weights after the step"
        )
    if event.role == "buffer":
        return "reset the buffer; for running statistics keep bad batches away from the forward, not only the step"
    if event.module is None and event.kind == "inf" and event.dtype in _HALF:
        return f"make it in float32, where {event.dtype} ends at {event.limit:.4g}; a mean where it is a sum is smaller"
    if event.module is None and event.kind == "inf":
        return (
            "look at the code that makes it: exp or a square of large outputs, a sum that should be a mean, "
            "a division by zero, log of zero"
        )
    if event.module is None:
        return "check this batch's labels: all ignored, out of range, an empty mean, a log of zero"
    if event.kind == "inf" and event.dtype in _HALF:
        wider = "bfloat16" if event.dtype == "float16" else "float32"
        return f"run this module in {wider}, or scale down what it takes; its frame shows how large the inputs are"
    if event.kind == "inf":
        return "its frame shows the inputs: look for exp, division by a small number, log of zero"
    return "its frame shows the inputs: look for a fully masked row in softmax, 0/0, inf - inf, std of one sample"
