"""SentencePiece model files: read and written as protobuf fields, so that what is not understood stays as it is."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer._json import BYTES, SPACE
from mldebug.tiny.tokenizer._vocab import Vocabulary, common_first

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Numbers of fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER, _SELF_TEST, _DENORMALIZER = 1, 2, 3, 4, 5
_MODEL_TYPE, _VOCAB_SIZE, _BYTE_FALLBACK = 3, 4, 35
_IDS = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}  # trainer_spec: the ids of the special pieces


class Field(NamedTuple):
    """One field of a message: its number, its wire type, and its value (bytes, or an int for varints)."""

    number: int
    wire: int
    value: bytes | int


class Piece(NamedTuple):
    text: str
    score: float
    type: int
    fields: list[Field]


class SpmForm:
    """A SentencePiece model: unigram, BPE, word or char."""

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self.path = path
        try:
            self.fields = list(fields(path.read_bytes() if data is None else data))
            self.pieces = [_piece(field) for field in self.fields if field.number == _PIECES]
            self.trainer = [list(fields(_bytes(field))) for field in self.fields if field.number == _TRAINER]
        except OSError as exc:
            raise MldebugError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
        except (ValueError, IndexError, struct.error, UnicodeDecodeError) as exc:
            raise _no_model(path) from exc
        if not self.pieces:
            raise _no_model(path)
        self.numbers: dict[int, int] = {}
        for field in self.trainer[0] if self.trainer else []:
            if isinstance(field.value, int):
                self.numbers[field.number] = field.value
        self._ids: dict[str, int] = {}
        for index, piece in enumerate(self.pieces):
            self._ids.setdefault(piece.text, index)

    def ids(self) -> dict[str, int]:
        return self._ids

    def added(self) -> list[str]:
        return [piece.text for piece in self.pieces if piece.type in (CONTROL, USER_DEFINED)]

    def control(self) -> list[str]:
        """The pieces that are never found in a text."""
        return [piece.text for piece in self.pieces if piece.type == CONTROL]

    def named(self) -> dict[str, str]:
        """Role -> token, of the trainer's ids (-1 says that there is none)."""
        defaults = {40: 0, 41: 1, 42: 2}
        found = {}
        for number, role in _IDS.items():
            id = _signed(self.numbers.get(number, defaults.get(number, -1)))
            if 0 <= id < len(self.pieces) and self.pieces[id].type in (UNKNOWN, CONTROL, USER_DEFINED):
                found[f"{role}_token"] = self.pieces[id].text
        return found

    def used(self) -> list[str]:
        """Tokens that programs know by name: those with a role, and those that are not merely numbered."""
        numbered = re.compile(r".*\d+\W*")
        return [*self.named().values(), *(token for token in self.added() if not numbered.fullmatch(token))]

    def vocabulary(self, specials: Collection[str], dropped: Collection[str]) -> Vocabulary:
        ids = {token: id for token, id in self._ids.items() if token not in dropped}
        pieces = [piece for piece in self.pieces if piece.text in ids]
        unknown = [piece.text for piece in pieces if piece.type == UNKNOWN]
        required = {
            "added tokens": [token for token in self.added() if token in ids],
            "special tokens": [*unknown, *(token for token in (*self.named().values(), *specials) if token in ids)],
        }
        learnt = [piece for piece in pieces if piece.type in (NORMAL, UNUSED)]
        singles = [piece.text for piece in learnt if len(piece.text) == 1]
        alphabet: list[str] = []
        has_bytes = self.has_bytes()
        if has_bytes:
            required["bytes"] = BYTES
            required["characters that the pipeline inserts"] = [token for token in singles if token == SPACE]
            alphabet = common_first(singles, ids)
        elif self.model_type() != "word":
            required["characters"] = singles
        ranked = [piece.text for piece in sorted(learnt, key=lambda piece: -piece.score)]
        kind = {"unigram": "Unigram", "bpe": "BPE"}.get(self.model_type(), self.model_type())
        merges = list(_merges(ranked, ids)) if kind == "BPE" else []
        kind = f"SentencePiece {'byte-fallback ' if has_bytes else ''}{kind}"
        whole = unknown[0] if unknown and not has_bytes and self.model_type() == "word" else None
        return Vocabulary(kind, ids, required, alphabet, merges, [] if merges else ranked, whole)

    def model_type(self) -> str:
        return {2: "bpe", 3: "word", 4: "char"}.get(self.numbers.get(_MODEL_TYPE, 1), "unigram")

    def has_bytes(self) -> bool:
        """Whether unknown characters become the 256 byte pieces."""
        return bool(self.numbers.get(_BYTE_FALLBACK)) and set(BYTES) <= self._ids.keys()

    def normalization(self) -> str | None:
        """The name of the rules that text is normalized with."""
        for field in self.fields:
            if field.number == _NORMALIZER:
                for inner in fields(_bytes(field)):
                    if inner.number == 1:
                        return _bytes(inner).decode("utf-8", "replace") or None
        return None

    def with_model(self, data: bytes) -> SpmForm:
        """A model that was trained anew, with the normalizer of this one."""
        trained = SpmForm(self.path, data)
        own = [field for field in self.fields if field.number in (_NORMALIZER, _DENORMALIZER)]
        rest = [field for field in trained.fields if field.number not in (_NORMALIZER, _DENORMALIZER)]
        trained.fields = [*rest, *own]
        return trained

    def write(self, kept: Collection[str], output: Path, ids: Mapping[str, int] | None) -> dict[str, int]:
        keep = set(kept)
        order = [i for i, piece in enumerate(self.pieces) if piece.text in keep or piece.type == UNKNOWN]
        new = {old: index for index, old in enumerate(order)}
        chunks = [_encoded(Field(_PIECES, 2, b"".join(map(_encoded, self.pieces[old].fields)))) for old in order]
        for field in self.fields:
            if field.number == _TRAINER:
                trainer = [self._renumbered(inner, new) for inner in fields(_bytes(field))]
                chunks.append(_encoded(Field(_TRAINER, 2, b"".join(map(_encoded, trainer)))))
            elif field.number not in (_PIECES, _SELF_TEST):  # the self test has pieces that may be gone
                chunks.append(_encoded(field))
        (output / self.path.name).write_bytes(b"".join(chunks))
        return {self.pieces[old].text: index for old, index in new.items()}

    def _renumbered(self, field: Field, new: Mapping[int, int]) -> Field:
        if field.number == _VOCAB_SIZE:
            return field._replace(value=len(new))
        if field.number in _IDS and isinstance(field.value, int) and _signed(field.value) >= 0:
            return field._replace(value=new.get(field.value, field.value))
        return field


