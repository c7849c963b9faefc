"""Which module of one run is which of the other: by name, and what is left by order and shape."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from mldebug.numerics.runs._compare_run import Call, Piece, Run

Module = tuple[int, str]  # model, name


def matched_modules(a: Run, b: Run) -> tuple[dict[Module, Module], list[str], list[str]]:
    """The modules of `b` for those of `a`, and the names that only one of them has.

    Names that differ, as after an upgrade, are matched in the order of their first calls, where the shapes of the
    outputs are the same: with the same last word of the name first, then without.
    """
    ours, theirs = _modules(a), _modules(b)
    found = {module: module for module in ours if module in theirs}
    for with_word in (True, False):
        left = [module for module in ours if module not in found]
        taken = set(found.values())
        right = [module for module in theirs if module not in taken]
        signs_a = [_sign(module, ours[module], with_word) for module in left]
        signs_b = [_sign(module, theirs[module], with_word) for module in right]
        for i, j, size in difflib.SequenceMatcher(None, signs_a, signs_b, autojunk=False).get_matching_blocks():
            found.update(zip(left[i : i + size], right[j : j + size], strict=True))
    taken = set(found.values())
    only_a = [name or "the model" for model, name in ours if (model, name) not in found]
    only_b = [name or "the model" for model, name in theirs if (model, name) not in taken]
    return found, only_a, only_b


def matched_paths(a: Mapping[str, Piece], b: Mapping[str, Piece]) -> list[tuple[str, str]]:
    """Which tensor of a call is which: by path, and what is left by order, where the rank and kind are the same."""
    pairs = [(path, path) for path in a if path in b]
    left, right = [path for path in a if path not in b], [path for path in b if path not in a]
    for path in left:
        wanted = len(a[path].line["shape"])
        for other in right:
            if len(b[other].line["shape"]) == wanted and _is_float(a[path]) == _is_float(b[other]):
                pairs.append((path, other))
                right.remove(other)
                break
    order = list(a)
    return sorted(pairs, key=lambda pair: order.index(pair[0]))


def matched_ops(a: Call, b: Call) -> list[tuple[int, int]]:
    """Which operation of a call is which: by the order of their names, casts and copies left out."""
    left = [(i, op.name) for i, op in enumerate(a.ops) if op.name not in _CASTS]
    right = [(i, op.name) for i, op in enumerate(b.ops) if op.name not in _CASTS]
    matcher = difflib.SequenceMatcher(None, [name for _, name in left], [name for _, name in right], autojunk=False)
    return [(left[i + k][0], right[j + k][0]) for i, j, size in matcher.get_matching_blocks() for k in range(size)]


_CASTS = ("_to_copy", "copy_", "clone", "detach", "empty", "empty_like", "empty_strided", "lift_fresh")


def _modules(run: Run) -> dict[Module, Call]:
    """Each module with its first call, in their order."""
    found: dict[Module, Call] = {}
    for _, call in run.first.events:
        if call.key[1] >= 0:
            found.setdefault((call.key[0], call.key[2]), call)
    found.pop((-1, ""), None)
    return found


def _sign(module: Module, call: Call, with_word: bool) -> tuple[object, ...]:
    first = next(iter(call.outputs.values()), None)
    shape = () if first is None else (*first.line["shape"],)
    return (shape, module[1].rpartition(".")[2]) if with_word else (shape, call.about["class"])


def _is_float(piece: Piece) -> bool:
    return "float" in piece.line["dtype"]
