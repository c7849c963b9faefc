"""What lies beside a model: tokenizer, processor and the settings for generation, made to fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._files import path_of
from mldebug.tiny._report import Check
from mldebug.tiny.model._checks_config import is_id
from mldebug.tiny.model._ids import NESTED
from mldebug.tiny.model._processor import has_processor, write_processor


def shrunk_tokenizer(
    found: Any, tokenizer: Any, vocab: int | None, folder: Path, trust_remote_code: bool
) -> dict[int, int] | None:
    """Shrink the tokenizer that was given, or the one at the source, into `folder`; None where there is none."""
    if tokenizer is not None and path_of(tokenizer) is None:
        raise UsageError(f"cannot read the tokenizer {tokenizer}: no such file or folder", "give one that is here")
    directory = Path(tokenizer) if tokenizer is not None else found.directory
    if tokenizer is None and (directory is None or not _has_tokenizer(directory)):
        return None
    from mldebug.tiny.tokenizer._make import shrink_tokenizer

    return shrink_tokenizer(directory, vocab, folder, trust_remote_code=trust_remote_code)


def with_ids_of(config: Mapping[str, Any], folder: Path, id_map: Mapping[int, int]) -> dict[str, Any]:
    """`config` with the begin, end and padding ids of the tokenizer in `folder`, as they were before `id_map`: for a
    tokenizer that is not the source's own, whose ids mean other tokens. A list that has such an id stays as it is."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    before = {new: old for old, new in id_map.items()}
    ids = {name: before.get(getattr(tokenizer, name)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def follows(key: str, value: Any) -> bool:
        new = ids.get(key)
        return value is not None and new is not None and not (isinstance(value, list) and new in value)

    def changed(level: Mapping[str, Any], top: bool) -> dict[str, Any]:
        reads = top or "vocab_size" in level
        return {
            key: changed(value, False)
            if isinstance(value, Mapping)
            else ids[key]
            if reads and follows(key, value)
            else value
            for key, value in level.items()
        }

    return changed(config, True)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tokenizer_config.json",
    "source.spm",
    "sentencepiece.model",
)


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def side_files(
    directory: Path | None, tokenizer: Any, folder: Path, model: Any, id_map: Mapping[int, int] | None
) -> list[str]:
    if directory is None or not has_processor(directory):
        return []
    changed = write_processor(directory, folder, model.config.to_dict(), id_map)
    return [f"processor: {', '.join(dict.fromkeys(changed))} follow the model"] if changed else []


def load_sides(folder: Path, source: Path | None, trust_remote_code: bool) -> tuple[Any, Any, list[Check]]:
    """The tokenizer and processor as a user would load them from the folder, and a check for each that does not load.

    Where that of the source does not load either, a package is missing: then the check does not apply.
    """
    import transformers

    loaded: dict[str, Any] = {"tokenizer": None, "processor": None}
    checks: list[Check] = []
    for name, there in (("tokenizer", _has_tokenizer(folder)), ("processor", has_processor(folder))):
        if not there:
            continue
        loader: Any = getattr(transformers, f"Auto{name.title()}")
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            loaded[name] = loader.from_pretrained(folder, **options)
        except Exception as exc:
            why = " ".join(f"{type(exc).__name__}: {exc}".split())[:200]
            try:
                if source is None:
                    raise
                loader.from_pretrained(source, **options)
                checks.append(Check(name, False, f"does not load: {why}"))
            except Exception:
                checks.append(Check(name, None, f"not loaded, nor is the source's: {why}"))
    return loaded["tokenizer"], loaded["processor"], checks


def generation_config(directory: Path | None) -> dict[str, Any] | None:
    file = None if directory is None else directory / "generation_config.json"
    if file is None or not file.exists():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise MldebugError(f"cannot read {file}: {exc}", "repair or remove it") from exc
    if not isinstance(document, dict):
        raise MldebugError(f"cannot read {file}: it holds no object", "repair or remove it")
    return document


def set_generation(model: Any, generation: Mapping[str, Any], id_map: Mapping[int, int]) -> None:
    """The source's settings for generation, with their ids mapped as the config's are. Ids that went are left out, and
    so is what names layers and heads."""
    from transformers import GenerationConfig

    from mldebug.tiny.model.inputs._facts import Facts

    longest = Facts(model, None, 1, 0).positions
    vocab = model.config.get_text_config().to_dict().get("vocab_size") or 0
    settings: dict[str, Any] = {}
    for key, value in generation.items():
        if key == "forced_decoder_ids" and isinstance(value, list):  # pairs of a place and an id
            value = [[place, _mapped(token, id_map, vocab)] for place, token in value]
            value = [pair for pair in value if pair[1] is not None] or None
        elif key in NESTED and isinstance(value, list):  # words of several ids: none of them without one
            value = _words(value, id_map, vocab) or None
        elif key == "alignment_heads":
            continue
        elif is_id(key) or key.endswith(("_to_id", "suppress_tokens")):
            value = _mapped(value, id_map, vocab)
            if value == []:  # ids that all went: none, as where there is no such key
                continue
        elif key in ("max_length", "max_new_tokens") and isinstance(value, int) and longest:
            value = min(value, longest)
        settings[key] = value
    model.generation_config = GenerationConfig.from_dict(settings)


def _words(value: list[Any], id_map: Mapping[int, int], vocab: int) -> list[Any]:
    found = []
    for item in value:
        if isinstance(item, list) and any(isinstance(inner, list) for inner in item):
            new: list[Any] = _words(item, id_map, vocab)
        else:
            new = _mapped(item, id_map, vocab)
            new = new if len(new) == len(item) else []
        if new:
            found.append(new)
    return found


def _mapped(value: Any, id_map: Mapping[int, int], vocab: int) -> Any:
    """An id, or ids in lists and by name, through the map; None for an id that the vocabulary no longer has."""
    if isinstance(value, list):
        return [new for item in value if (new := _mapped(item, id_map, vocab)) is not None]
    if isinstance(value, Mapping):
        return {key: new for key, item in value.items() if (new := _mapped(item, id_map, vocab)) is not None}
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return value
    return id_map.get(value, value if value < vocab and not id_map else None)
