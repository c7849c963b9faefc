"""A value for each keyword of a forward, by its name. Where a name has several shapes, all of them in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mldebug.tiny._inputs_facts import AUDIO, TEXT, VISION, Facts
from mldebug.tiny._inputs_more import GIVEN, MORE, documented

Values = dict[str, Any]
Maker = Callable[[Facts, Values], Any]


# --- images


def _flat_patches(facts: Facts, _made: Values) -> torch.Tensor:
    """Rows of patches, as processors with a grid of frames, rows and columns make them."""
    frames, rows, columns = facts.grid
    temporal = facts.number("temporal_patch_size", "patch_temporal", within=VISION, default=1) or 1
    features = facts.channels * facts.patch**2 * temporal
    return facts.floats(facts.batch * frames * rows * columns, features)


def _plain_image(facts: Facts, _made: Values) -> torch.Tensor:
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
    rows, columns = _patch_grid(facts)
    return facts.floats(facts.batch, rows * columns, facts.channels * facts.patch**2)


def _single_patches(facts: Facts, _made: Values) -> torch.Tensor:
    """Patches as small images, all images in a row: (patches, channels, side, side)."""
    _frames, rows, columns = facts.grid
    return facts.floats(facts.batch * rows * columns, facts.channels, facts.patch, facts.patch)


def _padded_patches(facts: Facts, made: Values) -> torch.Tensor:
    """The rows of patches of each image: (batch, patches, values of a patch)."""
    return _flat_patches(facts, made).unflatten(0, (facts.batch, -1))


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


def _pixel_values(facts: Facts) -> list[Maker]:
    frames = facts.value("num_frames", "frames_per_clip", "tubelet_size", "video_size", within=VISION) is not None
    pairs = "matching" in type(facts.model).__name__.lower() or facts.config.model_type in (
        "efficientloftr",
        "superglue",
        "lightglue",
    )
    makers: list[Maker] = [_plain_image, _many_images, _video, _tiles, _patch_rows, _flat_patches, _single_patches]
    if facts.takes("aspect_ratio_ids"):
        makers.insert(0, _tiles)
    if facts.takes("image_grid_thw", "grid_thw", "image_grid_hw"):
        makers = [
            _flat_patches,
            _single_patches,
            _padded_patches,
            _merged_patches,
            _patch_rows,
            _plain_image,
            _many_images,
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


def _videos(facts: Facts) -> list[Maker]:
    if facts.takes("video_grid_thw"):
        return [_flat_patches]
    return [_video, _video_channels_first]


def _frames(facts: Facts) -> int:
    said = facts.number("num_frames", "frames_per_clip", "num_image_with_embedding", within=VISION, default=2)
    return max(1, min(said, 64))


def _patch_grid(facts: Facts) -> tuple[int, int]:
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


def _positions_of_patches(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = _patch_grid(facts)
    pairs = [[column, row] for row in range(rows) for column in range(columns)]
    return torch.tensor([pairs] * facts.batch)


def _grid_thw(facts: Facts, _made: Values) -> torch.Tensor:
    return torch.tensor([facts.grid] * facts.batch)


def _image_sizes(facts: Facts, made: Values) -> torch.Tensor:
    image = made.get("pixel_values")
    size = tuple(image.shape[-2:]) if image is not None and image.dim() >= 4 else facts.size
    return torch.tensor([size] * facts.batch)


def _patch_mask(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = _patch_grid(facts)
    return torch.ones(facts.batch, rows * columns, dtype=torch.bool)


def _pixel_attention_mask(facts: Facts, made: Values) -> torch.Tensor:
    image = made.get("pixel_values")
    if image is not None and image.dim() == 5:
        return torch.ones(facts.batch, 1, *image.shape[-2:], dtype=torch.long)
    if image is not None and image.dim() == 3:
        return torch.ones(image.shape[:2], dtype=torch.long)
    return torch.ones(facts.batch, *facts.size, dtype=torch.long)


def _image_mask(facts: Facts, made: Values) -> torch.Tensor:
    """One mark for each image of a row."""
    image = made.get("pixel_values")
    images = image.shape[1] if image is not None and image.dim() >= 5 else 1
    return torch.ones(facts.batch, images, dtype=torch.bool)


def _hidden(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch, facts.length, facts.number("hidden_size", "d_model", "hidden_dim", "dim", default=64)
    )


def _hidden_last(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch, facts.number("hidden_size", "d_model", "hidden_dim", "dim", default=64), facts.length
    )


def _masked_patches(facts: Facts, _made: Values) -> torch.Tensor:
    rows, columns = _patch_grid(facts)
    tubelet = facts.number("tubelet_size")
    total = rows * columns * (max(1, _frames(facts) // tubelet) if tubelet else 1)
    mask = torch.zeros(facts.batch, total, dtype=torch.bool)
    mask[:, : max(1, total // 2)] = True
    return mask


# --- audio


def _audio_frames(facts: Facts) -> int:
    if facts.frames:
        return facts.frames
    said = facts.number("max_source_positions", within=AUDIO)
    return 2 * min(said, 1500) if said else 64


def _mels_first(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.mels, _audio_frames(facts))


def _mels_last(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, _mel_frames_last(facts), facts.mels)


def _mel_frames_last(facts: Facts) -> int:
    return facts.frames or facts.number("max_length") or 64


def _mel_image(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, 1, facts.number("spec_size", default=64), facts.mels)


def _mels_flat(facts: Facts, _made: Values) -> torch.Tensor:
    """All clips in a row: (mels, frames)."""
    return facts.floats(facts.mels, _audio_frames(facts))


def _wave(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, _samples(facts))


def _wave_channels(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.number("audio_channels", "channels", default=1) or 1, _samples(facts))


def _wave_frames(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch,
        4,
        facts.number("sampling_frame", "frame_size", "audio_samples_per_token", "hidden_size", default=640),
    )


def _samples(facts: Facts) -> int:
    """Samples of a waveform, a whole number of the steps in which codecs and encoders walk."""
    step = 1
    for value in facts.value("downsampling_ratios", "upsampling_ratios", "conv_stride", default=[320]) or [320]:
        if isinstance(value, int):
            step *= value
    return max(1600, 4 * step, 4 * facts.number("hop_length", "frame_size"))


def _features(facts: Facts) -> list[Maker]:
    first_conv, first_linear = facts.first(torch.nn.Conv1d), None
    whisper_like = facts.value("max_source_positions", within=AUDIO) is not None and first_conv is not None
    makers: list[Maker] = [_mels_first, _mels_last] if whisper_like else [_mels_last, _mels_first]
    del first_linear
    return [*makers, _mel_image, _mels_flat, _wave, _wave_channels, *_other_widths(facts)]


def _other_widths(facts: Facts) -> list[Maker]:
    """Widths that the first layers name, where the config's are not the ones."""
    widths: list[int] = []
    for module in facts.model.modules():
        if isinstance(module, torch.nn.Linear):
            widths.append(module.in_features)
        elif isinstance(module, torch.nn.Conv1d):
            widths.append(module.in_channels)
        elif isinstance(module, torch.nn.LayerNorm):
            widths.append(int(module.normalized_shape[0]))
        if len(widths) > 12:
            break
    return [
        (lambda facts, _made, width=width: facts.floats(facts.batch, _mel_frames_last(facts), width))
        for width in dict.fromkeys(widths)
    ]


