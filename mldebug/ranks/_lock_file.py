"""Where the lock file lies: one for each job, user and node, in a folder that nobody else can write."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time

from mldebug.core.world import job


def open_lock_file(size: int) -> int:
    """A descriptor of the lock file, `size` bytes long, made where it is not there; -1 where no folder will do.

    Tried are XDG_RUNTIME_DIR, /dev/shm, TMPDIR (else /tmp) and /var/tmp, in this order: ranks may have a TMPDIR each,
    or one on a network file system. A link, another user's file or
    folder, or one that others may write is passed over: in /tmp anybody could have put it there.
    """
    global _used
    for folder, name in _places():
        for _attempt in range(3):  # the last process of before may remove it just now
            try:
                fd = _open_in(folder, name, size)
                _used = (folder, name)
                return fd
            except FileNotFoundError:
                continue
            except OSError:
                break
    return -1


def remove_lock_file(fd: int) -> None:
    """Remove the file, if it is still the one that `fd` has open, and the folder, if nothing else is in it."""
    if _used is not None:
        path = os.path.join(*_used)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                os.unlink(path)
                os.rmdir(_used[0])


def left_behind() -> list[str]:
    """The other lock files of this host, an hour old at least: those of killed jobs among them."""
    found = []
    if _used is not None:
        with contextlib.suppress(OSError), os.scandir(_used[0]) as entries:
            for entry in entries:
                ours = entry.name.startswith(f"print-{socket.gethostname()}-") and entry.name != _used[1]
                if ours and entry.is_file(follow_symlinks=False) and time.time() - entry.stat().st_mtime > 3600:
                    found.append(entry.path)
    return found


_used: tuple[str, str] | None = None  # folder and name; a program may set TMPDIR later, and fork


def _places() -> list[tuple[str, str]]:
    name = _name()
    return [*([_used] if _used is not None else []), *((folder, name) for folder in _folders())]


def _folders() -> list[str]:
    uid = os.geteuid()
    found = []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        found.append(os.path.join(runtime, "mldebug"))
    temporary = os.environ.get("TMPDIR", "")
    for folder in ("/dev/shm", temporary if os.path.isabs(temporary) else "/tmp", "/var/tmp"):
        found.append(os.path.join(folder, f"mldebug-{uid}"))
    return found


def _open_in(folder: str, name: str, size: int) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        _refuse_others(os.fstat(inside), stat.S_ISDIR)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | flags, 0o600, dir_fd=inside)
    finally:
        os.close(inside)
    try:
        state = os.fstat(fd)
        _refuse_others(state, stat.S_ISREG)
        if state.st_size < size:
            os.posix_fallocate(fd, 0, size)  # so that a disk that fills up later does not matter
        return fd if fd > 2 else _above(fd)
    except OSError:
        os.close(fd)
        raise


def _refuse_others(state: os.stat_result, is_kind: object) -> None:
    assert callable(is_kind)
    if not is_kind(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise PermissionError


def _above(fd: int) -> int:
    """Not among the standard streams: in a process that has closed one, prints would end in the lock file."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _name() -> str:
    """Launchers name their jobs before Python starts. What a script sets itself (MASTER_ADDR) comes too late: two
    processes must not take different files because one of them printed early."""
    name = job()
    known = name.startswith(("torchrun-", "mpi-", "slurm-")) and name != f"mpi-{os.getppid()}"
    return f"print-{socket.gethostname()}-{name if known else 'local'}.lock"
