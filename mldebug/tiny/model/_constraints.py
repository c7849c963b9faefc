"""What fields must be to each other. Met after the roles have had their say, by the source's sizes and the new ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mldebug.tiny.model._images import meet_images
from mldebug.tiny.model._quirks import SECTIONS
from mldebug.tiny.model._roles import Level, is_int, is_ints, role_of
from mldebug.tiny.model._setter import Setter

_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim", "width")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")


def meet(tree: Sequence[Level], before: Mapping[str, Level], setter: Setter) -> None:
    """Meet every constraint that the source meets."""
    meet_images(tree, before, setter)
    for level in tree:
        source = before[level.path].fields if level.path in before else {}
        for rule in (_heads, _linear_heads, _head_sums, _experts, _mamba, _stages, _rope, _groups, _windows, _codecs):
            rule(level, source, setter)


def first(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if is_int(fields.get(name)) and fields[name] > 0), None)


# --- attention


def _heads(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Heads divide the width, and kv heads the heads."""
    fields = level.fields
    hidden = first(fields, _HIDDEN)
    if hidden is None:
        return
    for key, value in list(fields.items()):
        if role_of(key, value) != "heads" or not is_int(value) or value <= 0:
            continue
        width = _width_of(key, fields) or hidden
        if source.get(width, 0) % max(1, source.get(key) or 1) == 0 and fields[width] % value:
            most = max(value, min(16, source.get(key) or value))
            fit = [
                count for count in (4, 6, 8, 10, 9, 14, 2, 3, 5, 7, 1) if count <= most and not fields[width] % count
            ]
            even = [count for count in fit if fields[width] // count % 2 == 0]
            setter.set(level, key, (even or fit)[0])
    for key, value in list(fields.items()):
        if role_of(key, value) == "kv" and is_int(value) and value > 0:
            partner = first(fields, (key.replace("key_value", "attention"), *_HEADS))
            old = source.get(key), source.get(partner or "")
            if partner is None or not (is_int(old[0]) and is_int(old[1]) and old[0] and old[1] % old[0] == 0):
                continue
            grouped = old[0] < old[1]
            if fields[partner] % value or (grouped and value >= fields[partner] > 1):
                most = min(value, fields[partner] - 1 if grouped and fields[partner] > 1 else fields[partner])
                setter.set(level, key, next(count for count in range(most, 0, -1) if fields[partner] % count == 0))
            elif not grouped and value < fields[partner]:
                setter.set(level, key, fields[partner])


def _width_of(key: str, fields: Mapping[str, Any]) -> str | None:
    """The width that heads with a prefix of their own belong to, such as decoder_hidden_size."""
    prefix = key.split("_", maxsplit=1)[0]
    return first(fields, tuple(f"{prefix}_{name}" for name in ("hidden_size", "embed_dim", "dim", "hidden_dim")))


def _head_sums(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    fields = level.fields
    nope, rope = fields.get("qk_nope_head_dim"), fields.get("qk_rope_head_dim")
    if is_int(nope) and is_int(rope) and is_int(fields.get("qk_head_dim")):
        setter.set(level, "qk_head_dim", int(nope or 0) + int(rope or 0))
    if is_int(fields.get("head_dim")) and is_int(source.get("head_dim")):
        for other in (
            "qk_rope_head_dim",
            "qk_head_dim",
            "v_head_dim",
            "query_pre_attn_scalar",
            "kv_channels",
            "attention_head_dim",
        ):
            if source.get(other) == source["head_dim"]:
                setter.set(level, other, fields["head_dim"])
        if is_int(source.get("query_pre_attn_scalar")) and source["query_pre_attn_scalar"] != source["head_dim"]:
            hidden, heads = first(source, _HIDDEN), first(source, _HEADS)
            if hidden and heads and source["query_pre_attn_scalar"] == source[hidden] // source[heads]:
                setter.set(level, "query_pre_attn_scalar", fields[hidden] // fields[heads])
            else:
                ratio = source["query_pre_attn_scalar"] / source["head_dim"]
                setter.set(level, "query_pre_attn_scalar", max(1, round(fields["head_dim"] * ratio)))
    hidden, wide = source.get("hidden_size"), source.get("attention_hidden_size")
    if is_int(hidden) and is_int(wide) and hidden and wide and int(wide or 0) % int(hidden or 1) == 0:
        setter.set(level, "attention_hidden_size", int(wide or 0) // int(hidden or 1) * fields["hidden_size"])
        if (
            is_int(source.get("attention_head_dim"))
            and source["attention_head_dim"] * source["num_attention_heads"] == wide
        ):
            setter.set(level, "attention_head_dim", fields["attention_hidden_size"] // fields["num_attention_heads"])
    sizes = [source.get(name) for name in ("hidden_size", "num_attention_heads", "attention_head_size")]
    if all(map(is_int, sizes)) and sizes[1] * sizes[2] == sizes[0]:  # type: ignore[operator]
        setter.set(level, "attention_head_size", fields["hidden_size"] // fields["num_attention_heads"])


def _linear_heads(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Linear attention: as many value heads for each key head as the source has, 1 or 2."""
    fields = level.fields
    keys, values = fields.get("linear_num_key_heads"), source.get("linear_num_value_heads")
    if is_int(keys) and is_int(values) and source["linear_num_key_heads"] < source["linear_num_value_heads"]:
        setter.set(level, "linear_num_key_heads", 2)
        setter.set(level, "linear_num_value_heads", 4)


def _rope(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Sections of rotary dimensions and factors for each of them follow the size of a head."""
    fields = level.fields
    size, old_size = head_size(fields), head_size(source)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict) and setter.free(level, name):
            if level.type in SECTIONS and name == "rope_parameters" and "mrope_section" not in fields[name] and size:
                default = SECTIONS[level.type]
                part = fields[name].get("partial_rotary_factor", 1.0)
                fields[name]["mrope_section"] = (
                    spread(default, max(1, int(size * part) // 2)) if size < old_size else default
                )
                continue
            for place in _rope_dicts(fields[name]):
                _one_rope(place, size, old_size, level, source)
    for name in ("mrope_section", "rope_section", "xdrope_section"):
        if is_ints(fields.get(name)) and size and old_size:
            setter.set(
                level, name, spread(fields[name], max(len(fields[name]), round(sum(fields[name]) * size / old_size)))
            )


def head_size(fields: Mapping[str, Any]) -> float:
    for name in ("qk_rope_head_dim", "rotary_dim", "head_dim"):
        if is_int(fields.get(name)) and fields[name]:
            return float(fields[name])
    hidden, heads = first(fields, _HIDDEN), first(fields, _HEADS)
    return fields[hidden] / fields[heads] if hidden and heads else 0.0


def _rope_dicts(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield value
    for item in value.values():
        if isinstance(item, dict):
            yield from _rope_dicts(item)


def _one_rope(place: dict[str, Any], size: float, old_size: float, level: Level, source: Mapping[str, Any]) -> None:
    for name in ("mrope_section", "xdrope_section", "mrope_sections"):
        if is_ints(place.get(name)) and old_size:
            place[name] = spread(place[name], max(1, round(sum(place[name]) * size / old_size)))
    for name in ("short_factor", "long_factor", "long_mscale_", "short_mscale_"):
        if isinstance(place.get(name), list) and old_size:
            count = max(1, round(len(place[name]) * size / old_size))
            place[name] = [place[name][number * len(place[name]) // count] for number in range(count)]
    original = place.get("original_max_position_embeddings")
    now, old = level.fields.get("max_position_embeddings"), source.get("max_position_embeddings")
    if is_int(original) and is_int(now) and is_int(old) and old and now != old:
        place["original_max_position_embeddings"] = max(
            1, min(int(original or 1), math.ceil(int(original or 1) * int(now or 1) / int(old or 1)))
        )


def spread(parts: list[int], total: int) -> list[int]:
    """Numbers in the proportion of `parts` that sum to `total`, none of them 0 where it was not, if `total` allows."""
    if sum(parts) <= total:
        return parts
    least = 1 if total >= sum(part > 0 for part in parts) else 0
    made = [max(least if part else 0, part * total // sum(parts)) for part in parts]
    while sum(made) < total:
        lacking = [part * total / sum(parts) - now for part, now in zip(parts, made, strict=True)]
        made[lacking.index(max(lacking))] += 1
    while sum(made) > total:
        made[made.index(max(made))] -= 1
    return made


# --- experts, state spaces, stages


def _experts(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Fewer experts are used than there are where that was so, and groups of experts stay groups."""
    fields = level.fields
    count = next(
        (key for key, value in fields.items() if role_of(key, value) == "experts" and is_int(value) and value > 0), None
    )
    top = next(
        (key for key, value in fields.items() if role_of(key, value) == "topk" and is_int(value) and value > 0), None
    )
    if count is None:
        return
    groups = first(fields, ("n_group", "num_expert_group", "num_expert_groups"))
    if groups is not None and fields[groups] > 1:
        setter.set(level, groups, 2)
        if is_int(fields.get("topk_group")):
            setter.set(level, "topk_group", 1 if source.get("topk_group", 1) < source.get(groups, 1) else 2)
    if (
        top is not None
        and is_int(source.get(top))
        and source[top] < source.get(count, 0)
        and fields[top] >= fields[count]
    ):
        if not setter.free(level, top) and fields[top] > 1:
            setter.set(level, count, min(source[count], fields[top] + 2 - fields[top] % 2))
        else:
            setter.set(level, top, max(1, fields[count] - 1))
    elif top is not None and fields[top] > fields[count]:
        setter.set(level, top, fields[count])


def _mamba(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Heads times head size is the inner width; states and groups divide it."""
    fields = level.fields
    for state in ("mamba_d_state", "state_size", "ssm_state_size", "d_state", "mamba_state_size"):
        if is_int(fields.get(state)) and fields[state] > 16:
            setter.set(level, state, 16)
    for chunk in ("mamba_chunk_size", "chunk_size"):
        if (
            is_int(fields.get(chunk))
            and fields[chunk] > 16
            and any("mamba" in name or "ssm" in name or name == "state_size" for name in fields)
        ):
            setter.set(level, chunk, 16)
    hidden = first(fields, _HIDDEN)
    for heads, size, expand, inner in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_d_ssm"),
        ("mamba_num_heads", "mamba_head_dim", "expand", "mamba_d_ssm"),
        ("num_heads", "head_dim", "expand", "inner_size"),
        ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_d_ssm"),
    ):
        if not (hidden and is_int(fields.get(heads)) and is_int(fields.get(expand))):
            continue
        width = fields.get(inner) if is_int(fields.get(inner)) else int(fields[expand] * fields[hidden])
        if not is_int(source.get(size)):
            continue
        old = source.get(inner) if is_int(source.get(inner)) else source[expand] * source[hidden]
        if source[heads] * source[size] == old or heads.startswith("mamba"):
            setter.set(level, size, 16 if int(width or 0) % 16 == 0 else 8)
            setter.set(level, heads, max(1, int(width or 0) // fields[size]))
    for groups in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
        heads = next(
            (name for name in ("mamba_n_heads", "mamba_num_heads", "num_heads") if is_int(fields.get(name))), ""
        )
        if is_int(fields.get(groups)) and heads and fields[groups] > 1 and fields[heads] % fields[groups]:
            setter.set(level, groups, 2 if fields[heads] % 2 == 0 else 1)
    for rank in ("time_step_rank", "mamba_dt_rank"):
        if is_int(fields.get(rank)) and hidden:
            setter.set(level, rank, min(fields[rank], max(1, math.ceil(fields[hidden] / 16))))


def _stages(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """A width that doubles with each stage ends as the last stage's."""
    fields = level.fields
    depths = fields.get("depths")
    if (
        is_ints(depths)
        and is_int(fields.get("embed_dim"))
        and is_int(source.get("hidden_size"))
        and is_int(source.get("embed_dim"))
    ):
        factor = 2 ** (len(depths or []) - 1)
        if source["hidden_size"] == source["embed_dim"] * factor:
            setter.set(level, "embed_dim", 8)
            setter.set(level, "hidden_size", 8 * factor)
            if is_int(fields.get("window_size")):
                setter.set(level, "window_size", min(fields["window_size"], 2))  # the last stage has 2 by 2 patches


def _codecs(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Channels can be halved at each upsampling, and bandwidths are for as many codebooks as the source has."""
    fields = level.fields
    rates = fields.get("upsample_rates")
    if isinstance(rates, list) and level.number("upsample_initial_channel"):
        halved = 2 ** len(rates)
        if fields["upsample_initial_channel"] < halved <= (source.get("upsample_initial_channel") or 0):
            setter.set(level, "upsample_initial_channel", halved)
    bands, size, old = fields.get("target_bandwidths"), level.number("codebook_size"), source.get("codebook_size")
    if isinstance(bands, list) and size > 1 and isinstance(old, int) and old > size:
        ratio = math.ceil(math.log2(size)) / math.ceil(math.log2(old))  # a code of a smaller book has fewer bits
        setter.set(level, "target_bandwidths", [round(band * ratio, 6) for band in source["target_bandwidths"]])


def _groups(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """Groups of convolutions and norms divide the width, which is that of their prefix where there is one."""
    fields = level.fields
    for key, value in list(fields.items()):
        if (
            not ((is_int(value) and value > 1 and key.endswith("_groups")) or (key == "num_groups" and is_int(value)))
            or "key_value" in key
        ):
            continue
        hidden = _width_of(key, fields) or first(fields, _HIDDEN)
        if hidden is None:
            listed = next((fields[name] for name in ("hidden_sizes", "embed_dims") if is_ints(fields.get(name))), None)
            width = math.gcd(*listed) if listed else 0
        else:
            width = fields[hidden] if source.get(hidden, 0) % value == 0 else 0
        if width and width % value:
            setter.set(level, key, next(count for count in (16, 8, 4, 2, 1) if width % count == 0))


def _windows(level: Level, source: Mapping[str, Any], setter: Setter) -> None:
    """A window cuts something off; only that of all layers which is as large as the source's positions cuts nothing."""
    positions, before = level.number("max_position_embeddings"), source.get("max_position_embeddings")
    for key, value in list(level.fields.items()):
        old = source.get(key)
        if role_of(key, value) != "window" or not (positions and isinstance(old, int) and isinstance(before, int)):
            continue
        if old >= before and key == "sliding_window" and len(set(source.get("layer_types") or ())) < 2:
            setter.set(level, key, positions)
        elif is_int(value) and value >= positions:
            setter.set(level, key, max(1, positions // 2))
