"""Which code is traced: decided once for each code object, by its module, its path and its name."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any

from mldebug.core.errors import UsageError


class Selection:
    """What matches one of `include` and none of `exclude`.

    A pattern is one of the words user, installed, stdlib and all; a module or package (`torch.distributed`, with all
    below it); a path (with a slash or ending in .py, a folder with all below it); or `module:function`, where either
    side may be empty and the first one of these words or a path. Each may be a glob. `user` is what is neither in the
    standard library nor installed. The script itself is `__main__`, and has the name that an import would give it.
    """

    def __init__(
        self,
        include: Sequence[str] = ("user",),
        exclude: Sequence[str] = (),
        *,
        ignoredirs: Sequence[str] = (),
        ignoremods: Sequence[str] = (),
    ) -> None:
        for option, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise UsageError(f"{option} is {patterns!r}, a string", f"it takes a list: {option}=[{patterns!r}]")
            if "" in patterns:
                raise UsageError(f"{option} has an empty pattern", "name a module, a path or module:function")
        self._include, self._exclude = tuple(include), tuple(exclude)
        self.unused = set(include)  # what has matched no code up to now
        self._ignoredirs = tuple(os.path.abspath(path) + os.sep for path in ignoredirs)
        self._ignoremods = tuple(ignoremods)

    def wants(self, code: CodeType, names: Mapping[str, Any]) -> bool:
        """Whether `code`, which runs with the globals `names`, is to be traced. Never our own code."""
        if is_ours(code, names):
            return False
        path = path_of(code, names)
        module = module_of(path, names)
        function = function_of(code)
        if path.startswith(self._ignoredirs) or self._ignored(module):
            return False
        modules = (module, _imported_name(path, names)) if module == "__main__" else (module,)
        kind = kind_of(path, names)
        hits = [pattern for pattern in self._include if _matches(pattern, kind, modules, path, function)]
        self.unused.difference_update(hits)
        return bool(hits) and not any(_matches(each, kind, modules, path, function) for each in self._exclude)

    def _ignored(self, module: str) -> bool:
        """As the standard library's trace has it: the last part of a module's name counts, or a package in front."""
        last = module.removesuffix(".__init__").rpartition(".")[2]
        return any(name in (module, last) or module.startswith(f"{name}.") for name in self._ignoremods)


def is_ours(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether `code` is a part of mldebug; so is the file that pip makes for the command, which imports its main()."""
    command = sys.modules.get("mldebug.cli")
    return path_of(code, names).startswith(_OURS) or (command is not None and names.get("main") is command.main)


def function_of(code: CodeType) -> str:
    """The qualified name; Python 3.10 knows the last part only."""
    return str(getattr(code, "co_qualname", code.co_name))


def path_of(code: CodeType, names: Mapping[str, Any]) -> str:
    """The file of `code`; for frozen and generated code that of the module it runs in, if it is known."""
    name = code.co_filename
    if not name.startswith("<"):
        return os.path.abspath(name)
    path = names.get("__file__")
    if not isinstance(path, str):
        module = sys.modules.get(str(names.get("__name__", "")))
        if module is None or vars(module) is not names:
            return name
        path = getattr(module, "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) else name


def kind_of(path: str, names: Mapping[str, Any]) -> str:
    """One of user, installed, stdlib."""
    if path.startswith("<"):
        # Code of no file: what the standard library makes itself (namedtuples), or somebody's exec.
        made = path.startswith("<frozen") or str(names.get("__name__", "")).startswith("namedtuple_")
        return "stdlib" if made else "user"
    for kind, folder in _FOLDERS:
        if path.startswith(folder):
            return kind
    return "user"


def module_of(path: str, names: Mapping[str, Any]) -> str:
    """The full name of an installed module from its path; else what the module calls itself."""
    for _kind, folder in _FOLDERS:
        if path.startswith(folder):
            return os.path.splitext(path[len(folder) :])[0].replace(os.sep, ".")
    if path.startswith("<frozen "):
        return path[len("<frozen ") : -1]
    return str(names.get("__name__", path))


def _imported_name(path: str, names: Mapping[str, Any]) -> str:
    """What the module that runs as `__main__` is called elsewhere: `train` of train.py, `pkg.train` of -m pkg.train."""
    name = getattr(names.get("__spec__"), "name", None)
    return name if isinstance(name, str) else os.path.splitext(os.path.basename(path))[0]


def _matches(pattern: str, kind: str, modules: Sequence[str], path: str, function: str) -> bool:
    home, colon, wanted = pattern.rpartition(":")
    if not colon or "/" in wanted:
        home, wanted = pattern, ""
    if wanted and not (fnmatchcase(function, wanted) or fnmatchcase(function.rpartition(".")[2], wanted)):
        return False
    if home in ("", "all", "user", "installed", "stdlib"):
        return home in ("", "all", kind)
    if "/" in home or home.endswith(".py"):
        whole = home.rstrip("/")
        tries = (whole, f"{whole}/*") if whole.startswith(("/", "*")) else (f"*/{whole}", f"*/{whole}/*")
        return any(fnmatchcase(path, each) for each in tries)
    return any(_below(home, module) for module in modules)


def _below(pattern: str, module: str) -> bool:
    return fnmatchcase(module.removesuffix(".__init__"), pattern) or fnmatchcase(module, f"{pattern}.*")


def _folders() -> list[tuple[str, str]]:
    """Folders with what lies in them; site-packages is inside of the standard library's, so the longest come first."""
    paths = sysconfig.get_paths()
    found = {paths[key]: "stdlib" for key in ("stdlib", "platstdlib") if key in paths}
    found.update({paths[key]: "installed" for key in ("purelib", "platlib") if key in paths})
    found[os.path.dirname(os.__file__)] = "stdlib"
    for folder in (*getattr(site, "getsitepackages", list)(), site.getusersitepackages()):
        found[folder] = "installed"
    # A Debian Python keeps what its packages install in a folder of this name beside the standard library.
    found.update({os.path.join(f, "dist-packages"): "installed" for f, kind in list(found.items()) if kind == "stdlib"})
    full = {os.path.abspath(path) + os.sep: kind for path, kind in found.items()}
    full.update({os.path.realpath(path) + os.sep: kind for path, kind in found.items()})
    return sorted(((kind, path) for path, kind in full.items()), key=lambda item: -len(item[1]))


_FOLDERS = _folders()
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
