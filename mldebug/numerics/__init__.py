"""NaN, inf, overflow and underflow: where they began; and where two runs part."""

from mldebug.numerics._check import check, diagnose, watch_script
from mldebug.numerics._event import Event
from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport, NumericsWarning
from mldebug.numerics.frameworks._callback import OverflowCallback
from mldebug.numerics.frameworks._scalars import scalar_logger
from mldebug.numerics.frameworks._transformers import patch_transformers
from mldebug.numerics.runs._compare import CompareReport, compare
from mldebug.numerics.runs._recording import record_run

__all__ = [
    "CompareReport",
    "DebugUnderflowOverflow",
    "Event",
    "NumericsError",
    "NumericsReport",
    "NumericsWarning",
    "OverflowCallback",
    "check",
    "compare",
    "diagnose",
    "patch_transformers",
    "record_run",
    "scalar_logger",
    "watch_script",
]
