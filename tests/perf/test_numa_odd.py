"""bind_numa and numa_table on machines as they are found in the field, and lists that name GPUs in odd ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldebug.core.cpus import cpus
from mldebug.perf.numa import _bind
from mldebug.perf.numa._bind import bind, local_size, table
from tests.perf.numa_kit import AMD, FakeMachine, FakeNvml, dgx


class TestNodes:
    def test_masks_of_a_lumi_g_node_are_those_of_its_handbook(self, tmp_path: Path) -> None:
        """Eight parts of MI250X, two on each of four nodes, the first core of every eight kept for the system; jobs
        start on the first thread of each core. The masks are what the users of LUMI give to srun."""
        machine = FakeMachine(tmp_path)
        machine.add_nodes(
            {node: f"{16 * node}-{16 * node + 15},{64 + 16 * node}-{79 + 16 * node}" for node in range(4)}
        )
        machine.threads(64)
        for bus, node in zip((0xC1, 0xC6, 0xC9, 0xCE, 0xD1, 0xD6, 0xD9, 0xDE), (3, 3, 1, 1, 0, 0, 2, 2), strict=True):
            machine.add_gpu(f"0000:{bus:02x}:00.0", node, vendor=AMD)
        machine.allow(",".join(f"{8 * part + 1}-{8 * part + 7}" for part in range(8)))
        assert table(machine, share=True).cpu_bind == (
            "mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000"
        )

    def test_four_gpus_of_a_node_with_four_sockets_of_grace_hopper(self, tmp_path: Path) -> None:
        """Nodes 4 and up are the memory of GPUs: they have no CPUs, and distances are listed for all of them."""
        machine = FakeMachine(tmp_path)
        nodes = {node: f"{72 * node}-{72 * node + 71}" for node in range(4)}
        machine.add_nodes({**nodes, 4: "", 12: "", 20: "", 28: ""})
        for node in range(4):
            machine.add_gpu(f"{node:04x}:01:00.0", node)
        assert [row.near for row in table(machine, share=False).rows] == list(nodes.values())
        mask = int(table(machine, share=False).masks[3], 16)
        assert mask == sum(1 << cpu for cpu in range(216, 288))

    def test_memory_comes_from_where_the_cpus_are_and_not_from_the_gpu(self, tmp_path: Path, monkeypatch) -> None:
        """A GPU whose node is its own memory: the CPUs are those of the next node, and so is what they work on."""
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-3", 1: "4-7", 8: ""}, {0: "10 40 80", 1: "40 10 20", 8: "80 20 10"})
        machine.add_gpu("0000:01:00.0", 8)
        asked: list[tuple[str, int]] = []
        monkeypatch.setattr(_bind, "set_memory_policy", lambda *words: asked.append(words) or "done")
        report = bind(machine, None, share=False, memory="prefer")
        assert (report.cpus, report.ok, asked) == ("4-7", True, [("prefer", 1)])
        assert "its NUMA node 8 has no CPUs" in report.why

    def test_a_node_that_the_container_hides(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-3", 1: "4-7"})
        machine.add_gpu("0000:01:00.0", 5)
        report = bind(machine, None, share=False, memory=None)
        assert machine.bound == [] and not report.ok
        assert "says NUMA node 5, and /sys/devices/system/node does not show it" in report.why

    def test_a_node_that_is_all_offline(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-3", 1: "4-7"}, online="4-7")
        machine.add_gpu("0000:01:00.0", 0)
        report = bind(machine, None, share=False, memory=None)
        assert machine.bound == [] and report.cpus == "4-7" and "one NUMA node" in report.why

    def test_a_thousand_cpus_of_which_each_rank_has_its_part(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path)
        machine.add_nodes(
            {node: f"{64 * node}-{64 * node + 63},{512 + 64 * node}-{575 + 64 * node}" for node in range(8)}
        )
        machine.threads(512)
        for number in range(16):
            machine.add_gpu(f"0000:{0x10 + number:02x}:00.0", number // 2)
        masks = [int(mask, 16) for mask in table(machine, share=True).masks]
        assert sum(masks) == (1 << 1024) - 1 and [mask.bit_count() for mask in masks] == [64] * 16
        report = bind(machine.rank(15, 16), None, share=True, memory=None)
        assert report.cpus == "480-511,992-1023" and int(report.mask, 16) == masks[15]

    def test_a_core_one_thread_of_which_is_offline_stays_whole(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        machine.put("/sys/devices/system/cpu/online", "0-15,17-31")  # 16 is the other thread of 0
        machine.allow("0-15,17-31")
        parts = [cpus(bind(machine.rank(rank), None, share=True, memory=None).cpus) for rank in (0,)]
        assert parts == [{0, 1, 17}]


class TestNames:
    @pytest.mark.parametrize(
        ("variable", "gpu"), [("1gpu,2", 1), (" 3 , 1", 3), ("+2", 2), ("6,,1", 6), ("GPU-4,3", 4)]
    )
    def test_words_are_read_as_cuda_reads_them(self, tmp_path: Path, variable: str, gpu: int) -> None:
        machine = dgx(tmp_path).rank(0, 1)
        machine.env["CUDA_VISIBLE_DEVICES"] = variable
        assert bind(machine, None, share=False, memory=None).gpu == gpu

    @pytest.mark.parametrize("variable", ["0,1,0", "5,5", "GPU-5,GPU-50"])
    def test_a_gpu_that_is_named_twice_leaves_none(self, tmp_path: Path, variable: str) -> None:
        machine = dgx(tmp_path).rank(1, 2)
        machine.env["CUDA_VISIBLE_DEVICES"] = variable
        report = bind(machine, None, share=False, memory=None)
        assert machine.bound == [] and not report.ok and "leaves no GPU of 8" in report.why

    def test_a_mig_device_without_nvml_says_what_is_missing(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0, 1)
        machine.env["CUDA_VISIBLE_DEVICES"] = "MIG-8e0f"
        report = bind(machine, None, share=False, memory=None)
        assert "only NVML tells" in report.why and report.hint == "pip install nvidia-ml-py"

    def test_parts_of_one_gpu_share_its_cpus(self, tmp_path: Path) -> None:
        parts = []
        for rank in range(2):
            machine = dgx(tmp_path).rank(rank, 2)
            addresses = [f"0000:{0x10 + number:02x}:00.0" for number in range(8)]
            gpus = [(address, f"GPU-{number}0000000-aa", set()) for number, address in enumerate(addresses)]
            machine.nvml = FakeNvml(gpus, {"MIG-a": 6, "MIG-b": 6})
            machine.env["CUDA_VISIBLE_DEVICES"] = "MIG-a,MIG-b"
            parts.append(bind(machine, None, share=True, memory=None).cpus)
        assert parts == ["8-11,24-27", "12-15,28-31"]

    def test_only_gpus_whose_files_are_in_the_container_count(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0, 2)
        for number in (5, 7):
            machine.put(f"/dev/nvidia{number}", "")
        assert bind(machine, None, share=False, memory=None).address == "0000:15:00.0"
        assert bind(machine.rank(1, 2), None, share=False, memory=None).address == "0000:17:00.0"


class TestRanks:
    def test_all_ranks_on_the_only_gpu_share_its_cpus(self, tmp_path: Path) -> None:
        parts = []
        for rank in range(3):
            machine = FakeMachine(tmp_path).rank(rank, 3)
            machine.add_nodes({0: "0-7", 1: "8-15"})
            machine.add_gpu("0000:01:00.0", 1)
            parts.append(cpus(bind(machine, None, share=True, memory=None).cpus))
        assert set().union(*parts) == set(range(8, 16)) and sum(map(len, parts)) == 8

    def test_more_ranks_than_cpus_on_the_only_gpu(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(2, 12)
        machine.add_nodes({0: "0-7", 1: "8-15"})
        machine.add_gpu("0000:01:00.0", 1)
        report = bind(machine, None, share=True, memory=None)
        assert report.cpus == "8-15" and not report.ok and "12 ranks share 8-15 (8) CPUs" in report.text()

    @pytest.mark.parametrize(
        ("environ", "size"),
        [
            ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8),
            ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
            ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
            ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
            ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1"}, 4),
        ],
        ids=["second node", "last node", "step in a larger job", "job alone", "torchrun under srun"],
    )
    def test_ranks_of_this_node(self, environ: dict[str, str], size: int) -> None:
        assert local_size(environ) == size
