"""What a model's config, modules and forward say about the inputs that it takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch

# Where an encoder's settings may be, besides the config itself. The order is that of preference.
VISION = ("vision_config", "backbone_config", "image_config", "image_encoder", "encoder_config", "encoder")
AUDIO = ("audio_config", "audio_encoder_config", "speech_config", "encoder_config", "encoder", "asr_config")
TEXT = ("text_config", "language_config", "llm_config", "decoder_config", "decoder")


class Facts:
    """One model, looked at for inputs. `count` holds how many placeholder tokens each kind of feature needs."""

    def __init__(self, model: Any, length: int | None, batch: int, seed: int) -> None:
        self.model = model
        self.config = model.config
        self.config_dict: dict[str, Any] = model.config.to_dict()
        self.parameters = _named_parameters(model)
        self.batch = batch
        self.asked_length = length
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.count: dict[str, int] = {}  # placeholder tokens for each kind of feature, once known
        self.image_size: tuple[int, int] | None = None  # where a forward asked for another one than the config's
        self.frames: int | None = None  # the same for audio
        self.choice: dict[str, int] = {}  # which of several shapes of an input is being tried
        self.step = 1  # of which the samples of a waveform must be a multiple
        self.calls = 0  # of modules, in the last forward

    # --- the forward

    def takes(self, *names: str) -> bool:
        return any(name in self.parameters for name in names)

    def required(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]

    # --- the config

    def value(self, *names: str, within: tuple[str, ...] = (), default: Any = None) -> Any:
        """The first of `names` that is set: in the configs named by `within`, else at the top, else anywhere."""
        places = [self.config_dict.get(place) for place in within] + [self.config_dict]
        for place in places:
            for name in names:
                if isinstance(place, dict) and place.get(name) is not None:
                    return place[name]
        for _path, key, value in walk(self.config_dict):
            if key in names and value is not None:
                return value
        return default

    def number(self, *names: str, within: tuple[str, ...] = (), default: int = 0) -> int:
        value = self.value(*names, within=within, default=default)
        if isinstance(value, (list, tuple)):
            value = value[0] if value else default
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def token(self, *names: str) -> int | None:
        """A token id by the names its field may have: at the top, in the text configs, or anywhere."""
        places = [self.config_dict, *(self.config_dict.get(name) for name in (*TEXT, "thinker_config"))]
        found = [place[name] for place in places if isinstance(place, dict) for name in names if name in place]
        found += [value for name in names for _path, key, value in walk(self.config_dict) if key == name]
        for value in found:
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def vocab(self) -> int:
        """How many ids the input embedding knows."""
        rows = embedding_rows(self.model)
        tops = [self.config_dict, *(self.config_dict.get(name) for name in TEXT[:3])]
        said = next(
            (top["vocab_size"] for top in tops if isinstance(top, dict) and isinstance(top.get("vocab_size"), int)), 0
        )
        return int(min(rows, said) if rows and said else rows or said or self.number("vocab_size") or 32)

    @property
    def special_ids(self) -> set[int]:
        """Every id that some field of the config gives a meaning."""
        found: set[int] = set()
        for _path, key, value in walk(self.config_dict):
            if "token" in key or key.endswith(("_id", "_ids", "_index")):
                values = value if isinstance(value, (list, tuple)) else [value]
                found |= {item for item in values if isinstance(item, int) and not isinstance(item, bool)}
        return found

    @property
    def positions(self) -> int | None:
        """How long a text may be, or None where nothing says."""
        value = self.number(
            "max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions", "n_ctx",
            "max_seq_len", "seq_length", "block_size", "max_text_positions", within=TEXT,
        )  # fmt: skip
        return value or None

    @property
    def length(self) -> int:
        most = self.positions or 1 << 30
        slack = max((places.padding_idx + 1 for places in self._places() if places.padding_idx is not None), default=0)
        return max(1, min(self.asked_length or 16, most - slack))

    def _places(self) -> Iterator[torch.nn.Embedding]:
        """Embeddings of positions. Those that keep a row for padding start to count behind it."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and name.endswith(("position_embeddings", "embed_positions")):
                yield module

    # --- images

    @property
    def channels(self) -> int:
        said = self.value("num_channels", "in_channels", "in_chans", "n_channels", within=VISION)
        if isinstance(said, int) and said in (1, 3, 4):
            return said
        first = self.first(torch.nn.Conv2d, torch.nn.Conv3d)
        return int(first.in_channels) if first is not None and first.in_channels <= 4 else 3

    @property
    def patch(self) -> int:
        said = self.number("patch_size", "spatial_patch_size", within=VISION)
        if said:
            return said
        first = self.first(torch.nn.Conv2d)
        return int(first.kernel_size[0]) if first is not None else 16

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        if self.image_size:
            return self.image_size
        value = self.value("image_size", "img_size", "input_size", within=VISION)
        if isinstance(value, dict):
            value = [
                value.get("height", value.get("shortest_edge", 32)),
                value.get("width", value.get("shortest_edge", 32)),
            ]
        if isinstance(value, (list, tuple)) and len(value) >= 2 and all(isinstance(item, int) for item in value):
            return int(value[-2]), int(value[-1])
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, value
        side = 64 if self.patch <= 16 else 4 * self.patch
        return side, side

    @property
    def merge(self) -> int:
        return (
            self.number(
                "spatial_merge_size",
                "merge_size",
                "spatial_merge_unit",
                "merge_kernel_size",
                "hidden_stride",
                within=VISION,
                default=1,
            )
            or 1
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of patches in an image given as flat patches."""
        side = 2 * self.merge
        return 1, side, side

    # --- audio

    @property
    def mels(self) -> int:
        return self.number(
            "num_mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size", "n_mel_bins", "mel_dim",
            "n_mels", "num_mel_channels", "feature_projection_input_dim", "input_dim", "input_feature_size",
            within=AUDIO, default=80,
        )  # fmt: skip

    # --- modules

    def first(self, *kinds: type) -> Any:
        """The first module of a kind, in the order in which the model lists them."""
        return next((module for module in self.model.modules() if isinstance(module, kinds)), None)

    # --- numbers

    def ints(self, *shape: int, high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def ids(self, *shape: int) -> torch.Tensor:
        """Ids of plain text: none that the config gives a meaning, as long as others are left."""
        plain = sorted(set(range(self.vocab)) - self.special_ids) or list(range(self.vocab))
        picks = self.ints(math.prod(shape), high=len(plain)).tolist()
        return torch.tensor([plain[pick] for pick in picks]).reshape(shape)


def _named_parameters(model: Any) -> dict[str, inspect.Parameter]:
    """The named parameters of the forward; where it only passes everything on, those of the class that it extends."""
    for forward in (
        model.forward,
        *(kind.__dict__["forward"] for kind in type(model).__mro__ if "forward" in kind.__dict__),
    ):
        found = {
            name: parameter
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and name != "self"
        }
        if found:
            return found
    return {}


def walk(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each field that is no config itself, as (path, name, value)."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from walk(value, here)
        else:
            yield here, str(key), value


def embedding_rows(model: Any) -> int:
    """How many ids a model's input embedding has rows for; 0 where it has no such thing."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError):
        return 0
