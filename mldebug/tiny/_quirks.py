"""What no rule by role can know, as data: one entry per model type."""

from __future__ import annotations

from typing import Any

# Fields that the default config of a type lacks and that a model cannot do without.
FILL: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
}

# model_type -> {field: tiny value}. It holds for a config of that type at any level. A field that is a list is cut or
# set whole. Dotted names reach into a nested config.
SET: dict[str, dict[str, Any]] = {}

# The class to build where the auto classes name none, or one that is not the whole model.
CLASSES: dict[str, str] = {}
