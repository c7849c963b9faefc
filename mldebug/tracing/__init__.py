"""Which line runs: a tracer that can be left on, and what its traces say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.tracing._tail import trace_tail
    from mldebug.tracing._tail_report import TraceTailReport
    from mldebug.tracing._tracer import NicerTrace

__all__ = ["NicerTrace", "TraceTailReport", "trace_tail"]

_HOMES = {
    "NicerTrace": "mldebug.tracing._tracer",
    "TraceTailReport": "mldebug.tracing._tail_report",
    "trace_tail": "mldebug.tracing._tail",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
