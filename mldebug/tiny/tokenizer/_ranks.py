"""Vocabularies that are lists of byte strings by rank: tiktoken files and tekken.json."""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer._json import byte_characters
from mldebug.tiny.tokenizer._side import CONFIG, content, read_json, read_object, write_json
from mldebug.tiny.tokenizer._vocab import Vocabulary

_CHARACTERS = byte_characters()
# What older files of mistral leave to the program: the special tokens before the numbered ones.
_TEKKEN_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def as_characters(token: bytes) -> str:
    """The bytes as byte-level vocabularies write them, one character each."""
    return "".join(_CHARACTERS[byte] for byte in token)


def as_bytes(token: str) -> bytes:
    return bytes(_CHARACTERS.index(character) for character in token)


class TiktokenForm:
    """A file with a base64 token and its rank on each line; special tokens are in tokenizer_config.json, if at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks = _read_ranks(path)
        self.tokens = {as_characters(token): rank for token, rank in self.ranks.items()}
        table = read_object(path.parent / CONFIG).get("added_tokens_decoder")
        self.specials = {
            text: int(id)
            for id, token in (table.items() if isinstance(table, dict) else ())
            if (text := content(token)) is not None and text not in self.tokens and str(id).isdecimal()
        }

    def ids(self) -> dict[str, int]:
        return {**self.tokens, **self.specials}

    def added(self) -> list[str]:
        return list(self.specials)

    def named(self) -> dict[str, str]:
        return {}

    def used(self) -> list[str]:
        return []

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        ids = {token: id for token, id in self.ids().items() if token not in dropped}
        required = {
            "added tokens": [token for token in self.specials if token in ids],
            "special tokens": [token for token in specials if token in ids],
            "bytes": [token for token in self.tokens if len(token) == 1],
        }
        ranked = sorted(self.tokens, key=self.tokens.__getitem__)
        return Vocabulary("tiktoken byte-level BPE", ids, required, ranked=ranked)

    def with_tokens(self, tokens: list[str]) -> TiktokenForm:
        """The same file with other tokens in it, by rank."""
        other = copy.copy(self)
        other.tokens = {token: rank for rank, token in enumerate(tokens)}
        other.ranks = {as_bytes(token): rank for token, rank in other.tokens.items()}
        return other

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        keep = set(kept)
        order = [token for token in sorted(self.tokens, key=self.tokens.__getitem__) if token in keep]
        new = {token: rank for rank, token in enumerate(order)}
        lines = [f"{base64.b64encode(as_bytes(token)).decode()} {rank}\n" for token, rank in new.items()]
        (output / self.path.name).write_text("".join(lines), encoding="ascii")
        for token in sorted((t for t in self.specials if t in keep), key=self.specials.__getitem__):
            new.setdefault(token, len(new))
        return new


class TekkenForm:
    """tekken.json: special tokens first, then byte strings by rank, of which the first so many are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document = read_json(path)
        try:
            self._read(self.document)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as exc:
            raise MldebugError(
                f"{path} is no tekken file: {exc!r}", 'it should have "config", "vocab" and, if new, "special_tokens"'
            ) from exc

    def _read(self, document: Any) -> None:
        config = document["config"]
        listed = document.get("special_tokens")
        if listed is None:
            names = list(_TEKKEN_SPECIALS)
        else:
            names = [str(token["token_str"]) for token in sorted(listed, key=lambda token: int(token["rank"]))]
        self.listed = len(names)
        count = int(config.get("default_num_special_tokens", len(names)))
        names += [f"<SPECIAL_{id}>" for id in range(len(names), count)]
        size = int(config.get("default_vocab_size", count + len(document["vocab"])))
        rows = sorted(document["vocab"], key=lambda row: int(row["rank"]))[: size - count]
        self.specials = {name: id for id, name in enumerate(names)}
        self.rows: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, int] = {}
        for row in rows:
            token = as_characters(base64.b64decode(row["token_bytes"], validate=True))
            token = token if token not in self.specials else f"{token}\0"  # text that reads as a special token
            self.rows[token] = row
            self.tokens[token] = count + len(self.tokens)

    def ids(self) -> dict[str, int]:
        return {**self.specials, **self.tokens}

    def added(self) -> list[str]:
        return list(self.specials)

    def named(self) -> dict[str, str]:
        return {}

    def used(self) -> list[str]:
        """Every special token with a name has a role in the code; those that are only numbered have none."""
        return [token for token in list(self.specials)[: self.listed] if not token.startswith("<SPECIAL_")]

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        ids = {token: id for token, id in self.ids().items() if token not in dropped}
        required = {
            "added tokens": [token for token in self.specials if token in ids],
            "special tokens": [token for token in specials if token in ids],
            "bytes": [token for token in self.tokens if len(token.rstrip("\0")) == 1],
        }
        return Vocabulary("tekken byte-level BPE", ids, required, ranked=list(self.tokens))

    def with_tokens(self, tokens: list[str]) -> TekkenForm:
        """The same file with other tokens in it, by rank."""
        other = copy.copy(self)
        count = len(self.specials)
        other.tokens, other.rows = {}, {}
        for rank, characters in enumerate(tokens):
            data = as_bytes(characters)
            token = characters if characters not in self.specials else f"{characters}\0"
            other.tokens[token] = count + rank
            text = data.decode("utf-8", "replace")
            row = {"rank": rank, "token_bytes": base64.b64encode(data).decode(), "token_str": text}
            other.rows[token] = {**row, "token_str": None if "\ufffd" in text else text}
        return other

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        keep = set(kept)
        specials = [token for token in self.specials if token in keep]
        order = [token for token in self.tokens if token in keep]
        document = dict(self.document)
        document["vocab"] = [{**self.rows[token], "rank": rank} for rank, token in enumerate(order)]
        if document.get("special_tokens") is not None:
            rows = [row for row in document["special_tokens"] if str(row["token_str"]) in keep]
            rows.sort(key=lambda row: int(row["rank"]))
            document["special_tokens"] = [{**row, "rank": rank} for rank, row in enumerate(rows)]
            specials = [str(row["token_str"]) for row in rows]
            fillers = [token for token in self.specials if token in keep and token not in specials]
            specials += fillers
        document["config"] = {
            **document["config"],
            "num_vocab_tokens": len(order),
            "default_vocab_size": len(order) + len(specials),
            "default_num_special_tokens": len(specials),
        }
        write_json(output / self.path.name, document)
        return {token: id for id, token in enumerate([*specials, *order])}


def is_tiktoken(path: Path) -> bool:
    """Whether the first line is a base64 token and a rank."""
    try:
        with path.open("rb") as stream:
            parts = stream.readline(4096).split()
        if len(parts) != 2 or not parts[1].isdigit():
            return False
        base64.b64decode(parts[0], validate=True)
    except (OSError, binascii.Error):
        return False
    return True


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise MldebugError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as exc:  # binascii.Error is one
            raise MldebugError(
                f"{path}, line {number} is no token with its rank: {line[:60].decode(errors='replace')!r}",
                "each line of a tiktoken file is a token in base64, a space and a number",
            ) from exc
    if not ranks:
        raise MldebugError(f"{path} is empty", "each line of a tiktoken file is a token in base64 and its rank")
    return ranks
