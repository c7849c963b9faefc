"""Machines that are well and look odd: doctor may call nothing of them bad. And files that are damaged."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mldebug.cluster import doctor, load_doctor
from mldebug.cluster.health import _amd, _nvml
from mldebug.cluster.health._doctor import look
from mldebug.core.errors import MldebugError
from tests.cluster.doctor_kit import NO_PERMISSION, NOT_SUPPORTED, Fails, Machine, Values, judge, limits, load, of

GIB = 1 << 30


def switches(machine: Machine) -> None:
    for number in range(4):
        folder = f"/sys/bus/pci/devices/0000:8{number}:00.0"
        machine.put(f"{folder}/class", "0x068000")
        machine.put(f"{folder}/vendor", "0x10de")


def consumer(folder: Path, count: int, links: Callable[[int], Any]) -> Machine:
    """GeForce cards on a desktop board: half of the lanes, no ECC, no RDMA, no persistence."""
    machine = Machine(folder, gpus=count, model="NVIDIA GeForce RTX 3090", links=0, rdma=0)
    for index, gpu in enumerate(machine.nvml.gpus):
        gpu.update(
            ecc_mode=Fails(NOT_SUPPORTED), ecc_corrected=Fails(NOT_SUPPORTED), ecc_uncorrected=Fails(NOT_SUPPORTED),
            ecc_ever=Fails(NOT_SUPPORTED), remapped=Fails(NOT_SUPPORTED), fabric=Fails(NOT_SUPPORTED),
            mig=Fails(NOT_SUPPORTED), links=links(index), persistence=0, width=8, max_width=8, max_gen=4, gpu_gen=4,
        )  # fmt: skip
        machine.slot(index, width=8)
    return machine


def cloud(folder: Path) -> Machine:
    """A virtual machine with one GPU; its network is a virtual function that could do RDMA, as Azure's are."""
    machine = Machine(folder, gpus=1, rdma=0, links=0)
    machine.put("/proc/cpuinfo", "flags\t\t: fpu vme hypervisor\n")
    machine.roce(0, mtu=1500)
    machine.remove("/dev/infiniband/uverbs0")
    machine.put("/proc/self/limits", limits(memlock="8388608", nofile=1024))
    return machine


def build_machine(folder: Path) -> Machine:
    """The same without a GPU, as machines for CI are."""
    machine = Machine(folder, gpus=0, rdma=0)
    machine.roce(0, mtu=1500)
    machine.remove("/dev/infiniband/uverbs0")
    machine.put("/proc/self/limits", limits(memlock="65536", nofile=1024))
    return machine


def nspawn(folder: Path) -> Machine:
    """systemd-nspawn, enroot and the like: no mark of a container, and only their own processes are seen."""
    machine = Machine(folder, gpus=8)
    switches(machine)
    for gpu in machine.nvml.gpus:
        gpu["fabric"] = Fails(NOT_SUPPORTED)  # a driver that does not tell it
    machine.put("/proc/1/comm", "systemd")
    machine.put("/proc/2/comm", "bash")
    return machine


def container_without_sys(folder: Path) -> Machine:
    machine = Machine(folder, gpus=2, rdma=0)
    machine.put("/.dockerenv")
    for index in range(2):
        machine.remove(f"/sys/bus/pci/devices/0000:{16 + index:02x}:00.0")
    machine.remove("/dev/kmsg")
    return machine


def grace_hopper(folder: Path) -> Machine:
    """One GPU that is joined to its CPU: PCIe is idle, the memory of the GPU is a NUMA node without CPUs."""
    machine = Machine(folder, gpus=1, model="NVIDIA GH200 480GB", links=0, rdma=1)
    machine.gpu(0).update(c2c=1, gen=1, width=1, fabric=(0, 0, 0), links=[0] * 18, limit=900000, default_limit=900000)
    machine.slot(0, iommu="DMA-FQ")
    machine.put("/sys/devices/system/node/node2/cpulist", "")
    return machine


