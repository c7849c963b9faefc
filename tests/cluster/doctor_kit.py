"""A healthy machine of eight GPUs made of files and a fake NVML, for tests that plant one fault in it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from mldebug.cluster.health._doctor import judge_doctor, look
from mldebug.cluster.health._finding import Finding
from mldebug.cluster.health._root import NotVisible, Root

GIB = 1 << 30
NOT_SUPPORTED, NO_PERMISSION, INVALID, LOST, RESET = 3, 4, 2, 15, 16
H100, NVL, PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA L40S"
KINDS = ("replay", "recovery", "crc flit", "crc data")


class Fails:
    """An answer that is one of NVML's errors."""

    def __init__(self, code: int) -> None:
        self.code = code


class Values:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class FakeNvml:
    """Answers as pynvml does, with its own errors and structures, from a dictionary for each GPU."""

    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self.gpus = gpus
        self.pairs: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self.driver = "570.86.15"

    def __getattr__(self, name: str) -> Any:
        answers = _ANSWERS.get(name)
        if answers is not None:
            return lambda handle, *more: self._say(handle, answers, *more)
        if name.startswith("nvmlDevice"):
            raise AttributeError(name)
        return getattr(pynvml, name)  # constants and structures

    def _say(self, handle: int, fact: str, *more: Any) -> Any:
        if fact == "ecc":
            fact = {(0, 0): "ecc_corrected", (1, 0): "ecc_uncorrected", (1, 1): "ecc_ever"}[more]
        elif fact in ("clock", "max_clock"):
            fact = f"{fact}_{more[0]}"
        elif fact == "affinity" and fact in self.gpus[handle]:
            return (ctypes.c_ulonglong * more[0])(*self.gpus[handle][fact][: more[0]])
        return self.value(self.gpus[handle].get(fact, Fails(NOT_SUPPORTED)))

    @staticmethod
    def value(answer: Any) -> Any:
        if isinstance(answer, Fails):
            raise pynvml.NVMLError(answer.code)
        return answer

    def nvmlDeviceGetC2cModeInfoV1(self, handle: int) -> Any:
        return Values(isC2cEnabled=self.value(self.gpus[handle].get("c2c", Fails(NOT_SUPPORTED))))

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.value(self.gpus[index].get("handle"))
        return index

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        links = self.value(self.gpus[handle]["links"])
        if link >= len(links):
            raise pynvml.NVMLError(INVALID)
        return int(self.value(links[link]))

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        if counter > 3:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return int(self.gpus[handle].get("link_errors", {}).get((link, KINDS[counter]), 0))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        return [Values(nvmlReturn=NOT_SUPPORTED, valueType=1, value=Values(uiVal=0)) for _ in fields]

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, pointer: Any) -> None:
        state, status, health = self.value(self.gpus[handle].get("fabric", Fails(NOT_SUPPORTED)))
        info = pointer._obj
        info.state, info.status, info.healthMask = state, status, health

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        pair = self.pairs.get((one, other), (0, 0, 20))
        return int(self.value(pair[0 if index == 1 else 1]))

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return int(self.value(self.pairs.get((one, other), (0, 0, 20))[2]))


_ANSWERS = {
    "nvmlDeviceGetName": "name", "nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetVbiosVersion": "vbios", "nvmlDeviceGetVirtualizationMode": "virtual",
    "nvmlDeviceGetPersistenceMode": "persistence", "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetMigMode": "mig", "nvmlDeviceGetEccMode": "ecc_mode", "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetRemappedRows": "remapped", "nvmlDeviceGetRetiredPagesPendingStatus": "retired",
    "nvmlDeviceGetCurrPcieLinkGeneration": "gen", "nvmlDeviceGetCurrPcieLinkWidth": "width",
    "nvmlDeviceGetMaxPcieLinkGeneration": "max_gen", "nvmlDeviceGetGpuMaxPcieLinkGeneration": "gpu_gen",
    "nvmlDeviceGetMaxPcieLinkWidth": "max_width", "nvmlDeviceGetPcieReplayCounter": "replays",
    "nvmlDeviceGetPerformanceState": "pstate", "nvmlDeviceGetClockInfo": "clock",
    "nvmlDeviceGetMaxClockInfo": "max_clock", "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetTemperatureThreshold": "slowdown", "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetEnforcedPowerLimit": "limit", "nvmlDeviceGetPowerManagementDefaultLimit": "default_limit",
    "nvmlDeviceGetCurrentClocksEventReasons": "throttle", "nvmlDeviceGetCpuAffinity": "affinity",
    "nvmlDeviceGetPciInfo": "pci", "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetRowRemapperHistogram": "rows", "nvmlDeviceGetComputeRunningProcesses": "processes",
}  # fmt: skip


