"""Builds a model from a shrunk config. Where that fails, shrinking is undone until it works, and the culprit named."""

from __future__ import annotations

import contextlib
import copy
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny.model._build_class import class_of
from mldebug.tiny.model._shrink import Shrunk, set_path

SEARCH_SECONDS = 20.0  # for finding which field broke a build
LARGEST = 30_000_000  # parameters that are built for real; a model with a field undone may have more


@dataclass(frozen=True)
class Built:
    """A seeded model in eval mode, and the config that it was built from in the end."""

    model: Any
    shrunk: Shrunk
    notes: list[str] = field(default_factory=list)


def build(
    shrunk: Shrunk,
    *,
    dtype: str | None = None,
    seed: int = 0,
    model_class: str | None = None,
    trust_remote_code: bool = False,
) -> Built:
    """Make the model that `shrunk` describes, with random weights that depend on `seed` only.

    The class is `model_class`, else the one that the config names under architectures, else the most complete one that
    the auto classes have for the type. A config that cannot be built is an MldebugError that names what is wrong.

        build(shrink(resolve("llama").config)).model
    """
    notes: list[str] = []
    cls = class_of(shrunk.config, model_class, trust_remote_code)
    asked = [str(name) for name in shrunk.config.get("architectures") or ()]
    if model_class is None and asked and cls.__name__ not in asked:
        notes.append(f"the config names {asked[0]}, which transformers does not have for it: {cls.__name__} was built")
    try:
        return Built(_make(cls, shrunk.config, dtype, seed, notes), shrunk, notes)
    except MldebugError:
        raise
    except Exception as exc:
        failure = exc
    if isinstance(failure, ImportError):
        raise MldebugError(_package(failure), "install that package") from failure
    undone, culprits = _undo(shrunk, cls, failure, trust_remote_code)
    named = ", ".join(
        f"{path} ({shrunk.changes[path][1]!r} back to {shrunk.changes[path][0]!r})" for path in culprits[:4]
    )
    count = _parameters_on_meta(cls, undone.config)
    if count > LARGEST:
        raise MldebugError(
            f"{cls.__name__} cannot be built small: {_says(failure)}; it needs {named}, which is {count:,} parameters",
            f"set the field yourself, such as --set {culprits[0]}=...",
        ) from failure
    notes.append(f"{_says(failure)}: so not shrunk: {named}")
    try:
        return Built(_make(cls, undone.config, dtype, seed, notes), undone, notes)
    except Exception as exc:  # only with real numbers in it, which the search does without
        raise MldebugError(
            f"{cls.__name__} cannot be built small: {_says(exc)}", "give a larger --hidden, or set fields with --set"
        ) from exc


def config_of(config: Mapping[str, Any], cls: Any = None) -> Any:
    """The config object of a plain config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    config_class = (
        CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING and not config.get("auto_map") else cls.config_class
    )
    return config_class.from_dict(copy.deepcopy(dict(config)))


def _make(cls: Any, config: Mapping[str, Any], dtype: str | None, seed: int, notes: list[str]) -> Any:
    import torch

    made = config_of(config, cls)
    wanted = _dtype(dtype) if dtype is not None else _own_dtype(made)
    with _seeded(seed), _nan_memory():
        model = cls._from_config(made, dtype=wanted)
        lost = _fill_lost(model)
    if lost:
        notes.append(f"{len(lost)} tensors that {cls.__name__} leaves unset got random values, {lost[0]} first")
    if wanted != torch.float32 and made.dtype is None:
        made.dtype = wanted
    return model.eval()


def _own_dtype(config: Any) -> Any:
    import torch

    places = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {})]
    for place in places:
        said = getattr(place, "dtype", None)
        if said is not None:
            return said if isinstance(said, torch.dtype) else _dtype(str(said))
    return torch.float32


def _dtype(name: str) -> Any:
    import torch

    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}
    found = getattr(torch, short.get(name, name.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"{name} is no dtype that weights can have", "such as float32, bfloat16 or float16")
    return found


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """All generators a model may draw from start at `seed`, and go on afterwards as if nothing had been drawn."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _nan_memory() -> Iterator[None]:
    """Memory that nobody sets is NaN: what a class forgets to initialise is seen, and does not depend on chance."""
    import torch

    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _fill_lost(model: Any) -> list[str]:
    """Give a value to each weight that is still NaN. Seeded, as it draws from the generator of the build."""
    import torch

    lost = []
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and not tensor.is_meta and bool(torch.isnan(tensor).any()):
                tensor.copy_(
                    torch.where(
                        torch.isnan(tensor), torch.randn(tensor.shape, dtype=torch.float32).to(tensor) * 0.02, tensor
                    )
                )
                lost.append(name)
    return lost


