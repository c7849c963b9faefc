"""Order statistics along the last axis of what is not NaN; NaN, and no warning, where that is nothing."""

from __future__ import annotations

from typing import Any

import numpy as np


def upper(values: Any, share: float) -> Any:
    """The quantile `share`; between two values the higher."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.isfinite(values).sum(axis=-1)
    place = np.ceil(share * np.maximum(count - 1, 0)).astype(np.int64)
    found = np.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]
    return np.where(count > 0, found, np.nan)


def median(values: Any) -> Any:
    """The median; between two values their mean."""
    ordered = np.sort(values, axis=-1)
    count = np.isfinite(values).sum(axis=-1)
    low, high = (
        np.take_along_axis(ordered, np.maximum(place, 0)[..., None], axis=-1)[..., 0]
        for place in ((count - 1) // 2, np.minimum(count // 2, ordered.shape[-1] - 1))
    )
    return np.where(count > 0, (low + high) / 2, np.nan)
