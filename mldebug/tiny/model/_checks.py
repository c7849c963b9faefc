"""The checks of a tiny model: each says whether it holds, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mldebug.core.errors import MldebugError
from mldebug.tiny._report import Check
from mldebug.tiny.model._checks_config import check_diff, check_ids
from mldebug.tiny.model._checks_train import backward, loss_falls, some
from mldebug.tiny.model._forward import float_tensors, loss_of
from mldebug.tiny.model.inputs._facts import Facts, walk
from mldebug.tiny.model.inputs._make import example_inputs

LONGEST = 512  # tokens of the longest forward; the report says where a model could take more


@dataclass
class Subject:
    """What is checked: the model as built, the folder it was saved to, and what it was made from."""

    model: Any
    folder: Path
    source: Mapping[str, Any]  # the config that was shrunk
    changes: Mapping[str, tuple[Any, Any]]
    dtype: torch.dtype
    reference: Callable[[], Any] | None = None  # the model at full size on the meta device
    tokenizer: Any = None
    processor: Any = None
    trust_remote_code: bool = False
    seed: int = 0
    notes: list[str] = field(default_factory=list)


def run_checks(subject: Subject) -> list[Check]:
    """All checks in the order of the report. A check that cannot run fails with the reason; nothing is raised."""
    model = subject.model
    checks = [
        _guard("ids", lambda: check_ids(model, subject.folder, subject.source, subject.tokenizer)),
        _guard("finite", lambda: _finite(model)),
        _guard("dtypes", lambda: _dtypes(model, subject.folder, subject.dtype)),
        _guard("diff", lambda: check_diff(model, subject.source, subject.changes, subject.reference)),
        _guard("shapes", lambda: _shapes(model, subject.reference)),
    ]
    reloaded: list[Any] = []
    checks.append(_guard("reload", lambda: _reload(subject, reloaded)))
    worker = reloaded[0] if reloaded else model  # training is done on the copy
    inputs: dict[str, Any] = {}
    checks.append(_guard("forward", lambda: _forward(subject, worker, inputs)))
    if not inputs:
        missing = "there are no inputs that the forward takes"
        return [*checks, *(Check(name, False, missing) for name in ("backward", "loss"))]
    checks.append(_guard("generate", lambda: _generate(subject, worker, inputs)))
    checks.append(_guard("backward", lambda: backward(worker, inputs)))
    checks.append(_guard("loss", lambda: loss_falls(worker, inputs)))
    return checks


def _guard(name: str, run: Callable[[], tuple[bool | None, str]]) -> Check:
    ok: bool | None
    try:
        ok, why = run()
    except Exception as exc:
        text = exc.message if isinstance(exc, MldebugError) else f"{type(exc).__name__}: {exc}"
        ok, why = False, " ".join(text.split())[:300]
    return Check(name, ok, why)


def _finite(model: Any) -> tuple[bool, str]:
    bad = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor).all())]
    count = sum(1 for _ in model.parameters())
    return (False, f"not finite: {some(bad)}") if bad else (True, f"all {count} parameters")


def _dtypes(model: Any, folder: Path, asked: torch.dtype) -> tuple[bool, str]:
    """In memory and in the file; a module may keep a wider dtype only by a rule of its own class."""
    from safetensors import safe_open

    counts: dict[torch.dtype, list[str]] = {}
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point():
            counts.setdefault(tensor.dtype, []).append(name)
    kept = tuple(
        pattern
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for pattern in (getattr(model, attribute, None) or ())
    )
    odd = [
        name
        for dtype, names in counts.items()
        if dtype != asked
        for name in names
        if not (dtype == torch.float32 and any(pattern in name for pattern in kept))
    ]
    if odd:
        first = dict(model.named_parameters())[odd[0]].dtype
        return False, f"{_dtype(asked)} was asked for, but {some(odd)} has {_dtype(first)}"
    state = model.state_dict()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in list(opened.keys()):
                saved = opened.get_slice(name).get_dtype()
                if name in state and _SAVED.get(state[name].dtype, saved) != saved:
                    return False, f"{name} is {_dtype(state[name].dtype)} and was saved as {saved}"
    return True, ", ".join(
        f"{_dtype(dtype)} ({len(names)})" for dtype, names in counts.items()
    ) or "no float parameters"


_SAVED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def _shapes(model: Any, reference: Callable[[], Any] | None) -> tuple[bool, str]:
    """No matrix may have become much wider than it is: a size that was left behind shows here."""
    rows = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    tables = {value for _path, key, value in walk(model.config.to_dict()) if key == "vocab_size"}
    tables.add(getattr(model.config, "num_labels", None))
    wide = {
        name: tuple(tensor.shape)
        for name, tensor in model.named_parameters()
        if tensor.dim() == 2
        and tensor.shape[0] > 16 * tensor.shape[1]
        and id(tensor) not in rows
        and tensor.shape[0] not in tables  # of a vocabulary or of labels: as long as it is
    }
    if not wide:
        return True, "no matrix has more than 16 times as many outputs as inputs"
    if reference is None:
        return True, f"not compared with the source: {some(list(wide))} is wide"
    shapes = {name: tuple(tensor.shape) for name, tensor in reference().named_parameters()}
    grown = [
        f"{name} {shape} was {shapes[name]}"
        for name, shape in wide.items()
        if name in shapes and len(shapes[name]) == 2 and shapes[name][0] < 4 * shapes[name][1]
    ]
    return (
        (False, f"a size was left behind: {some(grown)}")
        if grown
        else (True, "wide matrices are wide in the source too")
    )


def _reload(subject: Subject, reloaded: list[Any]) -> tuple[bool, str]:
    """The saved folder gives the same tensors and the same ties; nothing is filled in anew."""
    kind = type(subject.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed + 1)  # so that what is drawn anew differs
        again, info = kind.from_pretrained(
            subject.folder, output_loading_info=True, dtype="auto", local_files_only=True,
            **({"trust_remote_code": True} if subject.trust_remote_code else {}),
        )  # fmt: skip
    again.eval()
    before, after = subject.model.state_dict(), again.state_dict()
    trouble = [
        f"{len(names)} {label}: {some(sorted(map(str, names)))}"
        for label, key in (
            ("re-initialised", "missing_keys"),
            ("not used", "unexpected_keys"),
            ("of another shape", "mismatched_keys"),
        )
        if (names := info.get(key))
    ]
    differing = [name for name, tensor in before.items() if name not in after or not _same(tensor, after[name])]
    if differing:
        trouble.append(f"{len(differing)} of {len(before)} tensors differ: {some(differing)}")
    if extra := sorted(set(after) - set(before)):
        trouble.append(f"only after the reload: {some(extra)}")
    ties = _ties(subject.model)
    if ties != _ties(again):
        trouble.append(f"tied before: {_groups(ties)}; after: {_groups(_ties(again))}")
    if trouble:
        return False, "; ".join(trouble)
    reloaded.append(again)
    tied = f"; tied: {_groups(ties)}" if ties else ""
    return True, f"all {len(before)} tensors bit-equal{tied}"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw_a, raw_b = (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        for tensor in (a, b)
    )
    return torch.equal(raw_a, raw_b)


def _ties(model: Any) -> list[tuple[str, ...]]:
    """Groups of parameters that are one storage."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if tensor.numel():
            groups.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(tuple(sorted(names)) for names in groups.values() if len(names) > 1)