def _waves(facts: Facts) -> list[Maker]:
    if facts.value("num_mel_bins") and facts.value("max_length"):
        return [_mels_last, _wave, _wave_channels]
    if facts.value("audio_channels", "sampling_rate", "codebook_size", "upsampling_ratios") is not None:
        return [_wave_channels, _wave, _mels_last, _mels_first]
    return [_wave, _wave_channels, _mels_last, _mels_first]


def _mask_of(*names: str, dtype: torch.dtype = torch.long) -> Maker:
    """Ones for each frame of the first of `names` that is there."""

    def make(facts: Facts, made: Values) -> torch.Tensor:
        found = next((made[name] for name in names if name in made), None)
        if found is None:
            return torch.ones(facts.batch, facts.length, dtype=dtype)
        if found.dim() == 2:
            return torch.ones(found.shape, dtype=dtype)
        frames = found.shape[-1] if found.shape[1] <= 2 or found.shape[1] == facts.mels else found.shape[1]
        return torch.ones(found.shape[0], frames, dtype=dtype)

    return make


# --- text


def _input_ids(facts: Facts) -> list[Maker]:
    if "MultipleChoice" in type(facts.model).__name__:
        return [lambda facts, _made: facts.ids(facts.batch, 2, facts.length), _text]
    if facts.value("num_codebooks", "n_codebooks", "num_quantizers") is not None:
        return [_text, _codebooks_last, _codebooks_first]
    return [_text]


