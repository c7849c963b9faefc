"""What compare() returns, and how it reads."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import ClassVar

from mldebug.core.report import Report, paint

_WORDS = {
    "input": "the inputs of the model differ",
    "random": "random numbers differ",
    "jump": "inputs agree, outputs do not",
    "between": "what it is given differs",
    "choice": "inputs agree, the choice does not",
    "drift": "small differences have grown",
    "weights": "weights differ",
}


@dataclass
class Row:
    """One tensor of a module call in both runs. `scale` are the rms values in a and b."""

    module: str
    class_name: str
    role: str
    path: str
    op: str
    forward: int
    call: int
    error: float
    tolerance: float
    scale: tuple[float, float]
    dtypes: tuple[str, str]
    sampled: bool
    exact: bool
    parted: bool = False


@dataclass(frozen=True)
class CompareReport(Report):
    """Where two runs part.

    `kind` says how: "" they do not, "jump" the module's inputs agree and its outputs do not, "between" the code around
    it made it, "random" other random numbers, "choice" whole numbers differ, "input" the model's inputs differ,
    "drift" small differences have grown too large, "weights" only weights differ. `module` is the name in a (None:
    nowhere; "" the model itself, or outside of modules), `other_name` that in b where it is another; `op` the
    operation where operations were recorded. Errors are relative to a tensor's scale. `rows` are the tensors around it,
    `only_a` and `only_b` the modules that the other run does not have, `exact` how many of the `compared` tensors are
    the same in every bit, `weights` those that differ before the first forward.

        report = mldebug.compare("before", "after")
        print(report.module, report.kind, report.error)
    """

    schema: ClassVar[int] = 1

    names: tuple[str, str]
    parted: bool
    kind: str
    module: str | None
    other_name: str
    class_name: str
    op: str
    path: str
    forward: int
    call: int
    error: float
    tolerance: float
    error_before: float
    error_at_end: float
    reading: str
    hint: str
    dtype: str
    compared: int
    exact: int
    not_compared: int
    rows: list[Row] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether they part nowhere."""
        return not self.parted

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [textwrap.fill(self._headline(), width, subsequent_indent="    "), ""]
        if self.reading:
            lines += [textwrap.fill(self.reading, width)]
        if self.hint:
            lines += [textwrap.fill(f"hint: {self.hint}", width, subsequent_indent="      ")]
        if self.reading:
            lines.append("")
        if self.rows and self.parted:
            lines += [*_table(self.rows, width), ""]
        lines += [textwrap.fill(self._counts(), width, subsequent_indent="  ")]
        for name, missing in (("a", self.only_a), ("b", self.only_b)):
            if missing:
                more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
                text = f"only in {name}: {', '.join(missing[:4])}{more}"
                lines.append(textwrap.fill(text, width, subsequent_indent="  "))
        if self.weights and self.kind != "weights":
            text = f"{len(self.weights)} weights differ before the first forward: {', '.join(self.weights[:3])}"
            lines.append(textwrap.fill(text, width, subsequent_indent="  "))
        lines += [textwrap.fill(note, width, subsequent_indent="  ") for note in self.notes]
        text = "\n".join(lines)
        return paint(text) if color else text

    def _headline(self) -> str:
        if not self.parted:
            return (
                f"a and b part nowhere: largest error {_number(self.error)} of a tensor's scale,"
                f" {_number(self.error_at_end)} at the end"
            )
        if self.kind == "weights":
            return "a and b have different weights"
        where = self.module or ("the model" if self.class_name else "the function, outside of modules")
        if self.class_name:
            where += f" ({self.class_name})"
        if self.other_name:
            where += f", in b {self.other_name}"
        if self.op:
            where += f", operation aten.{self.op}"
        call = f", call {self.call}" if self.call else ""
        limit = "they must be equal" if self.tolerance == 0 else f"{_number(self.tolerance)} is allowed in {self.dtype}"
        return (
            f"a and b part at {where}, forward {self.forward}{call}, {self.path}: {_WORDS[self.kind]}"
            f" (error {_number(self.error)}, {limit}, {_number(self.error_before)} before)"
        )

    def _counts(self) -> str:
        named = [f"{name} = {path}" for name, path in zip("ab", self.names, strict=True) if name != path]
        text = "; ".join([*named, f"{self.compared} tensors compared, {self.exact} equal in every bit"])
        if self.not_compared:
            text += f", {self.not_compared} could not be compared (other shapes or kinds)"
        return text + (f"; error {_number(self.error_at_end)} at the end of the model" if self.parted else "")


def _table(rows: list[Row], width: int) -> list[str]:
    head = f"  {'error':>8} {'rms of a':>9} {'rms of b':>9}  {'dtypes':<10} what"
    lines = [head]
    for row in rows:
        what = row.module or ("the model" if row.class_name else "outside of modules")
        what += f" {row.path}" if row.path not in ("output", "output[0]") else ""
        what += f" aten.{row.op}" if row.op else ""
        mark = ">" if row.parted else " "
        sign = "~" if row.sampled else " "
        dtypes = "/".join(dict.fromkeys(_SHORT.get(dtype, dtype) for dtype in row.dtypes))
        scales = f"{_number(row.scale[0]):>9} {_number(row.scale[1]):>9}"
        line = f"{mark} {sign + _number(row.error):>8} {scales}  {dtypes:<10} "
        room = width - len(line)
        lines.append(line + (what if len(what) <= room else "..." + what[-(room - 3) :]))
    if any(row.sampled for row in rows):
        lines.append("  ~ by a sample of 256 values")
    return lines


_SHORT = {
    "float32": "fp32",
    "float64": "fp64",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"
