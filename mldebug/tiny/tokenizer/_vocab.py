"""Which tokens a tiny tokenizer keeps: the same choice for every kind of vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass
class Vocabulary:
    """A vocabulary as the choice sees it, whatever file it came from.

    `ids` maps each token to its id in the source. `required` names, by reason, the tokens that must stay: its size is
    the floor. `alphabet` holds single characters that are worth keeping but have a way round (bytes), the commonest
    first. `merges` are (left, right, result) in the order of their rank; `ranked` is the order of worth of the tokens
    of kinds without merges. `unknown` is the token for words that are not there, where a kind has whole words only:
    there is nothing else that a word could be made of.
    """

    kind: str
    ids: dict[str, int]
    required: dict[str, list[str]]
    alphabet: list[str] = dataclasses.field(default_factory=list)
    merges: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    ranked: list[str] = dataclasses.field(default_factory=list)
    unknown: str | None = None

    @property
    def floor(self) -> int:
        """The number of tokens below which the vocabulary no longer does what it did."""
        return len(self.must_stay())

    def must_stay(self) -> set[str]:
        return {token for tokens in self.required.values() for token in tokens}

    def why(self) -> str:
        """The floor in words: how many tokens stay for which reason, each token counted once."""
        seen: set[str] = set()
        parts = []
        for reason, tokens in self.required.items():
            fresh = set(tokens) - seen
            seen |= fresh
            if fresh:
                one = reason.replace("tokens", "token").replace("characters", "character")
                parts.append(f"{len(fresh):,} {reason if len(fresh) > 1 else one}")
        return ", ".join(parts)


def choose(vocabulary: Vocabulary, size: int) -> list[str]:
    """The `size` tokens to keep, in the order of their old ids (fewer where the source has fewer).

    What must stay comes first, then the alphabet, then merges or pieces by rank. Half of what is left goes to an
    alphabet that may be left out, so that a small vocabulary has words as well. A merge is taken only if its parts
    are kept, so every token that is kept can be reached.
    """
    kept = vocabulary.must_stay() & vocabulary.ids.keys()
    room = max(size - len(kept), 0)
    half = [token for token in vocabulary.alphabet if token not in kept][: (room + 1) // 2]
    kept.update(half[:room])
    _take_merges(vocabulary.merges, kept, size)
    by_id = sorted(vocabulary.ids, key=vocabulary.ids.__getitem__)
    for tokens in (vocabulary.ranked, vocabulary.alphabet, by_id):
        _fill(tokens, kept, size)
    return [token for token in by_id if token in kept]


def _take_merges(merges: Sequence[tuple[str, str, str]], kept: set[str], size: int) -> None:
    """Add results in the order of rank; again where parts are made by later merges, until nothing changes."""
    before = -1
    while before != len(kept) and len(kept) < size:
        before = len(kept)
        for left, right, result in merges:
            if result not in kept and left in kept and right in kept:
                kept.add(result)
                if len(kept) >= size:
                    return


def _fill(tokens: Iterable[str], kept: set[str], size: int) -> None:
    for token in tokens:
        if len(kept) >= size:
            return
        kept.add(token)


def common_first(characters: Iterable[str], tokens: Iterable[str]) -> list[str]:
    """Single-character tokens by the number of tokens that have the character, ASCII letters and digits first."""
    counts: dict[str, int] = {}
    for token in tokens:
        for character in set(token):
            counts[character] = counts.get(character, 0) + 1

    def worth(token: str) -> tuple[bool, int]:
        bare = token.removeprefix("##")[:1]
        return not (bare.isascii() and bare.isalnum()), -counts.get(bare, 0)

    return sorted(characters, key=worth)
