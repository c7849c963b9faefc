"""Optional parts of the package, and how to install one."""

from __future__ import annotations

import shlex
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra: from the source tree where the package runs from one, else by its name.

    raise MldebugError("the heat map needs matplotlib", how_to_install("plot"))
    """
    tree = Path(__file__).resolve().parents[2]
    project = tree / "pyproject.toml"
    if project.is_file() and 'name = "mldebug-toolkit"' in project.read_text(encoding="utf-8"):
        return "pip install -e " + shlex.quote(f"{'.' if tree == Path.cwd() else tree}[{extra}]")
    return f"pip install 'mldebug-toolkit[{extra}]'"
