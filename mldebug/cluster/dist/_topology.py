"""How a GPU is joined to the other GPUs of its host, by what NVML says."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

# What nvmlDeviceGetTopologyCommonAncestor returns, in the words of `nvidia-smi topo -m`.
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def topology(uuid: str) -> dict[str, str]:
    """`{"NVLinks": "18 of 18 up", "others": "3 NODE, 4 SYS"}`, or nothing where NVML is not there or does not know."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no library, no driver, or another version of either
        return {}
    found: dict[str, str] = {}
    try:
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        mine = nvml.nvmlDeviceGetHandleByUUID(name)
        links = _links(nvml, mine)
        if links:
            found["NVLinks"] = f"{sum(links)} of {len(links)} up"
        levels: Counter[str] = Counter()
        for index in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(other) != nvml.nvmlDeviceGetUUID(mine):
                level = nvml.nvmlDeviceGetTopologyCommonAncestor(mine, other)
                levels[_LEVELS.get(level, str(level))] += 1
        if levels:
            found["other GPUs over"] = ", ".join(f"{count} {level}" for level, count in levels.most_common())
    except Exception:  # VMs hide it, and some cards have none
        return found
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()
    return found


def _links(nvml: Any, handle: Any) -> list[bool]:
    """Whether each NVLink is up; a card has as many as NVML answers for."""
    found = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            found.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except Exception:
            break
    return found