# --- undoing


def _undo(shrunk: Shrunk, cls: Any, failure: Exception, trust_remote_code: bool) -> tuple[Shrunk, list[str]]:
    """`shrunk` with as few fields as possible back at full size, so that it builds; and those fields.

    Only the meta device is used. One field alone is tried first, then whole nested configs, then all fields, of which
    as many as possible are shrunk again.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    source = _with(shrunk, list(shrunk.changes))
    wrong = _fails(cls, source.config)
    if wrong is not None:
        raise MldebugError(
            f"the config of {shrunk.config.get('model_type')} cannot be built at full size either: {_says(wrong)}",
            _missing(wrong, shrunk.config),
        ) from failure
    paths = [path for path in shrunk.changes if path not in shrunk.pinned]
    levels = sorted({path.rpartition(".")[0] for path in paths})
    groups = [[path] for path in paths] + [
        [path for path in paths if path.startswith(f"{level}.")] for level in levels if level
    ]
    found: list[tuple[int, list[str]]] = []
    for group in groups:
        if time.monotonic() > deadline or (found and len(group) > 1):
            break
        if _fails(cls, _with(shrunk, group).config) is None:
            found.append((_parameters_on_meta(cls, _with(shrunk, group).config), group))
    if found:
        group = min(found)[1]  # the smallest model
        return _with(shrunk, group), group
    back = list(paths)
    for path in paths:
        if time.monotonic() > deadline:
            break
        fewer = [other for other in back if other != path]
        if _fails(cls, _with(shrunk, fewer).config) is None:
            back = fewer
    tried = _with(shrunk, back)
    if (wrong := _fails(cls, tried.config)) is not None:
        raise MldebugError(
            f"{cls.__name__} cannot be built with what was set: {_says(wrong)}", "change or leave out what --set gives"
        )
    return tried, back


def _with(shrunk: Shrunk, paths: list[str]) -> Shrunk:
    config = copy.deepcopy(shrunk.config)
    for path in paths:
        set_path(config, path, copy.deepcopy(shrunk.changes[path][0]))
    changes = {path: pair for path, pair in shrunk.changes.items() if path not in paths}
    return Shrunk(config, changes, shrunk.layer_map, shrunk.notes, shrunk.id_map, shrunk.layer_maps, shrunk.pinned)


def _fails(cls: Any, config: Mapping[str, Any]) -> Exception | None:
    import torch

    try:
        with torch.device("meta"):
            cls._from_config(config_of(config, cls))
    except Exception as exc:
        return exc
    return None


def _parameters_on_meta(cls: Any, config: Mapping[str, Any]) -> int:
    import torch

    with torch.device("meta"):
        model = cls._from_config(config_of(config, cls))
    return sum(parameter.numel() for parameter in model.parameters())


def _says(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    if len(lines) > 1 and lines[0].startswith("Class validation error"):
        return lines[1][:240]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:240]


def _package(exc: ImportError) -> str:
    return " ".join(str(exc).split())[:200] or "a package is missing"


def _missing(exc: Exception, config: Mapping[str, Any]) -> str:
    """Name the field that the class looked for in vain, from the error or the line of code that raised it."""
    found = [exc.name] if isinstance(exc, AttributeError) and exc.name and "Config" in str(exc) else []
    lines = [frame.line or "" for frame in reversed(traceback.extract_tb(exc.__traceback__))]
    for owner in ("config", "self"):
        found += [name for line in lines for name in re.findall(rf"\b{owner}\.(\w+)", line) if _is_none(config, name)]
    model = f"give a folder with the config.json of a {config.get('model_type')} model"
    return f"{found[0]} is missing or None: {model}" if found else f"a field is missing or wrong: {model}"


def _is_none(config: Mapping[str, Any], name: str) -> bool:
    places = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    held = [place[name] for place in places if name in place]
    return bool(held) and all(value is None for value in held)
