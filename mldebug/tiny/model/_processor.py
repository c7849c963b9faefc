"""The processor files of a source, rewritten for the sizes of a tiny model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError

# Files of a source that a processor reads, beside those of its tokenizer.
FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "audio_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
)
TEMPLATES = ("chat_template.json", "chat_template.jinja")


def has_processor(directory: Path) -> bool:
    return any((directory / name).exists() for name in FILES)


def write_processor(
    directory: Path, output: Path, config: Mapping[str, Any], id_map: Mapping[int, int] | None
) -> list[str]:
    """Write the processor files of `directory` to `output`, with image and audio sizes from the tiny `config` and ids
    through `id_map`. Returns the names of the fields that were changed."""
    changed: list[str] = []
    for name in FILES:
        file = directory / name
        if not file.exists():
            continue
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise MldebugError(f"cannot read {file}: {exc}", "repair or remove it") from exc
        before = json.dumps(document)
        _follow(document, config, id_map, changed)
        text = (
            json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            if json.dumps(document) != before
            else file.read_text()
        )
        (output / name).write_text(text, encoding="utf-8")
    for name in TEMPLATES:
        if (directory / name).exists() and not (output / name).exists():
            shutil.copyfile(directory / name, output / name)
    return changed


def _follow(
    document: dict[str, Any], config: Mapping[str, Any], id_map: Mapping[int, int] | None, changed: list[str]
) -> None:
    vision, audio = (
        _part(config, ("vision_config", "backbone_config")),
        _part(config, ("audio_config", "encoder", "audio_encoder_config")),
    )
    tile = document.get("max_image_size")
    for key, value in list(document.items()):
        new = value
        if isinstance(value, dict) and key not in _SIZES:
            _follow(value, config, id_map, changed)
            continue
        if key == "size" and isinstance(tile, dict):  # of the whole, which is cut into tiles
            new = _whole(value, tile, vision)
        elif key in _SIZES:
            new = _size(value, vision)
        elif key == "image_grid_pinpoints" and isinstance(config.get(key), list):
            new = config[key]
        elif key in ("patch_size", "temporal_patch_size", "merge_size", "spatial_merge_size", "num_channels"):
            field = {"merge_size": ("spatial_merge_size", "merge_size")}.get(key, (key,))
            found = next((vision[name] for name in field if isinstance(vision.get(name), int)), None)
            new = found if isinstance(value, int) and found is not None else value
        elif key in ("min_pixels", "max_pixels") and isinstance(value, int):
            new = _pixels(vision)
        elif key in ("feature_size", "num_mel_bins", "n_mels", "feature_size_mel") and isinstance(value, int):
            found = next(
                (
                    audio[name]
                    for name in ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size")
                    if isinstance(audio.get(name), int)
                ),
                None,
            )
            new = found if found is not None and value != 1 else value
        elif key in ("image_seq_length", "image_seq_len", "num_image_tokens") and isinstance(value, int):
            found = next(
                (
                    config[name]
                    for name in ("image_seq_length", "mm_tokens_per_image")
                    if isinstance(config.get(name), int)
                ),
                None,
            )
            joined = config.get("scale_factor") if isinstance(config.get("scale_factor"), int) else 1
            new = found if found is not None else max(1, (_patches(vision) or value) // (joined or 1) ** 2)
        elif key.endswith(("_token_id", "_token_ids")) and id_map is not None:
            new = _mapped(value, id_map)
        if new != value:
            document[key] = new
            changed.append(key)
    _clip_length(document, audio, changed)


_SIZES = frozenset(("size", "crop_size", "image_size", "pad_size", "max_image_size"))


def _part(config: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    for holder in (config, config.get("thinker_config") or {}):
        for name in names:
            if isinstance(holder.get(name), Mapping):
                part: Mapping[str, Any] = holder[name]
                return part
    return config


def _whole(value: Any, tile: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
    """Two tiles wide where it was several, else one."""
    one = _size(tile, vision)
    edges = [item for item in tile.values() if isinstance(item, int)]
    if not isinstance(value, dict) or not edges or one == tile:
        return _size(value, vision)
    edge = max(item for item in one.values() if isinstance(item, int))
    return {
        key: edge * (2 if item > max(edges) else 1) if isinstance(item, int) else item for key, item in value.items()
    }


def _size(value: Any, vision: Mapping[str, Any]) -> Any:
    """A size in the form that it had: a number, sides, edges, or counts of pixels."""
    side = vision.get("image_size", vision.get("img_size"))
    if isinstance(side, (list, tuple)) and side:
        side = side[-1]
    if isinstance(value, dict):
        if max((item for item in value.values() if isinstance(item, int)), default=0) > 8192:  # pixels, not a side
            return {key: _pixels(vision) for key in value}
        if not isinstance(side, int):
            return value
        return {key: side if isinstance(item, int) else item for key, item in value.items()}
    return side if isinstance(value, int) and isinstance(side, int) else value


def _pixels(vision: Mapping[str, Any]) -> int:
    """The pixels of a picture of two by two merged patches."""
    patch = vision.get("patch_size") if isinstance(vision.get("patch_size"), int) else 14
    merge = vision.get("spatial_merge_size") if isinstance(vision.get("spatial_merge_size"), int) else 2
    return int((2 * patch * merge) ** 2)  # type: ignore[operator]


def _patches(vision: Mapping[str, Any]) -> int | None:
    side, patch = vision.get("image_size"), vision.get("patch_size")
    return (side // patch) ** 2 if isinstance(side, int) and isinstance(patch, int) and patch else None


def _mapped(value: Any, id_map: Mapping[int, int]) -> Any:
    if isinstance(value, list):
        return [_mapped(item, id_map) for item in value]
    return id_map.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _clip_length(document: dict[str, Any], audio: Mapping[str, Any], changed: list[str]) -> None:
    """Whisper's extractor pads to `chunk_length` seconds, which must be twice the positions of the encoder."""
    positions, rate, hop = audio.get("max_source_positions"), document.get("sampling_rate"), document.get("hop_length")
    if not (
        "chunk_length" in document and isinstance(positions, int) and isinstance(rate, int) and isinstance(hop, int)
    ):
        return
    frames = 2 * positions
    whole = rate // math.gcd(
        rate, frames
    )  # with multiples of this as the hop the clip is whole seconds, as it has to be
    hop = whole * max(1, round(hop / whole))
    samples = frames * hop
    new = {"chunk_length": samples // rate, "n_samples": samples, "nb_max_frames": frames, "hop_length": hop}
    for key, value in new.items():
        if key in document and document[key] != value:
            document[key] = value
            changed.append(key)
