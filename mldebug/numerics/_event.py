"""What was found: one event, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["init", "forward", "backward", "optimizer"]
Kind = Literal["nan", "inf", "underflow", "precision"]
Role = Literal["input", "output", "parameter", "buffer", "gradient", "loss"]


@dataclass(frozen=True)
class Event:
    """The first bad tensor of a run.

    `step` counts optimizer steps (the `i` of `diagnose`), `batch` forward calls of the root, `micro_batch` training
    forwards within the step; all from 0. `module` is the dotted name, "" for the root itself and None outside any
    module. `name` says which tensor (`output[0]`, `weight`, `loss`), `limit` is the largest finite value of its dtype.
    `absmax` is the largest finite magnitude beside the bad elements, `bad` how many of `numel` elements are bad.
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

    @property
    def where(self) -> str:
        """The place in words: `encoder.block.2.wo (Linear)`, `the model itself (Net)`, `outside any module`."""
        if self.module is None:
            return "outside any module"
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
