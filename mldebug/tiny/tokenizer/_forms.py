"""The files that hold a vocabulary: each form can be read as a Vocabulary and written with fewer tokens."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer import _json as documents
from mldebug.tiny.tokenizer._side import read_json, read_object, write_json
from mldebug.tiny.tokenizer._vocab import Vocabulary


class Form(Protocol):
    """A file, or files that belong together, with a vocabulary in them."""

    path: Path

    def ids(self) -> dict[str, int]:
        """Token -> id, added tokens included."""

    def added(self) -> list[str]:
        """The tokens that are found in the text as they stand."""

    def named(self) -> dict[str, str]:
        """Role -> token, for tokens to which the file itself gives a role."""

    def used(self) -> list[str]:
        """Tokens that are known by name though no file names them."""

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        """What may go and what must stay. `specials` must stay; `dropped` are added tokens that go."""

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        """Write the form with the tokens of `kept` and return their new ids.

        `ids` are the new ids that the leading form of the folder gave; None where this is the leading one.
        """


class JsonForm:
    """tokenizer.json of the tokenizers library."""

    def __init__(self, path: Path, document: dict[str, Any] | None = None) -> None:
        self.path = path
        self.document = read_json(path) if document is None else document
        if not isinstance(self.document, dict):
            raise MldebugError(f"{path} holds no JSON object", "is it really a tokenizer.json?")
        documents.model_kind(self.document)
        try:
            self._ids = documents.document_ids(self.document)
        except (KeyError, TypeError, ValueError) as exc:
            raise MldebugError(f"{path} is no tokenizer.json: {exc!r}", "save the tokenizer again") from exc

    def ids(self) -> dict[str, int]:
        return self._ids

    def added(self) -> list[str]:
        return [token["content"] for token in self.document.get("added_tokens") or []]

    def named(self) -> dict[str, str]:
        return {}

    def used(self) -> list[str]:
        return []

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        return documents.read(self.document, specials, dropped)

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        smaller = documents.write(self.document, kept)
        write_json(output / "tokenizer.json", smaller)
        return documents.document_ids(smaller)


class WordsForm:
    """vocab.json with merges.txt, vocab.json alone, or vocab.txt: the files of slow tokenizers.

    They say nothing of the pipeline, so the kind is told by the tokens.
    """

    def __init__(self, path: Path, merges: Path | None = None) -> None:
        self.path = path
        self.merges_path = merges
        self._ids = _read_words(path)
        self.added_ids = {
            token: id for token, id in read_object(path.parent / "added_tokens.json").items() if isinstance(id, int)
        }
        self.header, self.merges = _read_merges(merges) if merges is not None else ([], [])

    def ids(self) -> dict[str, int]:
        return {**self.added_ids, **self._ids}

    def added(self) -> list[str]:
        return [*(token for token in _USUAL if token in self._ids), *self.added_ids]

    def named(self) -> dict[str, str]:
        return {}

    def used(self) -> list[str]:
        return [token for token in _USUAL if token in self._ids]

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        return documents.read(self._document(), specials, dropped)

    def model(self) -> dict[str, Any]:
        """The model as tokenizer.json would have it, with the type that the tokens speak for."""
        model: dict[str, Any] = {"type": "WordLevel", "vocab": self._ids, "unk_token": _unknown(self._ids)}
        if self._is_bpe():
            marked = any(right.endswith("</w>") for _left, right in self.merges)
            model.update(type="BPE", merges=list(self.merges), end_of_word_suffix="</w>" if marked else None)
        elif self.path.with_name("source.spm").is_file():  # Marian: pieces of SentencePiece, listed by id
            model.update(type="WordPiece", continuing_subword_prefix=None)
        elif self.path.suffix == ".txt" or any(token.startswith("##") for token in self._ids):
            model.update(type="WordPiece", continuing_subword_prefix="##")
        return model

    def with_words(self, words: Mapping[str, int], merges: list[tuple[str, str]]) -> WordsForm:
        """The same files with other words in them."""
        other = copy.copy(self)
        other._ids = dict(words)
        other.merges = merges
        return other

    def words(self) -> dict[str, int]:
        """Token -> id, without those of added_tokens.json."""
        return dict(self._ids)

    def _is_bpe(self) -> bool:
        """Whether the merges make the tokens of the list. CTRL and others list them with marks of their own."""
        made = sum(left + right in self._ids for left, right in self.merges)
        return self.merges_path is not None and made >= len(self.merges) / 2

    def is_byte_level(self) -> bool:
        """Whether the tokens are bytes, written as characters."""
        return self._is_bpe() and ("Ġ" in self._ids or set(documents.byte_characters()) <= self._ids.keys())

    def is_cased(self) -> bool:
        """Whether the words keep their case: as the config says, else as the tokens look."""
        lower = read_object(self.path.parent / "tokenizer_config.json").get("do_lower_case")
        if isinstance(lower, bool):
            return not lower
        return any(token != token.lower() for token in self._ids if not token.startswith(("[", "<")))

    def _document(self) -> dict[str, Any]:
        """A tokenizer.json with as much in it as the choice of tokens looks at."""
        ids = self.ids()
        added = [{"content": token, "id": ids[token]} for token in self.added()]
        steps = {"pre_tokenizer": {"type": "ByteLevel"}} if self.is_byte_level() else {}
        return {"added_tokens": added, "model": self.model(), **steps}

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        keep = set(kept)
        order = sorted((token for token in self._ids if token in keep), key=self._ids.__getitem__)
        new = {token: index for index, token in enumerate(order)} if ids is None else {t: ids[t] for t in order}
        if self.path.suffix == ".txt":
            text = "".join(f"{token}\n" for token in order)
            (output / self.path.name).write_text(text, encoding="utf-8")
        else:
            write_json(output / self.path.name, new)
        if self.merges_path is not None:
            whole = not self._is_bpe()
            lines = [f"{a} {b}" for a, b in self.merges if whole or {a, b, a + b} <= keep]
            (output / self.merges_path.name).write_text("\n".join([*self.header, *lines, ""]), encoding="utf-8")
        for token in sorted((t for t in self.added_ids if t in keep), key=self.added_ids.__getitem__):
            new.setdefault(token, len(new) if ids is None else ids[token])
        return new


# Special tokens by their usual names, which no file may list.
_USUAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<unk>", "<mask>", "<|endoftext|>")


class FixedForm:
    """A tokenizer whose vocabulary is in its code, such as one of bytes or code points: nothing can be left out."""

    def __init__(self, path: Path, ids: Mapping[str, int], files: Collection[str]) -> None:
        self.path = path
        self._ids = dict(ids)
        self.files = files

    def ids(self) -> dict[str, int]:
        return self._ids

    def added(self) -> list[str]:
        return []

    def named(self) -> dict[str, str]:
        return {}

    def used(self) -> list[str]:
        return []

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        return Vocabulary("fixed vocabulary", self._ids, {"tokens that its code makes": list(self._ids)})

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        for name in self.files:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, output / name)
        return dict(self._ids)


def _unknown(tokens: Collection[str]) -> str | None:
    for token in ("[UNK]", "<unk>", "<UNK>", "unk", "UNK"):
        if token in tokens:
            return token
    return None


def _read_words(path: Path) -> dict[str, int]:
    if path.suffix == ".json":
        document = read_object(path)
        if not document or not all(isinstance(id, int) for id in document.values()):
            raise MldebugError(f"{path} is no table of tokens and ids", 'it should read {"token": 0, ...}')
        return document
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise MldebugError(f"cannot read {path}: {exc}", "it should have one token a line, in UTF-8") from exc
    if lines and not lines[-1]:
        lines.pop()
    ids: dict[str, int] = {}
    for index, line in enumerate(lines):
        ids[line.rstrip("\r")] = index
    if not ids:
        raise MldebugError(f"{path} is empty", "it should have one token a line")
    return ids


def _read_merges(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The comment at the top, and the merges. A third column (a count, in older files) is not read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise MldebugError(f"cannot read {path}: {exc}", "it should have one merge a line, in UTF-8") from exc
    header = [line for line in lines[:1] if line.startswith("#version")]
    merges = []
    for number, line in enumerate(lines[len(header) :], len(header) + 1):
        parts = line.rstrip("\r").split(" ")
        if not line.strip():
            continue
        if len(parts) not in (2, 3):
            raise MldebugError(f"{path}, line {number} is no merge: {line!r}", "a merge is two tokens with a space")
        merges.append((parts[0], parts[1]))
    return header, merges
