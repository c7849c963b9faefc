"""mldebug is for a training run that goes wrong: NaN and overflow, a hang, output that nobody can read.

    from mldebug import DebugUnderflowOverflow
    DebugUnderflowOverflow(model)  # the run now stops where the first NaN or inf appears

Importing this package loads nothing else: each public name is fetched from its room on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.cluster import (
        DistTestReport,
        DoctorReport,
        PairsReport,
        PairsVerdict,
        dist_test,
        doctor,
        pair_matrix,
    )
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
    from mldebug.ranks import (
        EmulateReport,
        LockedOutput,
        LogsReport,
        breakpoint_on,
        emulate,
        local_main_process_first,
        logs,
        main_process_by_path_first,
        main_process_first,
        print_once,
        printflock,
        rank0_print,
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
    from mldebug.tracing import NicerTrace, TraceTailReport, trace_tail

__version__ = "0.1.0"

__all__ = [
    "DebugUnderflowOverflow",
    "DistTestReport",
    "DoctorReport",
    "EmulateReport",
    "Event",
    "LockedOutput",
    "LogsReport",
    "MldebugError",
    "NicerTrace",
    "NumericsError",
    "NumericsReport",
    "PackReport",
    "PairsReport",
    "PairsVerdict",
    "SpyReport",
    "TinyDatasetReport",
    "TinyModelReport",
    "TinyTokenizerReport",
    "TraceTailReport",
    "UnpackReport",
    "Verdict",
    "WatchReport",
    "__version__",
    "breakpoint_on",
    "check",
    "collect",
    "diagnose",
    "dist_test",
    "doctor",
    "emulate",
    "hang_watchdog",
    "judge",
    "local_main_process_first",
    "logs",
    "main_process_by_path_first",
    "main_process_first",
    "mark",
    "pack",
    "pair_matrix",
    "print_once",
    "printflock",
    "rank0_print",
    "scalar_logger",
    "spy",
    "tiny_dataset",
    "tiny_model",
    "tiny_tokenizer",
    "trace_tail",
    "unpack",
    "watch",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "DebugUnderflowOverflow": "mldebug.numerics",
    "DistTestReport": "mldebug.cluster",
    "DoctorReport": "mldebug.cluster",
    "EmulateReport": "mldebug.ranks",
    "Event": "mldebug.numerics",
    "LockedOutput": "mldebug.ranks",
    "LogsReport": "mldebug.ranks",
    "MldebugError": "mldebug.core.errors",
    "NicerTrace": "mldebug.tracing",
    "NumericsError": "mldebug.numerics",
    "NumericsReport": "mldebug.numerics",
    "PackReport": "mldebug.tiny",
    "PairsReport": "mldebug.cluster",
    "PairsVerdict": "mldebug.cluster",
    "SpyReport": "mldebug.hang",
    "TinyDatasetReport": "mldebug.tiny",
    "TinyModelReport": "mldebug.tiny",
    "TinyTokenizerReport": "mldebug.tiny",
    "TraceTailReport": "mldebug.tracing",
    "UnpackReport": "mldebug.tiny",
    "Verdict": "mldebug.hang",
    "WatchReport": "mldebug.hang",
    "breakpoint_on": "mldebug.ranks",
    "check": "mldebug.numerics",
    "collect": "mldebug.hang",
    "diagnose": "mldebug.numerics",
    "dist_test": "mldebug.cluster",
    "doctor": "mldebug.cluster",
    "emulate": "mldebug.ranks",
    "hang_watchdog": "mldebug.hang",
    "judge": "mldebug.hang",
    "local_main_process_first": "mldebug.ranks",
    "logs": "mldebug.ranks",
    "main_process_by_path_first": "mldebug.ranks",
    "main_process_first": "mldebug.ranks",
    "mark": "mldebug.hang",
    "pack": "mldebug.tiny",
    "pair_matrix": "mldebug.cluster",
    "print_once": "mldebug.ranks",
    "printflock": "mldebug.ranks",
    "rank0_print": "mldebug.ranks",
    "scalar_logger": "mldebug.numerics",
    "spy": "mldebug.hang",
    "tiny_dataset": "mldebug.tiny",
    "tiny_model": "mldebug.tiny",
    "tiny_tokenizer": "mldebug.tiny",
    "trace_tail": "mldebug.tracing",
    "unpack": "mldebug.tiny",
    "watch": "mldebug.hang",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
