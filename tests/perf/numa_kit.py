"""Machines made of files below a folder, for tests of binding: nodes, CPUs, GPUs, affinity, variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mldebug.core.cpus import cpu_list, cpus
from mldebug.perf.numa._bind import Machine

NVIDIA, AMD = "0x10de", "0x1002"


class FakeMachine(Machine):
    """`bound` has what it was bound to, in the order of the calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.env: dict[str, str] = {}
        self.bound: list[frozenset[int]] = []
        self.gpus = 0
        self.nodes: dict[int, str] = {}

    def environ(self) -> Mapping[str, str]:
        return self.env

    def bind(self, mine: frozenset[int], before: frozenset[int]) -> None:
        assert mine and mine <= before
        self.bound.append(mine)
        self.allow(cpu_list(mine))

    def put(self, path: str, text: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def allow(self, text: str) -> None:
        self.put("/proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{text}")

    def add_nodes(self, nodes: Mapping[int, str], distances: Mapping[int, str] | None = None, online: str = "") -> None:
        """CPUs of each node as sysfs lists them; every CPU is a core of its own until `threads` says otherwise."""
        self.nodes = dict(nodes)
        every = online or cpu_list({cpu for text in nodes.values() for cpu in cpus(text)})
        for fact in ("online", "possible"):
            self.put(f"/sys/devices/system/cpu/{fact}", every)
        for node, text in nodes.items():
            self.put(f"/sys/devices/system/node/node{node}/cpulist", text)
            far = distances[node] if distances else " ".join("10" if one == node else "21" for one in nodes)
            self.put(f"/sys/devices/system/node/node{node}/distance", far)
        self.allow(every)

    def threads(self, cores: int) -> None:
        """CPU n and n + cores are one core, as on machines with hyperthreads."""
        for cpu in range(2 * cores):
            pair = f"{cpu % cores},{cpu % cores + cores}"
            self.put(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", pair)

    def add_gpu(self, address: str, node: int, local: str = "", vendor: str = NVIDIA) -> None:
        folder = f"/sys/bus/pci/devices/{address}"
        self.put(f"{folder}/vendor", vendor)
        self.put(f"{folder}/class", "0x030200" if vendor == NVIDIA else "0x120000")
        self.put(f"{folder}/numa_node", str(node))
        self.put(f"{folder}/local_cpulist", local or self.nodes.get(node, ""))
        if vendor == NVIDIA:
            facts = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{self.gpus}0000000-aa\nDevice Minor: \t {self.gpus}"
            self.put(f"/proc/driver/nvidia/gpus/{address}/information", facts)
        self.gpus += 1

    def rank(self, local_rank: int, of: int = 8) -> FakeMachine:
        self.env.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(of), LOCAL_WORLD_SIZE=str(of))
        return self


def dgx(folder: Path) -> FakeMachine:
    """Two sockets of 8 cores with two threads each, and four GPUs on each socket."""
    machine = FakeMachine(folder)
    machine.add_nodes({0: "0-7,16-23", 1: "8-15,24-31"})
    machine.threads(16)
    for number in range(8):
        machine.add_gpu(f"0000:{0x10 + number:02x}:00.0", number // 4)
    return machine


class FakeNvml:
    """Answers for GPUs given as (address, uuid, set of near CPUs); MIG devices by the number of their GPU."""

    def __init__(self, gpus: list[tuple[str, str, set[int]]], mig: Mapping[str, int] | None = None) -> None:
        self.gpus, self.mig = gpus, dict(mig or {})

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId="0000" + self.gpus[handle][0].upper())

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.gpus[handle][1].encode()

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        near = self.gpus[handle][2]
        return [sum(1 << cpu - 64 * word for cpu in near if cpu // 64 == word) for word in range(words)]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.mig:
            raise KeyError(uuid)
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> int:
        return self.mig[handle]
