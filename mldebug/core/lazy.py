"""Names of a package that are fetched from their modules on first use (PEP 562), so that importing it stays light."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # type checkers take it for true; importing typing would be most of what `import mldebug` costs
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `package`; `homes` says which module defines each public name.

    Type checkers do not follow this: the package imports the same names under TYPE_CHECKING.

        __getattr__, __dir__ = lazy_names(__name__, {"spy": "mldebug.hang"})
    """

    def fetch(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # the next look-up no longer comes here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return fetch, names
