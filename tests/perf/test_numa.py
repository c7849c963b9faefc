"""bind_numa and numa_table on machines made of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mldebug.core.cpus import cpus
from mldebug.core.errors import UsageError
from mldebug.perf.numa._bind import bind, local_size, table
from mldebug.perf.numa._nodes import share
from tests.perf.numa_kit import AMD, FakeMachine, FakeNvml, dgx


def bound(machine: FakeMachine, device: int | None = None, share: bool = False):
    return bind(machine, device, share=share, memory=None)


class TestTwoSockets:
    @pytest.mark.parametrize(("rank", "node", "near"), [(0, 0, "0-7,16-23"), (3, 0, "0-7,16-23"), (4, 1, "8-15,24-31")])
    def test_a_rank_gets_the_cpus_of_its_gpu(self, tmp_path: Path, rank: int, node: int, near: str) -> None:
        machine = dgx(tmp_path).rank(rank)
        report = bound(machine)
        assert machine.bound == [frozenset(cpus(near))]
        assert (report.bound, report.ok, report.node, report.cpus) == (True, True, node, near)
        assert (report.rank, report.gpu, report.address) == (rank, rank, f"0000:{0x10 + rank:02x}:00.0")
        assert report.before == "0-31" and int(report.mask, 16) == sum(1 << cpu for cpu in cpus(near))
        assert f"NUMA node {node} near GPU {rank}" in report.text()
        assert json.loads(report.json())["cpus"] == near

    def test_only_cpus_of_the_present_affinity_count(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0)
        machine.allow("4-11")
        report = bound(machine)
        assert (report.cpus, report.before, report.ok) == ("4-7", "4-11", True)
        assert "12 more near it may not be used here" in report.text()

    def test_a_cgroup_without_the_near_node_leaves_all_as_it_was(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0)
        machine.allow("8-15")
        report = bound(machine)
        assert machine.bound == []
        assert (report.bound, report.ok, report.cpus) == (False, False, "8-15")
        assert "none of its CPUs (0-7,16-23, NUMA node 0) may be used here; those of node 1 are" in report.why
        assert "--exclusive" in report.hint

    def test_what_is_near_already_is_not_bound_again(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(5)
        machine.allow("24-27")
        report = bound(machine)
        assert machine.bound == [] and report.ok
        assert "all of them are near GPU 5" in report.why

    def test_offline_cpus_are_left_out(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0)
        machine.put("/sys/devices/system/cpu/online", "0-5,8-31")
        machine.allow("0-31")  # the mask may name them all the same
        assert bound(machine).cpus == "0-5,16-23"

    def test_a_process_that_drives_all_gpus_is_left_alone(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        report = bound(machine)
        assert machine.bound == [] and report.ok
        assert "sees 8 GPUs" in report.why and "no launcher says" in report.why

    def test_without_a_launcher_gpus_of_one_node_are_enough(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        machine.env["CUDA_VISIBLE_DEVICES"] = "6,4"
        assert bound(machine).cpus == "8-15,24-31"

    def test_a_device_is_counted_among_the_visible_ones(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        machine.env["CUDA_VISIBLE_DEVICES"] = "0,7"
        report = bound(machine, device=1)
        assert (report.gpu, report.node) == (7, 1)

    @pytest.mark.parametrize(("device", "memory"), [(-1, None), (True, None), ("cuda:0", None), (0, "interleave")])
    def test_wrong_arguments(self, tmp_path: Path, device, memory) -> None:
        with pytest.raises(UsageError):
            bind(dgx(tmp_path), device, share=False, memory=memory)


class TestVisible:
    @pytest.mark.parametrize(
        ("variable", "rank", "gpu"),
        [("7,0", 0, 7), ("7,0", 1, 0), ("GPU-5", 0, 5), ("GPU-20000000-aa,GPU-6", 1, 6), ("3", 2, 3), ("4,9,1", 0, 4)],
    )
    def test_numbers_uuids_and_beginnings(self, tmp_path: Path, variable: str, rank: int, gpu: int) -> None:
        machine = dgx(tmp_path).rank(rank)
        machine.env["CUDA_VISIBLE_DEVICES"] = variable
        assert bound(machine).gpu == gpu

    @pytest.mark.parametrize("variable", ["", "-1", "GPU-f", "8", "NoDevFiles"])
    def test_a_list_that_leaves_none(self, tmp_path: Path, variable: str) -> None:
        machine = dgx(tmp_path).rank(0)
        machine.env["CUDA_VISIBLE_DEVICES"] = variable
        report = bound(machine)
        assert machine.bound == [] and not report.ok
        assert f"CUDA_VISIBLE_DEVICES={variable!r} leaves no GPU of 8" in report.why

    def test_a_list_ends_at_the_first_word_that_names_none(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(1)
        machine.env["CUDA_VISIBLE_DEVICES"] = "5,-1,6"
        assert bound(machine).gpu == 5  # the only one that is left

    def test_more_ranks_than_gpus(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(2)
        machine.env["CUDA_VISIBLE_DEVICES"] = "5,6"
        report = bound(machine)
        assert machine.bound == [] and "local rank 2 has no GPU: 2 are visible" in report.why

    @pytest.mark.parametrize("name", ["MIG-77", "MIG-GPU-60000000-aa/1/0"])
    def test_mig(self, tmp_path: Path, name: str) -> None:
        machine = dgx(tmp_path).rank(0, 1)
        addresses = [f"0000:{0x10 + number:02x}:00.0" for number in range(8)]
        gpus = [(address, f"GPU-{number}0000000-aa", set()) for number, address in enumerate(addresses)]
        machine.nvml = FakeNvml(gpus, {"MIG-77": 6})
        machine.env["CUDA_VISIBLE_DEVICES"] = name
        assert (bound(machine).gpu, bound(machine).node) == (6, 1)

    def test_gpus_that_a_cgroup_forbids_are_not_counted(self, tmp_path: Path, monkeypatch) -> None:
        machine = dgx(tmp_path).rank(0)
        monkeypatch.setattr(machine, "is_forbidden", lambda path: path[-1] in "0123")
        assert bound(machine).address == "0000:14:00.0"


class TestSplit:
    def test_eight_ranks_share_no_cpu_and_have_as_many(self, tmp_path: Path) -> None:
        parts = [bound(dgx(tmp_path).rank(rank), share=True) for rank in range(8)]
        sets = [cpus(part.cpus) for part in parts]
        assert set().union(*sets) == set(range(32)) and all(len(part) == 4 for part in sets)
        assert parts[0].cpus == "0-1,16-17" and "part 1 of 4" in parts[0].text()  # both threads of two cores

    def test_only_the_gpus_of_ranks_count(self, tmp_path: Path) -> None:
        parts = []
        for rank in range(3):
            machine = dgx(tmp_path).rank(rank, 3)
            machine.env["CUDA_VISIBLE_DEVICES"] = "6,1,4"
            parts.append(bound(machine, share=True).cpus)
        assert parts == ["8-11,24-27", "0-7,16-23", "12-15,28-31"]

    def test_where_each_rank_sees_its_own_gpu_all_of_the_machine_count(self, tmp_path: Path) -> None:
        parts = []
        for rank in range(8):
            machine = dgx(tmp_path).rank(rank)
            machine.env["CUDA_VISIBLE_DEVICES"] = str(rank)
            parts.append(cpus(bound(machine, share=True).cpus))
        assert sum(map(len, parts)) == len(set().union(*parts)) == 32

    def test_cpus_that_do_not_divide(self, tmp_path: Path) -> None:
        parts = []
        for rank in range(4):
            machine = dgx(tmp_path).rank(rank)
            machine.allow("0-6")
            parts.append(cpus(bound(machine, share=True).cpus))
        assert sorted(map(len, parts)) == [1, 2, 2, 2] and set().union(*parts) == set(range(7))

    def test_too_few_to_split(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(0)
        machine.allow("0-2,8-15")
        report = bound(machine, share=True)
        assert report.cpus == "0-2" and not report.ok and "4 ranks share 0-2 (3) CPUs" in report.text()

    def test_a_share_that_srun_gave_is_not_cut_again(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path).rank(1)
        machine.allow("2-3,18-19")
        report = bound(machine, share=True)
        assert machine.bound == [] and "no more than a share of 1/4 already" in report.text()

    def test_more_parts_than_cores_cut_threads(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        assert [share(machine, {0, 1, 16, 17}, place, 4) for place in range(4)] == [{0}, {1}, {16}, {17}]


class TestOddMachines:
    def test_one_numa_node_with_minus_one(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-15"})
        machine.add_gpu("0000:01:00.0", -1, local="0-15")
        report = bound(machine)
        assert machine.bound == [] and report.ok and "one NUMA node" in report.why

    def test_a_virtual_machine_that_hides_the_node(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-7", 1: "8-15"})
        machine.put("/proc/cpuinfo", "flags\t\t: fpu hypervisor sse")
        machine.add_gpu("0000:01:00.0", -1, local="0-15")
        report = bound(machine)
        assert machine.bound == [] and not report.ok
        assert "this virtual machine hides the topology" in report.why

    def test_nvml_knows_where_sysfs_does_not(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-7", 1: "8-15"})
        machine.add_gpu("0000:01:00.0", -1, local="0-15")
        machine.nvml = FakeNvml([("0000:01:00.0", "GPU-1", set(range(8, 16)))])
        report = bound(machine)
        assert (report.cpus, report.node) == ("8-15", 1)

    def test_a_container_without_sysfs(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.allow("0-15")
        machine.nvml = FakeNvml([("0000:01:00.0", "GPU-1", set())])
        report = bound(machine)
        assert machine.bound == [] and "/sys/bus/pci/devices/0000:01:00.0 is not there" in report.why

    def test_no_gpu(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path)
        machine.add_nodes({0: "0-7", 1: "8-15"})
        report = bound(machine)
        assert machine.bound == [] and report.ok and "there is no GPU here" in report.why

    def test_a_system_without_affinity(self, tmp_path: Path) -> None:
        report = bound(FakeMachine(tmp_path))
        assert not report.ok and "does not tell which CPUs" in report.why

    def test_more_than_64_cpus(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path)
        machine.add_nodes({0: "0-95,192-287", 1: "96-191,288-383"})
        machine.add_gpu("0000:01:00.0", 0)
        machine.add_gpu("0001:01:00.0", 1)
        found = table(machine, share=False)
        wanted = [sum(1 << cpu for cpu in cpus(text)) for text in machine.nodes.values()]
        assert [int(mask, 16) for mask in found.masks] == wanted
        assert bound(machine.rank(1, 2)).count == 192

    def test_nvml_masks_of_more_than_64_cpus(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path).rank(0, 1)
        machine.add_nodes({0: "0-95", 1: "96-191"})
        machine.nvml = FakeNvml([("0000:01:00.0", "GPU-1", set(range(96, 192)))])
        assert bound(machine).cpus == "96-191"

    def test_the_kernel_refuses(self, tmp_path: Path, monkeypatch) -> None:
        machine = dgx(tmp_path).rank(0)

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(machine, "bind", refuse)
        report = bound(machine)
        assert not report.ok and not report.bound and report.cpus == "0-31"
        assert "the kernel refuses CPUs 0-7,16-23: operation not permitted" in report.why


class TestAmd:
    """Four quadrants of a socket (NPS4) on each of two sockets; a GPU on every second one."""

    def machine(self, folder: Path) -> FakeMachine:
        machine = FakeMachine(folder)
        near = {
            node: [10 if one == node else 12 if one // 4 == node // 4 else 32 for one in range(8)] for node in range(8)
        }
        distances = {node: " ".join(map(str, row)) for node, row in near.items()}
        machine.add_nodes({node: f"{4 * node}-{4 * node + 3}" for node in range(8)}, distances)
        for number in range(4):
            machine.add_gpu(f"0000:{0x20 + number:02x}:00.0", 2 * number, vendor=AMD)
        return machine

    @pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
    def test_its_own_variables(self, tmp_path: Path, variable: str) -> None:
        machine = self.machine(tmp_path).rank(0)
        machine.env[variable] = "3,1"
        report = bound(machine)
        assert (report.gpu, report.node, report.cpus) == (3, 6, "24-27")

    def test_a_second_variable_numbers_what_the_first_left(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path).rank(0)
        machine.env.update(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0")
        assert bound(machine).gpu == 3

    def test_the_next_quadrant_where_its_own_is_excluded(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path).rank(0)
        machine.allow("4-7,16-31")
        report = bound(machine)
        assert report.cpus == "4-7" and not report.ok
        assert "NUMA node 1, the next one (distance 12)" in report.why

    def test_the_order_is_that_of_the_compute_driver(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path).rank(1, 2)
        machine.put("/sys/class/kfd/kfd/topology/nodes/0/properties", "simd_count 0\nlocation_id 0")
        for node, (bus, part) in enumerate([(0x23, 0), (0x21, 0), (0x21, 1)], start=1):
            text = f"simd_count 304\nlocation_id {part << 28 | bus << 8}\ndomain 0\nunique_id {node}"
            machine.put(f"/sys/class/kfd/kfd/topology/nodes/{node}/properties", text)
        assert bound(machine).address == "0000:21:00.0"
        assert bound(machine, device=2).address == "0000:21:00.0"
        machine.env["ROCR_VISIBLE_DEVICES"] = "GPU-0000000000000001"
        assert bound(machine).address == "0000:23:00.0"


class TestTable:
    def test_rows_and_the_option_for_srun(self, tmp_path: Path) -> None:
        found = table(dgx(tmp_path), share=False)
        assert found.ok and [row.node for row in found.rows] == [0] * 4 + [1] * 4
        assert found.cpu_bind == "mask_cpu:" + ",".join(["0xff00ff"] * 4 + ["0xff00ff00"] * 4)
        assert f"--cpu-bind={found.cpu_bind}" in found.text()
        assert all(len(line) <= 80 for line in found.text().splitlines()[:-1])

    def test_split_masks_do_not_overlap(self, tmp_path: Path) -> None:
        masks = [int(mask, 16) for mask in table(dgx(tmp_path), share=True).masks]
        assert sum(masks) == (1 << 32) - 1 and len({bin(mask).count("1") for mask in masks}) == 1

    def test_gpus_that_are_masked_have_no_rank(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        machine.env["CUDA_VISIBLE_DEVICES"] = "5,2"
        found = table(machine, share=False)
        assert [row.local_rank for row in found.rows] == [None, None, 1, None, None, 0, None, None]
        assert found.masks == ("0xff00ff00", "0xff00ff")

    def test_nothing_to_bind_prints_no_option(self, tmp_path: Path) -> None:
        machine = FakeMachine(tmp_path)
        machine.add_nodes({0: "0-15"})
        machine.add_gpu("0000:01:00.0", 0)
        found = table(machine, share=False)
        assert found.cpu_bind == "" and found.ok and "left as it is" in found.text()

    def test_trouble_is_said_once_for_the_gpus_that_have_it(self, tmp_path: Path) -> None:
        machine = dgx(tmp_path)
        machine.allow("8-15")
        found = table(machine, share=False)
        assert not found.ok and "GPU 0,1,2,3: none of its CPUs" in found.text()


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4), ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, None), ({}, None),
    ],
    ids=["torchrun", "srun", "uneven", "none"],
)  # fmt: skip
def test_ranks_of_this_node(environ: dict[str, str], size: int | None) -> None:
    assert local_size(environ) == size
