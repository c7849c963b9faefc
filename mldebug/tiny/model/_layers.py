"""Which layers of a stack stay: at least one of each kind, by one map for counts, per-layer lists and indexes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mldebug.tiny.model._roles import Level, is_int, is_ints, role_of

MOST = 8  # layers of a stack that has more kinds than this

# Lists of indexes into the layers of the same config.
_INDEXES = re.compile(
    r"(_indexes|_indices|_idxs|_layer_ids|_layers|_layer_idx|layer_indexes|global_attention_blocks|window_block_indices|"
    r"intermediate_hidden_state_indices|target_layers)$"
)
_ONE_BASED = frozenset(("out_indices",))
# The first n, or the last n, layers are of another kind.
_FIRST = frozenset(
    ("first_k_dense_replace", "max_window_layers", "num_dense_layers", "prefix_dense_layers", "num_global_layers_first")
)
_LAST = frozenset(("num_kv_shared_layers",))
# Kinds that follow from a layer's number. They hold only for the first layers of a stack.
_PERIODS = (
    ("decoder_sparse_step", None), ("encoder_sparse_step", None), ("interleave_moe_layer_step", None),
    ("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"),
    ("cross_attention_frequency", None), ("global_attn_every_n_layers", None), ("layer_group_size", None),
    ("moe_layer_interval", None), ("no_rope_layer_interval", None),
    ("full_attention_interval", None), ("n_layers_per_attn_res_block", None),
)  # fmt: skip


def cut_layers(level: Level, wanted: int | None, asked: Mapping[str, Any], notes: list[str]) -> dict[str, list[int]]:
    """Cut every stack of one config; the indexes that stay, by the name of the field that counts them."""
    fields = level.fields
    counts = {key: value for key, value in fields.items() if role_of(key, value) == "layers" and value > 0}
    if (
        "num_hidden_layers" not in counts
        and "layers_block_type" in fields
        and isinstance(fields["layers_block_type"], list)
    ):
        counts["layers_block_type"] = len(fields["layers_block_type"])
    maps: dict[str, list[int]] = {}
    claimed: set[str] = set()
    stages = any(role_of(key, value) == "stages" for key, value in fields.items())
    for key in sorted(counts, key=lambda name: name != "num_hidden_layers"):
        size = counts[key]
        if stages and key in ("num_layers", "num_hidden_layers"):
            continue  # the number of stages, not of layers
        lists = [name for name, value in fields.items() if name not in claimed and _is_per_layer(name, value, size)]
        indexes = [
            name for name, value in fields.items()
            if name not in claimed and name not in lists and _is_indexes(level, name, value, size)
        ]  # fmt: skip
        if len(counts) > 1 and not (lists or key == "num_hidden_layers"):
            indexes = [] if "num_hidden_layers" in counts else indexes
        claimed.update(lists, indexes)
        first = [name for name in _FIRST if is_int(fields.get(name)) and fields[name] > 0] if key in _MAIN else []
        last = [name for name in _LAST if is_int(fields.get(name)) and fields[name] > 0] if key in _MAIN else []
        per_layer = fields.get("per_layer_config") if key in _MAIN else None
        count = asked.get(level.at(key))
        kept = _choose(level, size, lists, indexes, first, last, per_layer, count if is_int(count) else wanted, notes)
        maps[key] = kept
        _apply(level, key, size, kept, lists, indexes, first, last)
    return maps


_MAIN = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers_block_type", "num_decoder_layers")


def _is_per_layer(name: str, value: Any, size: int) -> bool:
    if not isinstance(value, list) or len(value) != size or size < 2:
        return False
    if _is_index_name(name) and is_ints(value) and not set(value) <= {0, 1}:
        return False
    named = re.search(r"(_types?|_pattern|_per_layer|layers|layer_\w+|_list)$", name) is not None
    return named or size >= 8


def _is_index_name(name: str) -> bool:
    return _INDEXES.search(name) is not None or name in _ONE_BASED


def _is_indexes(level: Level, name: str, value: Any, size: int) -> bool:
    if not _is_index_name(name) or not is_ints(value):
        return False
    if name in _ONE_BASED:
        named = level.fields.get("stage_names")
        staged = any(role_of(key, item) == "stages" for key, item in level.fields.items())
        return (len(named) == size + 1 if named else not staged) and all(0 < item <= size for item in value)
    return all(0 <= item <= size for item in value)


def _choose(
    level: Level, size: int, lists: list[str], indexes: list[str], first: list[str], last: list[str], per_layer: Any,
    wanted: int | None, notes: list[str],
) -> list[int]:  # fmt: skip
    fields = level.fields
    named = {int(key) for key in per_layer} if isinstance(per_layer, dict) else set()

    values = len({str(item) for item in per_layer.values()}) <= 3 if isinstance(per_layer, dict) else True

    def kind(layer: int) -> tuple[Any, ...]:
        marks: list[Any] = [str(fields[name][layer]) for name in lists]
        marks += [
            layer + (1 if name in _ONE_BASED else 0)
            if name in _EACH and _at(name, layer) in fields[name]
            else _at(name, layer) in fields[name]
            for name in indexes
        ]
        marks += [layer < fields[name] for name in first]
        marks += [layer >= size - fields[name] for name in last]
        if layer in named:
            own = per_layer[_key_of(per_layer, layer)]
            marks.append(str(own) if values else sorted(own))  # where they differ everywhere their names must do
        else:
            marks.append("")
        return tuple(map(str, marks))

    periods = [] if any("types" in name for name in lists) else [
        (fields[name], fields.get(offset, 0) if offset else 0)
        for name, offset in _PERIODS if is_int(fields.get(name)) and fields[name] > 1
    ]  # fmt: skip
    if periods:
        least = min(size, max(max(period, offset + 1) for period, offset in periods))
        kinds = {kind(layer) for layer in range(size)}
        while least < size and {kind(layer) for layer in range(least)} != kinds and least < MOST:
            least += 1
        return list(range(min(size, wanted if wanted is not None else max(2, least))))
    seen: dict[tuple[Any, ...], int] = {}
    for layer in range(size):
        seen.setdefault(kind(layer), layer)
    kept = sorted(seen.values())
    if len(kept) > MOST:
        notes.append(f"{level.path or 'the model'} has {len(kept)} kinds of layers: {MOST} of them are kept")
        kept = kept[:: max(1, len(kept) // MOST)][:MOST]
    target = max(2, len(kept)) if wanted is None else wanted
    if wanted is not None and wanted < len(kept):
        notes.append(f"{level.path or 'the model'} has {len(kept)} kinds of layers, and {wanted} layers were asked for")
        kept = kept[:wanted]
    spare = [layer for layer in range(size) if layer not in kept]
    while len(kept) < min(target, size):
        kept.append(spare.pop(0))
    return sorted(kept)


# Each of these names layers that something else takes one by one: all of them stay.
_EACH = frozenset((
    "out_indices", "intermediate_hidden_state_indices", "intermediate_layers_indices", "deepstack_visual_indexes",
    "backbone_out_indices", "target_layer_ids", "spatial_target_layers", "fusion_layers", "segmentation_indices",
))  # fmt: skip


def _at(name: str, layer: int) -> int:
    return layer + 1 if name in _ONE_BASED else layer


def _key_of(per_layer: dict[str, Any], layer: int) -> str:
    return next(key for key in per_layer if int(key) == layer)


def _apply(
    level: Level,
    key: str,
    size: int,
    kept: list[int],
    lists: list[str],
    indexes: list[str],
    first: list[str],
    last: list[str],
) -> None:
    fields = level.fields
    if is_int(fields.get(key)):
        fields[key] = len(kept)
    for name in lists:
        fields[name] = [fields[name][layer] for layer in kept]
    for name in indexes:
        shift = 1 if name in _ONE_BASED else 0
        fields[name] = [kept.index(item - shift) + shift for item in fields[name] if item - shift in kept]
    for name in first:
        fields[name] = sum(layer < fields[name] for layer in kept)
    for name in last:
        fields[name] = sum(layer >= size - fields[name] for layer in kept)
    per_layer = fields.get("per_layer_config")
    if isinstance(per_layer, dict) and key in _MAIN:
        fields["per_layer_config"] = {
            str(kept.index(int(name))): value for name, value in per_layer.items() if int(name) in kept
        }
    if "out_indices" in indexes and isinstance(fields.get("stage_names"), list):
        fields["stage_names"] = ["stem", *(f"stage{number + 1}" for number in range(len(kept)))]
        fields["out_features"] = [f"stage{number}" for number in fields["out_indices"]]
