"""What lies beside a model: tokenizer, processor and the settings for generation, made to fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError
from mldebug.tiny._processor import has_processor, write_processor

if TYPE_CHECKING:
    from mldebug.tiny._checks_config import Check


def shrunk_tokenizer(
    found: Any, tokenizer: Any, vocab: int | None, folder: Path, trust_remote_code: bool
) -> dict[int, int] | None:
    """Shrink the tokenizer that was given, or the one at the source, into `folder`; None where there is none."""
    directory = Path(tokenizer) if tokenizer is not None else found.directory
    if tokenizer is None and (directory is None or not _has_tokenizer(directory)):
        return None
    from mldebug.tiny._tokenizer import shrink_tokenizer

    return shrink_tokenizer(directory, vocab, folder, trust_remote_code=trust_remote_code)


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


def load_sides(folder: Path, trust_remote_code: bool) -> tuple[Any, Any, list[Check]]:
    """The tokenizer and processor as a user would load them from the folder."""
    from mldebug.tiny._checks_config import Check

    tokenizer = processor = None
    failed: list[Check] = []
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    if _has_tokenizer(folder):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as exc:
            failed.append(Check("tokenizer", False, f"does not load: {type(exc).__name__}: {exc}"))
    if has_processor(folder):
        from transformers import AutoProcessor as untyped

        loader: Any = untyped

        try:
            processor = loader.from_pretrained(folder, **options)
        except Exception as exc:
            failed.append(Check("processor", False, f"does not load: {type(exc).__name__}: {exc}"))
    return tokenizer, processor, failed


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
    """The source's settings for generation, with their ids mapped as the config's are."""
    from transformers import GenerationConfig

    def mapped(value: Any) -> Any:
        if isinstance(value, list):
            return [mapped(item) for item in value]
        return id_map.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    settings = {
        key: mapped(value)
        if key.endswith(("_token_id", "_token_ids", "_tokens", "_ids")) and key != "num_assistant_tokens"
        else value
        for key, value in generation.items()
    }
    model.generation_config = GenerationConfig.from_dict(settings)
