"""A package that a command needs and that is not there, or cannot be loaded: one error instead of a traceback."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from traceback import walk_tb
from types import ModuleType, TracebackType

from mldebug.core.errors import UsageError
from mldebug.core.extras import how_to_install

# The module that is imported -> the distribution that has it, for what the package itself imports.
DISTRIBUTIONS = {
    "torch": "torch",
    "numpy": "numpy",
    "transformers": "transformers",
    "datasets": "datasets",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "rich": "rich",
    "pynvml": "nvidia-ml-py",
    "shtab": "shtab",
}
EXTRAS = {"matplotlib": "plot", "ClusterShell": "cluster", "pytest": "testing"}


def require(name: str) -> None:
    """A UsageError where there is no module of this name: for a command whose ranks, started by this Python, import it.

    require("torch")
    """
    if _origin(name) is None:
        raise _error(name)


def as_usage_error(exc: Exception) -> UsageError | None:
    """What the command line says of it; None where the import is not ours, and its traceback is the user's to see.

    A module of the user's that is missing, and one that a package misses where it says so itself, are not ours.
    """
    broken = _broken_module(exc.__traceback__)
    if broken is not None:
        return _broken_error(broken, exc)
    module = _module_without(exc)
    name = module.partition(".")[0]
    if (name not in DISTRIBUTIONS and name not in EXTRAS) or not _is_our_import(exc.__traceback__):
        return None
    if _hides_a_package(name):
        return _broken_error(name, exc)
    return _error(name) if isinstance(exc, ModuleNotFoundError) or _origin(name) is None else None


def _error(name: str) -> UsageError:
    install = how_to_install(EXTRAS[name]) if name in EXTRAS else f"pip install {DISTRIBUTIONS[name]}"
    return UsageError(
        f"{name} is not installed for the Python that runs this: {sys.executable}",
        f"{install}; or is it another Python that trains? Then its `python -m mldebug`",
    )


def _broken_error(module: str, exc: Exception) -> UsageError:
    """A library that is not there, versions that do not fit, a file of the user's that has the name of a package."""
    name = module.partition(".")[0]
    said = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
    command = f"`{shlex.quote(sys.executable)} -c 'import {module}'` shows all of it"
    if ".so" in said and " shared object file" in said:
        cause = f"that library is not where it is looked for: load its module, set LD_LIBRARY_PATH, or reinstall {name}"
    elif _hides_a_package(name):
        cause = f"if {_origin(name)} is yours, it hides the package: rename it"
    else:
        cause = f"reinstall {DISTRIBUTIONS.get(name, name)}, in the version that fits what it imports"
    return UsageError(f"{module} cannot be imported: {said}", f"{cause}; {command}")


def _broken_module(traceback: TracebackType | None) -> str | None:
    """The package that failed while it was imported, where we asked for it and nobody between."""
    found, ours = None, False
    for frame, _line in walk_tb(traceback):
        module = str(frame.f_globals.get("__name__", ""))
        home = module.partition(".")[0]
        if home == "importlib":
            continue
        if home == "mldebug":
            found, ours = None, True
        elif ours:
            known = home in DISTRIBUTIONS or home in EXTRAS
            found, ours = module if known and frame.f_code.co_name == "<module>" else None, False
    return found


def _module_without(exc: Exception) -> str:
    """The module that is not there, or lacks what was asked of it."""
    if isinstance(exc, ImportError):
        return exc.name or ""
    if isinstance(exc, AttributeError) and isinstance(exc.obj, ModuleType):
        return exc.obj.__name__
    return ""


def _origin(name: str) -> str | None:
    """The file of a package. None where there is none: a folder that only has its name is no package."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # it is half imported
        return None
    return spec.origin if spec is not None else None


def _hides_a_package(name: str) -> bool:
    """Whether it is no package that was installed: those are below folders of these names."""
    origin = _origin(name)
    return origin is not None and not {"site-packages", "dist-packages"} & set(Path(origin).parts)


def _is_our_import(traceback: TracebackType | None) -> bool:
    """Python leaves out the frames of its own import system, but those of importlib.import_module."""
    home = ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        home = home if name == "importlib" or name.startswith("importlib.") else name.partition(".")[0]
        traceback = traceback.tb_next
    return home == "mldebug"
