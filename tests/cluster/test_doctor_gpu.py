"""doctor and GPUs: each planted fault is named, and what looks like it and is well gives nothing bad."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import doctor, load_doctor
from mldebug.cluster.health import _nvml
from tests.cluster.doctor_kit import (
    INVALID,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    NVL,
    PCIE,
    RESET,
    Fails,
    Machine,
    Values,
    judge,
    load,
    of,
)  # fmt: skip

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node1")


def test_a_healthy_machine_has_nothing_bad_and_nothing_to_look_at(machine: Machine) -> None:
    found = machine.findings()
    assert [one for one in found if one.level in ("bad", "warn")] == []
    ok = {one.check for one in found if one.level == "ok"}
    assert {
        "GPUs",
        "ECC",
        "memory rows",
        "NVLink",
        "PCIe link",
        "Xid",
        "RDMA ports",
        "ACS/IOMMU",
        "fabric manager",
    } <= ok
    # What cannot be seen says why; that of InfiniBand's MTU is by design.
    assert [one.check for one in found if one.level == "unseen"] in (
        ["RDMA MTU"],
        ["RDMA MTU", "NCCL"],
        ["NCCL", "RDMA MTU"],
    )


def set_gpu(index: int, **answers: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.gpu(index).update(answers)


# Each fault: what is planted, the check, where, a word of the finding, and what looks alike and is well.
FAULTS = {
    "uncorrected": (set_gpu(3, ecc_uncorrected=2), "ECC", "GPU 3", "2 uncorrected", set_gpu(3, ecc_corrected=7)),
    "row pending": (set_gpu(1, remapped=(0, 1, 1, 0)), "memory rows", "GPU 1", "waits", set_gpu(1, remapped=(2, 1, 0,
        0))),
    "row failed": (set_gpu(1, remapped=(0, 9, 0, 1)), "memory rows", "GPU 1", "could not", set_gpu(1, remapped=(0, 9,
        0, 0))),
    "page pending": (set_gpu(2, retired=1), "memory rows", "GPU 2", "waits", set_gpu(2, retired=0)),
    "lost": (set_gpu(5, handle=Fails(LOST)), "GPUs", "GPU 5", "fallen off the bus", set_gpu(5,
        vbios=Fails(NO_PERMISSION))),
    "lost later": (set_gpu(5, temperature=Fails(LOST)), "GPUs", "GPU 5", "fallen off", set_gpu(5,
        temperature=Fails(NOT_SUPPORTED))),
    "needs reset": (set_gpu(6, handle=Fails(RESET)), "GPUs", "GPU 6", "needs a reset", set_gpu(6,
        power=Fails(NO_PERMISSION))),
    "hot": (set_gpu(0, temperature=88), "temperature", "GPU 0", "88 C", set_gpu(0, temperature=84)),
    "prohibited": (set_gpu(0, compute_mode=2), "compute mode", "GPU 0", "prohibited", set_gpu(0, compute_mode=0)),
    "fabric": (set_gpu(0, fabric=(2, 0, 0)), "fabric manager", "GPU 0", "in progress", set_gpu(0, fabric=(0, 0, 0))),
    "fabric status": (set_gpu(0, fabric=(3, 999, 0)), "fabric manager", "GPU 0", "999", set_gpu(0,
        fabric=Fails(NOT_SUPPORTED))),
    "fabric bandwidth": (set_gpu(0, fabric=(3, 0, 1)), "fabric manager", "GPU 0", "degraded", set_gpu(0, fabric=(3, 0,
        2))),
    "links": (set_gpu(4, links=[1] * 16 + [0, 0]), "NVLink", "GPU 4", "16 links", set_gpu(4, links=[1] * 18)),
    "all links": (set_gpu(4, links=[0] * 18), "NVLink", "GPU 4", "0 links", set_gpu(4, mig=[1, 1], links=[0] * 18)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_gpu_and_a_hint(machine: Machine, name: str) -> None:
    plant, check, where, word, _ = FAULTS[name]
    plant(machine)
    (found,) = of(machine.findings(), "bad")
    assert (found.check, found.where) == (check, where)
    assert word in found.says and found.hint and found.hosts == ("node1",)


@pytest.mark.parametrize("name", FAULTS)
def test_what_looks_like_the_fault_and_is_well_is_not_bad(machine: Machine, name: str) -> None:
    FAULTS[name][4](machine)
    assert of(machine.findings(), "bad") == []


DOUBTS = {
    "power limit": (set_gpu(2, limit=500000), "power limit", "500 W"),
    "persistence": (set_gpu(2, persistence=0), "persistence", "GPU 2"),
    "ecc off": (set_gpu(2, ecc_mode=[0, 0]), "ECC", "off, unlike"),
    "ecc pending": (set_gpu(2, ecc_mode=[1, 0]), "ECC", "reboot"),
    "mig": (set_gpu(2, mig=[1, 1]), "MIG", "on, unlike"),
    "vbios": (set_gpu(2, vbios="96.00.74.00.01"), "VBIOS", "96.00.74"),
    "spare rows": (set_gpu(2, rows=Values(max=0, high=0, partial=0, low=0, none=3)), "memory rows", "3 banks"),
    "errors ever": (set_gpu(2, ecc_ever=1), "ECC", "in its life"),
    "exclusive": (set_gpu(2, compute_mode=3), "compute mode", "exclusive process"),
    "brake": (set_gpu(2, throttle=0x80), "clocks", "power brake"),
    "idle width": (set_gpu(2, width=8), "PCIe link", "x8 of x16"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_is_doubtful_is_a_warning(machine: Machine, name: str) -> None:
    plant, check, word = DOUBTS[name]
    plant(machine)
    found = machine.findings()
    assert of(found, "bad") == []
    (one,) = of(found, "warn")
    assert one.check == check and word in one.says and one.hint


class TestLinks:
    def test_idle_gpus_at_gen1_are_well_and_it_is_said_how_to_judge_them(self, machine: Machine) -> None:
        (one,) = of(machine.findings(), "ok", "PCIe link")
        assert "as idle GPUs are: --load" in one.says

    def test_a_generation_that_stays_low_under_load_is_bad(self, machine: Machine) -> None:
        (one,) = of(machine.findings(load=load(machine, pcie_gen={3: 3})), "bad")
        assert (one.check, one.where) == ("PCIe link", "GPU 3") and "Gen3 under load" in one.says

    def test_a_narrow_link_under_load_is_bad_and_full_ones_are_well(self, machine: Machine) -> None:
        (one,) = of(machine.findings(load=load(machine, pcie_width={7: 8})), "bad")
        assert (one.check, one.where) == ("PCIe link", "GPU 7")
        assert of(machine.findings(load=load(machine)), "bad") == []

    def test_copies_of_a_grace_hopper_do_not_use_pcie(self, machine: Machine) -> None:
        machine.gpu(3)["c2c"] = 1
        assert of(machine.findings(load=load(machine, pcie_gen={3: 1})), "bad") == []

    def test_a_gpu_that_was_not_loaded_is_not_judged(self, machine: Machine) -> None:
        seen = load(machine, pcie_gen={3: 1})
        del seen["gpus"][machine.gpu(3)["uuid"]]
        assert of(machine.findings(load=seen), "bad") == []

    def test_a_slot_with_fewer_lanes_than_its_gpu_is_bad_where_siblings_have_all(self, machine: Machine) -> None:
        machine.slot(2, width=8)
        (one,) = of(machine.findings(), "bad", "PCIe slot")
        assert one.where == "GPU 2" and "x8" in one.says and "0000:00:03.0" in one.says

    def test_where_all_slots_have_eight_lanes_it_is_by_design(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=2, model=PCIE, links=0)
        for index in range(2):
            machine.slot(index, width=8)
            machine.gpu(index).update(width=8, fabric=Fails(NOT_SUPPORTED))
        found = machine.findings()
        assert of(found, "bad") == []
        assert {one.where for one in of(found, "warn", "PCIe slot")} == {"GPU 0", "GPU 1"}

    def test_one_slot_of_a_lower_generation_is_bad_and_all_of_them_are_well(self, machine: Machine) -> None:
        machine.gpu(6)["max_gen"] = 3
        (one,) = of(machine.findings(), "bad")
        assert (one.check, one.where) == ("PCIe slot", "GPU 6") and "Gen3, its siblings Gen5" in one.says
        for index in range(8):
            machine.gpu(index)["max_gen"] = 4  # an older server
        assert of(machine.findings(), "bad") == []

    def test_the_kernels_own_complaint_about_a_link_is_shown(self, machine: Machine) -> None:
        machine.kernel_log(
            "pci 0000:12:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:00:03.0 "
            "(capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)"
        )
        (one,) = of(machine.findings(), "warn", "PCIe slot")
        assert one.where == "GPU 2" and "8.0 GT/s PCIe x8 link" in one.says

    def test_a_link_that_stands_at_gen1_at_boot_is_well(self, machine: Machine) -> None:
        machine.kernel_log(
            "pci 0000:12:00.0: 32.000 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at 0000:00:03.0 "
            "(capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)"
        )
        assert of(machine.findings(), "warn") == []

    def test_a_complaint_about_another_device_is_none_of_gpus(self, machine: Machine) -> None:
        machine.kernel_log(
            "pci 0000:99:00.0: 15.752 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x2 link at 0000:98:00.0 "
            "(capable of 31.504 Gb/s with 8.0 GT/s PCIe x4 link)"
        )
        assert of(machine.findings(), "warn") == []


class TestNvlink:
    def test_twelve_links_of_an_h100_nvl_are_by_design(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=4, model=NVL)
        for index in range(4):
            machine.gpu(index).update(links=[1] * 12 + [0] * 6, fabric=Fails(NOT_SUPPORTED))
        assert of(machine.findings(), "bad") == [] == of(machine.findings(), "warn", "NVLink")
        machine.gpu(2)["links"] = [1] * 10 + [0] * 8
        (one,) = of(machine.findings(), "bad")
        assert one.where == "GPU 2" and "10 links are active, its siblings have 12" in one.says

    def test_a_lone_h100_nvl_is_well_and_another_lone_gpu_with_links_down_is_doubtful(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=1, model=NVL)
        machine.gpu(0)["links"] = [1] * 12 + [0] * 6
        assert of(machine.findings(), "warn", "NVLink") == []
        machine.gpu(0)["name"] = "NVIDIA H100 80GB HBM3"
        assert len(of(machine.findings(), "warn", "NVLink")) == 1

    def test_pcie_cards_have_no_nvlink_and_that_is_well(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=4, model=PCIE, links=0)
        found = machine.findings()
        assert of(found, "bad") == []
        assert "have none" in of(found, "ok", "NVLink")[0].says

    def test_a_pair_without_a_bridge_is_doubtful(self, tmp_path: Path) -> None:
        """NCCL issue 1423: of eight cards only 6 and 7 had a bridge."""
        machine = Machine(tmp_path, gpus=8, model="NVIDIA RTX A6000", links=4)
        for index in range(8):
            machine.gpu(index)["fabric"] = Fails(NOT_SUPPORTED)
        for index in range(6):
            machine.gpu(index)["links"] = [0] * 4
        found = machine.findings()
        assert of(found, "bad") == []
        assert {one.where for one in of(found, "warn")} == {f"GPU {index}" for index in range(6)}

    def test_most_gpus_with_fewer_links_than_the_best(self, machine: Machine) -> None:
        for index in range(6):
            machine.gpu(index)["links"] = [1] * 17 + [0]
        assert len(of(machine.findings(), "bad", "NVLink")) == 6

    def test_a_virtual_machine_may_hide_them(self) -> None:
        """Recorded on one H200 that is passed through to a virtual machine: its links are not to be seen."""
        path = Path(__file__).parent / "evidence" / "doctor_h200_vm.json"
        found = doctor(load_doctor([path])).findings
        assert of(found, "bad") == [] and "may hide them" in of(found, "unseen", "NVLink")[0].says
        assert {one.check for one in of(found, "warn")} == {"NCCL", "host name"}

    def test_two_gpus_of_which_one_has_lost_links(self, tmp_path: Path) -> None:
        """Two of six inactive on one V100: with two there is no majority, and the one with fewer is named."""
        machine = Machine(tmp_path, gpus=2, model="Tesla V100-SXM2-32GB", links=6)
        machine.gpu(1)["links"] = [1, 1, 0, 1, 0, 1]
        (one,) = of(machine.findings(), "bad")
        assert one.where == "GPU 1" and "down: 2, 4" in one.says

    def test_no_permission_is_not_visible(self, machine: Machine) -> None:
        for index in range(8):
            machine.gpu(index)["links"] = Fails(NO_PERMISSION)
        (one,) = of(machine.findings(), "unseen", "NVLink")
        assert "run as root" in one.says

    def test_a_card_without_a_bridge_says_not_supported_for_single_links(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=2, model="NVIDIA A100 80GB PCIe", links=12)
        for index in range(2):
            machine.gpu(index)["links"] = [0] + [Fails(NOT_SUPPORTED)] * 11
        assert of(machine.findings(), "bad") == []

    def test_error_counters_come_from_fields_where_the_driver_has_them(self, machine: Machine) -> None:
        def fields(handle: int, asked: list[tuple[int, int]]) -> list[Any]:
            import pynvml

            known = pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY
            return [
                Values(nvmlReturn=0 if field == known else 3, valueType=3, value=Values(ullVal=link))
                for field, link in asked
            ]

        machine.nvml.nvmlDeviceGetFieldValues = fields  # type: ignore[method-assign]
        errors = machine.look()["gpu"]["gpus"][0]["link_errors"]
        assert errors["link 17 replay"] == 17 and len(errors) == 18

    def test_links_beyond_the_last_one_end_with_invalid_argument(self, machine: Machine) -> None:
        machine.nvml.NVML_NVLINK_MAX_LINKS = 36  # type: ignore[misc]
        assert len(machine.look()["gpu"]["gpus"][0]["links"]) == 18
        machine.gpu(0)["links"] = Fails(INVALID)
        assert "links" in machine.look()["gpu"]["gpus"][0]["unseen"]


class TestPeers:
    def test_a_model_without_peer_access_is_by_design(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=4, model="NVIDIA GeForce RTX 4090", links=0)
        machine.nvml.pairs = {(a, b): (2, 5, 20) for a in range(4) for b in range(a + 1, 4)}
        found = machine.findings()
        assert of(found, "bad") == [] == of(found, "warn", "peer access")
        assert "host memory" in of(found, "ok", "peer access")[0].says

    def test_a_pair_without_it_is_doubtful_unless_it_crosses_sockets(self, machine: Machine) -> None:
        machine.nvml.pairs = {(2, 5): (1, 5, 20)}
        (one,) = of(machine.findings(), "warn")
        assert one.check == "peer access" and "2-5" in one.says
        machine.nvml.pairs = {(2, 5): (3, 5, 50)}
        assert of(machine.findings(), "warn") == []

    def test_a_driver_that_does_not_tell(self, machine: Machine) -> None:
        machine.nvml.pairs = {(a, b): (Fails(3),) * 3 for a in range(8) for b in range(a + 1, 8)}
        assert len(of(machine.findings(), "unseen", "peer access")) == 1


class TestRedirects:
    """ACS and IOMMU: hangs (NCCL issues 257, 606), and damaged data (1423)."""

    def pcie(self, folder: Path, **slot: Any) -> Machine:
        machine = Machine(folder, gpus=4, model=PCIE, links=0, rdma=0)
        machine.nvml.pairs = {(a, b): (0, 5, 20) for a in range(4) for b in range(a + 1, 4)}
        for index in range(4):
            machine.slot(index, **slot)
        return machine

    def test_translation_below_pairs_that_talk_over_pcie_is_bad(self, tmp_path: Path) -> None:
        (one,) = of(self.pcie(tmp_path, iommu="DMA-FQ", acs=0x1D).findings(), "bad")
        assert one.check == "ACS/IOMMU" and "iommu=pt" in one.hint and "ACS redirects" in one.says

    def test_a_passthrough_without_redirection_is_well(self, tmp_path: Path) -> None:
        found = self.pcie(tmp_path, iommu="identity", acs=0x01).findings()
        assert of(found, "bad") == [] == of(found, "warn")
        assert len(of(found, "ok", "ACS/IOMMU")) == 1

    def test_only_pairs_without_nvlink_count(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path)
        for index in range(8):
            machine.slot(index, iommu="DMA")
        found = machine.findings()
        assert of(found, "bad") == [] and len(of(found, "warn", "ACS/IOMMU")) == 1
        machine.nvml.pairs = {(a, b): (0, 5, 20) for a in range(8) for b in range(a + 1, 8) if (a, b) != (6, 7)}
        (one,) = of(machine.findings(), "bad")
        assert "27 pairs" in one.says

    def test_acs_alone_is_doubtful(self, tmp_path: Path) -> None:
        found = self.pcie(tmp_path, acs=0x0C).findings()
        assert of(found, "bad") == [] and len(of(found, "warn", "ACS/IOMMU")) == 1

    def test_a_virtual_machine_hides_it(self, tmp_path: Path) -> None:
        machine = self.pcie(tmp_path, iommu="DMA-FQ", acs=0x1D)
        machine.put("/proc/cpuinfo", "flags\t\t: fpu hypervisor lm\n")
        machine.put("/sys/class/dmi/id/product_name", "Standard_ND96")
        found = machine.findings()
        assert of(found, "bad") == []
        assert "Standard_ND96" in of(found, "unseen", "ACS/IOMMU")[0].says

    def test_without_root_the_register_is_not_visible(self, tmp_path: Path) -> None:
        machine = self.pcie(tmp_path)
        for index in range(4):
            machine.put(f"/sys/devices/pci0000:00/0000:00:{index + 1:02x}.0/config", b"\0" * 64)
        (one,) = of(machine.findings(), "unseen", "ACS/IOMMU")
        assert "only root" in one.says


class TestPresence:
    def test_a_gpu_on_the_bus_that_the_driver_does_not_show(self, machine: Machine) -> None:
        machine.nvml.gpus.pop(6)
        (one,) = of(machine.findings(), "bad")
        assert one.check == "GPUs" and "0000:16:00.0 is missing" in one.says

    def test_a_container_that_was_given_some_of_them_is_well(self, machine: Machine) -> None:
        machine.nvml.gpus = machine.nvml.gpus[:2]
        for index in range(2, 8):
            machine.remove(f"/dev/nvidia{index}")
        machine.put("/.dockerenv")
        found = machine.findings()
        assert of(found, "bad") == [] and "given 2 of 8" in of(found, "ok", "GPUs")[0].says

    def test_gpus_that_a_cgroup_forbids_are_not_missing(self, machine: Machine) -> None:
        """SLURM leaves the device files of other jobs' GPUs in sight."""
        machine.nvml.gpus = machine.nvml.gpus[:2]
        machine.root.forbidden = {f"/dev/nvidia{index}" for index in range(2, 8)}
        found = machine.findings()
        assert of(found, "bad") == [] and "given 2 of 8" in of(found, "ok", "GPUs")[0].says

    def test_a_gpu_that_is_passed_to_a_virtual_machine_is_not_missing(self, machine: Machine) -> None:
        machine.nvml.gpus.pop(7)
        machine.remove("/dev/nvidia7")
        machine.put("/sys/bus/pci/drivers/vfio-pci/module")
        machine.link("/sys/devices/pci0000:00/0000:00:08.0/0000:17:00.0/driver", "/sys/bus/pci/drivers/vfio-pci")
        assert of(machine.findings(), "bad") == []

    @pytest.mark.parametrize(
        ("error", "level", "word"),
        [(9, "bad", "modprobe"), (18, "bad", "reboot"), (12, "bad", "--gpus all"), (0, "unseen", "pip install")],
    )
    def test_gpus_without_a_library(self, machine: Machine, error: int, level: str, word: str) -> None:
        node = machine.look()
        node["gpu"] = {
            "gpus": [],
            "why": _nvml._REASONS.get(error, "nvidia-ml-py is not installed"),
            "error": error,
        }
        (one,) = of(judge([node]), level, "GPUs")
        assert word in one.hint and "8 on the PCI bus" in one.says

    def test_an_nvml_that_hangs_is_bad_and_keeps_nobody_waiting(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mldebug.cluster.health._doctor._NVML_SECONDS", 0.3)
        machine.nvml.nvmlDeviceGetCount = lambda: time.sleep(5) or 0  # type: ignore[method-assign]
        began = time.monotonic()
        (one,) = of(machine.findings(), "bad")
        assert time.monotonic() - began < 4
        assert one.check == "GPUs" and "no answer within 0.3 s" in one.says and "reboot" in one.hint

    def test_a_machine_without_gpus_and_without_a_driver_is_well(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=0, rdma=0)
        node = machine.look()
        node["gpu"] = {"gpus": [], "why": _nvml._REASONS[12], "error": 12}
        found = judge([node])
        assert of(found, "bad") == [] and len(of(found, "unseen", "GPUs")) == 1

    def test_nvml_functions_that_are_missing_are_said_and_harm_nothing(self, machine: Machine) -> None:
        del machine.gpu(0)["rows"]
        machine.nvml.__dict__["nvmlDeviceGetVbiosVersion"] = None
        found = machine.look()["gpu"]["gpus"][0]
        assert "nvmlDeviceGetVbiosVersion" in found["unseen"]["vbios"]


class TestUnderLoad:
    @pytest.mark.parametrize(
        ("changed", "check", "word"),
        [
            ({"throttle": {2: 0x40}}, "clocks", "too hot"),
            ({"throttle": {2: 0x80}}, "clocks", "power brake"),
            ({"sm_clock": {2: 1200}}, "clocks", "1200 MHz"),
            ({"tflops": {2: 400.0}}, "matmul", "400 TFLOPS"),
            ({"h2d_gbps": {2: 20.0}}, "PCIe copies", "20 GBps"),
        ],
    )
    def test_the_odd_one_out_is_bad(self, machine: Machine, changed: Any, check: str, word: str) -> None:
        (one,) = of(machine.findings(load=load(machine, **changed)), "bad")
        assert (one.check, one.where) == (check, "GPU 2") and word in one.says

    def test_a_power_cap_in_a_matmul_is_how_it_should_be(self, machine: Machine) -> None:
        everywhere = {index: 0x4 for index in range(8)}
        found = machine.findings(load=load(machine, throttle=everywhere, sm_clock={3: 1700}))
        assert of(found, "bad") == [] == of(found, "warn")

    def test_why_gpus_were_left_alone_is_said(self, machine: Machine) -> None:
        seen = {"gpus": {}, "why": "GPU 0 in use: left alone"}
        assert "left alone" in of(machine.findings(load=seen), "unseen", "load")[0].says


class TestDuplicates:
    """Two ranks on one GPU: verl issue 1096, NCCL issue 1241."""

    def ranks(self, machine: Machine, places: dict[int, list[tuple[int, int]]]) -> None:
        for rank, held in places.items():
            machine.process(100 + rank, {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
            for gpu, used in held:
                machine.gpu(gpu)["processes"] = [
                    *machine.gpu(gpu)["processes"],
                    Values(pid=100 + rank, usedGpuMemory=used),
                ]

    def test_two_ranks_on_one_gpu(self, machine: Machine) -> None:
        self.ranks(machine, {0: [(0, 20 * GIB)], 1: [(0, 20 * GIB)]})
        (one,) = of(machine.findings(), "bad")
        assert (one.check, one.where) == ("duplicate GPU", "GPU 0") and "ranks 0, 1" in one.says

    def test_ranks_of_mpi_are_ranks(self, machine: Machine) -> None:
        for rank in (0, 1):
            machine.process(300 + rank, {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"})
        machine.gpu(0)["processes"] = [Values(pid=300 + rank, usedGpuMemory=20 * GIB) for rank in (0, 1)]
        assert [one.check for one in of(machine.findings(), "bad")] == ["duplicate GPU"]

    def test_instances_of_one_gpu_are_well(self, machine: Machine) -> None:
        self.ranks(machine, {0: [(0, 20 * GIB)], 1: [(0, 20 * GIB)]})
        machine.gpu(0)["mig"] = [1, 1]
        assert of(machine.findings(), "bad") == []

    def test_a_little_of_every_rank_on_the_first_gpu_is_well(self, machine: Machine) -> None:
        self.ranks(machine, {0: [(0, 20 * GIB)], 1: [(0, GIB // 2), (1, 20 * GIB)]})
        assert of(machine.findings(), "bad") == []
