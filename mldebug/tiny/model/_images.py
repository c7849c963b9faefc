"""What the sizes of images and positions, and of what towers give out, must be to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mldebug.tiny.model._roles import Level, is_int, is_ints, role_of
from mldebug.tiny.model._setter import Setter

POSITIONS = 128


def meet_images(tree: Sequence[Level], before: Mapping[str, Level], setter: Setter) -> None:
    """Shrink positions and images, and let what depends on them follow."""
    _positions(tree, setter)
    _images(tree, before, setter)
    _image_tokens(tree, before, setter)
    _towers(tree, before, setter)


def _positions(tree: Sequence[Level], setter: Setter) -> None:
    for level in tree:
        for key, value in list(level.fields.items()):
            if role_of(key, value) == "positions" and is_int(value) and value > POSITIONS:
                setter.set(level, key, POSITIONS)
    for level in tree:  # positions as a product of two axes
        axes, most = level.fields.get("axial_pos_shape"), level.number("max_position_embeddings")
        if is_ints(axes) and len(axes or []) == 2 and math.prod(axes or []) > most > 0:
            side = 2 ** (int(math.log2(most)) // 2)
            setter.set(level, "axial_pos_shape", [side, most // side])
    for level in tree:
        original, now = (
            level.fields.get("original_max_position_embeddings"),
            level.fields.get("max_position_embeddings"),
        )
        if is_int(original) and is_int(now) and original == now:
            setter.set(level, "original_max_position_embeddings", max(1, int(original or 1) // 4))


def _images(tree: Sequence[Level], before: Mapping[str, Level], setter: Setter) -> None:
    """Images of 4 by 4 patches, or of what the stages divide; the same new size wherever it was the same."""
    sizes: dict[int, int] = {}
    fields = [
        (level, key, value) for level in tree for key, value in level.fields.items()
        if role_of(key, value) == "image" or (key in ("image_size", "img_size", "size") and isinstance(value, dict))
    ]  # fmt: skip
    for level, _key, value in fields:
        unit = _image_unit(level, tree)
        for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
            if is_int(item) and item > unit:
                sizes[item] = min(item, max(sizes.get(item, 0), unit))
    for level, key, value in fields:
        if isinstance(value, dict):
            new: Any = {name: sizes.get(item, item) for name, item in value.items()}
        else:
            new = [sizes.get(item, item) for item in value] if isinstance(value, list) else sizes.get(value, value)
        if new != value:
            setter.set(level, key, new)


def _towers(tree: Sequence[Level], before: Mapping[str, Level], setter: Setter) -> None:
    """What a tower gives out is as wide as the text takes it in, and grids follow the size of the image."""
    text = next(
        (
            level
            for level in tree
            if level.name in ("text_config", "llm_config", "language_config") and level.number("hidden_size")
        ),
        None,
    )
    for level in tree:
        source = before[level.path].fields if level.path in before else {}
        fields = level.fields
        same = text is not None and level.parent is text.parent and level is not text
        if same and text is not None and is_int(fields.get("out_hidden_size")):
            setter.set(level, "out_hidden_size", text.number("hidden_size"))
        tower = next(
            (
                other
                for other in tree
                if other.parent is level and other.name == "vision_config" and other.path in before
            ),
            None,
        )
        if tower is not None and level.number("out_hidden_size") and is_int(source.get("out_hidden_size")):
            old = before[tower.path].number("hidden_size")
            if old and source["out_hidden_size"] % old == 0:
                setter.set(level, "out_hidden_size", source["out_hidden_size"] // old * tower.number("hidden_size"))
        if level.number("image_embedding_size") and level.number("image_size") and level.number("patch_size"):
            setter.set(level, "image_embedding_size", fields["image_size"] // fields["patch_size"])
        hidden = source.get("hidden_size") if is_int(source.get("hidden_size")) else 0
        if hidden and is_int(source.get("vision_output_dim")) and source["vision_output_dim"] % hidden == 0:
            setter.set(level, "vision_output_dim", source["vision_output_dim"] // hidden * fields["hidden_size"])
        if level.number("num_pos_feats") and level.parent is not None:
            decoder = next(
                (other for other in tree if other.parent is level.parent and other.name == "mask_decoder_config"), None
            )
            if decoder is not None:
                setter.set(level, "num_pos_feats", decoder.number("hidden_size") // 2)
    ratio = _image_ratio(tree, before)
    if ratio is not None:
        for level in tree:
            for key in ("backbone_feature_sizes", "image_grid_pinpoints", "memory_attention_rope_feat_sizes"):
                value = level.fields.get(key)
                if isinstance(value, list) and value:
                    setter.set(level, key, _scaled(value, ratio))


def _image_ratio(tree: Sequence[Level], before: Mapping[str, Level]) -> float | None:
    for level in tree:
        old = before[level.path].fields.get("image_size") if level.path in before else None
        new = level.fields.get("image_size")
        old, new = (value[0] if isinstance(value, list) and value else value for value in (old, new))
        if is_int(old) and is_int(new) and old and old != new:
            return int(new or 0) / int(old or 1)
    return None


def _scaled(value: Any, ratio: float) -> Any:
    return [_scaled(item, ratio) for item in value] if isinstance(value, list) else max(1, round(value * ratio))


_PER_IMAGE = (
    "image_seq_length",
    "image_seq_len",
    "mm_tokens_per_image",
    "num_image_tokens_per_image",
    "image_token_length",
    "num_image_tokens",
)


def _image_tokens(tree: Sequence[Level], before: Mapping[str, Level], setter: Setter) -> None:
    """How many tokens an image gives shrinks as its number of patches does."""
    vision = next(
        (level for level in tree if is_int(level.fields.get("image_size")) and is_int(level.fields.get("patch_size"))),
        None,
    )
    if vision is None or vision.path not in before:
        return
    old, new = before[vision.path].fields, vision.fields
    if not (is_int(old.get("image_size")) and is_int(old.get("patch_size"))):
        return
    was, now = (old["image_size"] // old["patch_size"]) ** 2, (new["image_size"] // new["patch_size"]) ** 2
    for level in tree:
        for key in _PER_IMAGE:
            value = before[level.path].fields.get(key) if level.path in before else None
            if is_int(value) and value and was:
                side = max(1, round(math.sqrt(value * now / was)))
                if (
                    value > was and key == "mm_tokens_per_image"
                ):  # more than there are patches: the source cannot pool them
                    side = max(1, math.isqrt(now) // 2)
                setter.set(level, key, side * side)


def _image_unit(level: Level, tree: Sequence[Level]) -> int:
    places = [level, *(other for other in tree if other.parent is level), *([level.parent] if level.parent else [])]
    for place in places:
        patch = place.fields.get("patch_stride", place.fields.get("patch_size"))
        patch = max(patch) if isinstance(patch, list) and is_ints(patch) else patch
        if isinstance(patch, int):
            stages = next((len(value) for key, value in place.fields.items() if role_of(key, value) == "stages"), 1)
            if stages > 1:
                return int(max(64, patch * 2 ** (stages - 1) * 2))
            return patch * 4
    return 64
