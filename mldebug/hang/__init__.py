"""Why a job hangs: which rank holds the others up, at which line, and what says so.

    from mldebug.hang import spy
    print(spy().text())

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldebug.hang._collect import collect
    from mldebug.hang._evidence import Evidence, merge_evidence
    from mldebug.hang._inspect import load_evidence, save_evidence, spy
    from mldebug.hang._judge import judge
    from mldebug.hang._report import SpyReport
    from mldebug.hang._source import annotate
    from mldebug.hang._verdict import Verdict

__all__ = [
    "Evidence",
    "SpyReport",
    "Verdict",
    "annotate",
    "collect",
    "judge",
    "load_evidence",
    "merge_evidence",
    "save_evidence",
    "spy",
]

# Public name -> the module of this room that defines it. Type checkers read the imports above instead.
_HOMES = {
    "Evidence": "_evidence",
    "SpyReport": "_report",
    "Verdict": "_verdict",
    "annotate": "_source",
    "collect": "_collect",
    "judge": "_judge",
    "load_evidence": "_inspect",
    "merge_evidence": "_evidence",
    "save_evidence": "_inspect",
    "spy": "_inspect",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
