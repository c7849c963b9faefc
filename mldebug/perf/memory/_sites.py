"""Where in the program a tensor was made: the line that made it, and the user's line that led there."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

_DEPTH = 64  # frames looked at, from the innermost on


@dataclass(frozen=True)
class Site:
    """`module` is the nn.Module that was running (or the phase, in brackets); `line` is "file:line" of the innermost
    line that is not torch's own, and `user_line` of the innermost that belongs to no installed package."""

    module: str
    line: str
    user_line: str

    def where(self) -> str:
        """The line, and the user's where it is another one."""
        return self.line if self.user_line in ("", self.line) else f"{self.line} (from {self.user_line})"


def site_of_frame(frame: FrameType | None, module: str) -> Site:
    """The site of a stack, from `frame` outwards."""
    line = ""
    for _ in range(_DEPTH):
        if frame is None:
            break
        kind = _kind(frame.f_code)
        if kind != "torch":
            line = line or _line(frame.f_code.co_filename, frame.f_lineno)
            if kind == "user":
                return Site(module, line, _line(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return Site(module, line, "")


def site_of_names(frames: list[tuple[str, int]], module: str) -> Site:
    """The same from file names and line numbers, innermost first, as torch's memory snapshot has them."""
    line = ""
    for filename, number in frames[:_DEPTH]:
        kind = kind_of_file(filename)
        if kind != "torch":
            line = line or _line(filename, number)
            if kind == "user":
                return Site(module, line, _line(filename, number))
    return Site(module, line, "")


def hide_own_frames(exc: BaseException) -> None:
    """Take our frames out of the middle of a traceback, and torch's that an operation has only while we look on."""
    above, here, was_ours = None, exc.__traceback__, False
    while here is not None:
        name = str(here.tb_frame.f_globals.get("__name__", ""))
        was_ours = name.startswith("mldebug.") or (was_ours and name == "torch._ops")
        if was_ours and above is not None:
            above.tb_next = here.tb_next
        else:
            above = here
        here = here.tb_next


_kinds: dict[CodeType, str] = {}  # a dict is quicker than a cached function, and this is the hot part


def _kind(code: CodeType) -> str:
    kind = _kinds.get(code)
    if kind is None:
        if len(_kinds) > 20_000:  # a program that compiles code all the time
            _kinds.clear()
        kind = _kinds[code] = kind_of_file(code.co_filename)
    return kind


@lru_cache(4096)
def kind_of_file(filename: str) -> str:
    """ "torch" for what is skipped (torch, mldebug, Python's machinery), "library" for other packages, else "user"."""
    if filename.startswith("<") and not filename.startswith(("<stdin", "<string", "<ipython")):
        return "torch"
    path = os.path.abspath(filename)
    if path.startswith((_MLDEBUG, *_torch_folders())) or "??" in filename:
        return "torch"
    if path.startswith(_packages()):
        return "library"
    # C++ frames have the names of shared objects and headers; the standard library only passes calls on.
    return "torch" if path.startswith(_STDLIB) or not path.endswith((".py", "<stdin>", "<string>")) else "user"


_MLDEBUG = str(Path(__file__).resolve().parents[2]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


@lru_cache(1)
def _torch_folders() -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    return (os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep,) if torch is not None else ()


@lru_cache(1)
def _packages() -> tuple[str, ...]:
    folders = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], site.getusersitepackages()]
    return tuple({os.path.abspath(folder) + os.sep for folder in [*folders, *site.getsitepackages()]})


@lru_cache(4096)
def _line(filename: str, number: int) -> str:
    """Short, but so that an editor finds it: relative to the current folder, or to the folder of packages."""
    path = os.path.abspath(filename)
    for folder in (os.getcwd() + os.sep, *_packages()):
        if path.startswith(folder):
            return f"{path[len(folder) :]}:{number}"
    return f"{filename}:{number}"