def nvl72(folder: Path) -> Machine:
    """A tray of GB200: four GPUs, each in a PCI domain of its own, in a fabric whose switches are elsewhere."""
    machine = Machine(folder, gpus=4, model="NVIDIA GB200", links=18, rdma=4)
    for index, gpu in enumerate(machine.nvml.gpus):
        gpu.update(c2c=1, fabric=(3, 0, 0x1AA), pci=Values(busId=f"{8 + index:08X}:01:00.0"), gpu_gen=6, max_gen=6)
        place = f"/sys/devices/pci{8 + index:04x}:00/{8 + index:04x}:00:00.0/{8 + index:04x}:01:00.0"
        for name, text in (("class", "0x030200"), ("vendor", "0x10de"), ("numa_node", str(index // 2))):
            machine.put(f"{place}/{name}", text)
        machine.remove(f"/sys/bus/pci/devices/0000:{16 + index:02x}:00.0")
        machine.link(f"/sys/bus/pci/devices/{8 + index:04x}:01:00.0", place)
    return machine


def mig(folder: Path) -> Machine:
    """Two GPUs in parts; as a user of one part sees them."""
    machine = Machine(folder, gpus=2, rdma=0)
    for gpu in machine.nvml.gpus:
        gpu.update(mig=[1, 1], power=Fails(NO_PERMISSION), processes=Fails(NO_PERMISSION), links=[0] * 18)
        gpu["fabric"] = Fails(NOT_SUPPORTED)
    return machine


def laptop(folder: Path) -> Machine:
    machine = consumer(folder, 1, lambda index: Fails(NOT_SUPPORTED))
    machine.gpu(0).update(power=Fails(NOT_SUPPORTED), limit=Fails(NOT_SUPPORTED), throttle=0x80)
    machine.root.known = {"node1": ["127.0.1.1"]}
    machine.kernel_log(
        "pcieport 0000:00:1c.5: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:00:1c.5",
        "pcieport 0000:00:1c.5: AER: Corrected error received: 0000:03:00.0",
    )
    return machine


def passed_through(folder: Path) -> Machine:
    """A host of virtual machines: they have its GPUs."""
    machine = Machine(folder, gpus=2, rdma=0)
    for index in range(2):
        machine.link(f"/sys/bus/pci/devices/0000:{16 + index:02x}:00.0/driver", "/sys/bus/pci/drivers/vfio-pci")
        machine.put("/sys/bus/pci/drivers/vfio-pci/module")
        machine.remove(f"/dev/nvidia{index}")
    machine.nvml.gpus.clear()
    return machine


def log_of_many_boots(folder: Path) -> Machine:
    """The kernel's buffer is for root; the log file, which some may read, goes back to before the GPU was replaced."""
    machine = Machine(folder, gpus=8)
    machine.remove("/dev/kmsg")
    machine.put(
        "/var/log/kern.log",
        "Jan  3 10:00:00 node1 kernel: [ 9000.123456] NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off\n"
        "Jan  5 10:00:00 node1 kernel: [    0.000000] Linux version 6.8.0-60-generic (buildd@lcy02)\n"
        "Jan  5 10:00:09 node1 kernel: [    9.000000] nvidia: module license 'NVIDIA' taints kernel.\n",
    )
    return machine


def uncabled(folder: Path) -> Machine:
    """A workstation with a network card of two ports that nobody uses."""
    machine = consumer(folder, 2, lambda index: Fails(NOT_SUPPORTED))
    for index in range(2):
        machine.roce(index)
        folder_ = f"/sys/class/infiniband/mlx5_{index}/ports/1"
        machine.put(f"{folder_}/state", "1: DOWN")
        machine.put(f"{folder_}/phys_state", "3: Disabled")
    return machine


def efa(folder: Path) -> Machine:
    machine = Machine(folder, gpus=8, rdma=0)
    for index in range(4):
        machine.port(index, link_layer="Unspecified", rate="100 Gb/sec (4X EDR)")
    machine.put("/proc/cpuinfo", "flags\t\t: fpu hypervisor\n")
    machine.remove("/sys/module/nvidia_peermem/version")
    machine.put("/sys/module/efa_nv_peermem/version", "1.2")
    return machine


HEALTHY = (
    cloud, build_machine, nspawn, container_without_sys, grace_hopper, nvl72, mig, laptop, passed_through,
    log_of_many_boots, uncabled, efa,
)  # fmt: skip


@pytest.mark.parametrize("build", HEALTHY, ids=lambda build: build.__name__)
def test_nothing_is_bad(tmp_path: Path, build: Callable[[Path], Machine]) -> None:
    machine = build(tmp_path)
    node = machine.look()
    found = judge([node])
    assert of(found, "bad") == [] and not [one for one in found if "cannot be judged" in one.says]
    assert not [name for name, part in node.items() if isinstance(part, dict) and "Error" in str(part.get("why", ""))]
    report = doctor({"nodes": [node], "failed": [], "notes": []})
    assert report.ok and max(map(len, report.text(width=80).splitlines())) <= 80


@pytest.mark.parametrize("links", [(4, 4, 0), (4, 4, 4, 4, 0), (0, 0, 4, 4)], ids=str)
def test_cards_without_a_partner_have_no_bridge(tmp_path: Path, links: tuple[int, ...]) -> None:
    machine = consumer(tmp_path, len(links), lambda index: [1] * links[index] + [0] * (4 - links[index]))
    assert of(machine.findings(), "bad") == []


def test_one_of_a_pair_without_links_is_bad(tmp_path: Path) -> None:
    machine = consumer(tmp_path, 4, lambda index: [0] * 4 if index == 2 else [1] * 4)
    assert [one.where for one in of(machine.findings(), "bad", "NVLink")] == ["GPU 2"]


def test_grace_hopper_under_load(tmp_path: Path) -> None:
    machine = grace_hopper(tmp_path)
    assert of(machine.findings(load=load(machine, pcie_gen={0: 1}, pcie_width={0: 1})), "bad") == []


def test_mi300(tmp_path: Path) -> None:
    """Eight cards, and amdsmi beside sysfs; the driver of NVIDIA is not there."""

    class Smi:
        def amdsmi_get_processor_handles(self) -> list[int]:
            return list(range(8))

        def amdsmi_get_gpu_total_ecc_count(self, handle: int) -> dict[str, int]:
            return {"uncorrectable_count": 0, "correctable_count": 3}

    machine = Machine(tmp_path, gpus=0)
    for index in range(8):
        place = f"/sys/devices/pci0000:00/0000:00:{index + 1:02x}.1/0000:{index + 32:02x}:00.0"
        for name, text in (
            ("class", "0x120000"), ("vendor", "0x1002"), ("device", "0x74a1"), ("current_link_width", "16"),
            ("max_link_width", "16"), ("ras/umc_err_count", "ue: 0\nce: 3"), ("vbios_version", "113-M3000100-102"),
        ):  # fmt: skip
            machine.put(f"{place}/{name}", text)
        machine.link(f"/sys/class/drm/card{index}/device", place)
        machine.link(f"/sys/bus/pci/devices/0000:{index + 32:02x}:00.0", place)
    machine.put("/dev/kfd")
    node = look(machine.root, None) | {"gpu": {"gpus": [], "why": _nvml._REASONS[12], "error": 12}}
    node["amd"] = _amd.look(machine.root, Smi(), "")
    found = judge([node])
    assert of(found, "bad") == []
    assert of(found, "ok", "AMD GPUs")[0].says == "8 x 0x74a1"
    node["amd"]["gpus"][5]["uncorrected"] = 2
    assert [one.where for one in of(judge([node]), "bad")] == ["card5"]


def test_the_real_troubles_beside_those_that_only_look_like_it(tmp_path: Path) -> None:
    """What was made milder for healthy machines is still bad where jobs depend on it."""
    machine = Machine(tmp_path)
    switches(machine)
    for gpu in machine.nvml.gpus:
        gpu["fabric"] = Fails(NOT_SUPPORTED)
    machine.put("/proc/2/comm", "kthreadd")
    machine.put("/proc/self/limits", limits(memlock="65536"))
    for index in range(8):
        machine.remove(f"/dev/infiniband/uverbs{index}")
        machine.put(f"/sys/class/infiniband/mlx5_{index}/ports/1/state", "1: DOWN")
    machine.kernel_log(
        "pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:10:00.0",
        "pcieport 0000:00:1c.5: AER: Uncorrected (Fatal) error received: 0000:00:1c.5",
    )
    found = of(machine.findings(), "bad")
    assert {one.check for one in found} == {"fabric manager", "memlock", "RDMA files", "RDMA ports", "PCIe errors"}
    assert len([one for one in found if one.check == "PCIe errors"]) == 2


def test_a_fault_since_the_last_boot_is_found_in_a_log_file(tmp_path: Path) -> None:
    machine = log_of_many_boots(tmp_path)
    path = machine.root.path("/var/log/kern.log")
    path.write_text(path.read_text() + "Jan  5 11:00:00 node1 kernel: [ 3600.0] NVRM: Xid (PCI:0000:13:00): 79, gone\n")
    assert [one.where for one in of(machine.findings(), "bad")] == ["GPU 3"]


# Files that are damaged

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**40, math.nan, math.inf, "²", "\x1b[31m", "9" * 400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
QUIET = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None,
    derandomize=True,
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [way, *(one for name, item in items for one in places(item, (*way, name)))]


def damaged(document: Any, way: tuple[Any, ...], junk: Any) -> Any:
    """The document with something else, or nothing (`...`), in one place."""
    document = copy.deepcopy(document)
    inner = document
    for name in way[:-1]:
        inner = inner[name]
    if way and junk is ...:
        del inner[way[-1]]
    elif way:
        inner[way[-1]] = junk
    return document if way else junk if junk is not ... else None


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    machines = [
        Machine(tmp_path_factory.mktemp(f"m{number}"), gpus=2, rdma=1, name=f"node{number}") for number in (1, 2)
    ]
    nodes = [machine.look() for machine in machines]
    return {"schema": 1, "kind": "doctor", "nodes": nodes, "failed": [{"host": "n3", "why": "no"}], "notes": ["x"]}


@QUIET
@given(data=st.data())
def test_a_damaged_file_is_judged_or_refused(document: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    way = data.draw(st.sampled_from(places(document)))
    told = damaged(document, way, data.draw(JUNK | st.just(...)))
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps(told))
    _judged(file)


@QUIET
@given(cut=st.integers(0, 20_000), junk=st.binary(max_size=5))
def test_a_file_that_was_cut(document: dict[str, Any], tmp_path: Path, cut: int, junk: bytes) -> None:
    file = tmp_path / "evidence.json"
    file.write_bytes(json.dumps(document).encode()[:cut] + junk)
    _judged(file)


def test_brackets_without_end(tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_text('{"nodes": ' + "[" * 100_000)
    _judged(file)


def _judged(file: Path) -> None:
    try:
        evidence = load_doctor([file])
    except MldebugError:
        return
    report = doctor(evidence)
    report.text()
    json.loads(report.json())
