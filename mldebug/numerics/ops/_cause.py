"""A row of the table of causes, and where it fits.

A row fits an operation if its phase, one of its names and all of its facts do. Names are those of
`_op_names.base_name`, or of nodes of the autograd graph without `Backward0`; facts those of `_operands`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mldebug.numerics._event import Operation
from mldebug.numerics.ops._op_names import base_name


@dataclass(frozen=True)
class Cause:
    """One row: `key`, where it fits, and in words what happened (`reading`) and what helps (`remedy`)."""

    key: str
    ops: str  # names, with blanks between; "*" for any
    facts: str  # with commas between; all must hold
    reading: str
    remedy: str
    phase: str = "*"  # forward, backward, optimizer


def fits(cause: Cause, made: Operation, phase: str) -> bool:
    """Whether a row fits an operation."""
    name = base_name(made.op)
    if made.node.endswith("Backward") or "a hook" in made.facts:  # code of the user's own
        phase = "forward" if cause.phase == "forward" else phase
    elif made.node:
        name = made.node.rstrip("0123456789").removesuffix("Backward").lower()
    return (
        cause.phase in ("*", phase)
        and (cause.ops == "*" or name in cause.ops.split())
        and all(fact.strip() in made.facts for fact in cause.facts.split(",") if fact.strip())
    )
