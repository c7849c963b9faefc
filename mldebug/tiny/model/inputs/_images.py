"""Images and videos in the shapes that forwards take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mldebug.tiny.model.inputs._facts import VISION, Facts

Values = dict[str, Any]
Maker = Callable[[Facts, Values], Any]


def flat_patches(facts: Facts, _made: Values) -> torch.Tensor:
    """Rows of patches, as processors with a grid of frames, rows and columns make them."""
    frames, rows, columns = facts.grid
    temporal = facts.number("temporal_patch_size", "patch_temporal", within=VISION, default=1) or 1
    features = facts.channels * facts.patch**2 * temporal
    return facts.floats(facts.batch * frames * rows * columns, features)


def plain_image(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.channels, *facts.size)


def _many_images(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, 1, facts.channels, *facts.size)


def _tiles(facts: Facts, _made: Values) -> torch.Tensor:
    tiles = facts.number("max_num_tiles", within=VISION, default=1) or 1
    return facts.floats(facts.batch, 1, tiles, facts.channels, *facts.size)


def _square_side(facts: Facts, side: int) -> Maker:
    return lambda facts, _made: facts.floats(facts.batch, facts.channels, side, side)


def _patch_rows(facts: Facts, _made: Values) -> torch.Tensor:
    """Patches already cut: (batch, patches, values of a patch)."""
    rows, columns = patch_grid(facts)
    return facts.floats(facts.batch, rows * columns, facts.channels * facts.patch**2)


def _single_patches(facts: Facts, _made: Values) -> torch.Tensor:
    """Patches as small images, all images in a row: (patches, channels, side, side)."""
    _frames, rows, columns = facts.grid
    return facts.floats(facts.batch * rows * columns, facts.channels, facts.patch, facts.patch)


def _padded_patches(facts: Facts, made: Values) -> torch.Tensor:
    """The rows of patches of each image: (batch, patches, values of a patch)."""
    rows = flat_patches(facts, made)
    return rows.reshape(facts.batch, -1, rows.shape[-1])


def _listed_patches(facts: Facts, made: Values) -> torch.Tensor:
    """Small images in a list of their own: (batch, patches, channels, side, side)."""
    return _single_patches(facts, made).unflatten(0, (facts.batch, -1))  # type: ignore[no-untyped-call, no-any-return]


def _merged_patches(facts: Facts, _made: Values) -> torch.Tensor:
    """One small image, channels last, for each placeholder."""
    frames, rows, columns = facts.grid
    side = facts.patch * facts.merge
    temporal = facts.number("temporal_patch_size", within=VISION)
    return facts.floats(
        facts.batch * frames * rows * columns, *([temporal] if temporal > 1 else []), side, side, facts.channels
    )


def _video(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, _frames(facts), facts.channels, *facts.size)


def _video_channels_first(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.channels, _frames(facts), *facts.size)


def _pair(facts: Facts, _made: Values) -> torch.Tensor:
    """Two images to match."""
    return facts.floats(facts.batch, 2, facts.channels, *facts.size)


def _anyres(facts: Facts, _made: Values) -> torch.Tensor:
    """The whole image and its tiles, as any-resolution processors cut it."""
    pinpoints = facts.value("image_grid_pinpoints", "vision_aspect_ratio_pinpoints")
    height, width = facts.size
    tiles = 1
    if pinpoints:
        best = min(pinpoints, key=lambda pair: abs(pair[0] - height) + abs(pair[1] - width))
        tiles = max(1, -(-best[0] // height)) * max(1, -(-best[1] // width))
    return facts.floats(facts.batch, 1 + tiles, facts.channels, height, width)


def pixel_values(facts: Facts) -> list[Maker]:
    frames = facts.value("num_frames", "frames_per_clip", "tubelet_size", "video_size", within=VISION) is not None
    pairs = "matching" in type(facts.model).__name__.lower() or facts.config.model_type in (
        "efficientloftr",
        "superglue",
        "lightglue",
    )
    makers: list[Maker] = [plain_image, _many_images, _video, _tiles, _patch_rows, flat_patches, _single_patches]
    if facts.takes("aspect_ratio_ids"):
        makers.insert(0, _tiles)
    if facts.takes("image_grid_thw", "grid_thw", "image_grid_hw"):
        makers = [
            flat_patches,
            _single_patches,
            _padded_patches,
            _merged_patches,
            _patch_rows,
            plain_image,
            _many_images,
            _listed_patches,
        ]
    elif facts.takes("spatial_shapes", "pixel_position_ids", "image_position_ids"):
        makers.insert(0, _patch_rows)
    elif pairs:
        makers.insert(0, _pair)
    elif facts.takes("pixel_attention_mask"):
        makers.insert(0, _many_images)
    elif facts.value("image_grid_pinpoints"):
        makers = [_anyres, *makers]
    elif frames and not facts.takes("input_ids"):
        makers.insert(0, _video)
    return [*makers, *(_square_side(facts, side) for side in (64, 128, 224))]


def videos(facts: Facts) -> list[Maker]:
    if facts.takes("video_grid_thw"):
        return [flat_patches]
    return [_video, _video_channels_first]


def _frames(facts: Facts) -> int:
    said = facts.number("num_frames", "frames_per_clip", "num_image_with_embedding", within=VISION, default=2)
    return max(1, min(said, 64))


def patch_grid(facts: Facts) -> tuple[int, int]:
    """Rows and columns of patches in a plain image."""
    height, width = facts.size
    pool = facts.number("pooling_kernel_size", within=VISION, default=1) or 1
    if facts.takes("spatial_shapes", "pixel_position_ids", "image_position_ids"):
        most = facts.number("num_patches", "max_num_patches", within=VISION, default=16) or 16
        side = max(1, int(min(most, 16) ** 0.5))
        side = max(
            pool,
            side // pool * pool,
            facts.merge * max(1, side // facts.merge),
            facts.number("downsample_factor", default=1),
        )
        return side, side
    return max(1, height // facts.patch), max(1, width // facts.patch)


def positions_of_patches(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = patch_grid(facts)
    pairs = [[column, row] for row in range(rows) for column in range(columns)]
    return torch.tensor([pairs] * facts.batch)


def grid_thw(facts: Facts, _made: Values) -> torch.Tensor:
    return torch.tensor([facts.grid] * facts.batch)


def image_sizes(facts: Facts, made: Values) -> torch.Tensor:
    image = made.get("pixel_values")
    size = tuple(image.shape[-2:]) if image is not None and image.dim() >= 4 else facts.size
    return torch.tensor([size] * facts.batch)


def patch_mask(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = patch_grid(facts)
    return torch.ones(facts.batch, rows * columns, dtype=torch.bool)


def pixel_attention_mask(facts: Facts, made: Values) -> torch.Tensor:
    image = made.get("pixel_values")
    if image is not None and image.dim() == 5:
        return torch.ones(facts.batch, 1, *image.shape[-2:], dtype=torch.long)
    if image is not None and image.dim() == 3:
        return torch.ones(image.shape[:2], dtype=torch.long)
    return torch.ones(facts.batch, *facts.size, dtype=torch.long)


def image_mask(facts: Facts, made: Values) -> torch.Tensor:
    """One mark for each image of a row."""
    image = made.get("pixel_values")
    images = image.shape[1] if image is not None and image.dim() >= 5 else 1
    return torch.ones(facts.batch, images, dtype=torch.bool)


def hidden(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch, facts.length, facts.number("hidden_size", "d_model", "hidden_dim", "dim", default=64)
    )


def hidden_last(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch, facts.number("hidden_size", "d_model", "hidden_dim", "dim", default=64), facts.length
    )


def masked_patches(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = patch_grid(facts)
    tubelet = facts.number("tubelet_size")
    total = rows * columns * (max(1, _frames(facts) // tubelet) if tubelet else 1)
    mask = torch.zeros(facts.batch, total, dtype=torch.bool)
    mask[:, : max(1, total // 2)] = True
    return mask


def encoder_states(facts: Facts) -> list[Maker]:
    """What another tower would hand over, as wide as the config says."""
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size", "hidden_size", "d_model")
    return [_states(size) for size in dict.fromkeys(filter(None, (facts.number(name) for name in names)))]


def _states(size: int) -> Maker:
    return lambda facts, _made: facts.floats(facts.batch, 4, size)
