"""NUMA nodes by sysfs: their CPUs, their distances, and which of them a GPU is on."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field

from mldebug.core.cpus import cpu_list, cpus
from mldebug.core.machine import NotVisible, Root
from mldebug.perf.numa._gpus import Gpu

_NODES = "/sys/devices/system/node"
_CPUS = "/sys/devices/system/cpu"


@dataclass(frozen=True)
class Nodes:
    """`cpus` by node, the online ones only; `distance[a][b]` as the firmware tells it (10: the same node)."""

    cpus: dict[int, frozenset[int]]
    distance: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def with_cpus(self) -> list[int]:
        return [node for node, found in self.cpus.items() if found]


@dataclass(frozen=True)
class Near:
    """The CPUs near a GPU: `node` is its NUMA node (-1: not told); no CPUs where it is not known, and `why` then."""

    cpus: frozenset[int]
    node: int = -1
    why: str = ""


def read_nodes(root: Root) -> Nodes:
    """The NUMA nodes of this machine; none where sysfs does not show them."""
    online = online_cpus(root)
    found: dict[int, frozenset[int]] = {}
    distance: dict[int, dict[int, int]] = {}
    with contextlib.suppress(NotVisible):
        numbers = sorted(int(name[4:]) for name in root.names(_NODES) if re.fullmatch(r"node\d+", name))
        for node in numbers:
            near = cpus(root.maybe(f"{_NODES}/node{node}/cpulist") or "")
            found[node] = frozenset(near & online if online else near)
            far = (root.maybe(f"{_NODES}/node{node}/distance") or "").split()
            if len(far) == len(numbers) and all(word.isdecimal() for word in far):
                distance[node] = dict(zip(numbers, map(int, far), strict=True))
    return Nodes(found, distance)


def online_cpus(root: Root) -> set[int]:
    return cpus(root.maybe(f"{_CPUS}/online") or "")


def near_gpu(root: Root, gpu: Gpu, nodes: Nodes) -> Near:
    """What sysfs tells of the GPU's place, else what NVML does. All CPUs of the machine are no answer."""
    folder, online = f"/sys/bus/pci/devices/{gpu.address}", online_cpus(root)
    local = frozenset(cpus(root.maybe(f"{folder}/local_cpulist") or ""))
    with contextlib.suppress(NotVisible):
        node = root.number(f"{folder}/numa_node")
        if node >= 0 and (local or node in nodes.cpus):
            return Near(nodes.cpus.get(node) or local, node)
        if node >= 0:
            return Near(frozenset(), -1, f"{folder} says NUMA node {node}, and {_NODES} does not show it")
    for found in (local, gpu.nvml_cpus):
        if found and found < online:
            return Near(found, _node_of(found, nodes))
    if not root.exists(folder) and not gpu.nvml_cpus:
        return Near(frozenset(), -1, f"{folder} is not there: this container or machine hides it")
    virtual = re.search(r"^flags\s*:.*\bhypervisor\b", root.maybe("/proc/cpuinfo") or "", re.M)
    hides = "this virtual machine hides the topology" if virtual else "the firmware does not tell it"
    return Near(frozenset(), -1, f"the NUMA node of {gpu.address} is not known: {hides}")


def nearest(nodes: Nodes, node: int, usable: set[int]) -> tuple[int, int] | None:
    """The next node to this one that has CPUs in `usable`, and its distance; None where there is no nearer and
    farther among them."""
    far = nodes.distance.get(node, {})
    reach = sorted((far[one], one) for one in nodes.with_cpus if one in far and nodes.cpus[one] & usable)
    if not reach or reach[0][0] == reach[-1][0]:
        return None
    return reach[0][1], reach[0][0]


def cores(root: Root, usable: set[int]) -> list[list[int]]:
    """The CPUs of `usable` by core: hyperthreads stay together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(usable):
        text = root.maybe(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list")
        siblings = tuple(sorted(cpus(text or "") or {cpu}))
        found.setdefault(siblings if cpu in siblings else (cpu,), []).append(cpu)
    return list(found.values())


def share(root: Root, usable: set[int], place: int, of: int) -> set[int]:
    """Part `place` (from 0) of the CPUs, cut evenly into `of` parts of whole cores; single CPUs where there are fewer
    cores than parts; all of them where there are fewer CPUs than parts."""
    units = cores(root, usable)
    if len(units) < of:
        units = [[cpu] for cpu in sorted(usable)]
    if len(units) < of:
        return set(usable)
    first, last = place * len(units) // of, (place + 1) * len(units) // of
    return {cpu for unit in units[first:last] for cpu in unit}


def hex_mask(numbers: frozenset[int] | set[int]) -> str:
    """The CPUs as srun and taskset take them: 0xff00 is CPUs 8 to 15. Any number of CPUs."""
    return hex(sum(1 << cpu for cpu in numbers))


def described(numbers: frozenset[int] | set[int]) -> str:
    return f"{cpu_list(numbers)} ({len(numbers)})" if numbers else "none"


def _node_of(found: frozenset[int], nodes: Nodes) -> int:
    holding = [node for node, here in nodes.cpus.items() if here and found & here]
    return holding[0] if len(holding) == 1 else -1
