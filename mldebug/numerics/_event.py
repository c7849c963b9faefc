"""What was found: one event, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mldebug.numerics.ops._operands import Operand

Phase = Literal["init", "forward", "backward", "optimizer"]
Kind = Literal["nan", "inf", "underflow", "precision"]
Again = Literal["", "shown", "did not reproduce", "only when compiled", "not replayable"]
# GradScaler has lowered its scale so often in a row that no healthy run needs it: from 2**32, the largest start in
# use, it is below 1 after 33 steps.
MANY = 40
Role = Literal["input", "output", "parameter", "buffer", "gradient", "loss", "state"]


@dataclass(frozen=True)
class Operation:
    """The operation behind an event.

    `op` is the operation that ran (`aten.sqrt`), of a gradient formula where `node` names its node of the autograd
    graph (`SqrtBackward0`); `forward_op` is then the operation of the forward whose gradient it is. `file`, `line`,
    `function` and `code` are the user's or the model's own line. `victim` says that a bad operand came from outside:
    the operation is the first that took it. `cause` is the key of a row of the table of causes, "" if none fits.
    """

    op: str
    node: str = ""
    forward_op: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    facts: tuple[str, ...] = ()
    victim: bool = False
    cause: str = ""


@dataclass(frozen=True)
class Event:
    """The first bad tensor of a run.

        event = diagnose(model, step, steps=100).event
        print(event.step, event.where, event.kind, event.op)

    - `step`: optimizer steps before it (the `i` of `diagnose`); `batch`: forward calls of the root; `micro_batch`:
      training forwards within the step; all from 0
    - `phase`: "init", "forward", "backward" or "optimizer"; `kind`: "nan", "inf", "underflow" or "precision"
    - `module`: the dotted name, "" for the root itself and None outside any module; `module_class`: its class; `where`:
      both in words
    - `role`: "input", "output", "parameter", "buffer", "gradient", "loss" or "state"; `name`: which tensor
      (`output[0]`, `weight`, `loss`, of a "state" what an optimizer keeps of a parameter: `exp_avg_sq`); `param`: the
      parameter's full name, if it is of one
    - `dtype`, and `limit`, the largest finite value of it
    - `absmax`: the largest finite magnitude beside the bad elements; `bad`: how many of `numel` elements are bad; None
      where they were not counted
    - `op`: the operation that made it, or for a gradient the node of the autograd graph; `operation`: all that is known
      of that; None where operations were not looked at
    - `sample`: index of the first bad sample of an input
    - `again`: what came of a replay of the forward, and of its backward for a gradient; "" where there was none
    - `loss_scale`: of a gradient under a GradScaler, the scale it carried; `scaled_down`: how many steps in a row, this
      one included, had gradients that were not finite; `benign`: only the loss scale made it, and the step is skipped
    - `cause`: of a parameter that an optimizer's update spoiled, the key of a row of the table of causes; "" where none
      fits, and where `operation` has it
    - `rank`: the global rank that had it; `training`: the module was in training mode
    """

    step: int
    batch: int
    micro_batch: int
    phase: Phase
    module: str | None
    module_class: str
    role: Role
    kind: Kind
    name: str
    dtype: str
    limit: float
    param: str | None = None
    op: str | None = None
    benign: bool = False
    rank: int = 0
    absmax: float | None = None
    bad: int | None = None
    numel: int | None = None
    training: bool = True
    sample: int | None = None
    operation: Operation | None = None
    again: Again = ""
    loss_scale: float | None = None
    scaled_down: int = 0
    cause: str = ""

    @property
    def where(self) -> str:
        """The place in words: `encoder.block.2.wo (Linear)`, `the model itself (Net)`, `outside any module`."""
        if self.module is None:
            return "outside any module"
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
