"""A board of files: in a folder of this job in the memory of the node, for ranks that have no store."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mldebug.core.errors import MldebugError
from mldebug.core.world import job, launcher


class FolderBoard:
    """Notes as files that appear by rename.

    The last of `local_size` ranks to end removes the folder; what others leave, the next job sweeps.
    """

    def __init__(self, local_size: int | None = None) -> None:
        self._folder = _folder()
        _leave_at_exit(self._folder, local_size)

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


_leaving: set[tuple[int, Path]] = set()


def _leave_at_exit(folder: Path, local_size: int | None) -> None:
    me = (os.getpid(), folder)
    if local_size is None or me in _leaving:
        return
    _leaving.add(me)

    def leave() -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == me[0]:
                (folder / f"left.{me[0]}").touch()
                if len(list(folder.glob("left.*"))) >= local_size:
                    shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)


def _folder() -> Path:
    base = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    uid = os.getuid()
    above = base / f"mldebug-{uid}" / "ranks"
    top = launcher()
    try:
        above.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (above.parent, above):
            found = os.lstat(one)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
                raise MldebugError(f"{one} can be written to by others, or is theirs", f"`rm -r {one}`")
        _sweep(above)
        folder = above / f"{node()[-40:]}.{top}.{ticks(top)}.{quote(job(), safe='')[:120]}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise MldebugError(
            f"ranks have no folder for notes: {above}: {exc.strerror}",
            "call torch.distributed.init_process_group() first: its store is then used",
        ) from None
    return folder


def _sweep(above: Path) -> None:
    """Remove what jobs have left whose launcher is gone."""
    for one in above.iterdir():
        place, top, started = (*one.name.split("."), "", "", "")[:3]
        gone = top.isdecimal() and place == node()[-40:] and str(ticks(int(top))) != started
        with contextlib.suppress(OSError):
            if gone or time.time() - one.stat().st_mtime > 30 * 86400:
                shutil.rmtree(one, ignore_errors=True)
