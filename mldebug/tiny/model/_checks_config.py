"""The checks that need no forward: ids, and the difference from the source config."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mldebug.tiny.model._ids import NESTED, ids_in
from mldebug.tiny.model.inputs._facts import embedding_rows


def check_ids(model: Any, folder: Path, source: Mapping[str, Any], tokenizer: Any) -> tuple[bool, str]:
    """Every id of the config, at any level, of generation_config and of the tokenizer is one that the vocabulary has,
    and ids that were distinct still are."""
    tiny = model.config.to_dict()
    vocab = _vocab(tiny) or embedding_rows(model)
    found = list(_ids(tiny, "", vocab))
    generation = folder / "generation_config.json"
    if generation.exists():
        found += list(_ids(json.loads(generation.read_text()), "generation_config", vocab))
    too_big = [f"{path} = {value} of {limit}" for path, value, limit in found if limit and value >= limit]
    if too_big:
        return False, f"past the vocabulary: {', '.join(too_big[:3])}"
    if clash := _clash(source, tiny):
        return False, clash
    said = (
        f"all {len(found)} ids < {vocab}" if vocab and found else f"{'no ids are named' if vocab else 'no vocabulary'}"
    )
    if tokenizer is not None and vocab:
        top = max(tokenizer.get_vocab().values(), default=-1)
        if top >= vocab:
            return False, f"the tokenizer's largest id is {top}, the vocabulary has {vocab}"
        said += f", the tokenizer's {len(tokenizer)} too"
    return True, said


def _vocab(config: Mapping[str, Any]) -> int | None:
    """The text vocabulary of a config, its own or that of the text config in it."""
    if isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    for name in (
        "text_config",
        "language_config",
        "llm_config",
        "decoder",
        "decoder_config",
        "text_encoder",
        "thinker_config",
    ):
        if isinstance(config.get(name), Mapping) and (found := _vocab(config[name])):
            return found
    return None


def _ids(config: Mapping[str, Any], path: str, vocab: int | None) -> Iterator[tuple[str, int, int | None]]:
    """(path, id, the vocabulary it is of). Where a level has several vocabularies the largest counts."""
    sizes = [
        value
        for key, value in config.items()
        if "vocab" in str(key) and isinstance(value, int) and not isinstance(value, bool)
    ]
    sizes += [
        value for key, value in config.items() if key in ("codebook_size", "num_codes") and isinstance(value, int)
    ]
    limit = max(sizes) if sizes else (_vocab(config) or vocab)
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _ids(value, here, limit)
        elif is_id(str(key)):
            for item in ids_in(str(key), value):
                if item >= 0:
                    yield here, item, limit


def is_id(name: str) -> bool:
    """Whether a field holds ids of tokens, by its name."""
    endings = ("_token_id", "_token_ids", "_token_index", "_patch_id", "suppress_tokens")
    return name.endswith(endings) or name in NESTED


def _clash(source: Mapping[str, Any], tiny: Mapping[str, Any]) -> str:
    """Two ids that differ at the source and are one now, in the same vocabulary: that of a size, at any level."""
    met: dict[tuple[int | None, int], tuple[str, int]] = {}
    before = {path: (item, limit) for path, item, limit in _ids(source, "", _vocab(source))}
    after = {path: item for path, item, _limit in _ids(tiny, "", None)}
    for path, (old, limit) in before.items():
        if path not in after or isinstance(_raw(source, path), list) or isinstance(_raw(tiny, path), list):
            continue
        name, other = met.setdefault((limit, after[path]), (path, old))
        if other != old:
            return f"{name} and {path} were {other} and {old}, and are both {after[path]}"
    return ""


def _raw(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


# Written by save_pretrained or set by hand, and no part of the architecture.
_UNIMPORTANT = frozenset(
    ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "_commit_hash", "auto_map")
)


def check_diff(
    model: Any,
    source: Mapping[str, Any],
    changes: Mapping[str, tuple[Any, Any]],
    reference: Callable[[], Any] | None = None,
) -> tuple[bool, str]:
    """The tiny config differs from the source's only in what the shrinker says that it changed."""
    tiny = model.config.to_dict()
    whole = _with_defaults(model, source)
    found = {path: (old, new) for path, old, new in differences(whole, tiny)}
    differing = [path for path in found if path.rpartition(".")[2] not in _UNIMPORTANT]
    declared = set(changes)
    odd = [
        path
        for path in differing
        if path not in declared and not _inside(path, declared) and not _follows(path, *found[path])
    ]
    if odd and reference is not None:  # a class of models may set fields as it is built, at any size
        own = reference().config.to_dict()
        odd = [path for path in odd if _plain(_raw(own, path)) != _plain(_raw(tiny, path))]
    if odd:
        shown = ", ".join(f"{path} {found[path][0]!r} became {found[path][1]!r}" for path in odd[:3])
        return False, f"{len(odd)} undeclared: {shown}"
    return True, f"{len(differing)} fields differ from the source, all of them sizes"


def _follows(path: str, old: Any, new: Any) -> bool:
    """Whether the config class works a size out from others, such as a count of layers from a list of stages."""
    if type(new) is not int:
        return False
    sized = re.search(r"layers|size|dim|heads|width|depth|^num_", path.rpartition(".")[2]) is not None
    return old is None or (type(old) is int and new < old and sized)


def _with_defaults(model: Any, source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The source config as its class reads it, so that defaults that it leaves out are no difference."""
    try:
        config: Mapping[str, Any] = type(model.config).from_dict(dict(source)).to_dict()
        return config
    except Exception:  # such as a default config that is incomplete: then it is compared as it is written
        return source


def _inside(path: str, declared: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in declared for count in range(1, len(parts)))


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, old, new) of each field that differs, nested configs included."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            here = f"{path}.{key}" if path else str(key)
            if key not in new or key not in old:
                present = old.get(key) if key in old else new.get(key)
                if present is not None:
                    yield here, old.get(key), new.get(key)
            else:
                yield from differences(old[key], new[key], here)
    elif _plain(old) != _plain(new):
        yield path, old, new


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, bool, type(None))) else str(value)