def is_spm(path: Path) -> bool:
    """Whether the file begins as a SentencePiece model does: with its first piece."""
    try:
        with path.open("rb") as stream:
            return stream.read(1) == b"\x0a"
    except OSError:
        return False


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a protobuf message, in order. A message that is cut off is a ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield Field(number, wire, value)
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or at + length > len(data):
            raise ValueError("cut off")
        yield Field(number, wire, data[at : at + length])
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number that is too long")


def _encoded(field: Field) -> bytes:
    key = _encoded_varint(field.number << 3 | field.wire)
    if isinstance(field.value, int):
        return key + _encoded_varint(field.value)
    return key + (_encoded_varint(len(field.value)) if field.wire == 2 else b"") + field.value


def _encoded_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _signed(value: int) -> int:
    """Negative numbers are written as 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _bytes(field: Field) -> bytes:
    if isinstance(field.value, int):
        raise ValueError("a number where a message should be")
    return field.value


def _piece(field: Field) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    inner = list(fields(_bytes(field)))
    for part in inner:
        if part.number == 1:
            text = _bytes(part).decode("utf-8")
        elif part.number == 2:
            (score,) = struct.unpack("<f", _bytes(part))
        elif part.number == 3 and isinstance(part.value, int):
            kind = part.value
    return Piece(text, score, kind, inner)


def _merges(ranked: list[str], ids: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Every way to make a piece of two others, the best pieces first: a BPE model merges whatever gives a piece."""
    for piece in ranked:
        for cut in range(1, len(piece)):
            if piece[:cut] in ids and piece[cut:] in ids:
                yield piece[:cut], piece[cut:], piece


def _no_model(path: Path) -> MldebugError:
    return MldebugError(
        f"{path} is no SentencePiece model: it cannot be read as one",
        "the file may be cut off, or be a pointer of Git LFS: download it again",
    )
