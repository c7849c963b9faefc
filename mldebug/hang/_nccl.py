"""What NCCL and the driver say about ranks with no code in the job: operations issued, and how busy the GPUs are.

NCCL 2.24 and later listens for questions on each node (RAS): who is in a communicator and, from 2.28.9 on, how many
operations of each sort each rank has issued. NVML tells which process is on which GPU.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldebug.hang._evidence import Communicator, Gpu, Rank

_PORT = 28028  # NCCL's own default
_MOST = 64 << 20  # bytes of an answer that are read: 10,000 ranks take 5 MB


class Watcher:
    """Asks beside each look at the ranks. Where there is no NCCL or no driver it costs a look at /proc."""

    def __init__(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        self._pids = set(environments)
        self._address = ras_address(environments.values()) if any(map(uses_nccl, environments)) else None
        self._looks: list[dict[str, Any]] = []
        self._busy: list[dict[int, list[tuple[int, int]]]] = []

    def sample(self) -> None:
        if self._address is None:
            return
        answer = ask_ras(self._address)
        if answer is not None:
            self._looks.append(_of_this_node(answer, self._pids))
        self._busy.append(gpus())

    @property
    def still(self) -> bool:
        """Whether nobody issued an operation between the looks, while some GPU is at work."""
        counts = [_counts(answer) for answer in self._looks]
        at_work = any(percent >= 90 for look in self._busy[-1:] for rows in look.values() for _, percent in rows)
        return at_work and all(one == counts[0] for one in counts[1:])

    def communicators(self, pid: int) -> list[Communicator]:
        """The communicators of a process, with the operations that it had issued at each look."""
        found: list[Communicator] = []
        if not self._looks:
            return found
        for group in self._looks[-1]["communicators"]:
            here = [rank for rank in (*group["ranks"], *group["missing_ranks"]) if rank["pid"] == pid and rank["here"]]
            if not here:
                continue
            counts = [table[key] for look in self._looks if (key := (group["hash"], pid)) in (table := _counts(look))]
            status = _status(here[0]["status"]) if here[0] in group["ranks"] else "left"
            row: Communicator = {
                "name": group["hash"], "size": group["size"], "rank": here[0]["rank"], "status": status,
            }  # fmt: skip
            if counts:
                row["issued"] = counts
            found.append(row)
        return found

    def gpus(self, pid: int) -> list[Gpu]:
        """The GPUs of a process, with how busy each was at each look, in percent."""
        table: dict[int, list[int]] = {}
        for look in self._busy:
            for index, percent in look.get(pid, []):
                table.setdefault(index, []).append(percent)
        return [{"index": index, "busy": busy} for index, busy in sorted(table.items())]

    def notes(self) -> list[str]:
        """What NCCL says of ranks that it cannot reach, on whatever node."""
        lines = []
        for group in self._looks[-1]["communicators"] if self._looks else ():
            for rank in group["missing_ranks"]:
                state = rank["status"]
                word = "dead" if state.get("considered_dead") else "unresponsive" if state.get("unresponsive") else ""
                if word:
                    who = f"rank {rank['rank']} of {group['size']} (pid {rank['pid']} on {rank['host']})"
                    lines.append(f"NCCL takes {who} of a communicator for {word}")
        return lines


def joined(looks: Sequence[Rank]) -> tuple[list[Communicator], list[Gpu]]:
    """The communicators and GPUs of one process in evidences that follow each other, as one."""
    groups: dict[str, Communicator] = {}
    cards: dict[int, Gpu] = {}
    for look in looks:
        for group in look.get("nccl", []):
            before = groups[group["name"]].get("issued", []) if group["name"] in groups else []
            groups[group["name"]] = {**group, "issued": [*before, *group.get("issued", [])]}
        for card in look.get("gpus", []):
            earlier = cards[card["index"]]["busy"] if card["index"] in cards else []
            cards[card["index"]] = {"index": card["index"], "busy": [*earlier, *card["busy"]]}
    return list(groups.values()), list(cards.values())


def ras_address(environments: Iterable[Mapping[str, str]]) -> tuple[str, int] | None:
    """Where the ranks' NCCL answers, as NCCL_RAS_ADDR has it; None where NCCL_RAS_ENABLE=0 turned it off."""
    for environment in environments:
        if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
            return None
        host, colon, port = environment.get("NCCL_RAS_ADDR", "").strip().rpartition(":")
        if colon and port.isdecimal():
            return host.strip("[]") or "localhost", int(port)
    return "localhost", _PORT


