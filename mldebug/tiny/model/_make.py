"""tiny_model: a model of any architecture, small enough for a second, checked, and rebuilt from its recipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.extras import needs
from mldebug.tiny._calls import NUMBER, PATH, TEXT, checked_call
from mldebug.tiny._files import folder_beside, put, refuse
from mldebug.tiny._report import Check
from mldebug.tiny._sizes import parse_bytes
from mldebug.tiny._stop import Stop
from mldebug.tiny.model._recipe import FILE
from mldebug.tiny.model._report import TinyModelReport, budget_check
from mldebug.tiny.model._sides import (
    generation_config,
    load_sides,
    set_generation,
    shrunk_tokenizer,
    side_files,
    with_ids_of,
)

if TYPE_CHECKING:
    import torch


__all__ = ["TinyModelReport", "tiny_model"]


@checked_call(
    source=PATH,
    output=PATH,
    layers=NUMBER,
    hidden=NUMBER,
    vocab=NUMBER,
    seed=NUMBER,
    set=(Mapping,),
    budget=(*NUMBER, *TEXT),
    tokenizer=PATH,
    model_class=TEXT,
    from_recipe=PATH,
)
def tiny_model(
    source: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    set: Mapping[str, Any] | None = None,
    budget: str | int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    offline: bool | None = None,
    model_class: str | None = None,
    from_recipe: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> TinyModelReport:
    """Make a tiny model with the architecture of `source`, write it to the new folder `output`, check it, and report.

    `source` is a folder or config.json, the id of a repository (from the cache, or the network where it is allowed), or
    a model type such as "llama". `layers`, `hidden` and `vocab` are upper sizes; `set` gives fields of the config by
    their dotted names; `budget` ("1MB" or bytes) is what the weights may take. A tokenizer at `source`, or `tokenizer`,
    is shrunk with the embeddings through one map of ids, and processors follow the sizes of images and audio.
    Without `output` nothing is kept. `from_recipe` rebuilds byte for byte what a mldebug_recipe.json names instead.

    The folder appears when everything in it is written. A check that fails does not raise: see `report.ok`. What
    cannot be built at all is an MldebugError, and a folder that is not empty a UsageError; `force` replaces an earlier
    tiny model.

        report = tiny_model("llama", "llama-tiny", layers=2)
        report.model(**example_inputs(report.model)).loss.backward()
    """
    target = None if output is None else Path(output)
    if target is not None:
        refuse(target, force, FILE, "tiny model", source)
    options = {
        "layers": _at_least_one("layers", layers),
        "hidden": _at_least_one("hidden", hidden),
        "vocab": _at_least_one("vocab", vocab),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "seed": _seed(seed),
        "set": dict(set or {}),
        "model_class": model_class,
    }
    limit = parse_bytes("the budget", budget)
    clock = _Clock()
    with clock.measure("import"):
        _import_libraries()
    with _quiet(), folder_beside(target) as folder:
        if from_recipe is not None:
            if source is not None:
                raise UsageError("both a source and a recipe are given", "the recipe names its source: leave one out")
            made = _from_recipe(Path(from_recipe), folder, clock, trust_remote_code)
        elif source is None:
            raise UsageError(
                "no source to make a tiny model of", "give a folder, a repository id or a model type such as llama"
            )
        else:
            made = _from_source(os.fspath(source), folder, clock, options, tokenizer, trust_remote_code, offline)
        with clock.measure("checks"):
            made.checks += _check(made, folder, trust_remote_code)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if limit is not None:
            made.checks.append(budget_check(made.model, size, limit, made.changes))
        if target is not None:
            put(folder, target, force)
    return TinyModelReport(
        source=made.name,
        path=target,
        architecture=type(made.model).__name__,
        model=made.model,
        checks={check.name: check for check in made.checks},
        params=sum(parameter.numel() for parameter in made.model.parameters()),
        bytes=size,
        dtype=str(made.dtype).removeprefix("torch."),
        changes=made.changes,
        notes=tuple(made.notes),
        seconds=clock.total(),
        times=dict(clock.times),
    )


@dataclass
class _Made:
    name: str
    model: Any
    source: Mapping[str, Any]
    changes: dict[str, tuple[Any, Any]]
    notes: list[str]
    dtype: Any
    checks: list[Check] = field(default_factory=list)
    directory: Path | None = None  # of the source


def _from_source(
    source: str,
    folder: Path,
    clock: _Clock,
    options: Mapping[str, Any],
    tokenizer: Any,
    trust_remote_code: bool,
    offline: bool | None,
) -> _Made:
    from mldebug.tiny.model._build_class import class_of
    from mldebug.tiny.model._recipe import write_recipe
    from mldebug.tiny.model._source import resolve

    with clock.measure("build"):
        found = resolve(source, trust_remote_code=trust_remote_code, offline=offline)
        id_map = shrunk_tokenizer(found, tokenizer, options["vocab"], folder, trust_remote_code)
        if id_map is not None:
            options = {**options, "vocab": None}
        config, generation = found.config, generation_config(found.directory)
        if tokenizer is not None and id_map is not None:
            config = with_ids_of(config, folder, id_map)
            generation = generation and with_ids_of(generation, folder, id_map)
    with clock.measure("import"):
        class_of(config, options["model_class"], trust_remote_code)  # the one module of models that is needed
    with clock.measure("build"):
        made, shrunk = _build(found.name, config, options, id_map, generation, folder, trust_remote_code)
        made.directory = found.directory
        made.notes += side_files(found.directory, tokenizer, folder, made.model, id_map or shrunk.id_map)
        write_recipe(
            folder,
            {
                "source": {
                    "name": found.name,
                    "kind": found.kind,
                    "sha256": found.sha256,
                    "config": config,
                    "generation_config": generation,
                },
                "rules": _rules_version(),
                "options": options,
                "tokenizer": None if tokenizer is None else os.fspath(tokenizer),
                "tokenizer_id_map": None if id_map is None else {str(old): new for old, new in id_map.items()},
                "id_map": {str(old): new for old, new in (id_map or shrunk.id_map or {}).items()}
                if id_map is None
                else None,
                "architecture": type(made.model).__name__,
                "changes": {path: list(pair) for path, pair in shrunk.changes.items()},
            },
        )
    return made


def _from_recipe(file: Path, folder: Path, clock: _Clock, trust_remote_code: bool) -> _Made:
    """The same again: weights from config and seed, the files of tokenizer and processor from beside the recipe."""
    from mldebug.tiny.model._build_class import class_of
    from mldebug.tiny.model._recipe import compare, read_recipe

    recipe = read_recipe(file)
    beside = file if file.is_dir() else file.parent
    source = recipe["source"]
    with clock.measure("import"):
        class_of(source["config"], recipe["options"]["model_class"], trust_remote_code)
    with clock.measure("build"):
        ids = recipe.get("tokenizer_id_map")
        id_map = None if ids is None else {int(old): new for old, new in ids.items()}
        made, _shrunk = _build(
            source["name"],
            source["config"],
            recipe["options"],
            id_map,
            source.get("generation_config"),
            folder,
            trust_remote_code,
        )
        lacking = [name for name in recipe["files"] if not (folder / name).exists()]
        for name in lacking:
            if not (beside / name).exists():
                raise MldebugError(
                    f"the recipe names {name}, which is not beside it",
                    f"keep the files of tokenizer and processor in {beside}",
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(beside / name, folder / name)
        shutil.copyfile(beside / FILE if file.is_dir() else file, folder / FILE)
    same, why = compare(folder, recipe)
    made.checks.append(Check("recipe", same, why))
    return made


def _build(
    name: str,
    config: dict[str, Any],
    options: Mapping[str, Any],
    id_map: Mapping[int, int] | None,
    generation: Mapping[str, Any] | None,
    folder: Path,
    trust_remote_code: bool,
) -> tuple[_Made, Any]:
    from mldebug.tiny.model._build import build
    from mldebug.tiny.model._shrink import shrink

    shrunk = shrink(
        config,
        layers=options["layers"],
        hidden=options["hidden"],
        vocab=options["vocab"],
        overrides=options["set"],
        id_map=id_map,
    )
    built = build(
        shrunk,
        dtype=options["dtype"],
        seed=options["seed"],
        model_class=options["model_class"],
        trust_remote_code=trust_remote_code,
    )
    model, shrunk = built.model, built.shrunk
    if generation is not None:
        set_generation(model, generation, id_map or shrunk.id_map or {})
    model.save_pretrained(folder)
    made = _Made(
        name, model, config, dict(shrunk.changes), [*shrunk.notes, *built.notes], _dtype_of(config, options["dtype"])
    )
    return made, shrunk


def _check(made: _Made, folder: Path, trust_remote_code: bool) -> list[Check]:
    from mldebug.tiny.model._checks import Subject, run_checks

    tokenizer, processor, failed = load_sides(folder, made.directory, trust_remote_code)
    subject = Subject(
        model=made.model,
        folder=folder,
        source=made.source,
        changes=made.changes,
        dtype=made.dtype,
        reference=lambda: _reference(made),
        tokenizer=tokenizer,
        processor=processor,
        trust_remote_code=trust_remote_code,
    )
    return [*failed, *run_checks(subject)]


def _reference(made: _Made) -> Any:
    """The source's own model without its weights."""
    import torch

    with torch.device("meta"):
        return type(made.model)(type(made.model.config).from_dict(dict(made.source)))


