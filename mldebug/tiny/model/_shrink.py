"""A config at tiny sizes: fields change by their role, then constraints between them are met, then quirks."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny.model._constraints import meet
from mldebug.tiny.model._ids import map_ids
from mldebug.tiny.model._layers import cut_layers
from mldebug.tiny.model._quirks import SET
from mldebug.tiny.model._roles import OPAQUE, Level, levels, role_of
from mldebug.tiny.model._setter import Setter
from mldebug.tiny.model._widths import by_layer, head_dims, heads, heads_of_kv, layer_heads, widths

RULES_VERSION = 1
VOCAB = 256
WINDOW = 16


@dataclass(frozen=True)
class Shrunk:
    """A tiny config, and what became of the big one."""

    config: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]  # dotted name -> (old, new)
    layer_map: list[int]  # the layers of the main stack that stayed, by their old numbers
    notes: list[str] = field(default_factory=list)
    id_map: dict[int, int] = field(default_factory=dict)  # token ids that the config names: old -> new
    layer_maps: dict[str, list[int]] = field(
        default_factory=dict
    )  # the same as layer_map for each field that counts layers
    pinned: frozenset[str] = frozenset()  # what was set by hand


def shrink(
    config: Mapping[str, Any],
    *,
    layers: int | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    id_map: Mapping[int, int] | None = None,
) -> Shrunk:
    """Shrink a complete config (each field written out, as `resolve` gives it) without changing its architecture.

    `layers` is the number of layers of each stack, `hidden` the largest hidden size, `vocab` the largest vocabulary.
    `overrides` sets fields by dotted names, nested configs field by field; the rest follows them. With `id_map` the
    tokenizer was shrunk: ids go through it and the vocabulary is as large as it.

        shrink(resolve("llama").config, layers=2).config["num_key_value_heads"]
    """
    source = copy.deepcopy(dict(config))
    tiny = copy.deepcopy(source)
    asked = _with_labels(source, dict(_flat(overrides or {})))
    pins = _check(source, asked)
    notes: list[str] = []
    before = {level.path: level for level in levels(source)}
    tree = list(levels(tiny))
    maps: dict[str, list[int]] = {}
    for level in tree:
        for key, kept in cut_layers(level, layers, asked, notes).items():
            maps[level.at(key)] = kept
    for path, value in asked.items():
        set_path(tiny, path, copy.deepcopy(value))
    tree = list(levels(tiny))
    setter = Setter(tiny, pins)
    _unquantized(tree, setter, notes)
    for level in tree:
        heads_of_kv(level, before[level.path].fields if level.path in before else {}, setter)
    widths(tree, before, setter, hidden, notes)
    for level in tree:
        heads(level, before[level.path].fields if level.path in before else {}, setter)
        head_dims(level, before[level.path].fields if level.path in before else {}, setter)
        _sizes(level, setter)
    layer_heads(tree, setter)
    for level in by_layer(tree):
        _sizes(level, setter)
    found_ids = map_ids(tree, setter, vocab or VOCAB, id_map, notes)
    meet(tree, before, setter)
    for level in tree:
        for name, value in SET.get(level.type, {}).items():
            if name.startswith("+"):
                setter.set(level, name[1:], value)
                continue
            for place in _named(level, name, tree):
                setter.path(place, _value(value, place, level, tiny, source))
    main = next(
        (kept for path, kept in maps.items() if "vision" not in path and "audio" not in path),
        next(iter(maps.values()), []),
    )
    return Shrunk(tiny, changes_of(source, tiny), main, notes, found_ids, maps, pins)


def _value(value: Any, path: str, level: Level, tiny: dict[str, Any], source: dict[str, Any]) -> Any:
    """A quirk's value: "keep" is what the source has, and "=4*name" four times another one's."""
    if value == "keep":
        return get_path(source, path)
    if isinstance(value, str) and value.startswith("="):
        times, _star, name = value[1:].rpartition("*")
        return int(times or 1) * get_path(tiny, level.at(name))
    return value


def _named(level: Level, name: str, tree: list[Level]) -> list[str]:
    """The fields that a quirk is about: "**.name" is the field of that name in any config inside the level."""
    if not name.startswith("**."):
        return [level.at(name)]
    key = name[3:]
    inside = f"{level.path}." if level.path else ""
    return [other.at(key) for other in tree if other.path.startswith(inside) and key in other.fields]


# How weights are stored, which new weights are not: with it a loader asks for tensors and packages that are not there.
_QUANTIZED = ("quantization_config", "compression_config", "quantization")


def _unquantized(tree: list[Level], setter: Setter, notes: list[str]) -> None:
    for level in tree:
        for key in _QUANTIZED:
            stored = level.fields.get(key)
            if isinstance(stored, dict) and stored and not setter.has_pin(level, key):
                del level.fields[key]
                method = stored.get("quant_method") or stored.get("format") or f"{stored.get('bits')} bits"
                notes.append(f"{level.at(key)} ({method}) is left out: the weights are new and not quantized")


# --- what is set by hand


def _check(config: dict[str, Any], asked: Mapping[str, Any]) -> frozenset[str]:
    """Refuse names that the config does not have."""
    for path, value in asked.items():
        *parents, key = path.split(".")
        place: Any = config
        for count, name in enumerate(parents):
            if not isinstance(place.get(name), dict):
                raise _unknown(config, path, ".".join(parents[: count + 1]), place, name)
            place = place[name]
        if key not in place:
            raise _unknown(config, path, path, place, key)
        if isinstance(place[key], dict) and place[key] and not isinstance(value, dict) and value is not None:
            inner = f"{path}.{next(iter(place[key]))}"
            raise UsageError(
                f"{path} holds fields of its own, and was given {value!r}", f"set one of them, such as {inner}"
            )
    return frozenset(asked)


def _flat(overrides: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Overrides by dotted name; a dict for a nested config sets the fields that it has, and no others."""
    found: list[tuple[str, Any]] = []
    for name, value in overrides.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and name not in OPAQUE:
            found += _flat(value, here)
        else:
            found.append((here, value))
    return found


