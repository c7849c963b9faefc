"""Each example runs, and prints what its doc string says: all but figures, paths, names of hosts and times."""

from __future__ import annotations

import ast
import getpass
import importlib.util
import re
import shutil
import socket
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import mldebug

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LEFT_OUT = "[...]"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_finds_what_it_says(path: Path, tmp_path: Path, run_torch: Run) -> None:
    for module in imports(path) | {"torch"}:
        if importlib.util.find_spec(module) is None:  # loading lightning would change the environment for good
            pytest.skip(f"could not import {module!r}")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # what they leave behind is seen
    before = set(tmp_path.rglob("*"))
    done = run_torch(
        Path("examples", path.name), cwd=tmp_path, timeout=110, env={"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    left = {one.relative_to(tmp_path).parts[0] for one in set(tmp_path.rglob("*")) - before}
    assert left <= {"examples", f"torchinductor_{getpass.getuser()}"}  # byte code, and torch's own cache
    compare(shown(path), done.stdout)


def shown(path: Path) -> str:
    """The output in the doc string."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return textwrap.dedent(text.partition("It prints:\n")[2].strip("\n"))


def compare(expected: str, output: str) -> None:
    pieces = [plain(piece) for piece in expected.split(LEFT_OUT)]
    rest = plain(output)
    assert any(pieces) and rest.startswith(pieces[0]), f"it begins otherwise:\n{output}"
    for piece in filter(None, pieces):
        assert piece in rest, f"not in the output, or in another order:\n{piece}\n\n{output}"
        rest = rest.partition(piece)[2]
    assert not rest or not pieces[-1], f"it goes on:\n{output}"


def plain(text: str) -> str:
    """In one line, without what is another one on the next machine."""
    text = re.sub(r"^[\s^~]+$", "", text, flags=re.M)  # what tracebacks underline
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node7", text)
    text = re.sub(rf"(?<= of ){re.escape(getpass.getuser())}(?= on )", "alice", text)  # processes of a user
    text = re.sub(r"(?<![\w.])(?:/|\.\.\.|~/)[\w./~-]*/(?=[\w-]+\.\w+)", "", text)
    text = re.sub(r"(?<![\w/])examples/", "", text)
    text = re.sub(r"\b(pids?|worker|child) \d+(?:[,-]\d+)*", r"\1 #", text)
    text = re.sub(r"\b\d+:\d\d:\d\d\b", "#", text)
    text = re.sub(r"\b\d+ (bad|to look at|ok|not visible)\b", r"# \1", text)  # doctor, of this machine
    unit = r"(?:ms|us|s|[KMGT]?i?B|%)"
    text = re.sub(rf"(?<![\w.\[])[+-]?(?:\d+\.\d+|\d{{3,}})(?:e[+-]?\d+)?(?={unit}?(?![\w.]))", "#", text)
    text = re.sub(rf"(?<![\w.\[])\d+(?= ?{unit}(?![\w.]))", "#", text)
    return " ".join(text.split())


def test_the_comparison_can_fail() -> None:
    compare("inf in wo, step 3\n[...]\n  0.5 ms", "inf in wo, step 3\nmore\n 17 ms\n")
    for other in (
        "nan in wo, step 3\n 17 ms",
        "inf in wo, step 4\n 17 ms",
        "inf in wo, step 3",
        "inf in wo, step 3\n 17 ms x",
    ):
        with pytest.raises(AssertionError):
            compare("inf in wo, step 3\n[...]\n  0.5 ms", other)
    assert plain("at /tmp/x/train.py:17 in 1.norm, 297.6MiB(+74.6MiB), pid 57") == plain(
        "at /home/alice/train.py:17 in 1.norm, 3MiB(+1.5MiB), pid 4711"
    )
    assert plain("rank 2, block.1.layer.1") != plain("rank 1, block.1.layer.1")


def test_each_example_is_short_and_uses_public_names_only() -> None:
    assert len(EXAMPLES) >= 15
    for path in EXAMPLES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = ast.unparse(tree.body[1:]).splitlines()
        assert len([line for line in lines if line]) <= 60, path
        assert f"    python examples/{path.name}\n" in (ast.get_docstring(tree) or "") and shown(path), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mldebug"):
                assert node.module == "mldebug" and {alias.name for alias in node.names} <= set(mldebug.__all__), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mldebug":
                assert node.attr in mldebug.__all__, path


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found
