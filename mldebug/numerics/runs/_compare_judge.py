"""Walk through two recordings together, and name the first place where they part."""

from __future__ import annotations

import math
import re
from collections import deque
from typing import Any

from torch import Tensor

from mldebug.core.errors import MldebugError
from mldebug.numerics.runs._compare_match import matched_modules, matched_ops, matched_paths
from mldebug.numerics.runs._compare_parting import Parting
from mldebug.numerics.runs._compare_reading import environment_differences, read
from mldebug.numerics.runs._compare_report import CompareReport, Row
from mldebug.numerics.runs._compare_run import OUTSIDE, Call, Key, Piece, Run
from mldebug.numerics.runs._compare_values import (
    JUMP,
    TOLERANCE,
    Difference,
    Layouts,
    coarser,
    difference,
    drift_limit,
)

# Angles of positions are made of whole numbers: what may differ is the rounding of the result, and nothing before it.
_OF_ANGLES = 0.4  # of the tolerance of a module that multiplies and adds
_ANGLES = re.compile(r"rotary|rope|sinusoid|timestep|posit\w*(emb|enc)")
_AROUND = 5  # rows of the table before the one that parted; as many after it


def judge(a: Run, b: Run, tolerance: float | None, names: tuple[str, str]) -> CompareReport:
    """The report on two recordings."""
    walk = _Walk(a, b, tolerance)
    walk.through()
    if not walk.compared:
        missing = [note for note in _other_notes(a, b) if "no recording of rank" in note]
        raise MldebugError(
            "; ".join(["the two runs have no tensor in common", *missing]),
            "record the same model, or models of the same architecture, on the same inputs",
        )
    parting = walk.parting
    notes = environment_differences(a, b) + walk.layouts.notes + _other_notes(a, b)
    weights = walk.weights()
    reading, hint = ("", "") if parting is None else read(parting, walk.own_weights(parting), a, b)
    kind = parting.kind if parting else ""
    if parting is None and weights:
        kind, reading = "weights", f"Outputs agree, and weights do not: {', '.join(weights[:3])}."
        hint = "load the same checkpoint into both"
    row = parting.row if parting else None
    return CompareReport(
        names=names,
        parted=bool(kind),
        kind=kind,
        module=row.module if row else None,
        other_name=walk.other_name(parting),
        class_name=row.class_name if row else "",
        op=parting.op if parting else "",
        path=row.path if row else "",
        forward=row.forward if row else 0,
        call=row.call if row else 0,
        error=row.error if row else walk.largest,
        tolerance=row.tolerance if row else walk.tolerance_of(None),
        error_before=parting.before if parting else 0.0,
        error_at_end=walk.at_end,
        reading=reading,
        hint=hint,
        rows=[*walk.rows_before, *walk.rows_after] if parting else list(walk.rows_before),
        weights=weights,
        notes=notes,
        only_a=walk.only_a,
        only_b=walk.only_b,
        compared=walk.compared,
        exact=walk.exact,
        not_compared=walk.not_compared,
        dtype=walk.dtype,
    )