def _text(facts: Facts, _made: Values) -> torch.Tensor:
    """Plain ids with, for each kind of feature, as many placeholders as `facts.count` says. Ends with eos."""
    pieces: list[int] = []
    for kind in ("image", "video", "audio"):
        count, token = facts.count.get(kind, 0), placeholder(facts, kind)
        if count and token is not None:
            start = facts.token(*(f"{name}_token_{tail}" for name in _STARTS[kind] for tail in ("id", "index")))
            end = facts.token(*(f"{name}_token_{tail}" for name in _ENDS[kind] for tail in ("id", "index")))
            piece = [*([start] if start is not None else []), *[token] * count, *([end] if end is not None else [])]
            pieces += piece
    plain = max(4 if pieces else 1, facts.length - len(pieces))
    if facts.positions:
        plain = max(1, min(plain, facts.positions - len(pieces)))
    if facts.takes(
        "image_embeds_position_mask"
    ):  # these places are marked in the text, not filled with an id of their own
        plain = max(plain, facts.number("latent_query_num", default=4) + 2)
    text = facts.ids(facts.batch, plain)
    eos = facts.token("eos_token_id")
    if eos is not None and 0 <= eos < facts.vocab and plain > 1:
        text[:, -1] = eos
    if not pieces:
        return text
    fixed = torch.tensor([pieces] * facts.batch)
    return torch.cat([text[:, :1], fixed, text[:, 1:]], dim=1) if plain > 1 else torch.cat([fixed, text], dim=1)


_STARTS = {
    "image": ("vision_start", "image_start", "boi", "img_start", "image_bos", "im_start_image"),
    "video": ("vision_start", "video_start", "boi"),
    "audio": ("audio_start", "boa", "audio_bos"),
}
_ENDS = {
    "image": ("vision_end", "image_end", "eoi", "img_end"),
    "video": ("vision_end", "video_end", "eoi"),
    "audio": ("audio_end", "eoa", "audio_eos"),
}


def placeholder(facts: Facts, kind: str) -> int | None:
    """The id whose embeddings are replaced by features of `kind`."""
    found = facts.token(
        f"{kind}_token_id", f"{kind}_token_index", f"{kind}_pad_token_id", f"{kind}_patch_id", f"{kind}_placeholder_token_id",
        *(("media_placeholder_token_id", "im_patch_id", "img_context_token_id", "image_pad_id") if kind == "image" else ()),
    )  # fmt: skip
    return found


def _codebooks_last(facts: Facts, _made: Values) -> torch.Tensor:
    books = facts.number("num_codebooks", "n_codebooks", "num_quantizers", default=8)
    return facts.ints(
        facts.batch, facts.length, books, high=facts.number("codebook_size", "vocab_size", default=facts.vocab)
    )


def _codebooks_first(facts: Facts, _made: Values) -> torch.Tensor:
    books = facts.number("num_codebooks", "n_codebooks", "num_quantizers", default=8)
    return facts.ints(
        facts.batch * books, facts.length, high=min(facts.vocab, facts.number("codebook_size", default=facts.vocab))
    )