class FakeRoot(Root):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.env: dict[str, str] = {"HOME": "/root"}
        self.name = "node1"
        self.spaces: dict[str, tuple[int, int]] = {"/dev/shm": (512 * GIB, 511 * GIB)}
        self.known = {"node1": ["10.1.0.1"]}
        self.faces = {"lo": ["127.0.0.1"], "eth0": ["10.1.0.1"]}
        self.peeked = ""
        self.forbidden: set[str] = set()
        self.version = "6.8.0-60-generic"

    def environ(self) -> Mapping[str, str]:
        return self.env

    def host(self) -> str:
        return self.name

    def kernel(self) -> str:
        return self.version

    def space(self, path: str) -> tuple[int, int]:
        if path not in self.spaces:
            raise NotVisible(f"{path}: no such file")
        return self.spaces[path]

    def addresses(self) -> dict[str, list[str]]:
        return {name: list(known) for name, known in self.faces.items()}

    def resolve(self, name: str) -> list[str]:
        if name not in self.known:
            raise NotVisible(f"{name} has no address: name or service not known")
        return self.known[name]

    def peek(self) -> str:
        return self.peeked

    def is_forbidden(self, path: str) -> bool:
        return path in self.forbidden


class Machine:
    """`gpus` GPUs, each below a bridge of its own, and as many InfiniBand cards."""

    def __init__(
        self, folder: Path, *, gpus: int = 8, model: str = H100, links: int = 18, rdma: int = 8, name: str = "node1"
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.root = FakeRoot(folder)
        number = int("".join(filter(str.isdigit, name)) or 1)
        self.root.name = name
        self.root.known = {name: [f"10.1.0.{number}"]}
        self.root.faces = {"lo": ["127.0.0.1"], "eth0": [f"10.1.0.{number}"]}
        self.nvml = FakeNvml([self._gpu(index, model, links, number) for index in range(gpus)])
        for index in range(gpus):
            self.slot(index)
            self.put(f"/dev/nvidia{index}")
        for index in range(rdma):
            self.port(index)
        self._system()

    def _gpu(self, index: int, model: str, links: int, number: int) -> dict[str, Any]:
        return {
            "name": model, "uuid": f"GPU-{number:04x}-{index}", "minor": index, "vbios": "96.00.89.00.01", "virtual": 0,
            "persistence": 1, "compute_mode": 0, "mig": [0, 0], "ecc_mode": [1, 1], "ecc_corrected": 0,
            "ecc_uncorrected": 0, "ecc_ever": 0, "remapped": (0, 0, 0, 0), "gen": 1, "width": 16, "max_gen": 5,
            "gpu_gen": 5, "max_width": 16, "replays": 0, "pstate": 0, "clock_1": 345, "max_clock_1": 1980,
            "clock_2": 2619, "max_clock_2": 2619, "temperature": 31, "slowdown": 87, "power": 71000, "limit": 700000,
            "default_limit": 700000, "throttle": 1, "pci": Values(busId=f"00000000:{16 + index:02X}:00.0"),
            "memory": Values(total=80 * GIB, used=600 << 20), "rows": Values(max=640, high=0, partial=0, low=0, none=0),
            "processes": [], "fabric": (3, 0, 0x51AA), "affinity": [0xFFFFFFFF, 0],
            "links": [1] * links if links else Fails(NOT_SUPPORTED),
        }  # fmt: skip

    def gpu(self, index: int) -> dict[str, Any]:
        return self.nvml.gpus[index]

    def put(self, path: str, text: str | bytes = "") -> None:
        full = self.root.path(path)
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(text if isinstance(text, bytes) else text.encode())

    def remove(self, path: str) -> None:
        full = self.root.path(path)
        full.unlink()

    def link(self, path: str, target: str) -> None:
        full = self.root.path(path)
        full.parent.mkdir(parents=True, exist_ok=True)
        if full.is_symlink():
            full.unlink()
        full.symlink_to(os.path.relpath(self.root.path(target), full.parent))

    def slot(self, index: int, acs: int = 0, iommu: str = "identity", width: int = 16, numa: int = 0) -> None:
        """GPU `index` at 0000:1x:00.0 below the bridge 0000:00:0x.0."""
        bridge, address = f"0000:00:{index + 1:02x}.0", f"0000:{16 + index:02x}:00.0"
        base = f"/sys/devices/pci0000:00/{bridge}"
        for place, kind, vendor, lanes in (
            (base, "0x060400", "0x8086", width),
            (f"{base}/{address}", "0x030200", "0x10de", 16),
        ):
            for name, text in (
                ("class", kind), ("vendor", vendor), ("device", "0x2330"), ("current_link_speed", "2.5 GT/s PCIe"),
                ("current_link_width", str(min(lanes, width))), ("max_link_speed", "32.0 GT/s PCIe"),
                ("max_link_width", str(lanes)), ("numa_node", str(numa)), ("local_cpulist", "0-31"),
                ("config", config_space(acs if place == base else None)),
            ):  # fmt: skip
                self.put(f"{place}/{name}", text)
        for one, place in ((bridge, base), (address, f"{base}/{address}")):
            self.link(f"/sys/bus/pci/devices/{one}", place)
        self.put(f"/sys/kernel/iommu_groups/{index}/type", iommu)
        self.link(f"{base}/{address}/iommu_group", f"/sys/kernel/iommu_groups/{index}")
        self.put("/sys/bus/pci/drivers/nvidia/module")
        self.link(f"{base}/{address}/driver", "/sys/bus/pci/drivers/nvidia")

    def port(self, index: int, **facts: Any) -> None:
        """An InfiniBand card mlx5_`index` with one port; `facts` are files of the port."""
        folder = f"/sys/class/infiniband/mlx5_{index}"
        self.put(f"{folder}/board_id", "MT_0000000838")
        self.put(f"{folder}/fw_ver", facts.pop("firmware", "28.39.1002"))
        files = {
            "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
            "counters/symbol_error": "0", "counters/link_downed": "0", "hw_counters/out_of_sequence": "0",
            "gids/0": "fe80:0000:0000:0000:a088:c203:0012:3456", "gid_attrs/types/0": "IB/RoCE v1",
            **facts,
        }  # fmt: skip
        for name, text in files.items():
            self.put(f"{folder}/ports/1/{name}", str(text))
        self.put(f"/dev/infiniband/uverbs{index}")

    def roce(self, index: int, mtu: int = 9000) -> None:
        facts = {
            "link_layer": "Ethernet", "gids/0": "fe80:0000:0000:0000:a288:c2ff:fe12:3456",
                "gid_attrs/types/0": "IB/RoCE v1",
            "gids/1": "0000:0000:0000:0000:0000:ffff:0a02:0001", "gid_attrs/types/1": "IB/RoCE v1",
            "gids/3": "0000:0000:0000:0000:0000:ffff:0a02:0001", "gid_attrs/types/3": "RoCE v2",
            "gids/2": "0000:0000:0000:0000:0000:0000:0000:0000", "gid_attrs/ndevs/3": f"rdma{index}",
        }  # fmt: skip
        self.port(index, **facts)
        self.put(f"/sys/class/net/rdma{index}/mtu", str(mtu))

    def kernel_log(self, *lines: str, at: float = 5000.0) -> None:
        self.put("/dev/kmsg", "".join(f"4,{number},{int(at * 1e6)},-;{line}\n" for number, line in enumerate(lines)))

    def process(self, pid: int, env: dict[str, str], **files: str) -> None:
        self.put(f"/proc/{pid}/environ", "\0".join(f"{name}={value}" for name, value in env.items()) + "\0")
        self.put(f"/proc/{pid}/stat", f"{pid} (python) S 1 1 1")
        self.put(f"/proc/{pid}/status", "Cpus_allowed_list:\t0-63\nCapEff:\t0000000000000000\n")
        self.put(f"/proc/{pid}/limits", limits())
        for name, text in files.items():
            self.put(f"/proc/{pid}/{name}", text)

    def _system(self) -> None:
        self.put("/proc/self/limits", limits())
        self.put("/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\nCpus_allowed_list:\t0-63\n")
        self.put(
            "/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        )
        self.put("/proc/self/cgroup", "0::/user.slice/job\n")
        self.put("/sys/fs/cgroup/cgroup.controllers", "cpu memory")
        self.put("/sys/fs/cgroup/user.slice/job/memory.max", "max")
        self.put(
            "/proc/meminfo",
            f"MemTotal: {2 << 30} kB\nMemAvailable: {1 << 30} kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
        )
        self.put("/proc/uptime", "10000.00 80000.00")
        self.put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz iommu=pt")
        self.put("/proc/cpuinfo", "flags\t\t: fpu vme\n")
        self.put(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
        )
        self.put("/proc/sys/kernel/yama/ptrace_scope", "0")
        self.put("/proc/sys/kernel/numa_balancing", "0")
        self.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        for number in (0, 1):
            self.put(f"/sys/devices/system/node/node{number}/cpulist", "0-31")
        for name in ("possible", "online"):
            self.put(f"/sys/devices/system/cpu/{name}", "0-63")
        self.put("/sys/module/nvidia_peermem/version", "570.86.15")
        self.put("/sys/class/net/eth0/operstate", "up")
        self.put("/sys/class/net/eth0/mtu", "9000")
        self.put("/sys/class/net/lo/operstate", "unknown")
        self.put("/dev/nvidiactl")
        self.put("/dev/nvidia-uvm")
        self.kernel_log("usb 1-1: new device")

    def look(self, **more: Any) -> dict[str, Any]:
        return look(self.root, self.nvml, **more)

    def findings(self, **parts: Any) -> tuple[Finding, ...]:
        """The findings of this machine alone; `parts` are put over the evidence, as "load" is."""
        return judge([{**self.look(), **parts}])


def judge(nodes: list[dict[str, Any]]) -> tuple[Finding, ...]:
    return judge_doctor({"schema": 1, "kind": "doctor", "nodes": nodes, "failed": [], "notes": []})


def limits(memlock: str = "unlimited", nofile: int = 65536) -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max locked memory         {memlock:<20} {memlock:<20} bytes\n"
        f"Max open files            {nofile:<20} 1048576              files\n"
    )


def config_space(acs: int | None) -> bytes:
    """4096 bytes, with AER first and ACS behind it, as bridges have them; None: without ACS."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 2 << 16 | (0x148 << 20 if acs is not None else 0))
    if acs is not None:
        struct.pack_into("<IHH", data, 0x148, 0x000D | 1 << 16, 0x1F, acs)
    return bytes(data)


def load(machine: Machine, **changed: dict[int, Any]) -> dict[str, Any]:
    """What `--load` saw: all well, but for `changed`: fact -> {GPU: value}."""
    well = {"pcie_gen": 5, "pcie_width": 16, "sm_clock": 1755, "throttle": 4, "tflops": 700.0, "h2d_gbps": 55.0}
    rows = {}
    for index, gpu in enumerate(machine.nvml.gpus):
        rows[gpu["uuid"]] = {fact: changed.get(fact, {}).get(index, value) for fact, value in well.items()}
    return {"gpus": rows, "seconds": 3.0}


def of(findings: tuple[Finding, ...], level: str, check: str = "") -> list[Finding]:
    return [one for one in findings if one.level == level and check in ("", one.check)]
