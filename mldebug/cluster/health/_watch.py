"""Counters that grew while doctor watched: errors that happen now, and not at some time in the past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, fine, gpus, part, warn

_CABLE = "reseat the cable or transceiver, look at the switch port"
# The beginning of a counter's name -> (check, level, what to do).
_KINDS: tuple[tuple[str, str, str, str], ...] = (
    ("ecc uncorrected", "ECC", "bad", "drain the node, reset the GPU, run a memory test"),
    ("ecc corrected", "ECC", "warn", "keep an eye on it: `nvidia-smi -q -d ECC`"),
    ("rows remapped", "memory rows", "warn", "reset the GPU when it is free"),
    ("nvlink", "NVLink errors", "bad", "`nvidia-smi nvlink -e`; reset the GPU, reseat it or its bridge"),
    ("pcie replays", "PCIe errors", "warn", "reseat the card, riser or cable"),
    ("link_downed", "RDMA errors", "bad", _CABLE),
    ("link_error_recovery", "RDMA errors", "bad", _CABLE),
    ("symbol_error", "RDMA errors", "warn", _CABLE),
    ("port_rcv_errors", "RDMA errors", "warn", _CABLE),
    ("local_link_integrity", "RDMA errors", "warn", _CABLE),
    ("out_of_sequence", "RDMA errors", "warn", "packets are lost on the way: look at PFC, ECN and the switches"),
    ("packet_seq_err", "RDMA errors", "warn", "packets are lost on the way: look at PFC, ECN and the switches"),
    ("local_ack_timeout", "RDMA errors", "bad", "the other end does not answer: look at its port, and at the switches"),
    ("xid", "Xid", "bad", "see the Xid lines above"),
    ("oom_kill", "cgroup", "bad", "raise the memory limit, or use less memory"),
    ("nr_throttled", "cgroup", "warn", "raise --cpus, or the CPU limit of the pod"),
)


def counters(node: Node) -> dict[str, int]:
    """Everything that only grows: `GPU 0|nvlink link 3 replay` and so on, part and name."""
    found: dict[str, int] = {}
    for gpu in gpus(node):
        place = f"GPU {gpu['index']}"
        for fact, name in (
            ("ecc_uncorrected", "ecc uncorrected"),
            ("ecc_corrected", "ecc corrected"),
            ("pcie_replays", "pcie replays"),
        ):
            if fact in gpu:
                found[f"{place}|{name}"] = gpu[fact]
        if "remapped" in gpu:
            found[f"{place}|rows remapped"] = gpu["remapped"][0] + gpu["remapped"][1]
        for name, value in (gpu.get("link_errors") or {}).items():
            found[f"{place}|nvlink {name}"] = value
    for port in part(node, "rdma", "ports") or []:
        for name, value in port["errors"].items():
            found[f"{port['device']} port {port['port']}|{name}"] = value
    events = part(node, "log", "events")
    if events is not None:
        found["|xid"] = len(
            [one for one in events if one["kind"] in ("Xid", "SXid") and one["number"] not in (63, 154)]
        )
    for name in ("oom_kill", "nr_throttled"):
        value = part(node, "cpus", "cgroup", name)
        if value is not None:
            found[f"|{name}"] = int(value)
    return found


def grown(before: Node, after: Node) -> dict[str, int]:
    """By how much each counter grew. One that was reset meanwhile counts from 0."""
    first, last = counters(before), counters(after)
    found = {
        name: value - first[name] if value >= first[name] else value for name, value in last.items() if name in first
    }
    return {name: value for name, value in found.items() if value}


def judge(node: Node) -> Iterator[Finding]:
    """What grew in the window, on one node."""
    watch: Any = part(node, "watch")
    if not watch:
        return
    if "why" in watch:
        yield warn("watch", str(watch["why"]), "run it again")
        return
    seconds, count = watch["seconds"], watch["counters"]
    troubles = 0
    for key, value in sorted(watch["grew"].items()):
        place, _, name = key.partition("|")
        for start, check, level, hint in _KINDS:
            if name.startswith(start):
                troubles += 1
                says = f"{name.removeprefix('nvlink ')} grew by {value} in {seconds:g} s"
                yield (bad if level == "bad" else warn)(check, says, hint, place)
                break
    if not troubles:
        yield fine("watch", f"none of {count} error counters grew in {seconds:g} s")
