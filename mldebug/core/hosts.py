"""Names of other machines: lists such as `node[001-512]`, host files, and which names are no names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mldebug.core.errors import UsageError
from mldebug.core.extras import how_to_install

# A name goes to ssh, srun and kubectl as a word of its own, so it must be unable to be an option or a command.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:]{2,45}(%[A-Za-z0-9._-]+)?")
_MOST = 100_000


def parse_hosts(text: str) -> list[str]:
    """The hosts that a list names, in its order and each once: `a,b`, `node[001-512,600]`, `ada@node[1-4]`, `@group`.

    Ranges, `!` and groups are ClusterShell's. A name that could be taken for an option or a command is a UsageError.

        parse_hosts("node[08-10],head")  # ["node08", "node09", "node10", "head"]
    """
    if "\n" in text or "\0" in text:
        raise UsageError(f"the list of hosts {text[:60]!r} has a line break in it", "give --hostfile FILE for a file")
    words = [word for word in re.split(r"[,\s]+(?![^\[]*\])", text.strip()) if word]
    found: list[str] = []
    for word in words:
        found += [word] if _is_plain(word) else _expand(word)
    if not found:
        raise UsageError(f"the list of hosts {text!r} names none", "for example: --hosts node[1-4]")
    return checked(found)


def read_hostfile(path: str | os.PathLike[str]) -> list[str]:
    """The hosts in a file, one or a range on a line; what follows a name (`slots=8`, `:8`, a comment) is left out."""
    try:
        with Path(path).open(encoding="utf-8", errors="strict") as stream:
            lines = stream.read(64 * 1024 * 1024).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = (exc.strerror or str(exc)).lower() if isinstance(exc, OSError) else "it is not text"
        raise UsageError(f"cannot read the host file {os.fspath(path)}: {reason}", "check the path") from exc
    found: list[str] = []
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            found += parse_hosts(re.sub(r"^([^:]+):\d+$", r"\1", words[0]))
    if not found:
        raise UsageError(f"the host file {os.fspath(path)} names no host", "write one host on each line")
    return checked(found)


def checked(names: Iterable[str]) -> list[str]:
    """The names, each once; the first that is no host name is a UsageError."""
    unique = list(dict.fromkeys(names))
    for name in unique:
        if not is_host(name):
            raise UsageError(
                f"{name[:80]!r} is no host name", "names have letters, digits, dots, dashes, and a user@ in front"
            )
    if len(unique) > _MOST:
        raise UsageError(f"{len(unique)} hosts are too many", f"name up to {_MOST}")
    return unique


def is_host(name: str) -> bool:
    """Whether this can be nothing but the name or address of a host, maybe with a user."""
    user, at, host = name.rpartition("@")
    if at and not _NAME.fullmatch(user):
        return False
    return bool(_NAME.fullmatch(host) or (":" in host and _ADDRESS.fullmatch(host)))


def fold_hosts(names: Iterable[str], most: int = 4) -> str:
    """Host names for people: `node[3-9]` where ClusterShell is installed, or the first of them and how many more."""
    names = list(names)
    if len(names) > 2:
        with contextlib.suppress(Exception):  # it is only a shorter way to say it
            from ClusterShell.NodeSet import NodeSet

            folded = str(NodeSet.fromlist(names))
            if len(folded) <= 24 * most:
                return folded
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} others" if rest > 0 else "")


def _is_plain(word: str) -> bool:
    return "[" not in word and "!" not in word and not word.startswith("@") and "&" not in word


def _expand(word: str) -> list[str]:
    try:
        from ClusterShell.NodeSet import NodeSet, NodeSetException
    except ImportError as exc:
        raise UsageError(
            f"the list of hosts {word!r} needs ClusterShell, which is not installed",
            f"{how_to_install('cluster')}, or give the names one by one",
        ) from exc
    user, at, hosts = word.partition("@") if "@" in word[1:] else ("", "", word)
    try:
        _check_size(word)
        nodes = NodeSet(hosts)
        if not nodes:
            raise UsageError(f"{word!r} names no host", "for example: node[001-512], or a,b,c")
        return [f"{user}{at}{name}" for name in nodes]
    except (NodeSetException, ValueError) as exc:
        raise UsageError(f"{word!r} is no list of hosts: {exc}", "for example: node[001-512], or a,b,c") from exc


def _check_size(word: str) -> None:
    """Before it is expanded: a slip in a range must not fill the memory."""
    size = 1
    for ranges in re.findall(r"\[([^\]]*)\]", word):
        ends = re.findall(r"(\d+)(?:-(\d+))?", ranges)
        size *= sum(max(1, int(last[:18]) - int(first[:18]) + 1) if last else 1 for first, last in ends) or 1
    if size > _MOST:
        raise UsageError(f"{word!r} are {size} hosts", f"name up to {_MOST}")