class _Walk:
    """Goes through the events of one run (`lead`: the one whose modules were not compiled) and their likes."""

    def __init__(self, a: Run, b: Run, tolerance: float | None) -> None:
        self.a, self.b, self._tolerance = a, b, tolerance
        self._to_b, self.only_a, self.only_b = matched_modules(a, b)
        self._to_a = {theirs: ours for ours, theirs in self._to_b.items()}
        self.layouts = Layouts()
        self.compared = self.exact = self.not_compared = 0
        self.dtype = ""
        self.largest = self.at_end = 0.0
        self.parting: Parting | None = None
        self.rows_before: deque[Row] = deque(maxlen=_AROUND)
        self.rows_after: list[Row] = []
        self._errors: dict[int, float] = {}  # by the line of the lead
        self._context: dict[Key, float] = {}  # the largest error of what a call has to work with
        self._so_far = 0.0
        self._drifted: Parting | None = None

    def through(self) -> None:
        swapped = _is_compiled(self.a) and not _is_compiled(self.b)
        lead = self.b if swapped else self.a
        for role, call in lead.first.events:
            if self.parting and (call.key[1] != self.parting.row.forward and call.key != OUTSIDE):
                break
            if role == "result" and not self.parting:
                self._outside()
            theirs = self._counterpart(call, swapped)
            if theirs is not None:
                self._event(role, *((theirs, call) if swapped else (call, theirs)), lead_is_b=swapped)
        if self.parting is None and self._drifted is not None:
            self.parting = self._drifted

    def tolerance_of(self, found: Difference | None) -> float:
        if found is not None and found.whole_numbers:
            return 0.0
        return TOLERANCE.get(self.dtype, TOLERANCE["float32"]) if self._tolerance is None else self._tolerance

    def weights(self) -> list[str]:
        """The weights that differ before the first forward."""
        found = []
        for key in self.a.first.weights:
            if key[2] == 0 and (other := self._weight_in_b(key)) is not None:
                apart, where = self._weight_difference(key, other)
                if apart is not None and apart.error > self._limit(apart):
                    found.append(f"{key[1]} ({apart.error:.2g}{where})")
        return found

    def own_weights(self, parting: Parting) -> list[tuple[str, Difference]]:
        """Weights of the module itself that have other values or another dtype, as they are before this forward."""
        model, forward, module, _ = parting.a.key
        found = []
        latest: dict[str, tuple[int, str, int]] = {}
        for key in self.a.first.weights:
            owner = key[1].rpartition(".")[0]
            if key[0] == model and key[2] <= forward and owner == module:
                latest[key[1]] = key
        for name, key in latest.items():
            other = self._weight_in_b(key)
            apart, where = self._weight_difference(key, other) if other else (None, "")
            if apart and (apart.error > self._limit(apart) or apart.dtypes[0] != apart.dtypes[1]):
                found.append((name.rpartition(".")[2] + where, apart))
        return found

    def other_name(self, parting: Parting | None) -> str:
        """The name of the module in b, where it is another one."""
        return "" if parting is None or parting.a.key[2] == parting.b.key[2] else parting.b.key[2]

    def _limit(self, found: Difference) -> float:
        if found.whole_numbers:
            return 0.0
        dtype = coarser(*found.dtypes)
        return TOLERANCE.get(dtype, 0.0) if self._tolerance is None else self._tolerance

    def _weight_in_b(self, key: tuple[int, str, int]) -> tuple[int, str, int] | None:
        module, _, name = key[1].rpartition(".")
        model, theirs = self._to_b.get((key[0], module), (key[0], module))
        other = (model, f"{theirs}.{name}" if theirs else name, key[2])
        return other if other in self.b.first.weights else None

    def _weight_difference(
        self, key: tuple[int, str, int], other: tuple[int, str, int]
    ) -> tuple[Difference | None, str]:
        """The largest difference; and on which rank, where each rank has the whole weight."""
        a, b = self.a.weight(key), self.b.weight(other)
        if any(piece.line.get("shard") for piece in (*a, *b)) or len(a) == len(b) == 1:
            return difference(a, b, self.layouts), ""
        worst, where = None, ""
        for i in range(max(len(a), len(b))):
            found = difference(a[i : i + 1] or a[:1], b[i : i + 1] or b[:1], self.layouts)
            if found is not None and (worst is None or found.error > worst.error):
                worst, where = found, f" on rank {i}"
        return worst, where

    def _counterpart(self, call: Call, swapped: bool) -> Call | None:
        if call.key == OUTSIDE:
            return (self.a if swapped else self.b).first.outside
        model, forward, module, number = call.key
        other = (self._to_a if swapped else self._to_b).get((model, module))
        run = self.a if swapped else self.b
        return None if other is None else run.call((other[0], forward, other[1], number))

    def _event(self, role: str, a: Call, b: Call, lead_is_b: bool) -> None:
        lead, place = (b if lead_is_b else a), ("inputs" if role == "input" else "outputs")
        ours, theirs = getattr(a, place), getattr(b, place)
        parent = lead.parent
        if role == "input" and parent is None:
            self.layouts.padding = _padding(a)
        before = self._before(role, lead)
        errors = []
        if not ours or not theirs:  # what goes into modules of a compiled graph is known only from what made it
            errors = [self._errors.get(piece.number, 0.0) for piece in (ours or theirs).values()]
        for path, other in matched_paths(ours, theirs):
            found = difference(self.a.pieces(a.key, role, path), self.b.pieces(b.key, role, other), self.layouts)
            if found is None:
                self.not_compared += 1
                continue
            self._count(found)
            for call in (a, b):
                self.dtype = coarser(self.dtype, str(call.about.get("autocast") or ""))
            piece: Piece = theirs[other] if lead_is_b else ours[path]
            error = _worse_as_number(found.error)
            # The same tensor was compared before; unless the other run has another in its place by now.
            known = error <= JUMP * self._errors.get(piece.number, -1.0)
            self._errors.setdefault(piece.number, error)
            errors.append(error)
            share = _OF_ANGLES if role != "input" and self._tolerance is None and _makes_angles(a) else 1.0
            row = _row(role, path, a, found, share * self.tolerance_of(found))
            self._judge(row, a, b, before, found, known)
            if role != "input":
                self._show(row)
        self._so_far = max([self._so_far, *errors])
        home = lead.key if role == "input" else parent.key if parent else None
        if home is not None:
            self._context[home] = max([self._context.get(home, 0.0), *errors])
        if role != "input" and parent is None and errors:
            self.at_end = max(errors)

    def _before(self, role: str, lead: Call) -> float:
        """The largest error of what this was made of: the inputs of the call, and what calls inside it returned."""
        if role == "input":
            return self._context.get(lead.parent.key, 0.0) if lead.parent else 0.0
        if role == "result" or lead.about.get("compiled"):
            return self._so_far
        return self._context.get(lead.key, 0.0)

    def _judge(self, row: Row, a: Call, b: Call, before: float, found: Difference, known: bool) -> None:
        error = _worse_as_number(found.error)
        self.largest = max(self.largest, error)
        if self.parting is not None or known or error <= row.tolerance:
            return
        limit = max(drift_limit(self.dtype), row.tolerance) if self._tolerance is None else row.tolerance
        if before <= limit and (error > JUMP * before or found.whole_numbers):
            kind = _kind(row, a, b, found)
            op = self._op(a, b) if kind in ("jump", "random") else ""
            self.parting = Parting(kind, row, a, b, before, found, op)
            row.parted = True
        elif error > limit and self._drifted is None:
            self._drifted = Parting("drift", row, a, b, before, found)

    def _op(self, a: Call, b: Call) -> str:
        """The first operation of a call with operands that agree and a result that does not."""
        parted = self._parted_op(a, b)
        return "" if parted is None else parted[0]

    def _parted_op(self, a: Call, b: Call) -> tuple[str, Difference, float] | None:
        so_far = 0.0
        for i, j in matched_ops(a, b):
            ours, theirs = a.ops[i], b.ops[j]
            found = difference([ours.piece], [theirs.piece], self.layouts)
            if found is None:
                continue
            self._count(found)
            error, tolerance = _worse_as_number(found.error), self.tolerance_of(found)
            operands = [self._errors[line] for line in ours.made_of if line in self._errors]
            before = max(operands) if operands else so_far
            self._errors.setdefault(ours.piece.number, error)
            if error > tolerance and error > JUMP * before:
                return ours.name, found, before
            so_far = max(so_far, error)
        return None

    def _outside(self) -> None:
        """Operations outside of modules, if nothing parted inside."""
        a, b = self.a.first.outside, self.b.first.outside
        parted = self._parted_op(a, b)
        if parted is not None:
            name, found, before = parted
            row = _row("output", "output", a, found, self.tolerance_of(found), op=name)
            row.parted = True
            kind = "input" if name == "input" else "jump"
            self.parting = Parting(kind, row, a, b, before, found, "" if kind == "input" else name)
            self._show(row)

    def _count(self, found: Difference) -> None:
        self.compared += 1
        self.exact += found.exact
        self.dtype = coarser(self.dtype, coarser(*found.dtypes))

    def _show(self, row: Row) -> None:
        if self.parting is None or row is self.parting.row:
            self.rows_before.append(row)
        elif len(self.rows_after) < _AROUND:
            self.rows_after.append(row)