def _decoder_ids(facts: Facts) -> list[Maker]:
    def plain(facts: Facts, _made: Values) -> torch.Tensor:
        config = facts.config.get_text_config(decoder=True).to_dict()
        vocab = config.get("vocab_size") or facts.vocab
        most = config.get("max_target_positions") or config.get("max_position_embeddings") or 16
        ids = facts.ints(
            facts.batch,
            max(1, min(facts.length, most - 3)),
            high=min(vocab, facts.vocab) if vocab else facts.vocab,
            low=min(3, vocab - 1),
        )
        start = facts.value("decoder_start_token_id")
        if isinstance(start, int) and 0 <= start < vocab:
            ids[:, 0] = start
        return ids

    def codebooks(facts: Facts, made: Values) -> torch.Tensor:
        return _codebooks_last(facts, made)

    def codebooks_first(facts: Facts, _made: Values) -> torch.Tensor:
        decoder = facts.config_dict.get("decoder_config") or facts.config_dict.get("decoder") or {}
        books = decoder.get("num_codebooks") or facts.number("num_codebooks", default=4)
        return facts.ints(facts.batch * books, 4, high=decoder.get("vocab_size") or facts.vocab)

    decoder = facts.config_dict.get("decoder_config") or facts.config_dict.get("decoder") or {}
    by_books = isinstance(decoder, dict) and decoder.get("num_codebooks")
    return (
        [codebooks, codebooks_first, plain]
        if facts.value("num_codebooks") and not by_books
        else ([codebooks_first, plain] if by_books else [plain, codebooks, codebooks_first])
    )


def _ones_like_ids(facts: Facts, made: Values) -> torch.Tensor:
    ids = made.get("input_ids")
    if ids is None:
        return torch.ones(facts.batch, facts.length, dtype=torch.long)
    choices = "MultipleChoice" in type(facts.model).__name__
    return torch.ones(ids.shape if choices else ids.shape[:2], dtype=torch.long)


def _token_types(facts: Facts, made: Values) -> torch.Tensor:
    return torch.zeros_like(_ones_like_ids(facts, made))


def _kinds_of_tokens(facts: Facts, made: Values) -> torch.Tensor:
    """0 for text, 1 for image, 2 for video and 3 for audio placeholders."""
    ids = made["input_ids"]
    kinds = torch.zeros_like(ids)
    for number, kind in enumerate(("image", "video", "audio"), start=1):
        token = placeholder(facts, kind)
        if token is not None:
            kinds[ids == token] = number
    return kinds


