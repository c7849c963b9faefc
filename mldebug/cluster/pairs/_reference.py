"""A second opinion: what no comparison of siblings shows, as all of them are equally slow."""

from __future__ import annotations

import statistics

from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.core.reference import gpu_kind, link_gbps

_SHARE = 0.6  # of the specification; messages of 256 MiB reach 0.8 to 0.9 of it one way
_PCIE = 15.0  # GBps one way: generation 4 with 16 lanes reaches about 24, generation 5 about 48
_PORT = 9.0  # GBps between nodes: a port of 100 Gb/s reaches about 11, of 200 about 23, of 400 about 47


def second_opinion(evidence: PairsEvidence) -> list[str]:
    """Warnings where the median is far below what this GPU's links reach; none where the GPU is not known."""
    device = evidence.get("device", "")
    kind = gpu_kind(device)
    if not kind:
        return []
    hosts = [name.rpartition(":")[0] if ":" in name else name for name in evidence["gpus"]]
    rates: dict[bool, list[float]] = {True: [], False: []}
    for src, dst, gbps in zip(evidence["src"], evidence["dst"], evidence["gbps"], strict=True):
        if gbps:
            rates[hosts[src] == hosts[dst]].append(gbps)
    found = []
    link = link_gbps(device)
    if inside := rates[True]:
        middle = statistics.median(inside)
        if kind.endswith((" SXM", " OAM")) and link is not None and middle < _SHARE * link.gbps:
            found.append(
                f"within nodes {middle:.0f} GBps is usual here, and {link.name} of {kind} is specified for "
                f"{link.gbps:.0f}: peer access, NCCL_P2P_DISABLE, the fabric manager?"
            )
        elif kind.endswith((" PCIe", " NVL")) and middle < _PCIE:
            found.append(
                f"within nodes {middle:.1f} GBps is usual here; PCIe 4 x16 reaches about 24, PCIe 5 about 48: "
                "width and generation under load, ACS, NCCL_P2P_DISABLE?"
            )
    if (between := rates[False]) and (middle := statistics.median(between)) < _PORT:
        found.append(
            f"between nodes {middle:.1f} GBps is usual here; ports of 100, 200 and 400 Gb/s reach about 11, 23 and 47: "
            "plain TCP in place of RDMA, or one card for all GPUs?"
        )
    return found