def _groups(ties: list[tuple[str, ...]]) -> str:
    return some([" = ".join(names) for names in ties]) if ties else "nothing"


def _forward(subject: Subject, model: Any, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Once with the longest text that the model takes; through the saved processor where there is one."""
    options = {"seed": subject.seed, "tokenizer": subject.tokenizer}
    inputs.update(example_inputs(model, **options))
    why = _shown(inputs)
    ok = True
    if subject.processor is not None:
        try:
            given = example_inputs(model, processor=subject.processor, seed=subject.seed)
            inputs.clear()
            inputs.update(given)
            why = f"through the processor: {_shown(inputs)}"
        except MldebugError as exc:
            ok, why = False, f"the processor's outputs do not fit: {exc.message}"
    with torch.no_grad():
        outputs = model(**inputs)
    bad = [tuple(tensor.shape) for tensor in float_tensors(outputs) if bool(torch.isnan(tensor).any())]
    if bad:
        return False, f"nan in outputs of shape {bad[0]}"
    loss = loss_of(outputs)
    if loss is not None and not math.isfinite(float(loss)):
        return False, f"the loss is {float(loss)}"
    longest = _longest(subject, model)
    if longest and "input_ids" in inputs and longest > inputs["input_ids"].shape[-1]:
        long = example_inputs(model, length=longest, **options, labels=False)
        with torch.no_grad():
            model(**long)
        why += f"; at {long['input_ids'].shape[-1]} tokens"
    return ok, why


def _longest(subject: Subject, model: Any) -> int | None:
    limits = [Facts(model, None, 1, 0).positions, getattr(subject.tokenizer, "model_max_length", None), LONGEST]
    return min(int(limit) for limit in limits if limit)


def _shown(inputs: Mapping[str, Any]) -> str:
    shapes = []
    for name, value in inputs.items():
        if name == "attention_mask":
            continue
        shape = "x".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
        shapes.append(f"{name} {shape}")
    return ", ".join(shapes)


def _generate(subject: Subject, model: Any, inputs: Mapping[str, Any]) -> tuple[bool | None, str]:
    if not getattr(model, "can_generate", lambda: False)():
        return None, f"{type(model).__name__} does not generate"
    given = {
        name: value
        for name, value in inputs.items()
        if name
        not in (
            "labels",
            "decoder_input_ids",
            "return_loss",
            "decoder_attention_mask",
            "start_positions",
            "end_positions",
        )
    }
    longest = Facts(model, None, 1, 0).positions
    if longest and set(given) <= {"input_ids", "attention_mask"} and not model.config.is_encoder_decoder:
        given = {name: value[:, : max(1, longest - 4)] for name, value in given.items()}  # what follows has places too
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    settings = model.generation_config
    said = ""
    if model.config.is_encoder_decoder and settings.decoder_start_token_id is None and settings.bos_token_id is None:
        start = settings.pad_token_id or 0
        options["decoder_start_token_id"] = start
        said = f" (from id {start}: the source names no start)"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)
        try:
            out = model.generate(**given, **options)
        except ValueError as exc:
            if "MinNewTokens" not in str(exc):
                raise
            out = model.generate(**given, **{**options, "min_new_tokens": None})
    tokens = getattr(out, "sequences", out)
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and not tokens.is_floating_point():
        return True, f"4 tokens: {tokens[0, -4:].tolist()}{said}"
    shape = f" of shape {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else ""
    return True, f"gave {type(tokens).__name__}{shape}{said}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Check", "Subject", "run_checks"]
