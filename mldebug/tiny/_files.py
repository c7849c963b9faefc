"""A folder that appears when it is complete, and never before."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError


def refuse(target: Path, force: bool, mark: str, what: str, source: object = None) -> None:
    """Before any work: what would be in the way at its end. Only a folder with the file `mark` in it, which tells that
    it is a `what`, is ever replaced, and never the one that the source is in."""
    try:
        _refuse(target, force, mark, what, path_of(source) if isinstance(source, (str, os.PathLike)) else None)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise UsageError(f"cannot write {target}: {reason}", "choose another folder") from exc


def _refuse(target: Path, force: bool, mark: str, what: str, source: Path | None) -> None:
    if source is not None and target.exists():
        path = source.resolve()
        if target.resolve() in (path, *path.parents):
            raise UsageError(f"{target} is where the source is", "choose another folder")
    if target.is_dir():
        held = os.listdir(target)
        if held and not force:
            raise UsageError(
                f"{target} exists and is not empty", f"choose another folder, or --force to replace an earlier {what}"
            )
        if held and mark not in held:
            raise UsageError(f"{target} holds no {what}: it is not replaced", "choose another folder")
    elif target.exists() or target.is_symlink():
        raise UsageError(f"{target} is a file", "choose the name of a new folder")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}", f"mkdir -p {shlex.quote(str(parent))}")


def path_of(source: str | os.PathLike[str]) -> Path | None:
    """The file or folder that `source` names, or None where there is nothing of this name. What cannot be looked at,
    and is neither a file nor a folder, is an error."""
    text = os.fspath(source)
    if not text.strip():
        raise UsageError("the source is empty", "give a file, a folder or the id of a repository")
    path = Path(text).expanduser()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as exc:
        if path.is_symlink():
            raise UsageError(f"cannot read {text}: it is a link to nothing", f"ls -l {shlex.quote(text)}") from exc
        return None
    except ValueError:  # a null byte
        return None
    except OSError as exc:
        raise _cannot_read(text, exc) from exc
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise UsageError(f"cannot read {text}: it is neither a file nor a folder", "give a file, or a folder of files")
    try:
        if stat.S_ISDIR(mode):
            os.listdir(path)
            os.stat(os.path.join(path, "."))  # a folder that may be listed and not entered
        else:
            path.open("rb").close()
    except OSError as exc:
        raise _cannot_read(text, exc) from exc
    return path


def _cannot_read(text: str, exc: OSError) -> MldebugError:
    return MldebugError(
        f"cannot read {text}: {(exc.strerror or str(exc)).lower()}", "check the path and its permissions"
    )


@contextlib.contextmanager
def folder_beside(target: Path | None) -> Iterator[Path]:
    """A new folder on the same disk, gone at the end unless it was renamed."""
    try:
        parent = None if target is None else target.absolute().parent
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}." if target is not None else "tiny-model-", dir=parent))
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot write {target}: {reason}", "choose another folder") from exc
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)  # Ctrl-C in an import ends a command by what is registered here
    try:
        yield folder
    except Exception as exc:
        if not isinstance(exc, OSError) and "I/O error" not in str(exc):  # the writer of weights has errors of its own
            raise
        if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT):
            named = Path(os.fsdecode(exc.filename or folder)).absolute()
            if not any(named.is_relative_to(ours.absolute()) for ours in (folder, target or folder)):
                raise _cannot_read(str(named), exc) from exc  # it is a file of the source
        reason = (getattr(exc, "strerror", None) or str(exc).rpartition("I/O error: ")[2]).lower()
        raise MldebugError(f"cannot write {target or folder}: {reason}", "make room, or choose another folder") from exc
    finally:
        remove()
        atexit.unregister(remove)


def put(folder: Path, target: Path, force: bool) -> None:
    """The finished folder takes its name. An earlier one is moved aside first and removed last."""
    mask = _umask()
    folder.chmod(0o777 & ~mask)
    for file in folder.rglob("*"):  # some writers leave files that only their owner can read
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)
    old = None
    if target.is_dir() and any(target.iterdir()):
        old = folder.with_name(folder.name + ".old")
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
