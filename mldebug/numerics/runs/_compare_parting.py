"""Where two runs part."""

from __future__ import annotations

from dataclasses import dataclass

from mldebug.numerics.runs._compare_report import Row
from mldebug.numerics.runs._compare_run import Call
from mldebug.numerics.runs._compare_values import Difference


@dataclass
class Parting:
    """Where they part: a row, the calls of both runs, and what was before."""

    kind: str
    row: Row
    a: Call
    b: Call
    before: float
    found: Difference
    op: str = ""
