"""mldebug finds out where NaN, inf and overflow begin in a training run.

    from mldebug import DebugUnderflowOverflow
    DebugUnderflowOverflow(model)  # the run now stops where the first NaN or inf appears

Importing this package loads nothing else: each public name is fetched from its room on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.core.errors import MldebugError
    from mldebug.hang import SpyReport, Verdict, WatchReport, collect, hang_watchdog, judge, mark, spy, watch
    from mldebug.numerics import (
        DebugUnderflowOverflow,
        Event,
        NumericsError,
        NumericsReport,
        check,
        diagnose,
        scalar_logger,
    )
    from mldebug.tiny import (
        PackReport,
        TinyDatasetReport,
        TinyModelReport,
        TinyTokenizerReport,
        UnpackReport,
        pack,
        tiny_dataset,
        tiny_model,
        tiny_tokenizer,
        unpack,
    )

__version__ = "0.1.0"

__all__ = [
    "DebugUnderflowOverflow",
    "Event",
    "MldebugError",
    "NumericsError",
    "NumericsReport",
    "PackReport",
    "SpyReport",
    "TinyDatasetReport",
    "TinyModelReport",
    "TinyTokenizerReport",
    "UnpackReport",
    "Verdict",
    "WatchReport",
    "__version__",
    "check",
    "collect",
    "diagnose",
    "hang_watchdog",
    "judge",
    "mark",
    "pack",
    "scalar_logger",
    "spy",
    "tiny_dataset",
    "tiny_model",
    "tiny_tokenizer",
    "unpack",
    "watch",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "DebugUnderflowOverflow": "mldebug.numerics",
    "Event": "mldebug.numerics",
    "MldebugError": "mldebug.core.errors",
    "NumericsError": "mldebug.numerics",
    "NumericsReport": "mldebug.numerics",
    "PackReport": "mldebug.tiny",
    "SpyReport": "mldebug.hang",
    "TinyDatasetReport": "mldebug.tiny",
    "TinyModelReport": "mldebug.tiny",
    "TinyTokenizerReport": "mldebug.tiny",
    "UnpackReport": "mldebug.tiny",
    "Verdict": "mldebug.hang",
    "WatchReport": "mldebug.hang",
    "check": "mldebug.numerics",
    "collect": "mldebug.hang",
    "diagnose": "mldebug.numerics",
    "hang_watchdog": "mldebug.hang",
    "judge": "mldebug.hang",
    "mark": "mldebug.hang",
    "pack": "mldebug.tiny",
    "scalar_logger": "mldebug.numerics",
    "spy": "mldebug.hang",
    "tiny_dataset": "mldebug.tiny",
    "tiny_model": "mldebug.tiny",
    "tiny_tokenizer": "mldebug.tiny",
    "unpack": "mldebug.tiny",
    "watch": "mldebug.hang",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