def _boxes(facts: Facts) -> list[Maker]:
    high = min(1000, facts.number("max_2d_position_embeddings", default=1000) - 1)

    def corners(facts: Facts, made: Values) -> torch.Tensor:
        shape = _ones_like_ids(facts, made).shape
        first = facts.ints(*shape, 2, high=max(2, high // 2))
        return torch.cat([first, first + facts.ints(*shape, 2, high=max(2, high // 2))], dim=-1)

    def ratios(facts: Facts, made: Values) -> torch.Tensor:
        return corners(facts, made).to(facts.dtype) / max(high, 1)

    return [ratios, corners] if facts.config.model_type in ("bros", "udop") else [corners, ratios]


def _qformer_ids(facts: Facts, _made: Values) -> torch.Tensor:
    vocab = (facts.config_dict.get("qformer_config") or {}).get("vocab_size") or facts.vocab
    return facts.ints(facts.batch, 4, high=vocab)


# --- the table

# What a forward is given wherever it takes it, in this order.
ALWAYS = (
    "pixel_values", "pixel_values_videos", "pixel_values_images", "image_pixel_values", "flattened_patches", "image_patches", "image",
    "input_features", "input_values", "audio_input_features", "past_values", "inputs",
    "image_grid_thw", "grid_thw", "image_grid_hw", "image_sizes", "spatial_shapes", "pixel_attention_mask", "pixel_position_ids",
    "image_position_ids", "input_features_mask", "feature_attention_mask", "padding_mask", "input_values_mask",
    "input_ids", "attention_mask", "decoder_input_ids", "bbox", "mm_token_type_ids", "qformer_input_ids",
    "past_time_features", "past_observed_mask", "future_values", "future_time_features",
    *GIVEN,
)  # fmt: skip

# Kept out unless the forward cannot do without: other ways to give the same, and what is for generation.
NEVER = frozenset(
    ("inputs_embeds", "encoder_outputs", "cache", "past_key_values", "labels", "position_ids", "decoder_inputs_embeds")
)


def makers_for(facts: Facts, name: str) -> list[Maker]:
    """The shapes that a keyword may have, the likeliest first; none where its name says nothing."""
    found = MAKERS.get(name) or MORE.get(name)
    return documented(facts, name) if found is None else found(facts)


def _nothing(_facts: Facts, _made: Values) -> None:
    """Left out."""


def _one(maker: Maker) -> Callable[[Facts], list[Maker]]:
    return lambda _facts: [maker]


MAKERS: dict[str, Callable[[Facts], list[Maker]]] = {
    "pixel_values": _pixel_values,
    "pixel_values_images": _pixel_values,
    "image_pixel_values": _pixel_values,
    "pixel_values_videos": _videos,
    "image": _one(_plain_image),
    "image_grid_thw": _one(_grid_thw),
    "grid_thw": _one(_grid_thw),
    "video_grid_thw": _one(_grid_thw),
    "image_grid_hw": _one(lambda facts, _made: torch.tensor([facts.grid[1:]] * facts.batch)),
    "image_sizes": lambda facts: [_image_sizes, _nothing],  # some towers take none, though the forward does
    "spatial_shapes": _one(lambda facts, _made: torch.tensor([_patch_grid(facts)] * facts.batch)),
    "pixel_position_ids": _one(_positions_of_patches),
    "image_position_ids": _one(_positions_of_patches),
    "pixel_attention_mask": lambda facts: [_pixel_attention_mask, _patch_mask, _image_mask],
    "hidden_states": lambda facts: [_flat_patches] if facts.takes("grid_thw") else [_hidden, _hidden_last],
    "encoder_hidden_states": lambda facts: [
        lambda facts, _made, name=name: facts.floats(facts.batch, 4, facts.number(name, default=64))
        for name in (
            "encoder_hidden_size",
            "cross_attention_hidden_size",
            "vision_hidden_size",
            "hidden_size",
            "d_model",
        )
        if facts.number(name)
    ],
    "use_cache": _one(lambda _facts, _made: False),
    "query_embeds": _one(lambda facts, made: _hidden(facts, made)),
    "inputs_embeds": _one(lambda facts, made: _hidden(facts, made)),
    "latents": lambda facts: [_hidden_last, _hidden],
    "merge_sizes": _one(lambda facts, _made: torch.tensor([facts.merge] * facts.batch)),
    "bool_masked_pos": _one(_masked_patches),
    "input_features": _features,
    "audio_input_features": _features,
    "audio_mel": _features,
    "input_values": _waves,
    "input_features_mask": _one(_mask_of("input_features")),
    "feature_attention_mask": _one(_mask_of("input_features")),
    "audio_mel_mask": _one(_mask_of("audio_mel", dtype=torch.bool)),
    "padding_mask": _one(_mask_of("input_values", "input_features", dtype=torch.bool)),
    "input_values_mask": _one(_mask_of("input_values")),
    "input_ids": _input_ids,
    "attention_mask": _one(_ones_like_ids),
    "decoder_input_ids": _decoder_ids,
    "bbox": _boxes,
    "token_type_ids": _one(_token_types),
    "mm_token_type_ids": _one(_kinds_of_tokens),
    "qformer_input_ids": _one(_qformer_ids),
    "protein_input_ids": _one(lambda facts, _made: facts.ints(facts.batch, 8, high=20, low=4)),
    "protein_attention_mask": _one(lambda facts, _made: torch.ones(facts.batch, 8, dtype=torch.long)),
}

__all__ = ["ALWAYS", "AUDIO", "MAKERS", "NEVER", "TEXT", "Maker", "Values", "makers_for", "placeholder"]