def _dtype_of(config: Mapping[str, Any], asked: str | None) -> Any:
    import torch

    said = asked or config.get("dtype") or config.get("torch_dtype")
    if said is None:
        said = next(
            (
                part.get("dtype") or part.get("torch_dtype")
                for part in config.values()
                if isinstance(part, Mapping) and (part.get("dtype") or part.get("torch_dtype"))
            ),
            None,
        )
    found = getattr(torch, str(said).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.float32


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - begin

    def total(self) -> float:
        return sum(self.times.values())


def _import_libraries() -> None:
    """What every build needs, so that the time for it is not counted as the build's."""
    with Stop() as stop:  # half of NumPy does not survive the end of its import
        import numpy  # noqa: F401
    if stop.asked:
        raise KeyboardInterrupt
    needs("a tiny model", "transformers", 5)
    import torch  # noqa: F401
    import transformers.modeling_utils
    import transformers.models.auto.configuration_auto
    import transformers.models.auto.modeling_auto  # noqa: F401

    from mldebug.tiny.model import _build, _checks, _shrink, _source  # noqa: F401


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers says much while a model is built at odd sizes; what matters is in the report. One thread is the
    fastest for what is this small, by far where other work keeps the cores busy."""
    import warnings

    import torch
    from transformers.utils import logging as untyped

    logging: Any = untyped

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _rules_version() -> Any:
    from mldebug.tiny.model import _shrink

    return getattr(_shrink, "RULES_VERSION", 1)


def _seed(seed: int) -> int:
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"the seed {seed} has more than 64 bits", "give a smaller one")
    return seed


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}", "give 1 or more")
    return value
