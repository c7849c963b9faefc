from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.core import extras
from mldebug.core.errors import MldebugError

ROOT = Path(extras.__file__).parents[2]


def test_in_a_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert extras.how_to_install("plot") == "pip install -e '.[plot]'"
    monkeypatch.chdir(tmp_path)
    assert extras.how_to_install("plot") == f"pip install -e '{ROOT}[plot]'"
    tree = tmp_path / "al's tree"
    tree.mkdir()
    (tree / "pyproject.toml").write_text('name = "mldebug-toolkit"')
    monkeypatch.setattr(extras, "__file__", str(tree / "mldebug" / "core" / "extras.py"))
    assert shlex.split(extras.how_to_install("plot")) == ["pip", "install", "-e", f"{tree}[plot]"]


@pytest.mark.parametrize("project", [None, 'name = "another"'])
def test_installed(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, project: str | None
) -> None:
    shutil.copytree(ROOT / "mldebug" / "core", tmp_path / "mldebug" / "core")
    shutil.copy(ROOT / "mldebug" / "__init__.py", tmp_path / "mldebug")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    done = run_python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mldebug.core.extras import how_to_install\nprint(how_to_install('plot'))"
    )
    assert done.stdout == "pip install 'mldebug-toolkit[plot]'\n"


@pytest.mark.parametrize(("version", "fits"), [("4.57.1", False), ("5.0.0rc1", True), ("12.1", True), ("main", True)])
def test_a_part_that_needs_a_newer_version(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if fits:
        extras.needs("a tiny model", "transformers", 5)
        return
    with pytest.raises(MldebugError) as raised:
        extras.needs("a tiny model", "transformers", 5)
    assert str(raised.value) == (
        "a tiny model needs transformers 5 or newer; 4.57.1 is installed\n"
        "hint: pip install -U 'transformers>=5', in an environment of its own if your training needs 4.57.1"
    )


def test_what_is_not_installed_is_for_its_import_to_say() -> None:
    extras.needs("a tiny model", "no-such-distribution", 5)
