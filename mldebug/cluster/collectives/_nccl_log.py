"""What NCCL chose, read from its debug log: algorithm, protocol, channels, and the transport between ranks."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

# NCCL_DEBUG_SUBSYS=TUNING writes a line when a collective is enqueued; the numbers are of older versions.
_CHOSEN = re.compile(
    r"(?:(?P<name>\w+): )?(?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)"
    r"(?: channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?"
)
_SYMMETRIC = re.compile(r"(?P<name>\w+) \[Symmetric\]: (?P<bytes>\d+) Bytes -> Kernel (?P<kernel>\S+)")
_COPIED = re.compile(r"(?P<name>\w+) \[Copy Engine\]: (?P<bytes>\d+) Bytes -> (?P<call>\S+)")
_NAME = re.compile(r"(\w+)(?: \[[\w ]+\])?: \d+ Bytes -> ")
_ROUTE = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via (\S+)")
_ALGOS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOS = ("LL", "LL128", "SIMPLE")


class NcclLog:
    """The log of this process, in memory: nothing of it is left behind. Made before the first call of NCCL.

    Where the user set NCCL_DEBUG the log is the user's, and nothing is read.
    """

    def __init__(self, env: MutableMapping[str, str] = os.environ) -> None:
        self._fd = -1
        self._read = 0
        if "NCCL_DEBUG" in env or "NCCL_DEBUG_FILE" in env or not hasattr(os, "memfd_create"):
            return
        self._fd = os.memfd_create("mldebug-nccl-log")
        env["NCCL_DEBUG"] = "INFO"
        env["NCCL_DEBUG_SUBSYS"] = "INIT,GRAPH,TUNING"
        env["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{self._fd}"

    def new_text(self) -> str:
        """What was written since the last call."""
        if self._fd < 0:
            return ""
        parts = []
        while data := os.pread(self._fd, 1 << 20, self._read):
            self._read += len(data)
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")


def chosen(text: str, collective: str = "all_reduce") -> dict[str, str | int]:
    """The last choice for a collective: {"algo", "proto", "channels"} or {"kernel"}; empty where there is none.

    What is made of sends and receives (alltoall, gather, scatter, sendrecv) has none.

        chosen("AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}")["proto"]  # "LL"
    """
    found: dict[str, str | int] = {}
    name = collective.title().replace("_", "")
    for line in text.splitlines():
        match = _NAME.search(line)
        if match is not None and match[1] != name:
            continue
        if match := _CHOSEN.search(line):
            found = {"algo": _named(match["algo"], _ALGOS), "proto": _named(match["proto"], _PROTOS)}
            if match["low"]:
                found["channels"] = int(match["high"]) - int(match["low"]) + 1
        elif match := _SYMMETRIC.search(line):
            found = {"kernel": match["kernel"]}
        elif match := _COPIED.search(line):
            found = {"kernel": match["call"]}
    return found


def routes(text: str, rank: int) -> dict[str, list[str]]:
    """Transport -> the peers that this rank reaches by it: {"P2P/CUMEM": ["1"], "NET/IB": ["8"]}."""
    found: dict[str, set[str]] = {}
    for source, target, via in _ROUTE.findall(text):
        if int(source) == rank:
            kind = "/".join(via.split("/")[:2])
            found.setdefault(kind, set()).add(target)
    return {kind: sorted(peers, key=int) for kind, peers in found.items()}


def _named(word: str, names: tuple[str, ...]) -> str:
    return names[int(word)] if word.isdecimal() and int(word) < len(names) else word
