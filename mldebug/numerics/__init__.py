"""NaN, inf, overflow and underflow: where they began."""

from mldebug.numerics._check import check, diagnose, watch_script
from mldebug.numerics._event import Event
from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport, NumericsWarning
from mldebug.numerics._scalars import scalar_logger

__all__ = [
    "DebugUnderflowOverflow",
    "Event",
    "NumericsError",
    "NumericsReport",
    "NumericsWarning",
    "check",
    "diagnose",
    "scalar_logger",
    "watch_script",
]
