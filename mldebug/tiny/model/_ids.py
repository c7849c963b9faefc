"""Vocabularies and the ids in a config: all below the vocabulary, distinct ones still distinct, in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mldebug.tiny.model._roles import Level, is_int, is_vocab, role_of
from mldebug.tiny.model._setter import Setter

TEXT = (
    "text_config",
    "language_config",
    "llm_config",
    "text_encoder",
    "decoder",
    "decoder_config",
    "thinker_config",
    "backbone_config",
)


def map_ids(
    tree: Sequence[Level], setter: Setter, limit: int, id_map: Mapping[int, int] | None, notes: list[str]
) -> dict[int, int]:
    """Shrink each vocabulary to `limit` at most and map the ids of its level and of those around it."""
    text = _text_vocab(tree)
    size = len(id_map) if id_map is not None else None
    old_sizes = {level.at(key): value for level in tree for key, value in level.fields.items() if is_vocab(key, value)}
    new_sizes = _vocabularies(old_sizes, text, limit, size, setter)
    found: dict[int, int] = {}
    spaces: dict[str, list[tuple[Level, str]]] = {}
    for level in tree:
        for key, value in level.fields.items():
            if role_of(key, value) == "id" or (key in NESTED and isinstance(value, list)):
                space = _space(level, key, tree, old_sizes, text)
                if old_sizes.get(space) == old_sizes.get(text) and space not in setter.pins:
                    space = text  # a config may name the vocabulary of its text once more
                spaces.setdefault(space, []).append((level, key))
    for path, value in new_sizes.items():
        setter.path(path, value)
    for space, places in spaces.items():
        top = new_sizes.get(space)
        if top is None:
            continue
        if space in setter.pins:
            top = next(level.fields[key] for level in tree for key in level.fields if level.at(key) == space)
        used = sorted({item for level, key in places for item in ids_in(key, level.fields[key]) if item >= 0})
        mapping = _assign(used, int(top), id_map if space == text else None)
        for level, key in places:
            setter.set(level, key, with_ids(key, level.fields[key], mapping))
        if space == text or not found:
            found = mapping
    return found


def _text_vocab(tree: Sequence[Level]) -> str:
    """The dotted name of the vocabulary that a tokenizer of this model would have."""
    by_path = {level.path: level for level in tree}
    top = tree[0]
    for key in ("vocab_size", "n_vocab", "text_vocab_size", "src_vocab_size"):
        if top.number(key):
            return key
    for name in TEXT:
        for path in (name, f"{name}.text_config"):
            if path in by_path and by_path[path].number("vocab_size"):
                return f"{path}.vocab_size"
    return next((level.at("vocab_size") for level in tree if level.number("vocab_size")), "")


def _vocabularies(old: Mapping[str, int], text: str, limit: int, size: int | None, setter: Setter) -> dict[str, int]:
    """Equal sizes stay equal, smaller ones smaller: the largest is `limit`, each smaller one a step less."""
    large = sorted({value for value in old.values() if value > limit})
    step = 8 if limit >= 8 * (len(large) + 2) else 1
    new = {value: max(1, limit - step * (len(large) - 1 - number)) for number, value in enumerate(large)}
    made = {path: new.get(value, value) for path, value in old.items()}
    books = {value for path, value in old.items() if _is_codebook(path)}
    for path, value in old.items():
        if value in books and path != text:
            made[path] = min(value, 64)  # many must be powers of two
    if size is not None and text in old:
        by_size = {value: size for path, value in old.items() if value == old[text]}
        made = {path: by_size.get(value, made[path]) for path, value in old.items()}
    pinned = {old[path]: path for path in old if path in setter.pins}
    return {path: value for path, value in made.items() if old[path] not in pinned or path in setter.pins}


def _is_codebook(path: str) -> bool:
    return path.rpartition(".")[2] in ("codebook_size", "num_codes", "num_embeddings", "num_embeds", "n_embed_codes")


def _space(level: Level, key: str, tree: Sequence[Level], sizes: Mapping[str, int], text: str) -> str:
    """The vocabulary that a field's ids are of: that of its own prefix, its level's, of a level around, the text's."""
    prefix = key.split("_", maxsplit=1)[0]
    for name, value in level.fields.items():
        if (
            is_vocab(name, value)
            and name != "vocab_size"
            and name.split("_")[0] == prefix
            and prefix not in ("image", "num")
        ):
            return level.at(name)
    place: Level | None = level
    while place is not None:
        if place.at("vocab_size") in sizes:
            return place.at("vocab_size")
        place = place.parent
    inside = [path for path in sizes if level.path == "" or path.startswith(level.path + ".")]
    if text in inside or not inside:
        return text
    return next((path for path in inside if path.endswith("vocab_size")), text)


# Lists of lists of ids, which settings for generation have that are kept in the config.
PAIRS = "forced_decoder_ids"  # of a place and an id
NESTED = ("bad_words_ids", "force_words_ids", PAIRS)


def ids_in(key: str, value: Any) -> list[int]:
    """All ids that a field holds, in lists of any depth."""
    if key == PAIRS and isinstance(value, list):
        return [pair[1] for pair in value if isinstance(pair, list) and len(pair) == 2 and is_int(pair[1])]
    if isinstance(value, list):
        return [found for item in value for found in ids_in(key, item)]
    return [value] if is_int(value) else []


def with_ids(key: str, value: Any, mapping: Mapping[int, int]) -> Any:
    """The field with its ids through `mapping`."""
    if key == PAIRS and isinstance(value, list):
        return [[pair[0], mapping.get(pair[1], pair[1])] for pair in value]
    if isinstance(value, list):
        return [with_ids("", item, mapping) for item in value]
    return mapping.get(value, value) if is_int(value) else value


def _assign(used: list[int], size: int, id_map: Mapping[int, int] | None) -> dict[int, int]:
    """Old id -> new id below `size`, in the same order. Small ids stay what they are where all can."""
    if id_map is not None:
        mapping = {old: id_map[old] for old in used if old in id_map and id_map[old] < size}
        taken = set(mapping.values())
        for old in used:
            if old not in mapping:  # an id that the tokenizer does not have
                mapping[old] = next((new for new in range(size - 1, -1, -1) if new not in taken), size - 1)
                taken.add(mapping[old])
        return mapping
    small = [old for old in used if old < size]
    big = [old for old in used if old >= size]
    if not big:
        return {}
    fits = [old for old in small if old < size - len(big)]
    moved = [old for old in used if old not in fits]
    if len(moved) + len(fits) > size:
        return {old: number % size for number, old in enumerate(used)}
    if fits and len(fits) + len(moved) <= size and fits[-1] >= size - len(moved):
        return {old: number for number, old in enumerate(used)}
    return {old: size - len(moved) + number for number, old in enumerate(moved)}
