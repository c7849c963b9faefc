"""An event in plain words, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mldebug.numerics._event import Event

if TYPE_CHECKING:
    from mldebug.numerics._filter import Filter
    from mldebug.numerics._gradients import GradientNorms

_HALF = ("float16", "bfloat16")


def read(event: Event, history: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """(one paragraph, hint): what happened, what was seen before it, and the next thing to do."""
    sentences = [_opening(event)]
    if event.role in ("output", "loss") and event.kind == "inf" and event.absmax:
        sentences.append(f"The largest finite value in that tensor is {event.absmax:.2e}.")
    if not event.training and event.role != "parameter":
        sentences.append("The model was in eval mode.")
    sentences += _before(event, history)
    return " ".join(sentences), _hint(event)


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
    if event.role == "buffer":
        when = "before the first forward" if event.phase == "init" else "in a forward"
        return f"The buffer {event.param} became {event.kind} {when}."
    if event.kind == "underflow":
        return (
            f"The gradient of {event.param} is exactly zero everywhere, while gradients above it are at the small end "
            "of float16: it has underflowed, and this layer does not train."
        )
    if event.role == "gradient" and event.benign:
        return (
            f"The gradient of {event.param} overflowed because of the loss scale. GradScaler skips this step and "
            "lowers the scale: this is how it finds its scale, and no fault of the model."
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


def _is_data(event: Event) -> bool:
    """Whether the model was called with it; else its own code made it and handed it to a module inside."""
    return event.role == "input" and event.module == "" and " of " not in event.name


def _before(event: Event, history: Sequence[dict[str, Any]]) -> list[str]:
    """A spike of the loss or the gradient norm in the steps before, if there was one."""
    found = []
    past = [row for row in history if row["step"] < event.step or event.phase == "optimizer"]
    for key, words in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        values = [row[key] for row in past if row.get(key) is not None]
        if len(values) >= 4:
            usual = sorted(values[:-1])[len(values[:-1]) // 2]
            last = values[-1]
            if not abs(last) <= 5 * abs(usual):
                found.append(f"{words} jumped from about {usual:.3g} to {last:.3g} in the step before.")
    return found


def _hint(event: Event) -> str:
    if event.benign:
        return "nothing to do, unless it goes on for more than some dozen steps"
    if event.kind == "underflow":
        return "scale the loss (torch.amp.GradScaler) or train in bfloat16"
    if _is_data(event):
        return "look at this batch: check the data set for nan/inf and the preprocessing for divisions and logs"
    if event.role == "parameter" and event.phase == "init":
        return "check the checkpoint and the initialisation of this parameter (torch.empty leaves garbage)"
    if event.phase == "backward":
        return (
            "look for sqrt(0), x/0 or log(0) under a torch.where or a mask: their gradients are not finite; "
            "torch.autograd.detect_anomaly() names the line"
        )
    if event.role == "parameter":
        return "lower the learning rate, clip gradients, and look at the optimizer's eps in this dtype"
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
