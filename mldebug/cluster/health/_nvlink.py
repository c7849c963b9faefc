"""NVLink and peer access: siblings of the same model are compared, as the right number of links is not known here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import (
    Finding,
    Node,
    bad,
    by,
    fine,
    gpus,
    hidden,
    many,
    part,
    settle,
    unseen,
    warn,
)
from mldebug.cluster.health._gpu import where

_RESEAT = "`nvidia-smi nvlink -s` of it; reset the GPU, reboot, and reseat it or its bridge if links stay away"
# Why two GPUs have no peer access, by NVML's numbers.
_PEERS = {
    1: "the chipset does not allow it", 2: "this model does not support it", 3: "they hang on different root complexes",
    4: "the driver is told to forbid it", 5: "it is not supported", 6: "the driver does not say why",
}  # fmt: skip


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node. MIG instances have neither."""
    whole = [gpu for gpu in gpus(node) if not (gpu.get("mig") or [0])[0]]
    if whole:
        yield from _links(node, whole)
        yield from _peers(node, whole)


def _links(node: Node, found: list[Any]) -> Iterator[Finding]:
    check = "NVLink"
    told = [gpu for gpu in found if "links" in gpu]
    if not told:
        reasons = {gpu.get("unseen", {}).get("links", "") for gpu in found}
        if not all("does not support" in why for why in reasons):
            yield from hidden(check, found, "links")
        elif part(node, "pci", "virtual") or any(gpu.get("virtual") == 1 for gpu in found):
            yield unseen(check, "the driver tells of none, and a virtual machine may hide them")
        else:
            yield fine(check, "these GPUs have none")
        return
    troubles: list[Finding] = []
    words = []
    for model, group in by(told, lambda gpu: gpu.get("name")).items():
        most = max(sum(gpu["links"]) for gpu in group)
        troubles += _alike(check, group, most)
        if len(group) == 1 and 0 < most < len(group[0]["links"]) and "NVL" not in str(model):
            says = f"{most} of {len(group[0]['links'])} links are active, and there is no sibling to compare with"
            troubles.append(warn(check, says, _RESEAT, where(group[0])))
        words.append(f"{most} active links on {many(len(group), 'GPU')}" if most else _BARE)
    yield from settle(check, troubles, "; ".join(words))


_BARE = "no link is active: cards without a bridge look like this"


def _alike(check: str, group: list[Any], most: int) -> Iterator[Finding]:
    """GPUs of one model that have fewer links than the best of them.

    Cards with a bridge for each pair may be without one: those that have links are an even number then.
    """
    bare = [gpu for gpu in group if not sum(gpu["links"])]
    fabric = any(gpu.get("fabric", {}).get("state") for gpu in group)
    unbridged = not fabric and ((len(group) - len(bare)) % 2 == 0 or 2 * len(bare) > len(group))
    for gpu in group:
        count = sum(gpu["links"])
        if count == most:
            continue
        if count == 0 and unbridged:
            yield warn(check, f"{_BARE}; its siblings have {most}", "put a bridge on, or do not mix them", where(gpu))
            continue
        down = ", ".join(str(link) for link, state in enumerate(gpu["links"]) if not state)
        says = f"{count} links are active, its siblings have {most} (down: {down or 'not told'})"
        yield bad(check, says, _RESEAT, where(gpu))


def _peers(node: Node, found: list[Any]) -> Iterator[Finding]:
    """GPUs that reach each other's memory. A whole model without it is by design, single pairs are not."""
    check = "peer access"
    numbers = {gpu["index"] for gpu in found}
    rows = [row for row in part(node, "gpu", "peers") or [] if row[0] in numbers and row[1] in numbers]
    if not rows:
        return
    told = [row for row in rows if row[2] is not None]
    if not told:
        yield unseen(check, "the driver does not tell it")
        return
    without = [row for row in told if row[2] != 0]
    if not without:
        linked = sum(row[3] == 0 for row in told)
        yield fine(check, f"{many(len(told), 'pair')}, {linked} over NVLink")
        return
    why = _PEERS.get(without[0][2], f"status {without[0][2]}")
    if len(without) == len(told):
        if without[0][2] == 4:
            yield warn(check, f"none of {many(len(told), 'pair')}: {why}", "look for NVreg_ options in /etc/modprobe.d")
        else:
            yield fine(check, f"none of {many(len(told), 'pair')}: {why}. NCCL goes through host memory")
        return
    shown = ", ".join(f"{one}-{other}" for one, other, *_ in without[:4])
    says = f"{len(without)} of {len(told)} pairs have none (GPU {shown}{' ...' if len(without) > 4 else ''}): {why}"
    if all(row[4] is not None and row[4] >= 40 for row in without):  # NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM
        yield fine(check, f"{says}; they are on different sockets")
    else:
        yield warn(check, says, "`nvidia-smi topo -p2p rw`; ACS, IOMMU, or MIG on one of them")
