"""Which modules are measured, by patterns of their names; and patterns that match none, which are mostly slips."""

from __future__ import annotations

import difflib
import inspect
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mldebug.core.errors import UsageError


class Filter:
    """`include` and `exclude` of a recorder: glob patterns of module names.

    muted = Filter(["encoder.*"], []).mutes("decoder.0", decoder)  # True
    """

    def __init__(self, include: Any, exclude: Any) -> None:
        self.include, self.exclude = _patterns("include", include), _patterns("exclude", exclude)
        self.told = False  # the warning was given
        self.begin()

    def begin(self) -> None:
        """The recorder is attached, for the first time or again: every module is met anew."""
        self.modules = self.measured = 0  # met, and not muted
        self._names: dict[str, None] = {}
        self._unmatched = [("include", p) for p in self.include] + [("exclude", p) for p in self.exclude]

    def mutes(self, name: str, module: nn.Module) -> bool:
        """Whether a module of this name, met for the first time, is left out."""
        muted = (bool(self.include) and not _matches(name, self.include)) or _matches(name, self.exclude)
        # A ModuleList is never called. (A class made by torch.jit raises where its forward is asked for.)
        forward = inspect.getattr_static(type(module), "forward", None)
        if forward is not nn.Module.__dict__["forward"] or "forward" in vars(module):
            self._names[name] = None
            self._unmatched = [pair for pair in self._unmatched if not fnmatchcase(name, pair[1])]
            self.modules += 1
            self.measured += not muted
        return muted

    @property
    def nothing_left(self) -> str:
        """Why no module is measured, or ""."""
        if self.measured or not self.modules:
            return ""
        return self.unmatched("include") or f"include and exclude leave none of {self._count()}"

    def unmatched(self, kind: str = "") -> str:
        """What to say of the patterns that match no module (of one kind); "" if all do."""
        found = [f"{name} pattern {pattern!r}" for name, pattern in self._unmatched if kind in ("", name)]
        if not found or not self.modules:
            return ""
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{', '.join(found[:3])}{more} match{'es' if len(found) == 1 else ''} none of {self._count()}"

    def hint(self) -> str:
        """The names nearest to the patterns that match none."""
        names = [name for name in self._names if name]
        near = {name for _, pattern in self._unmatched[:3] for name in _nearest(pattern, names)}
        if not near:
            return f"names of modules are {', '.join(names[:5]) or 'only that of the model itself, which is empty'}"
        return f"the nearest names are {', '.join([name for name in names if name in near][:5])}"

    def _count(self) -> str:
        return f"the {self.modules} modules that can be called" if self.modules > 1 else "the only module"


def _nearest(pattern: str, names: list[str]) -> list[str]:
    text = pattern.strip("*?.").lower()
    lowered = {name.lower(): name for name in reversed(names)}
    found = [lowered[key] for key in difflib.get_close_matches(text, lowered, n=3, cutoff=0.6)]
    # A name that is a part of the real one, or the other way round, is near too.
    found += [name for key, name in reversed(lowered.items()) if text and (text in key or key in text)]
    return list(dict.fromkeys(found))[:3]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"{name} is {value!r}", hint=f'give patterns of module names: {name}=["encoder.*"]')
    return patterns
