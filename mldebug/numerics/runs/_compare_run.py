"""A recording as it is compared: its calls, in their order, with the tensors of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mldebug.numerics.runs._recording_files import RankFiles, ranks_in

Key = tuple[int, int, str, int]  # model, forward, module, call of it in this forward
OUTSIDE: Key = (-1, 0, "", 0)  # operations outside of all modules


@dataclass(eq=False)
class Piece:
    """A tensor as one rank has it: `line` is what was written of it, `number` the line that holds its values."""

    files: RankFiles
    line: dict[str, Any]
    number: int

    def whole(self) -> Tensor | None:
        """Its values, if they were kept."""
        return self.files.whole(self.number) if self.line.get("whole") else None


@dataclass(eq=False)
class Op:
    """One operation: its name, what it returned, and the lines of the tensors it took."""

    name: str
    piece: Piece
    made_of: list[int]


@dataclass(eq=False)
class Call:
    """One call of a module."""

    key: Key
    about: dict[str, Any]
    parent: Call | None = None
    random_after: int | None = None
    inputs: dict[str, Piece] = field(default_factory=dict)
    outputs: dict[str, Piece] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    @property
    def drew(self) -> bool:
        """Whether random numbers were drawn in it."""
        return self.random_after is not None and self.random_after != self.about.get("random")


class RankRun:
    """The recording of one rank. `events` are ("input" | "output", call) in their order."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.files = RankFiles(folder, rank)
        self.head = self.files.head
        self.calls: dict[Key, Call] = {}
        self.outside = Call(OUTSIDE, {"class": "", "module": ""})
        self.events: list[tuple[str, Call]] = []
        self.weights: dict[tuple[int, str, int], Piece] = {}  # by model, name and forward
        self.models: list[dict[str, Any]] = []
        self.is_full = False
        by_number: dict[int, Call] = {-1: self.outside}
        for line in self.files.lines:
            kind = line["kind"]
            if kind == "call":
                by_number[line["n"]] = self._call(line, by_number)
            elif kind == "tensor" and line["of"] in by_number:
                self._tensor(line, by_number[line["of"]])
            elif kind == "left" and line["of"] in by_number:
                by_number[line["of"]].random_after = line["random"]
            elif kind == "weight":
                self.weights[line["model"], line["module"], line["forward"]] = Piece(self.files, line, line["n"])
            elif kind == "model":
                self.models.append(line)
            elif kind == "full":
                self.is_full = True
        self.forwards = 1 + max((key[1] for key in self.calls), default=-1)

    def _call(self, line: dict[str, Any], by_number: dict[int, Call]) -> Call:
        key = (line["model"], line["forward"], line["module"], line["call"])
        if key in self.calls:  # inside a compiled graph each output has a line for its call
            return self.calls[key]
        call = self.calls[key] = Call(key, line, by_number.get(line["parent"]) if line["parent"] is not None else None)
        return call

    def _tensor(self, line: dict[str, Any], call: Call) -> None:
        number, origin = line["n"], line
        while "same" in origin:
            number = origin["same"]
            if number not in self.files.by_number:
                return  # the line was lost
            origin = self.files.by_number[number]
        piece = Piece(self.files, origin, number)
        if line["role"] == "op":
            call.ops.append(Op(line["op"], piece, line["from"]))
            return
        place = call.inputs if line["role"] == "input" else call.outputs
        if not place:
            self.events.append((line["role"], call))
        place[line["path"]] = piece


class Run:
    """A recording of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = [RankRun(folder, rank) for rank in ranks_in(folder)]
        self.first = self.ranks[0]
        self.head = self.first.head
        size = int(self.head.get("world_size", 1))
        self.missing = sorted(set(range(size)) - {rank.files.rank for rank in self.ranks})

    def call(self, key: Key) -> Call | None:
        """The call of the first rank with this key."""
        return self.first.outside if key == OUTSIDE else self.first.calls.get(key)

    def pieces(self, key: Key, role: str, path: str) -> list[Piece]:
        """A tensor as each rank has it, by rank."""
        found = []
        for rank in self.ranks:
            call = rank.outside if key == OUTSIDE else rank.calls.get(key)
            piece = None if call is None else (call.inputs if role == "input" else call.outputs).get(path)
            if piece is not None:
                found.append(piece)
        return found

    def weight(self, key: tuple[int, str, int]) -> list[Piece]:
        """A weight as each rank has it."""
        return [rank.weights[key] for rank in self.ranks if key in rank.weights]