def _with_labels(config: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The number of labels is no field of its own: it is how many names there are."""
    found: dict[str, Any] = {}
    places = {level.path: level.fields for level in levels(config)}
    for path, value in asked.items():
        parent, _dot, key = path.rpartition(".")
        fields = places.get(parent, {})
        if key != "num_labels" or key in fields or "id2label" not in fields:
            found[path] = value
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{path} is {value!r}", "give a whole number of 1 or more")
        names = list((fields["id2label"] or {}).values())[:value]
        names += [f"LABEL_{number}" for number in range(len(names), value)]
        start = f"{parent}." if parent else ""
        found[f"{start}id2label"] = {str(number): name for number, name in enumerate(names)}
        found[f"{start}label2id"] = {name: number for number, name in enumerate(names)}
    return found


def _unknown(config: dict[str, Any], asked: str, wrong: str, place: Any, key: str) -> UsageError:
    """The nearest name: at the same place first, then anywhere."""
    everywhere = [level.at(name) for level in levels(config) for name in level.fields]
    here = difflib.get_close_matches(key, [str(name) for name in place], 1, 0.75) if isinstance(place, dict) else []
    prefix = wrong.rpartition(".")[0]
    if here:
        near = f"{prefix}.{here[0]}" if prefix else here[0]
    else:
        same = [path for path in everywhere if path.rpartition(".")[2] == asked.rpartition(".")[2]]
        near = next(iter(same or difflib.get_close_matches(asked, everywhere, 1, 0.4)), "")
    if wrong != asked and near == wrong.rpartition(".")[0]:
        near = ""
    return UsageError(
        f"the config has no field {asked}", f"did you mean {near}?" if near else "see the config.json of the source"
    )


# --- sizes that stand by themselves


def _sizes(level: Level, setter: Setter) -> None:
    for key, value in list(level.fields.items()):
        rule = _SIZES.get(role_of(key, value) or "")
        if rule is not None:
            new = [rule(item, level) for item in value] if isinstance(value, list) else rule(value, level)
            if new != value:
                setter.set(level, key, new)
        elif role_of(key, value) == "stages" and _stages(value, level) != value:
            setter.set(level, key, _stages(value, level))


def _ratios(level: Level) -> int:
    return max(
        (len(value) for key, value in level.fields.items() if key.endswith("_ratios") and isinstance(value, list)),
        default=0,
    )


def _most(limit: int) -> Callable[[int, Level], int]:
    return lambda value, level: min(value, limit) if value > 0 else value


def _stages(value: Any, level: Level) -> Any:
    """One layer for each stage; two in the first where windows shift in every second layer."""
    if not isinstance(value, list):
        return value
    first = 2 if any(name.startswith("window_size") for name in level.fields) else 1
    return [min(item, first if number == 0 else 1) for number, item in enumerate(value)]


_SIZES: dict[str, Callable[[int, Level], int]] = {
    "window": _most(WINDOW),
    "experts": _most(4),
    "topk": _most(2),
    "queries": _most(8),
    "grid": lambda value, level: min(value, 16 if value > 64 else 8),
    "codebooks": _most(4),
    "filters": lambda value, level: min(value, 1 if _ratios(level) > 5 else 2),  # doubled at each stage
}


# --- changes


def changes_of(source: Mapping[str, Any], tiny: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of each field that differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, new in tiny.items():
        here = f"{path}.{key}" if path else str(key)
        old = source.get(key)
        if isinstance(new, dict) and isinstance(old, dict) and key not in OPAQUE:
            found |= changes_of(old, new, here)
        elif old != new:
            found[here] = (old, new)
    for key, old in source.items():
        if key not in tiny and old is not None:
            found[f"{path}.{key}" if path else str(key)] = (old, None)
    return found


def get_path(config: Mapping[str, Any], path: str) -> Any:
    place: Any = config
    for name in path.split("."):
        if not isinstance(place, Mapping) or name not in place:
            raise MldebugError(f"the config has no field {path}")
        place = place[name]
    return place


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    place = config
    for name in parents:
        place = place[name]
    place[key] = value
