"""A machine as files below a prefix: what is read of /proc and /sys, so that tests can put another machine there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_MOST = 1 << 20  # bytes of a file that are read


class NotVisible(Exception):
    """Something that cannot be read here; the text says why."""


class Root:
    """A machine as it is seen from this process. `prefix` is put before every path: "/" is this machine.

    Everything raises NotVisible with the reason where it cannot be read.

        Root().read("/proc/sys/kernel/numa_balancing")  # "1"
    """

    def __init__(self, prefix: str | os.PathLike[str] = "/") -> None:
        self.prefix = os.path.realpath(prefix)

    def path(self, path: str) -> Path:
        return Path(self.prefix, path.lstrip("/"))

    def read(self, path: str) -> str:
        """The text of a file, without spaces at its ends."""
        return self.data(path).decode("utf-8", "replace").strip(" \t\r\n\0")

    def data(self, path: str, most: int = _MOST) -> bytes:
        try:
            with self.path(path).open("rb") as stream:
                return stream.read(most)
        except OSError as exc:
            raise NotVisible(why_not(path, exc)) from exc

    def number(self, path: str) -> int:
        text = self.read(path)
        try:
            return int(text, 0)
        except ValueError:
            raise NotVisible(f"{path} holds {text[:40]!r} and no number") from None

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError as exc:
            raise NotVisible(why_not(path, exc)) from exc

    def exists(self, path: str) -> bool:
        return self.path(path).exists()

    def real(self, path: str) -> str:
        """Where a link leads, seen from the root."""
        full = os.path.realpath(self.path(path))
        if not os.path.exists(full):
            raise NotVisible(f"{path}: no such file")
        return full if self.prefix == "/" else full[len(self.prefix) :]

    def maybe(self, path: str) -> str | None:
        with contextlib.suppress(NotVisible):
            return self.read(path)
        return None

    def environ(self) -> Mapping[str, str]:
        return os.environ

    def is_forbidden(self, path: str) -> bool:
        """Whether this process may not open a device file, whatever its mode says."""
        try:
            os.close(os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except PermissionError:
            return True
        except OSError:
            return False
        return False


def why_not(path: str, exc: OSError) -> str:
    """The reason of an error in the words of the messages here."""
    reason = (exc.strerror or str(exc)).lower().replace("no such file or directory", "no such file")
    return f"{path}: {reason}"
