"""Short words for values that never run the program's own code: no __repr__, no property, no __len__ of its classes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 40  # characters of a string
_ITEMS = 3  # of a container


def safe_repr(value: Any, depth: int = 2) -> str:
    """`value` in a few words: tensors and arrays as dtype, shape and device, objects as their class.

    safe_repr([1, "two"])  # "[1, 'two']"
    """
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() < 128 else f"int({value.bit_length()} bits)"
    if kind in (str, bytes):
        return repr(value) if len(value) <= _MOST else f"{value[:_MOST]!r}...({len(value)})"
    if kind in (list, tuple, set, frozenset, dict):
        return _container(value, kind, depth)
    return _tensor(value, kind) or f"<{_name(kind)}>"


def arguments(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """`(x=1, y=<Model>)` for the arguments of a call."""
    return "(" + ", ".join(f"{name}={safe_repr(values[name])}" for name in names if name in values) + ")"


def _container(value: Any, kind: type, depth: int) -> str:
    if depth == 0:
        return f"{kind.__name__}({len(value)})"
    items = []
    # A copy: another thread may change it meanwhile.
    for item in (list(value.items()) if kind is dict else list(value))[:_ITEMS]:
        both = f"{safe_repr(item[0], depth - 1)}: {safe_repr(item[1], depth - 1)}" if kind is dict else None
        items.append(both or safe_repr(item, depth - 1))
    if len(value) > _ITEMS:
        items.append(f"...({len(value)})")
    opening, closing = "[]" if kind is list else "()" if kind is tuple else "{}"
    text = ", ".join(items)
    return f"{opening}{text}{',' if kind is tuple and len(value) == 1 else ''}{closing}"


def _tensor(value: Any, kind: type) -> str:
    """Never reads the values: that would wait for the device."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if tensor is not None and tensor in kind.__mro__:
        try:
            with torch._C.DisableTorchFunctionSubclass():  # type: ignore[union-attr]
                dtype, shape, device = str(tensor.dtype.__get__(value)), tensor.shape.__get__(value), value.device
            return f"{kind.__name__}({dtype.removeprefix('torch.')}, {list(shape)}, {device})"
        except Exception:  # a half-built one
            return f"<{_name(kind)}>"
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array is not None and kind is array:
        return f"ndarray({value.dtype}, {list(value.shape)})"
    return ""


def _name(kind: type) -> str:
    # By type's own slots: a metaclass may have made properties of them.
    name: str = type.__dict__["__qualname__"].__get__(kind)
    if kind is type or type in kind.__mro__:
        return "class"
    return name