def _makes_angles(call: Call) -> bool:
    """Whether a module is one of those that turn positions into angles, by its own name or its class."""
    return _ANGLES.search(f"{call.key[2].rpartition('.')[2]} {call.about.get('class', '')}".lower()) is not None


def _padding(root: Call) -> Tensor | None:
    for path, piece in root.inputs.items():
        if path.endswith("attention_mask") and len(piece.line["shape"]) == 2:
            value = piece.whole()
            if value is not None and not bool(value.all()):
                return value != 0
    return None


def _row(role: str, path: str, call: Call, found: Difference, tolerance: float, op: str = "") -> Row:
    return Row(
        module=call.key[2],
        class_name=str(call.about.get("class", "")),
        role=role,
        path=path,
        op=op,
        forward=call.key[1],
        call=call.key[3],
        error=found.error,
        tolerance=tolerance,
        scale=found.scale,
        dtypes=found.dtypes,
        sampled=found.sampled,
        exact=found.exact,
    )


def _kind(row: Row, a: Call, b: Call, found: Difference) -> str:
    if row.role == "input":
        return "between" if a.parent or b.parent else "input"
    random: list[Any] = [call.about.get("random") for call in (a, b)]
    if a.about.get("training") != b.about.get("training"):
        return "choice" if found.whole_numbers else "jump"
    is_dropout = "Dropout" in row.class_name and bool(a.about.get("training"))
    if is_dropout or ((a.drew or b.drew) and random[0] != random[1]):
        return "random"
    return "choice" if found.whole_numbers else "jump"


def _is_compiled(run: Run) -> bool:
    return any(call.about.get("compiled") for call in run.first.calls.values())


def _worse_as_number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _other_notes(a: Run, b: Run) -> list[str]:
    notes = []
    for run, name in ((a, "a"), (b, "b")):
        if run.missing:
            ranks = ", ".join(map(str, run.missing[:8]))
            notes.append(f"{name}: no recording of rank {ranks} of {run.head['world_size']}")
        if run.first.is_full:
            notes.append(f"{name}: the recording ended at max_bytes, in forward {run.first.forwards - 1}")
    if a.first.forwards != b.first.forwards:
        notes.append(f"a has {a.first.forwards} forwards, b {b.first.forwards}: those of both were compared")
    return notes
