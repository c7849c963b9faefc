"""Optional parts of the package, how to install one, and parts that need newer versions than the rest."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mldebug.core.errors import MldebugError


def how_to_install(extra: str) -> str:
    """The command that installs an extra: from the source tree where the package runs from one, else by its name.

    raise MldebugError("the heat map needs matplotlib", how_to_install("plot"))
    """
    tree = Path(__file__).resolve().parents[2]
    project = tree / "pyproject.toml"
    if project.is_file() and 'name = "mldebug-toolkit"' in project.read_text(encoding="utf-8"):
        return "pip install -e " + shlex.quote(f"{'.' if tree == Path.cwd() else tree}[{extra}]")
    return f"pip install 'mldebug-toolkit[{extra}]'"


def needs(what: str, distribution: str, major: int) -> None:
    """An MldebugError where the installed version of a distribution is older than this.

    needs("a tiny model", "transformers", 5)
    """
    from importlib import metadata  # twice what `mldebug --help` takes otherwise

    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return  # not installed by a name, or not at all: its import says that
    number = re.match(r"\d+", version)
    if number is not None and int(number.group()) < major:
        raise MldebugError(
            f"{what} needs {distribution} {major} or newer; {version} is installed",
            f"pip install -U '{distribution}>={major}', in an environment of its own if your training needs {version}",
        )
