"""A package that a command needs and that is not there: one error instead of a traceback."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType

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
    if importlib.util.find_spec(name) is None:
        raise _error(name)


def as_usage_error(exc: ModuleNotFoundError) -> UsageError | None:
    """What the command line says of it; None where the import is not ours, and its traceback is the user's to see.

    A module of the user's that is missing, and one that a package misses inside itself, are not ours.
    """
    name = (exc.name or "").partition(".")[0]
    if (name in DISTRIBUTIONS or name in EXTRAS) and _is_our_import(exc.__traceback__):
        return _error(name)
    return None


def _error(name: str) -> UsageError:
    install = how_to_install(EXTRAS[name]) if name in EXTRAS else f"pip install {DISTRIBUTIONS[name]}"
    return UsageError(
        f"{name} is not installed for the Python that runs this: {sys.executable}",
        f"{install}; or is it another Python that trains? Then its `python -m mldebug`",
    )


def _is_our_import(traceback: TracebackType | None) -> bool:
    """Python leaves out the frames of its own import system, but those of importlib.import_module."""
    home = ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        home = home if name == "importlib" or name.startswith("importlib.") else name.partition(".")[0]
        traceback = traceback.tb_next
    return home == "mldebug"
