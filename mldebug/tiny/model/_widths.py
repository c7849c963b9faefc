"""Widths, heads and head sizes: one scale for all widths of a model, so that equal ones stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mldebug.tiny.model._roles import Level, is_int, role_of
from mldebug.tiny.model._setter import Setter

HIDDEN = 32  # the largest hidden size, where nothing is asked for
UNIT = 16  # hidden sizes are multiples of it: 4 heads of an even size fit, in two dimensions too
STEP = 8  # other widths


MANY = 7  # distinct widths that all stay distinct; of more, close ones become equal, or the largest would be large


def widths(
    tree: Sequence[Level], before: Mapping[str, Level], setter: Setter, asked: int | None, notes: list[str]
) -> None:
    """Scale every width. Values are mapped, not fields: what was equal anywhere in the model stays equal."""
    largest = asked or HIDDEN
    hidden: set[int] = set()  # heads divide these
    others: set[int] = set()
    top = 0
    staged = False
    by_hand: dict[int, int] = {}  # hidden sizes of the source -> what they were set to
    fields = []
    for level in [*tree, *by_layer(tree)]:
        old = before[level.path].fields if level.path in before else {}
        for key, value in level.fields.items():
            role = role_of(key, value)
            if not setter.free(level, key) and is_int(value) and is_int(old.get(key)):
                if role == "hidden":
                    by_hand[old[key]] = value
                value = old[key]  # sizes beside it are scaled as the source has them
            fields.append((level, key, value, role))
    for level, _key, value, role in fields:
        items = value if isinstance(value, list) else [value]
        if role == "hidden":
            (hidden if not isinstance(value, list) or _has_heads(level, len(value)) else others).update(items)
            top = max(top, *items)
            staged = staged or (isinstance(value, list) and _is_staged(level))
        elif role == "width":
            others.update(items)
    blocks(tree, setter)
    if not hidden | others:
        return
    limit, unit = 2 * largest if staged else largest, _unit_of(tree, setter, largest)
    mapping = width_map(hidden, others, limit, top, unit, asked is not None and not staged)
    for old_size, size in by_hand.items():
        mapping = {key: size if key == old_size else value for key, value in {old_size: size, **mapping}.items()}
    alike = len(mapping) - len(set(mapping.values()))
    if alike:
        notes.append(
            f"{len(mapping)} different widths became {len(mapping) - alike}: close ones are equal in the tiny model"
        )
    for level, key, value, role in fields:
        if role in ("hidden", "width") and not (key in _WITH_BLOCKS and "block_configs" in level.fields):
            new = [mapping.get(item, item) for item in value] if isinstance(value, list) else mapping.get(value, value)
            if new != value:
                setter.set(level, key, new)


def _unit_of(tree: Sequence[Level], setter: Setter, largest: int) -> int:
    """What hidden sizes are multiples of, so that heads that were set divide them into even sizes, of 8 if it fits."""
    unit = UNIT
    for level in tree:
        for key, value in level.fields.items():
            if role_of(key, value) == "heads" and is_int(value) and value > 0 and not setter.free(level, key):
                size = next((size for size in (8, 4) if size * value <= largest), 2)
                unit = unit if unit % (2 * value) == 0 else size * value
    return unit


def heads_of_kv(level: Level, before: Mapping[str, Any], setter: Setter) -> None:
    """Heads for a number of kv heads that was set: twice as many where the source has more, else as many."""
    names = {key: value for key, value in before.items() if role_of(key, value) == "heads"}
    for key, value in list(level.fields.items()):
        partner = _partner(key, names) if role_of(key, value) == "kv" else None
        if partner is None or setter.free(level, key) or not setter.free(level, partner):
            continue
        if is_int(value) and is_int(before.get(key)) and is_int(before[partner]) and value not in (0, 1, 2, 4):
            grouped = before[key] < before[partner] and value < before[partner]
            setter.hold(level, partner, value * (2 if grouped else 1))


def _has_heads(level: Level, count: int) -> bool:
    """Whether heads are listed for each of `count` stages."""
    return any(
        role_of(key, value) == "heads" and isinstance(value, list) and len(value) == count
        for key, value in level.fields.items()
    )


def _is_staged(level: Level) -> bool:
    return any(role_of(key, value) == "stages" for key, value in level.fields.items())


BLOCKS = (
    "block_configs",
    "resnet_head",
    "resnet_configs",
    "stage_configs",
    "down_ops",
    "bridge_connector",
    "out_point_positions2D",
)


_WITH_BLOCKS = ("stem_channels", "stage_out_channels")


def blocks(tree: Sequence[Level], setter: Setter) -> None:
    """Tables of convolutions: each width in them (no kernel, stride or dilation is as large) is an eighth of what it
    was, and 16 at least, as some classes round up to that."""

    def narrow(value: Any) -> Any:
        if isinstance(value, list):
            return [narrow(item) for item in value]
        return max(16, value // 128 * 16) if is_int(value) and value >= 24 else value

    for level in tree:
        for key in BLOCKS:
            if isinstance(level.fields.get(key), list):
                setter.set(level, key, narrow(level.fields[key]))
        for key in _WITH_BLOCKS if "block_configs" in level.fields else ():
            if key in level.fields:
                setter.set(level, key, narrow(level.fields[key]))


def by_layer(tree: Sequence[Level]) -> list[Level]:
    """What single layers have of their own, as configs."""
    found = []
    for level in tree:
        own = level.fields.get("per_layer_config")
        if isinstance(own, dict):
            found += [
                Level(level.at(f"per_layer_config.{layer}"), fields, level)
                for layer, fields in own.items()
                if isinstance(fields, dict)
            ]
    return found


def layer_heads(tree: Sequence[Level], setter: Setter) -> None:
    """Heads of single layers: the same rules, within the layer's own numbers and the config's."""
    for level in by_layer(tree):
        old, around = dict(level.fields), level.parent.fields if level.parent else {}
        for key, value in old.items():
            if role_of(key, value) == "heads" and is_int(value):
                setter.set(level, key, few(value))
        for key, value in old.items():
            if role_of(key, value) == "kv" and is_int(value):
                partner = _partner(key, {**around, **old})
                count = level.fields.get(partner, around.get(partner, 4)) if partner else 4
                setter.set(level, key, max(1, min(few(value), count) if value > 1 else value))


def width_map(
    hidden: set[int], others: set[int], largest: int, top: int = 0, unit: int = UNIT, capped: bool = False
) -> dict[int, int]:
    """Old width -> new width: divided by one number, rounded, in the same order, distinct where they were. Hidden sizes
    are multiples of `unit`, if `largest` allows; they may pass it to stay distinct, unless `capped`."""
    top = top or max(hidden or others)
    if top <= largest and max(hidden | others) <= 4 * largest:
        return {}
    scale = max(1.0, top / largest)
    mapping: dict[int, int] = {}
    last = 0
    strict = len(hidden | others) <= MANY
    if unit == UNIT and largest < 2 * UNIT:
        unit = max(2, largest // 4 * 2)
    for old in sorted(hidden | others):
        if old <= unit:
            mapping[old] = old
            last = max(last, old)
            continue
        step = unit if old in hidden else min(STEP, unit)
        new = max(step, round(old / scale / step) * step)
        while new < last or (strict and new == last):
            new += step
        if new > old:
            new = old
        mapping[old] = last = new
    return _capped(mapping, hidden, largest, unit, strict) if capped else mapping


def _capped(mapping: dict[int, int], hidden: set[int], largest: int, unit: int, strict: bool) -> dict[int, int]:
    """No hidden size above `largest`: where other widths between them pushed one up, those make room."""
    above = 0  # the width that the next larger one has
    for old in sorted(mapping, reverse=True):
        new = mapping[old]
        if old in hidden and new > largest >= unit:
            new = largest // unit * unit
        elif above and (new > above or (strict and new == above)) and new > STEP:
            new = max(unit if old in hidden else min(STEP, unit), above - (unit if old in hidden else min(STEP, unit)))
        if old in hidden or above:
            above = new
        mapping[old] = new
    return mapping


def heads(level: Level, before: Mapping[str, Any], setter: Setter) -> None:
    """Fewer heads of the same kind: MHA stays MHA, one kv head stays one, and true groups stay true groups."""
    names = {key: value for key, value in before.items() if role_of(key, value) == "heads"}
    kv_names = {key: value for key, value in before.items() if role_of(key, value) == "kv"}
    for key, value in names.items():
        if isinstance(value, list) and key.endswith("_per_layer"):
            setter.set(level, key, [few(item) for item in level.fields[key]])
        elif isinstance(value, list):
            if key in level.fields and isinstance(level.fields[key], list):
                widths_ = next(
                    (item for item in (level.fields.get(name) for name in _STAGED) if _like(item, value)), None
                )
                counts = [_staged(item, min(value)) for item in level.fields[key]]
                if widths_ is not None:
                    counts = [
                        next(count for count in range(top, 0, -1) if width % count == 0)
                        for top, width in zip(counts, widths_, strict=True)
                    ]
                setter.set(level, key, counts)
        elif key in level.fields and is_int(level.fields[key]):
            setter.set(level, key, few(value))
    for key, value in kv_names.items():
        partner = _partner(key, names)
        old_heads = before.get(partner) if partner else None
        new_heads = level.fields.get(partner) if partner else None
        if isinstance(value, list):
            if isinstance(old_heads, list) and isinstance(new_heads, list) and isinstance(level.fields.get(key), list):
                setter.set(level, key, [_kv(kv, max(old_heads), max(new_heads)) for kv in level.fields[key]])
            elif is_int(old_heads) and is_int(new_heads) and isinstance(level.fields.get(key), list):
                setter.set(level, key, [_kv(kv, int(old_heads or 0), int(new_heads or 0)) for kv in level.fields[key]])
            continue
        if is_int(old_heads) and is_int(new_heads) and is_int(level.fields.get(key)):
            setter.set(level, key, _kv(value, int(old_heads or 0), int(new_heads or 0)))
        elif key in level.fields and is_int(level.fields[key]):
            setter.set(level, key, min(value, 2))


_STAGED = ("hidden_sizes", "embed_dim", "embed_dims", "embed_dim_per_stage", "hidden_size")


def _like(widths_: Any, value: list[int]) -> bool:
    return isinstance(widths_, list) and len(widths_) == len(value)


def few(count: int) -> int:
    """4 heads, or as many as there are."""
    return 4 if count >= 4 else 2 if count == 3 else count


def _staged(count: int, least: int) -> int:
    ratio = max(1, count // max(1, least))
    return min(8, ratio)


def _kv(kv: int, old_heads: int, new_heads: int) -> int:
    if kv >= old_heads:
        return new_heads
    if kv <= 1:
        return kv
    for candidate in (new_heads // 2, new_heads // 3):
        if candidate > 1 and new_heads % candidate == 0:
            return candidate
    return 1


def _partner(key: str, names: Mapping[str, Any]) -> str | None:
    """The field of query heads that a field of kv heads belongs to."""
    guesses = [
        key.replace("key_value_heads", "attention_heads"), key.replace("key_value_heads", "heads"),
        key.replace("_kv_heads", "_heads"), key.replace("kv_heads", "attention_heads"), key.replace("_kv", ""),
        key.replace("kv_", ""), "num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads",
        "encoder_attention_heads",
    ]  # fmt: skip
    return next((name for name in guesses if name in names), None)


_MAIN_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim", "width")
_MAIN_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")


def head_dims(level: Level, before: Mapping[str, Any], setter: Setter) -> None:
    """Head sizes: width / heads where that is what they were, wider or narrower where they were, the rest to scale."""
    names = {
        key: value for key, value in before.items()
        if role_of(key, value) == "head_dim" and is_int(value) and value > 0 and is_int(level.fields.get(key))
    }  # fmt: skip
    if not names:
        return
    hidden = next((key for key in _MAIN_HIDDEN if is_int(before.get(key)) and before[key]), None)
    count = next((key for key in _MAIN_HEADS if is_int(before.get(key)) and before[key]), None)
    main = next(
        (
            key
            for key in ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "dim_head", "d_head")
            if key in names
        ),
        None,
    )
    if main is not None and hidden and count and "kv_lora_rank" not in before:
        natural = before[hidden] / before[count]
        now = level.fields[hidden] // max(1, level.fields[count])
        ratio = names[main] / natural
        if abs(ratio - 1) < 1e-6:
            new = now
        elif ratio > 1:
            new = max(now + 4, _round(now * min(ratio, 2.0)))
        else:
            new = max(2, min(now - 4 if now > 4 else now // 2, _round(now * ratio))) if now > 2 else now
        new = min(new, names[main])
        scale = names[main] / new
    else:
        largest = max(names.values())
        scale = max(1.0, largest / (32 if largest >= 4 * min(names.values()) else 24 if _odd(largest) else 16))
    taken: dict[int, int] = {}
    for key, value in sorted(names.items(), key=lambda item: (item[0] != main, item[1])):
        size = taken.get(value) or max(4, _round(value / scale)) if value > 4 else value
        while value not in taken and size in taken.values() and size < value:
            size += 4
        size = min(size, value)
        taken[value] = size
        setter.set(level, key, size)
    for place in (level.fields.get("per_layer_config"),):
        if isinstance(place, dict):
            for layer in place.values():
                for key in list(layer):
                    if role_of(key, layer[key]) == "head_dim":
                        layer[key] = taken.get(layer[key]) or max(4, _round(layer[key] / scale))


def _odd(value: int) -> bool:
    return value % 3 == 0


def _round(value: float) -> int:
    return max(4, round(value / 4) * 4)
