"""Finds a tokenizer: a folder, a single file, or a repository of the hub."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._tokenizer_forms import Form, JsonForm, forms_in
from mldebug.tiny._tokenizer_load import Loaded, load_tokenizers, load_transformers

# What is fetched of a repository: the files of a tokenizer, and the configs that name its ids.
PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)


@dataclass
class Opened:
    """A source that is at hand: its folder, the forms in it, how to load such a folder, and the loaded source."""

    name: str
    directory: Path
    forms: list[Form]
    load: Callable[[Path], Loaded]
    loaded: Loaded
    tokenizer_class: str | None = None
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def open_source(
    source: str | os.PathLike[str], *, trust_remote_code: bool = False, offline: bool | None = None
) -> Iterator[Opened]:
    """The tokenizer of `source`, loaded. A file is looked at in a temporary folder that holds nothing else."""
    with contextlib.ExitStack() as stack:
        directory = _directory(source, offline, stack)
        forms = forms_in(directory)
        if not forms:
            held = ", ".join(sorted(path.name for path in directory.iterdir())[:6]) or "nothing"
            raise MldebugError(
                f"{source} has no tokenizer: there is {held}",
                "a tokenizer is a tokenizer.json, tokenizer.model, vocab.json, vocab.txt, *.tiktoken or tekken.json",
            )
        yield _opened(str(source), directory, forms, trust_remote_code)


def _opened(name: str, directory: Path, forms: list[Form], trust_remote_code: bool) -> Opened:
    def through_transformers(folder: Path) -> Loaded:
        return load_transformers(folder, trust_remote_code)

    def through_tokenizers(folder: Path) -> Loaded:
        return load_tokenizers(folder / "tokenizer.json")

    try:
        loaded = through_transformers(directory)
    except MldebugError as exc:
        if not isinstance(forms[0], JsonForm):
            raise
        loaded = through_tokenizers(directory)
        return Opened(name, directory, forms, through_tokenizers, loaded, notes=[exc.message])
    kind = type(loaded.object).__name__
    generic = kind in ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend")
    return Opened(name, directory, forms, through_transformers, loaded, None if generic else kind)


def _directory(source: str | os.PathLike[str], offline: bool | None, stack: contextlib.ExitStack) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mldebug-")))
        shutil.copyfile(path, folder / path.name)
        return folder
    text = os.fspath(source)
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1 or path.suffix in (".json", ".txt", ".model")
    if looks_local or not text.strip():
        raise UsageError(f"{text or 'an empty name'}: no such file or folder", "give the folder of a tokenizer")
    return _from_hub(text, offline)


def _from_hub(name: str, offline: bool | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    local = HF_HUB_OFFLINE if offline is None else offline
    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS), local_files_only=local))
    except Exception as exc:  # not there, no such name, no network: many types, one answer
        where = "in the cache of the hub (offline)" if local else "on the hub"
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
        raise MldebugError(
            f"{name} is no folder here and cannot be found {where}: {reason}",
            "check the name, or give a folder" + ("; without HF_HUB_OFFLINE=1 it is fetched" if local else ""),
        ) from exc
