"""Sizes in bytes: as people write them, and as they read them."""

from __future__ import annotations

import re

from mldebug.core.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(name: str, size: str | int | None) -> int | None:
    """A number of bytes above 0, or a text with a unit: 1MB, 500 kB, 1.5MiB. `name` is what the size is of.

    parse_bytes("the budget", "1MB")  # 1_000_000
    """
    if size is None or (isinstance(size, int) and size > 0):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(size).lower())
    count = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if count <= 0:
        raise UsageError(f"{name} {size!r} is no size", "give bytes or a size with a unit, such as 500kB or 1MB")
    return count


def size_text(count: float) -> str:
    """Bytes for people.

    size_text(2_500_000)  # "2.5 MB"
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
