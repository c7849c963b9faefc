"""Waveforms and spectra in the shapes that forwards take."""

from __future__ import annotations

import torch

from mldebug.tiny.model.inputs._facts import AUDIO, Facts
from mldebug.tiny.model.inputs._images import Maker, Values


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


def wave_channels(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.number("audio_channels", "channels", default=1) or 1, _samples(facts))


def _samples(facts: Facts) -> int:
    """Samples of a waveform, a whole number of the steps in which codecs and encoders walk."""
    step = 1
    for value in facts.value("downsampling_ratios", "upsampling_ratios", "conv_stride", default=[320]) or [320]:
        if isinstance(value, int):
            step *= value
    count = max(1600, 4 * step, 4 * facts.number("hop_length", "frame_size"))
    return -(-count // facts.step) * facts.step


def features(facts: Facts) -> list[Maker]:
    first_conv = facts.first(torch.nn.Conv1d)
    whisper_like = facts.value("max_source_positions", within=AUDIO) is not None and first_conv is not None
    makers: list[Maker] = [_mels_first, _mels_last] if whisper_like else [_mels_last, _mels_first]
    return [*makers, _mel_image, _mels_flat, _wave, wave_channels, *_other_widths(facts)]


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
    return [_mels_of(width) for width in dict.fromkeys(widths)]


def _mels_of(width: int) -> Maker:
    return lambda facts, _made: facts.floats(facts.batch, _mel_frames_last(facts), width)


def waves(facts: Facts) -> list[Maker]:
    if facts.value("num_mel_bins") and facts.value("max_length"):
        return [_mels_last, _wave, wave_channels]
    if facts.value("audio_channels", "sampling_rate", "codebook_size", "upsampling_ratios") is not None:
        return [wave_channels, _wave, _mels_last, _mels_first]
    return [_wave, wave_channels, _mels_last, _mels_first]


def mask_of(*names: str, dtype: torch.dtype = torch.long) -> Maker:
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
