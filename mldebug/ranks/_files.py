"""A board of files: in a folder of this job in the memory of the node, for ranks that have no store."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mldebug.core.errors import MldebugError
from mldebug.core.world import job, launcher
from mldebug.ranks._world import node_name


class FolderBoard:
    """Notes as files that appear by rename.

    The last of `local_size` ranks to end removes the folder; what others leave, the next job sweeps.
    """

    def __init__(self, local_size: int | None = None, rank: int | None = None) -> None:
        self._folder = _enter(local_size, rank)

    def write(self, name: str, note: dict[str, Any]) -> None:
        path = self._folder / quote(name, safe="")
        new = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            new.write_text(json.dumps(note))
            new.rename(path)
        except OSError as exc:
            raise self._failed(exc) from None

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            text = (self._folder / quote(name, safe="")).read_text()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._failed(exc) from None
        note = json.loads(text)
        return note if isinstance(note, dict) else None

    def claim(self, name: str, note: dict[str, Any]) -> dict[str, Any]:
        path = self._folder / quote(name, safe="")
        new = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            new.write_text(json.dumps(note))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
            new.unlink()
            found = json.loads(path.read_text())
        except OSError as exc:
            raise self._failed(exc) from None
        return found if isinstance(found, dict) else note

    def _failed(self, exc: OSError) -> MldebugError:
        return MldebugError(
            f"ranks cannot leave notes for each other in {self._folder}: {exc.strerror}",
            "make room there, or call torch.distributed.init_process_group() first: its store is then used",
        )


def ticks(pid: int) -> int:
    """When the process started, in ticks since the machine did: with its number it is unique. -1 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def node() -> str:
    """What is the same for two processes that see each other's pids: the boot of the machine, and the pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


_entered: dict[tuple[int, str], Path] = {}


def _enter(local_size: int | None, rank: int | None) -> Path:
    """The folder of this job, with a file in it that says that this process is here."""
    me = (os.getpid(), job())
    if me not in _entered:
        top = launcher()
        above = _private(f"/dev/shm/mldebug-{os.getuid()}" if os.access("/dev/shm", os.W_OK) else
                         f"{tempfile.gettempdir()}/mldebug-{os.getuid()}") / "ranks"  # fmt: skip
        name = f"{node()[-40:]}.{top}.{ticks(top)}.{quote(f'{job()}-{node_name()}', safe='')[:150]}"
        folder = above / name
        here = folder / f"here.{me[0]}.{ticks(me[0])}.{rank}"
        try:
            _private(str(above))
            _sweep(above)
            with _locked(above):
                if folder.exists() and _is_of_before(folder, rank):
                    shutil.rmtree(folder)
                folder.mkdir(mode=0o700, exist_ok=True)
                here.touch()
        except OSError as exc:
            raise MldebugError(
                f"ranks have no folder for notes: {above}: {exc.strerror}",
                "call torch.distributed.init_process_group() first: its store is then used",
            ) from None
        _entered[me] = folder
        if local_size is not None:
            atexit.register(_leave, here, local_size)
    return _entered[me]


def _leave(here: Path, local_size: int) -> None:
    with contextlib.suppress(OSError):
        if here.name.split(".")[1] == str(os.getpid()):  # and not a child that was forked
            with _locked(here.parent.parent):
                here.rename(here.with_name(here.name.replace("here.", "left.")))
                if len(list(here.parent.glob("left.*"))) >= local_size and not _is_lived_in(here.parent):
                    shutil.rmtree(here.parent)


def _is_lived_in(folder: Path) -> bool:
    """Whether a process that has come there, and has not left, still runs."""
    came = [one.name.split(".") for one in folder.glob("here.*")]
    return any(ticks(int(pid)) == int(started) for _, pid, started, _rank in came)


def _is_of_before(folder: Path, rank: int | None) -> bool:
    """Whether these are notes of ranks that the same launcher had started before ours: all gone when we began, or one
    of them had our number."""
    if _is_lived_in(folder):
        return False
    if rank is not None and any(one.name.startswith(("here.", "left.")) for one in folder.glob(f"*.*.*.{rank}")):
        return True
    lives = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    newest = max((one.stat().st_mtime for one in folder.iterdir()), default=0.0)
    return newest < time.time() - lives - 0.02  # a tick is 10 ms


@contextlib.contextmanager
def _locked(above: Path) -> Iterator[None]:
    handle = os.open(above / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _private(name: str) -> Path:
    """That folder, made if need be; an error if others may write there."""
    path = Path(name)
    path.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise MldebugError(f"{path} can be written to by others, or is theirs", f"`rm -r {shlex.quote(str(path))}`")
    return path


def _sweep(above: Path) -> None:
    """Remove what jobs have left whose launcher is gone."""
    for one in [one for one in above.iterdir() if one.is_dir()]:
        place, top, started = (*one.name.split("."), "", "", "")[:3]
        gone = top.isdecimal() and place == node()[-40:] and str(ticks(int(top))) != started
        with contextlib.suppress(OSError):
            if gone or time.time() - one.stat().st_mtime > 3 * 86400:
                shutil.rmtree(one, ignore_errors=True)