def ask_ras(address: tuple[str, int], timeout: float = 3.0) -> dict[str, Any] | None:
    """RAS's own JSON about all communicators, or None where nobody answers in time or it is too old for JSON."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), socket.create_connection(address, 1.0) as link:
        link.settimeout(timeout)
        with link.makefile("rwb") as stream:
            for line, wanted in (
                ("CLIENT PROTOCOL 2", b"SERVER PROTOCOL"),
                (f"TIMEOUT {max(1, int(timeout) - 1)}", b"OK"),
                ("SET FORMAT json", b"OK"),
            ):
                stream.write(line.encode() + b"\n")
                stream.flush()
                if not stream.readline(4096).startswith(wanted):
                    return None
            stream.write(b"VERBOSE STATUS\n")
            stream.flush()
            return parse_ras(stream.read(_MOST).decode("utf-8", "replace"))
    return None


_COMMA = re.compile(r'("nvml_dev": -?\d+)\s*\n(\s*"status")')  # NCCL 2.28.9 leaves it out in missing_ranks


def parse_ras(text: str) -> dict[str, Any]:
    """The JSON of RAS with the fields that are read checked; raises ValueError, KeyError or TypeError otherwise."""
    document = json.loads(_COMMA.sub(r"\1,\n\2", text))
    groups = []
    for group in document["communicators"]:
        ranks = [
            {
                "rank": int(rank["rank"]),
                "pid": int(rank["pid"]),
                "host": str(rank["host"]),
                "status": dict(rank["status"]),
                "counts": {str(name): int(count) for name, count in rank["collective_counts"].items()},
            }
            for rank in group["ranks"]
        ]
        missing = [
            {
                "rank": int(rank["rank"]),
                "pid": int(rank.get("pid", -1)),
                "host": str(rank.get("host", "")),
                "status": dict(rank.get("status", {})),
            }
            for rank in group["missing_ranks"]
        ]
        groups.append(
            {"hash": str(group["hash"]), "size": int(group["size"]), "ranks": ranks, "missing_ranks": missing}
        )
    return {"version": str(document["nccl_version"]), "communicators": groups}


def _of_this_node(answer: dict[str, Any], pids: set[int]) -> dict[str, Any]:
    """The communicators that processes of ours are in, each rank with `here`: on this node.

    NCCL names nodes by an address: this one is that whose process ids are ours. Those of other nodes may be equal.
    """
    hosts: Counter[str] = Counter()
    for group in answer["communicators"]:
        hosts.update(rank["host"] for rank in (*group["ranks"], *group["missing_ranks"]) if rank["pid"] in pids)
    home = hosts.most_common(1)[0][0] if hosts else None
    groups = []
    for group in answer["communicators"]:
        everyone = (*group["ranks"], *group["missing_ranks"])
        for rank in everyone:
            rank["here"] = rank["host"] == home and rank["pid"] in pids
        if any(rank["here"] for rank in everyone):  # of thousands of ranks, keep what is read here
            groups.append({**group, "ranks": [rank for rank in group["ranks"] if rank["here"]]})
    return {**answer, "communicators": groups}


def uses_nccl(pid: int) -> bool:
    """Whether a process has loaded NCCL."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as stream:
        return any(b"libnccl" in line for line in stream)
    return False


def gpus() -> dict[int, list[tuple[int, int]]]:
    """pid -> [(index of the GPU, its use in percent)], by NVML; {} where there is no driver.

    The use is the GPU's over the last sixth of a second to second: a kernel that waits for other ranks counts as work.
    """
    try:
        import pynvml
    except ImportError:
        return {}
    table: dict[int, list[tuple[int, int]]] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a card that is lost, or split by MIG
                card = pynvml.nvmlDeviceGetHandleByIndex(index)
                percent = int(pynvml.nvmlDeviceGetUtilizationRates(card).gpu)
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
                    table.setdefault(int(process.pid), []).append((index, percent))
    except pynvml.NVMLError:
        pass
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return table


def _counts(answer: dict[str, Any]) -> dict[tuple[str, int], dict[str, int]]:
    return {
        (group["hash"], rank["pid"]): {name: count for name, count in rank["counts"].items() if count}
        for group in answer["communicators"]
        for rank in group["ranks"]
    }


def _status(state: dict[str, Any]) -> str:
    if state.get("abort_flag"):
        return "aborted"
    if state.get("finalize_called") or state.get("destroy_flag"):
        return "ending"
    if state.get("async_error"):
        return "error"
    return "running" if state.get("init_state") == 0 else "starting"
