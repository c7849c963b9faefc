"""The shape of the package: light to import, rooms that know only core, names that are what they say."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mldebug

PACKAGE = Path(mldebug.__file__).parent
SHARED = {"core"}
MAY_IMPORT_ROOMS = {"cli", "testing", "preflight"}
HEAVY = ("torch", "numpy", "rich", "transformers", "matplotlib", "email")  # email: by importlib.metadata

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Runs what it is given and prints which heavy packages are loaded at the end.
PROBE = f"""
import contextlib, io, runpy, sys
what, *sys.argv[1:] = sys.argv[1:]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    if what.startswith("run "):
        runpy.run_module(what[4:], run_name="__main__", alter_sys=True)
    else:
        exec(what)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})))
"""


def heavy_after(run_python: Run, *what: str) -> list[str]:
    done = run_python(PROBE, *what)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "what",
    [
        ["import mldebug"],
        ["import mldebug, mldebug.cli; dir(mldebug); mldebug.MldebugError; mldebug.__version__"],
        ["run mldebug", "--help"],
        ["run mldebug"],
        ["run mldebug", "--version"],
        ["run mldebug", "overflow", "--help"],
        ["run mldebug", "demo", "--help"],
        ["from mldebug.core import errors, report, scope, script, world"],
    ],
    ids=" ".join,
)
def test_importing_and_help_load_nothing_heavy(run_python: Run, what: list[str]) -> None:
    assert heavy_after(run_python, *what) == []


def test_the_check_for_heavy_imports_can_fail(run_python: Run) -> None:
    assert heavy_after(run_python, "import rich.console") == ["rich"]


def test_python_m_and_the_installed_command_agree(run_python: Run) -> None:
    done = run_python("-m", "mldebug", "--version")
    assert (done.returncode, done.stdout) == (0, f"mldebug {mldebug.__version__}\n")
    command = Path(sys.executable).with_name("mldebug")
    if command.exists():
        installed = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
        assert installed.stdout == done.stdout


def test_all_is_what_the_package_exports() -> None:
    assert sorted(mldebug.__all__) == mldebug.__all__
    assert set(mldebug.__all__) == {"__version__", *mldebug._HOMES}
    for name in mldebug.__all__:
        assert getattr(mldebug, name) is not None
        assert name in dir(mldebug)
    for name, home in mldebug._HOMES.items():
        module = importlib.import_module(home)
        assert getattr(mldebug, name) is getattr(module, name)
        assert name in getattr(module, "__all__", [name])


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'spyy'"):
        mldebug.spyy  # noqa: B018
    assert not hasattr(mldebug, "spyy")


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == mldebug._HOMES


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {path.stem for path in PACKAGE.rglob("*.py")} | {
        path.name for path in PACKAGE.rglob("*") if path.is_dir()
    }
    assert modules.isdisjoint(mldebug.__all__)


def foreign_imports(source: str, path: Path) -> list[str]:
    """What a module of a room imports from other rooms. `path` is relative to the package."""
    home = path.parts[0] if len(path.parts) > 1 else ""
    package = ["mldebug", *path.parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != "mldebug":
                continue
            room = parts[1] if len(parts) > 1 else ""
            if room == "__version__" or room in SHARED | {home}:
                continue
            found.append(name)
    return found


def test_rooms_import_only_core() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if len(relative.parts) == 1 or relative.parts[0] in MAY_IMPORT_ROOMS:
            continue
        if found := foreign_imports(path.read_text(), relative):
            wrong[str(relative)] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from mldebug.hang import spy", ["mldebug.hang.spy"]),
        ("def f():\n    import mldebug.cli", ["mldebug.cli"]),
        ("from mldebug import diagnose", ["mldebug.diagnose"]),
        ("from ..hang import spy", ["mldebug.hang.spy"]),
        ("from . import _stats", []),
        ("from mldebug.core.errors import MldebugError\nfrom mldebug.numerics.ring import _stats\nimport torch", []),
    ],
)
def test_the_check_of_imports_can_fail(source: str, found: list[str]) -> None:
    assert foreign_imports(source, Path("numerics/_x.py")) == found


def test_every_module_says_what_it_is() -> None:
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign)) for node in tree.body):
            assert "from __future__ import annotations" in source, path


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


class TestLeavesNothingBehind:
    """The autouse check of conftest.py can fail, for each kind of state."""

    def test_nothing(self, process_state) -> None:
        before = process_state.snapshot()
        assert process_state.differences(before, process_state.snapshot()) == []

    def test_print(self, process_state, monkeypatch) -> None:
        before = process_state.snapshot()
        monkeypatch.setattr(builtins, "print", lambda *a: None)
        assert process_state.differences(before, process_state.snapshot()) == ["builtins.print"]

    def test_environment(self, process_state, monkeypatch) -> None:
        before = process_state.snapshot()
        monkeypatch.setitem(os.environ, "MLDEBUG_TEST", "1")
        assert process_state.differences(before, process_state.snapshot()) == ["os.environ: MLDEBUG_TEST"]

    def test_trace(self, process_state) -> None:
        before, old = process_state.snapshot(), sys.gettrace()
        sys.settrace(lambda *a: None)
        try:
            after = process_state.snapshot()
        finally:
            sys.settrace(old)
        assert process_state.differences(before, after) == ["sys.settrace"]

    def test_hooks(self, process_state, monkeypatch) -> None:
        torch = pytest.importorskip("torch")
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        before = process_state.snapshot()
        handles = [
            torch.nn.modules.module.register_module_forward_hook(lambda *a: None),
            register_optimizer_step_pre_hook(lambda *a: None),
        ]
        monkeypatch.setattr(torch.amp.GradScaler, "step", lambda *a: None)
        after = process_state.snapshot()
        for handle in handles:
            handle.remove()
        names = " ".join(process_state.differences(before, after))
        assert "_global_forward_hooks" in names
        assert "_global_optimizer_pre_hooks" in names
        assert "GradScaler.step" in names
        # The same where torch was not loaded before the test, so that there is nothing to compare with.
        light = {name: value for name, value in before.items() if "torch" not in name and "." in name}
        light = {
            name: value for name, value in light.items() if not name.startswith(("GradScaler", "Module", "Tensor"))
        }
        names = " ".join(process_state.differences(light, after))
        assert "_global_forward_hooks" in names and "GradScaler.step" in names and "Module.__call__" not in names


def test_run_python_shows_the_stacks_of_a_program_that_hangs(run_python: Run) -> None:
    program = """
import subprocess, sys, time
code = "import time\\ndef waiting_child(): time.sleep(60)\\nwaiting_child()"
child = subprocess.Popen([sys.executable, "-c", code])
def waiting_parent(): child.wait()
waiting_parent()
"""
    with pytest.raises(pytest.fail.Exception) as caught:
        run_python(program, timeout=2)
    assert "did not end in 2 s" in str(caught.value)
    assert "waiting_parent" in str(caught.value)
    assert "waiting_child" in str(caught.value)
