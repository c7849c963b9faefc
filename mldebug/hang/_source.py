"""What the text of the program says about the lines on which its ranks stand: conditions, loops, the way out.

Read on the node where the program runs, as its files may be nowhere else; only lines of the program itself, not those
of installed packages.
"""

from __future__ import annotations

import ast
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from mldebug.hang._evidence import Evidence, Frame, Source, Step

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MOST_STEPS = 200  # of one function
_LARGEST = 2_000_000  # bytes of a file that are worth parsing


def annotate(evidence: Evidence) -> None:
    """Add `source` to the evidence: a Source for each line of the program on a stack of a rank or its children.

    evidence = collect(); annotate(evidence)
    """
    table = evidence.setdefault("source", {})
    files: dict[str, _File | None] = {}
    for frame in _frames(evidence):
        key = f"{frame['file']}:{frame['line']}"
        if key in table or is_library(frame["file"]):
            continue
        if frame["file"] not in files:
            files[frame["file"]] = _read(frame["file"])
        file = files[frame["file"]]
        if file is not None:
            table[key] = file.source(frame["line"])


@lru_cache(maxsize=8192)
def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the program."""
    return (
        "/site-packages/" in file
        or "/dist-packages/" in file
        or file.startswith(("<", *_STDLIB))
        or "/lib/python3" in file
        or file.startswith(_OURS)
        or "/" not in file
    )


_OURS = f"{Path(__file__).resolve().parents[1]}/"
_STDLIB = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})


def _frames(evidence: Evidence) -> Iterator[Frame]:
    for rank in evidence["ranks"]:
        for process in (rank, *rank["children"]):
            for sample in process["samples"]:
                for thread in sample["threads"]:
                    yield from thread["frames"]
        for call in rank["record"]["calls"] if "record" in rank else ():
            yield from call.get("frames", ())


def _read(path: str) -> _File | None:
    try:
        if Path(path).stat().st_size > _LARGEST:
            return None
        with tokenize.open(path) as stream:
            text = stream.read()
        return _File(text, ast.parse(text))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


class _File:
    def __init__(self, text: str, tree: ast.Module) -> None:
        self.lines = text.splitlines()
        self.tree = tree

    def source(self, line: int) -> Source:
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        scope = self._scope(line)
        guards: list[str] = []
        steps: list[Step] = []
        for step, first, last in _steps(scope.body if isinstance(scope.body, list) else [], []):
            if step["what"] != "statement" or any(guard.startswith(("if ", "else ")) for guard in step["guards"]):
                steps.append(step)
            if first <= line <= last and len(step["guards"]) >= len(guards):
                guards = step["guards"]
        return {"text": text, "guards": guards, "steps": steps[:_MOST_STEPS]}

    def _scope(self, line: int) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef:
        """The innermost function around a line, or the module."""
        found: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef = self.tree
        for node in ast.walk(self.tree):  # from the outside inwards
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                found = node
        return found


def _steps(body: list[ast.stmt], guards: list[str]) -> Iterator[tuple[Step, int, int]]:
    """The statements of a block with what is around them, and their first and last line."""
    for node in body:
        last = node.end_lineno or node.lineno
        if isinstance(node, _FUNCTIONS):
            continue
        inner = _inner(node)
        heads = [field for field in ast.iter_child_nodes(node) if isinstance(field, (ast.expr, ast.withitem))]
        head_last = max((getattr(head, "end_lineno", None) or node.lineno for head in heads), default=node.lineno)
        here = [*guards, inner[0][0]] if isinstance(node, (ast.While, ast.For)) and inner else guards
        yield {"line": node.lineno, "what": "statement", "guards": here}, node.lineno, head_last if inner else last
        for head in heads:
            for call in ast.walk(head):
                if isinstance(call, ast.Call):
                    what = f"call {_short(call.func)}"
                    yield {"line": call.lineno, "what": what, "guards": guards}, call.lineno, call.lineno
        if isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)):
            what = type(node).__name__.lower()
            yield {"line": node.lineno, "what": what, "guards": guards}, node.lineno, last
        for guard, block in inner:
            yield from _steps(block, [*guards, guard] if guard else guards)


def _inner(node: ast.stmt) -> list[tuple[str, list[ast.stmt]]]:
    """The blocks of a statement, each with its guard."""
    if isinstance(node, ast.If):
        test = _short(node.test)
        return [(f"if {test}", node.body), (f"else {test}", node.orelse)]
    if isinstance(node, ast.While):
        return [(f"while {_short(node.test)}", node.body), ("", node.orelse)]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [(f"for {_short(node.target)} in {_short(node.iter)}", node.body), ("", node.orelse)]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [(f"with {', '.join(_short(item.context_expr) for item in node.items)}", node.body)]
    if isinstance(node, ast.Try):
        handlers = [(f"except {_short(h.type) if h.type else ''}".strip(), h.body) for h in node.handlers]
        return [("try", node.body), *handlers, ("", node.orelse), ("", node.finalbody)]
    if isinstance(node, ast.Match):
        return [(f"case {ast.unparse(case.pattern)}", case.body) for case in node.cases]
    return []


def _short(node: ast.AST, limit: int = 120) -> str:
    text = ast.unparse(node)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
