"""Finds a tokenizer: a folder, a single file, or a repository of the hub."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._files import path_of
from mldebug.tiny._hub import snapshot
from mldebug.tiny.tokenizer._forms import FixedForm, Form, JsonForm, WordsForm
from mldebug.tiny.tokenizer._json import repaired
from mldebug.tiny.tokenizer._load import Loaded, load_tokenizers, load_transformers
from mldebug.tiny.tokenizer._native import load_spm, load_tekken, load_tiktoken, load_words
from mldebug.tiny.tokenizer._ranks import TekkenForm, TiktokenForm, is_tiktoken
from mldebug.tiny.tokenizer._side import CONFIG, read_json, write_json
from mldebug.tiny.tokenizer._spm import SpmForm, is_spm

# What is fetched of a repository: the files of a tokenizer, and the configs that name its ids.
PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.model.v*",
    "*.spm",
    "*.tiktoken",
    "tekken*.json",
    "chat_template*",
    "additional_chat_templates/*",
    "normalizer.json",
    "emoji.json",
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
        try:
            opened = _open(source, trust_remote_code, offline, stack)
        except MldebugError as exc:
            raise type(exc)(_in_words_of(source, exc.message), exc.hint) from exc
        yield opened


def _open(
    source: str | os.PathLike[str], trust_remote_code: bool, offline: bool | None, stack: contextlib.ExitStack
) -> Opened:
    directory = _directory(source, offline, stack)
    forms = forms_in(directory)
    if not forms and (directory / CONFIG).is_file():
        return _fixed(str(source), directory, trust_remote_code)
    if not forms:
        held = ", ".join(sorted(path.name for path in directory.iterdir())[:6]) or "nothing"
        raise MldebugError(
            f"{source} has no tokenizer: there is {held}",
            "a tokenizer is a tokenizer.json, tokenizer.model, vocab.json, vocab.txt, *.tiktoken or tekken.json",
        )
    notes = _repair(directory, forms, stack)
    opened = _opened(str(source), forms[0].path.parent, forms, trust_remote_code)
    opened.notes += notes
    if not opened.loaded.size or not forms[0].ids():
        raise MldebugError(f"{source} has a vocabulary without a token", "is it really the tokenizer's file?")
    return opened


def _in_words_of(source: str | os.PathLike[str], message: str) -> str:
    """The message with the file that was given, and not its copy in a temporary folder."""
    copied = rf"{re.escape(os.path.join(tempfile.gettempdir(), _TEMPORARY))}\w+"
    whole = rf"{copied}(/[\w.-]+)?" if Path(source).is_file() else copied
    return re.sub(whole, lambda _found: os.fspath(source), message)


_TEMPORARY = "mldebug-"


def _repair(directory: Path, forms: list[Form], stack: contextlib.ExitStack) -> list[str]:
    """A post-processor with ids that are not there gets those of its tokens, in a copy of the folder; what is said."""
    form = forms[0]
    mended = repaired(form.document) if isinstance(form, JsonForm) else None
    if mended is None:
        return []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_TEMPORARY)))
    for path in directory.iterdir():
        if path.name != form.path.name:
            (folder / path.name).symlink_to(path.absolute())
    document, stale = mended
    write_json(folder / form.path.name, document)
    forms[:] = forms_in(folder)
    return [f"the source's post-processor inserts ids that it has no token for ({stale[0]}): mended by their names"]


def forms_in(directory: Path) -> list[Form]:
    """The forms in the folder, the leading one first: it is the one that the libraries load."""
    found: list[Form] = []
    if (directory / "tokenizer.json").is_file():
        found.append(JsonForm(directory / "tokenizer.json"))
    found += [TekkenForm(path) for path in sorted(directory.glob("tekken*.json"))]
    for name in ("vocab.json", "vocab-src.json", "vocab-tgt.json", "vocab.txt"):
        path, merges = directory / name, directory / "merges.txt"
        if path.is_file():
            found.append(WordsForm(path, merges if path.suffix == ".json" and merges.is_file() else None))
    for path in sorted({*directory.glob("*.model*"), *directory.glob("*.spm"), *directory.glob("*.tiktoken")}):
        if path.suffix == ".tiktoken" or is_tiktoken(path):
            found.append(TiktokenForm(path))
        elif is_spm(path) or path.name in _SPM_NAMES:
            found.append(SpmForm(path))
    return found


_SPM_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")


def _opened(name: str, directory: Path, forms: list[Form], trust_remote_code: bool) -> Opened:
    """Through transformers where the folder says how, else through the library that the leading file is for."""

    def through_transformers(folder: Path) -> Loaded:
        return load_transformers(folder, trust_remote_code)

    native = _native(forms[0])
    if not isinstance(forms[0], JsonForm) and not any((directory / each).is_file() for each in (CONFIG, "config.json")):
        return Opened(name, directory, forms, native, native(directory))
    try:
        loaded = through_transformers(directory)
    except MldebugError as exc:
        return Opened(name, directory, forms, native, native(directory), notes=[exc.message])
    kind = type(loaded.object).__name__
    generic = kind in ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend")
    return Opened(name, directory, forms, through_transformers, loaded, None if generic else kind)


def _fixed(name: str, directory: Path, trust_remote_code: bool) -> Opened:
    """A tokenizer without a file that is known: it may have its vocabulary in its code."""

    def load(folder: Path) -> Loaded:
        return load_transformers(folder, trust_remote_code)

    loaded = load(directory)
    files = [str(file) for file in (getattr(loaded.object, "vocab_files_names", None) or {}).values()]
    return Opened(name, directory, [FixedForm(directory, loaded.ids, files)], load, loaded)


def _native(form: Form) -> Callable[[Path], Loaded]:
    """What loads a folder with such a form in it."""
    name = form.path.name
    if isinstance(form, TekkenForm):
        return lambda folder: load_tekken(folder / name)
    if isinstance(form, SpmForm):
        return lambda folder: load_spm(folder / name)
    if isinstance(form, TiktokenForm):
        return lambda folder: load_tiktoken(folder / name)
    if isinstance(form, WordsForm):
        merges, cased = form.merges_path, form.is_cased()
        return lambda folder: load_words(WordsForm(folder / name, merges and folder / merges.name), cased)
    return lambda folder: load_tokenizers(folder / "tokenizer.json")


def _directory(source: str | os.PathLike[str], offline: bool | None, stack: contextlib.ExitStack) -> Path:
    path, text = Path(source), os.fspath(source)
    there = path_of(source)
    if there is not None and there.is_dir():
        return there
    if there is not None:
        path = there
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_TEMPORARY)))
        try:
            shutil.copyfile(path, folder / _usual_name(path))
            if path.name == "vocab.json" and path.with_name("merges.txt").is_file():
                shutil.copyfile(path.with_name("merges.txt"), folder / "merges.txt")
        except OSError as exc:
            raise MldebugError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
        return folder
    local = (
        text.startswith((".", "/", "~"))
        or text.endswith("/")
        or text.count("/") > 1
        or path.suffix in (".json", ".txt", ".model")
    )
    if local:
        raise UsageError(f"{text}: no such file or folder", "give the folder of a tokenizer")
    return snapshot(text, PATTERNS, offline, "tokenizer")


def _usual_name(path: Path) -> str:
    """The name under which the libraries look for such a file."""
    if path.suffix == ".json":
        document = read_json(path)
        if isinstance(document, dict) and isinstance(document.get("model"), dict):
            return "tokenizer.json"
        if isinstance(document, dict) and isinstance(document.get("config"), dict) and "vocab" in document:
            return path.name if path.name.startswith("tekken") else "tekken.json"
        return "vocab.json"
    if is_tiktoken(path) and path.suffix != ".tiktoken":
        return f"{path.name}.tiktoken"
    if path.suffix == ".txt":
        return "vocab.txt"
    return path.name if ".model" in path.name or not is_spm(path) else f"{path.stem}.model"
