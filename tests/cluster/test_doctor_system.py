"""doctor and everything around the GPUs: limits, cgroups, CPUs, network, InfiniBand, settings, kernel log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster.health._log import HARD, SOFT
from mldebug.cluster.health._names import KNOWN
from mldebug.cluster.health._net import chosen
from mldebug.cluster.health._software import LEFT_OVER
from tests.cluster.doctor_kit import Machine, judge, limits, of

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node1")


class TestSharedMemory:
    """64 MB in docker: NCCL issues 342, 290."""

    def test_dockers_64_mib_are_bad_for_eight_gpus(self, machine: Machine) -> None:
        machine.root.spaces["/dev/shm"] = (64 * MIB, 64 * MIB)
        (one,) = of(machine.findings(), "bad")
        assert one.check == "/dev/shm" and "64 MiB for 8 GPUs" in one.says and "--shm-size" in one.hint

    def test_half_a_gib_is_doubtful_and_more_is_well(self, machine: Machine) -> None:
        machine.root.spaces["/dev/shm"] = (512 * MIB, 512 * MIB)
        assert [one.check for one in of(machine.findings(), "warn")] == ["/dev/shm"]
        machine.root.spaces["/dev/shm"] = (8 * GIB, 8 * GIB)
        assert of(machine.findings(), "warn") == []

    def test_what_ended_jobs_left_there(self, machine: Machine) -> None:
        machine.root.spaces["/dev/shm"] = (64 * GIB, 100 * MIB)
        (one,) = of(machine.findings(), "warn")
        assert "100 MiB of 64 GiB are free" in one.says

    def test_none_at_all(self, machine: Machine) -> None:
        del machine.root.spaces["/dev/shm"]
        assert [one.check for one in of(machine.findings(), "bad")] == ["/dev/shm"]

    def test_without_gpus_a_small_one_is_only_doubtful(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=0, rdma=0)
        machine.root.spaces["/dev/shm"] = (64 * MIB, 64 * MIB)
        assert of(machine.findings(), "bad") == [] and len(of(machine.findings(), "warn")) == 1


class TestLockedMemory:
    """NCCL tests issue 206: limits.conf was edited, and the ranks did not have it."""

    def test_a_small_limit_with_rdma_is_bad_and_without_it_well(self, machine: Machine, tmp_path: Path) -> None:
        machine.put("/proc/self/limits", limits(memlock="8388608"))
        (one,) = of(machine.findings(), "bad")
        assert one.check == "memlock" and "8 MiB" in one.says
        other = Machine(tmp_path / "other", rdma=0)
        other.put("/proc/self/limits", limits(memlock="8388608"))
        assert of(other.findings(), "bad") == []

    def test_the_capability_lifts_the_limit(self, machine: Machine) -> None:
        machine.put("/proc/self/limits", limits(memlock="65536"))
        machine.put("/proc/self/status", f"CapEff:\t{1 << 14:016x}\nSeccomp:\t0\nCpus_allowed_list:\t0-63\n")
        assert of(machine.findings(), "bad") == []

    def test_the_ranks_limit_counts_and_not_the_shells(self, machine: Machine) -> None:
        machine.process(500, {"RANK": "3", "WORLD_SIZE": "8"}, limits=limits(memlock="65536"))
        (one,) = of(machine.findings(), "bad")
        assert one.where == "rank 3" and "64 KiB" in one.says
        machine.process(500, {"RANK": "3", "WORLD_SIZE": "8"})
        assert of(machine.findings(), "bad") == []
        machine.put("/proc/self/limits", limits(memlock="65536"))  # as in an ssh session, beside a job that is well
        assert of(machine.findings(), "bad") == []


class TestOpenFiles:
    def test_1024_is_little_for_eight_gpus_and_enough_without(self, machine: Machine, tmp_path: Path) -> None:
        machine.put("/proc/self/limits", limits(nofile=1024))
        assert [one.check for one in of(machine.findings(), "warn")] == ["open files"]
        other = Machine(tmp_path / "other", gpus=0, rdma=0)
        other.put("/proc/self/limits", limits(nofile=1024))
        assert of(other.findings(), "warn") == []


class TestPtrace:
    """py-spy issue 12."""

    def status(self, caps: int, seccomp: int = 0) -> str:
        return f"CapEff:\t{caps:016x}\nSeccomp:\t{seccomp}\nCpus_allowed_list:\t0-63\n"

    def test_a_filter_that_forbids_it(self, machine: Machine) -> None:
        machine.root.peeked = "operation not permitted"
        machine.put("/proc/self/status", self.status(0, 2))
        (one,) = of(machine.findings(), "warn")
        assert "seccomp" in one.says and "SYS_PTRACE" in one.hint

    def test_a_filter_that_allows_it_is_well(self, machine: Machine) -> None:
        machine.put("/proc/self/status", self.status(0, 2))
        assert of(machine.findings(), "warn") == []

    @pytest.mark.parametrize(
        ("scope", "caps", "count"), [("1", 0, 1), ("1", 1 << 19, 0), ("3", 1 << 19, 1), ("0", 0, 0)]
    )
    def test_yama(self, machine: Machine, scope: str, caps: int, count: int) -> None:
        machine.put("/proc/sys/kernel/yama/ptrace_scope", scope)
        machine.put("/proc/self/status", self.status(caps))
        assert len(of(machine.findings(), "warn", "ptrace")) == count

    def test_a_kernel_without_yama_is_well(self, machine: Machine) -> None:
        machine.remove("/proc/sys/kernel/yama/ptrace_scope")
        assert len(of(machine.findings(), "ok", "ptrace")) == 1


def test_numa_balancing_and_huge_pages(machine: Machine) -> None:
    machine.put("/proc/sys/kernel/numa_balancing", "1")
    machine.put(
        "/proc/meminfo",
        f"MemTotal: {2 << 30} kB\nMemAvailable: {1 << 30} kB\nHugePages_Free: 400000\nHugepagesize: 2048 kB\n",
    )
    assert {one.check for one in of(machine.findings(), "warn")} == {"NUMA balancing", "huge pages"}
    (machine.root.path("/sys/devices/system/node/node1/cpulist")).unlink()
    (machine.root.path("/sys/devices/system/node/node1")).rmdir()  # with one node there is nothing to balance
    assert {one.check for one in of(machine.findings(), "warn")} == {"huge pages"}


class TestCgroups:
    V1 = (
        "31 23 0:27 / /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n"
        "32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:6 - cgroup cgroup rw,cpu,cpuacct\n"
    )

    def v1(self, machine: Machine, quota: str, memory: str, used: str = "0") -> None:
        machine.put("/proc/self/mountinfo", self.V1)
        machine.put("/proc/self/cgroup", "5:memory:/slurm/job\n3:cpu,cpuacct:/slurm/job\n1:name=systemd:/x\n")
        machine.put("/sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes", memory)
        machine.put("/sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes", used)
        machine.put("/sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_quota_us", quota)
        machine.put("/sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_period_us", "100000")

    def test_version_2_quota_is_found_in_a_group_above(self, machine: Machine) -> None:
        machine.put("/sys/fs/cgroup/user.slice/cpu.max", "400000 100000")
        machine.put("/sys/fs/cgroup/user.slice/job/cpu.max", "max 100000")
        (one,) = of(machine.findings(), "bad")
        assert one.check == "cgroup" and "4 CPUs for 8 GPUs" in one.says

    def test_version_2_without_a_limit_is_well(self, machine: Machine) -> None:
        machine.put("/sys/fs/cgroup/user.slice/job/cpu.max", "max 100000")
        assert "no CPU limit, no memory limit (version 2)" in of(machine.findings(), "ok", "cgroup")[0].says

    def test_version_1(self, machine: Machine) -> None:
        self.v1(machine, "1200000", str(64 * GIB), str(63 * GIB))
        found = of(machine.findings(), "warn", "cgroup")
        assert ["12 CPUs" in found[0].says, "63 GiB of 64 GiB" in found[1].says] == [True, True]
        self.v1(machine, "-1", "9223372036854771712")
        assert "no CPU limit, no memory limit (version 1)" in of(machine.findings(), "ok", "cgroup")[0].says

    def test_both_versions_mounted_the_old_one_has_the_controllers(self, machine: Machine) -> None:
        self.v1(machine, "200000", str(64 * GIB))
        machine.put(
            "/proc/self/mountinfo", self.V1 + "30 23 0:26 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n"
        )
        machine.put("/proc/self/cgroup", "5:memory:/slurm/job\n3:cpu,cpuacct:/slurm/job\n0::/user\n")
        (one,) = of(machine.findings(), "bad")
        assert "2 CPUs" in one.says

    def test_a_container_that_sees_its_own_part_only(self, machine: Machine) -> None:
        machine.put("/proc/self/mountinfo", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
        machine.put("/proc/self/cgroup", "0::/docker/abc\n")
        machine.put("/sys/fs/cgroup/cpu.max", "100000 100000")
        (one,) = of(machine.findings(), "bad")
        assert "1 CPUs" in one.says

    def test_processes_that_were_killed_for_memory(self, machine: Machine) -> None:
        machine.put("/sys/fs/cgroup/user.slice/job/memory.events", "low 0\noom 3\noom_kill 2\n")
        assert "2 processes were killed" in of(machine.findings(), "warn", "cgroup")[0].says

    def test_no_cgroups_are_said(self, machine: Machine) -> None:
        machine.put("/proc/self/mountinfo", "1 1 0:1 / / rw - ext4 /dev/sda rw\n")
        assert len(of(machine.findings(), "unseen", "cgroup")) == 1


class TestAffinity:
    """NVML's mask is empty inside a cpuset (cosmos-predict1 issue 11), or the CPUs are those of another socket."""

    def allow(self, machine: Machine, text: str) -> None:
        machine.put("/proc/self/status", f"CapEff:\t{0:016x}\nSeccomp:\t0\nCpus_allowed_list:\t{text}\n")

    def test_cpus_of_the_other_socket_only(self, machine: Machine) -> None:
        self.allow(machine, "32-63")
        for index in range(8):
            machine.gpu(index)["affinity"] = [0, 0]
        found = of(machine.findings(), "warn", "CPU affinity")
        assert len(found) == 8
        assert "NVML's list is empty" in found[0].says and "0-31" in found[0].says

    def test_an_empty_mask_beside_good_cpus_is_well(self, machine: Machine) -> None:
        for index in range(8):
            machine.gpu(index)["affinity"] = [0, 0]
        assert of(machine.findings(), "warn") == []

    def test_fewer_than_two_for_each_gpu(self, machine: Machine) -> None:
        self.allow(machine, "0-7")
        assert "8 for 8 GPUs" in of(machine.findings(), "warn", "CPUs")[0].says
        self.allow(machine, "0-15")
        assert of(machine.findings(), "warn", "CPUs") == []

    def test_running_ranks_that_share_one_cpu(self, machine: Machine) -> None:
        for rank in range(4):
            status = "Cpus_allowed_list:\t0\nCapEff:\t0000000000000000\n"
            machine.process(600 + rank, {"RANK": str(rank), "WORLD_SIZE": "4", "SLURM_JOB_ID": "7"}, status=status)
        (one,) = of(machine.findings(), "warn")
        assert "4 running ranks (0, 1, 2, 3) share 1 CPU (0)" in one.says

    def test_ranks_with_cpus_of_their_own_are_well(self, machine: Machine) -> None:
        for rank in range(4):
            status = f"Cpus_allowed_list:\t{8 * rank}-{8 * rank + 7}\nCapEff:\t0000000000000000\n"
            machine.process(600 + rank, {"RANK": str(rank), "WORLD_SIZE": "4", "SLURM_JOB_ID": "7"}, status=status)
        assert of(machine.findings(), "warn") == []

    def test_a_virtual_machine_hides_which_are_near(self, machine: Machine) -> None:
        machine.put("/proc/cpuinfo", "flags\t\t: fpu hypervisor\n")
        for index in range(8):
            machine.gpu(index).pop("affinity")
            machine.put(
                f"/sys/devices/pci0000:00/0000:00:{index + 1:02x}.0/0000:{16 + index:02x}:00.0/local_cpulist", ""
            )
        found = machine.findings()
        assert of(found, "bad") == [] == of(found, "warn")
        assert "hides" in of(found, "unseen", "CPU affinity")[0].says


class TestInterfaces:
    """Horovod issues 584, 310, 700."""

    def faces(self, machine: Machine, **faces: str) -> None:
        machine.root.faces = {name.replace("_", "-"): [address] for name, address in faces.items()}
        for name in machine.root.faces:
            machine.put(f"/sys/class/net/{name}/operstate", "up")

    @pytest.mark.parametrize(
        ("setting", "first"),
        [
            (None, "ib0"), ("eth", "eth0"), ("^docker0", "lo"), ("^docker0,lo", "eth0"), ("=eth1", "eth1"), ("=eth",
                None),
            ("ib,eth", "eth0"), ("^=eth0", "lo"), ("enp", None),
        ],
    )  # fmt: skip
    def test_what_nccl_takes(self, setting: str | None, first: str | None) -> None:
        names = ("lo", "eth0", "eth1", "docker0", "ib0")
        faces = [{"name": name, "addresses": ["10.0.0.1"], "state": "up"} for name in names]
        assert ([*chosen(faces, setting), None])[0] == first

    def test_a_virtual_bridge_before_the_real_one(self, machine: Machine) -> None:
        self.faces(machine, lo="127.0.0.1", virbr0="192.168.122.1", eth0="10.1.0.1")
        (one,) = of(machine.findings(), "warn")
        assert one.check == "interface" and "virbr0" in one.says and "NCCL_SOCKET_IFNAME=eth0" in one.hint

    def test_docker_beside_a_real_one_is_well(self, machine: Machine) -> None:
        self.faces(machine, lo="127.0.0.1", docker0="172.17.0.1", eth0="10.1.0.1")
        assert of(machine.findings(), "warn") == []

    def test_an_exclusion_that_takes_the_loopback_back_in(self, machine: Machine) -> None:
        self.faces(machine, lo="127.0.0.1", docker0="172.17.0.1", eth0="10.1.0.1")
        machine.root.env["NCCL_SOCKET_IFNAME"] = "^docker0"
        assert of(machine.findings(), "bad") == []  # of one node nobody is told to come
        machine.root.env.update(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
        (one,) = of(machine.findings(), "bad")
        assert "takes lo" in one.says and "^docker0,lo" in one.hint
        machine.root.env["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
        assert of(machine.findings(), "bad") == []

    def test_a_name_that_is_not_there(self, machine: Machine) -> None:
        machine.root.env["NCCL_SOCKET_IFNAME"] = "ens3"
        (one,) = of(machine.findings(), "bad")
        assert "matches no interface" in one.says and "eth0" in one.hint

    def test_gloo_takes_the_name_as_it_is(self, machine: Machine) -> None:
        machine.root.env["GLOO_SOCKET_IFNAME"] = "eth"
        assert "GLOO_SOCKET_IFNAME=eth matches" in of(machine.findings(), "bad")[0].says
        machine.root.env["GLOO_SOCKET_IFNAME"] = "eth0"
        assert of(machine.findings(), "bad") == []

    def test_a_link_local_address_is_no_way_to_others(self, machine: Machine) -> None:
        self.faces(machine, lo="127.0.0.1", eno1="169.254.3.1", eth0="10.1.0.1")
        assert "eno1" in of(machine.findings(), "warn", "interface")[0].says

    def test_interfaces_with_ipv4_come_first(self, machine: Machine) -> None:
        self.faces(machine, lo="127.0.0.1", eno1="fe80::1", eth0="10.1.0.1")
        assert of(machine.findings(), "warn") == []

    def test_an_interface_with_ipv6_only(self, machine: Machine) -> None:
        machine.root.faces = {"lo": ["127.0.0.1"]}
        machine.put("/proc/net/if_inet6", "20010db8000000000000000000000001 02 40 00 80     eth0\n")
        machine.root.known["node1"] = ["2001:db8::1"]
        assert "2001:db8::1" in of(machine.findings(), "ok", "interface")[0].says


class TestNames:
    """pytorch issues 150532, 67547, 73656."""

    def test_a_name_that_leads_to_the_loopback(self, machine: Machine) -> None:
        machine.root.known["node1"] = ["127.0.1.1"]
        assert [one.check for one in of(machine.findings(), "warn")] == ["host name"]
        machine.root.env.update(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
        (one,) = of(machine.findings(), "bad")
        assert "127.0.1.1" in one.says and "10.1.0.1" in one.says

    def test_a_name_with_two_addresses_of_which_one_is_real_is_well(self, machine: Machine) -> None:
        machine.root.known["node1"] = ["127.0.1.1", "10.1.0.1"]
        assert of(machine.findings(), "warn") == []

    def test_a_name_that_is_nobody(self, machine: Machine) -> None:
        machine.root.known = {}
        assert "name or service not known" in of(machine.findings(), "warn", "host name")[0].says

    def test_a_name_with_somebody_elses_address(self, machine: Machine) -> None:
        machine.root.known["node1"] = ["10.1.0.77"]
        assert "no address of this host" in of(machine.findings(), "warn", "host name")[0].says

    def test_a_master_that_cannot_be_found(self, machine: Machine) -> None:
        machine.root.env["MASTER_ADDR"] = "node9"
        assert [one.check for one in of(machine.findings(), "bad")] == ["MASTER_ADDR"]
        machine.root.known["node9"] = ["10.1.0.9"]
        assert of(machine.findings(), "bad") == []

    def test_localhost_is_a_master_for_one_node_only(self, machine: Machine) -> None:
        machine.root.env["MASTER_ADDR"] = "localhost"
        machine.root.known["localhost"] = ["127.0.0.1"]
        assert of(machine.findings(), "bad") == []
        machine.root.env["SLURM_NNODES"] = "4"
        assert "meets only itself" in of(machine.findings(), "bad", "MASTER_ADDR")[0].says


PORTS: dict[str, tuple[Callable[[Machine], Any], str, str, str]] = {
    "down": (lambda m: m.port(2, state="1: DOWN", phys_state="3: Disabled"), "RDMA ports", "mlx5_2 port 1", "7 of 8"),
    "no manager": (lambda m: m.port(2, state="2: INIT"), "RDMA ports", "mlx5_2 port 1", "INIT"),
    "slow": (lambda m: m.port(2, rate="100 Gb/sec (1X NDR)"), "RDMA ports", "mlx5_2 port 1", "its siblings have 400"),
    "no files": (lambda m: [m.remove(f"/dev/infiniband/uverbs{i}") for i in range(8)], "RDMA files", "", "uverbs"),
}


class TestPorts:
    @pytest.mark.parametrize("name", PORTS)
    def test_a_fault_is_named(self, machine: Machine, name: str) -> None:
        plant, check, where, word = PORTS[name]
        plant(machine)
        (one,) = of(machine.findings(), "bad")
        assert (one.check, one.where) == (check, where) and word in one.says and one.hint

    def test_second_ports_that_nobody_has_cabled_are_well(self, machine: Machine) -> None:
        for index in range(8):
            folder = f"/sys/class/infiniband/mlx5_{index}/ports/2"
            for name, text in (
                ("state", "1: DOWN"),
                ("phys_state", "2: Polling"),
                ("rate", "10 Gb/sec (4X SDR)"),
                ("link_layer", "InfiniBand"),
            ):
                machine.put(f"{folder}/{name}", text)
        found = machine.findings()
        assert of(found, "bad") == [] and "8 of 16 are active" in of(found, "ok", "RDMA ports")[0].says

    def test_a_slower_card_of_another_model_is_well(self, machine: Machine) -> None:
        machine.port(8, rate="25 Gb/sec (1X EDR)", link_layer="Ethernet", **{"gid_attrs/types/0": "RoCE v2"})
        machine.put("/sys/class/infiniband/mlx5_8/board_id", "MT_0000000001")
        assert of(machine.findings(), "bad") == []

    def test_no_port_is_active(self, machine: Machine) -> None:
        for index in range(8):
            machine.port(index, state="1: DOWN", phys_state="2: Polling")
        (one,) = of(machine.findings(), "bad")
        assert "none of 8 is active" in one.says

    def test_firmware_of_another_version(self, machine: Machine) -> None:
        machine.port(4, firmware="28.35.1000")
        assert of(machine.findings(), "warn")[0].where == "mlx5_4 port 1"

    def test_roce_with_another_mtu(self, machine: Machine) -> None:
        for index in range(8):
            machine.roce(index, mtu=1500 if index == 3 else 9000)
        (one,) = of(machine.findings(), "bad")
        assert (one.check, one.where) == ("RDMA MTU", "mlx5_3 port 1") and "rdma3 mtu 9000" in one.hint

    def test_roce_with_1500_everywhere_is_doubtful_and_9000_well(self, machine: Machine) -> None:
        for index in range(8):
            machine.roce(index, mtu=1500)
        found = machine.findings()
        assert of(found, "bad") == [] and "1500 on 8 RoCE ports" in of(found, "warn")[0].says
        for index in range(8):
            machine.roce(index)
        assert of(machine.findings(), "warn") == []

    def test_roce_without_an_address(self, machine: Machine) -> None:
        machine.port(0, link_layer="Ethernet")
        assert "no address for RoCE v2" in of(machine.findings(), "warn", "RDMA addresses")[0].says

    def test_neither_peermem_nor_dma_buf(self, machine: Machine) -> None:
        machine.remove("/sys/module/nvidia_peermem/version")
        machine.root.path("/sys/module/nvidia_peermem").rmdir()
        assert "dma-buf" in of(machine.findings(), "ok", "GPUDirect RDMA")[0].says
        machine.root.version = "5.4.0-150-generic"
        assert "older than 5.12" in of(machine.findings(), "warn", "GPUDirect RDMA")[0].says
        machine.root.version = "6.8.0"
        machine.put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15")
        assert "open kernel module" in of(machine.findings(), "warn", "GPUDirect RDMA")[0].says


class TestVariables:
    @pytest.mark.parametrize("name", sorted(LEFT_OVER))
    def test_what_was_left_over_is_named(self, machine: Machine, name: str) -> None:
        value = LEFT_OVER[name][0].split("|")[0].replace(".+", "Ring")
        machine.root.env[name] = value
        (one,) = of(machine.findings(), "warn", "variables")
        assert f"{name}={value}" in one.says and f"unset {name}" in one.hint

    def test_settings_that_are_well(self, machine: Machine) -> None:
        machine.root.env.update(
            NCCL_SOCKET_IFNAME="eth0", NCCL_DEBUG="WARN", NCCL_IB_HCA="mlx5", NCCL_P2P_DISABLE="0", NCCL_CROSS_NIC="1"
        )
        found = machine.findings()
        assert of(found, "bad") == [] == of(found, "warn")
        assert "5 settings" in of(found, "ok", "variables")[0].says

    def test_a_misspelt_one(self, machine: Machine) -> None:
        machine.root.env["NCCL_SOCKET_IFNAMES"] = "eth0"
        assert "did you mean NCCL_SOCKET_IFNAME?" in of(machine.findings(), "warn")[0].hint
        assert "NCCL_SOCKET_IFNAME" in KNOWN

    def test_nccl_conf_counts_and_the_environment_comes_over_it(self, machine: Machine) -> None:
        machine.put("/etc/nccl.conf", "# old\nNCCL_P2P_DISABLE=1\nNCCL_DEBUG=WARN\n")
        (one,) = of(machine.findings(), "warn")
        assert "/etc/nccl.conf" in one.says and "/etc/nccl.conf" in one.hint
        machine.root.env["NCCL_P2P_DISABLE"] = "0"
        assert of(machine.findings(), "warn") == []

    def test_what_running_ranks_have_counts(self, machine: Machine) -> None:
        machine.process(900, {"RANK": "0", "WORLD_SIZE": "8", "NCCL_P2P_DISABLE": "1"})
        (one,) = of(machine.findings(), "warn")
        assert "NCCL_P2P_DISABLE=1 in running ranks" in one.says

    def test_a_file_that_is_not_there(self, machine: Machine) -> None:
        machine.root.env["NCCL_TOPO_FILE"] = "/opt/topo.xml"
        assert "no such file" in of(machine.findings(), "bad")[0].says
        machine.put("/opt/topo.xml")
        assert of(machine.findings(), "bad") == []

    def test_cards_that_are_not_there(self, machine: Machine) -> None:
        machine.root.env["NCCL_IB_HCA"] = "=mlx5_9:1,mlx5_10:1"
        assert "mlx5_9, mlx5_10" in of(machine.findings(), "bad")[0].says
        machine.root.env["NCCL_IB_HCA"] = "^mlx5_9"
        assert of(machine.findings(), "bad") == []

    def test_a_gid_that_is_empty_or_of_the_old_kind(self, machine: Machine) -> None:
        for index in range(8):
            machine.roce(index)
        machine.root.env["NCCL_IB_GID_INDEX"] = "3"
        assert of(machine.findings(), "bad") == []
        machine.root.env["NCCL_IB_GID_INDEX"] = "5"
        found = of(machine.findings(), "bad")
        assert len(found) == 8 and "is empty" in found[0].says and found[0].hint == "NCCL_IB_GID_INDEX=3"
        machine.root.env["NCCL_IB_GID_INDEX"] = "1"
        assert "RoCE v1" in of(machine.findings(), "bad")[0].says

    def test_several_nccl_libraries(self, machine: Machine) -> None:
        """pytorch issue 122571: three of them on one host."""
        machine.put("/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3")
        machine.put("/opt/nccl/lib/libnccl.so.2.21.5")
        machine.root.env["LD_LIBRARY_PATH"] = "/opt/nccl/lib:/nowhere"
        (one,) = of(machine.findings(), "warn", "NCCL")
        assert "/opt/nccl/lib/libnccl.so.2.21.5" in one.says

    def test_ranks_that_loaded_different_ones(self, machine: Machine) -> None:
        for rank, version in enumerate(("2.21.5", "2.21.5")):
            maps = f"7f0-7f1 r-xp 0 0:0 1   /venv/lib/libnccl.so.{version}\n"
            machine.process(700 + rank, {"RANK": str(rank), "WORLD_SIZE": "2"}, maps=maps)
        assert of(machine.findings(), "bad") == []
        machine.process(
            701, {"RANK": "1", "WORLD_SIZE": "2"}, maps="7f0-7f1 r-xp 0 0:0 1   /usr/lib/libnccl.so.2.18.3\n"
        )
        assert "2 different ones" in of(machine.findings(), "bad", "NCCL")[0].says

    def test_secrets_are_not_taken(self, machine: Machine) -> None:
        machine.root.env.update(NCCL_API_KEY="s3cret", HF_TOKEN="s3cret", AWS_SECRET="s3cret")
        assert "s3cret" not in str(machine.look())


class TestKernelLog:
    XID = "NVRM: Xid (PCI:0000:13:00): {}, pid=1896, name=python3, Ch 00000008"

    @pytest.mark.parametrize("number", [48, 64, 74, 79, 95, 119, 149])
    def test_a_fault_of_the_hardware_is_bad(self, machine: Machine, number: int) -> None:
        machine.kernel_log(self.XID.format(number))
        (one,) = of(machine.findings(), "bad")
        assert (
            (one.check, one.where) == ("Xid", "GPU 3") and f"Xid {number}" in one.says and HARD[number][1] == one.hint
        )

    @pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 94])
    def test_a_fault_of_a_program_is_not(self, machine: Machine, number: int) -> None:
        machine.kernel_log(self.XID.format(number))
        found = machine.findings()
        assert of(found, "bad") == [] == of(found, "warn")
        assert any(SOFT[number] in one.says for one in of(found, "ok", "Xid"))

    def test_many_are_one_line_with_their_age(self, machine: Machine) -> None:
        machine.kernel_log(*[self.XID.format(74)] * 5, at=9000.0)
        assert "5 times, last 17 min ago" in of(machine.findings(), "bad")[0].says

    def test_an_old_one_is_doubtful(self, machine: Machine) -> None:
        machine.put("/proc/uptime", "500000.0 1.0")
        machine.kernel_log(self.XID.format(79), at=1000.0)
        found = machine.findings()
        assert of(found, "bad") == [] and "6 days ago" in of(found, "warn")[0].says

    def test_the_drivers_advice(self, machine: Machine) -> None:
        machine.kernel_log(
            "NVRM: Xid (PCI:0000:13:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
        )
        assert "Node Reboot Required" in of(machine.findings(), "bad")[0].says
        machine.kernel_log(
            "NVRM: Xid (PCI:0000:13:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
        )
        assert of(machine.findings(), "bad") == []

    def test_a_switch(self, machine: Machine) -> None:
        machine.kernel_log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
        assert "SXid 20034" in of(machine.findings(), "bad")[0].says
        machine.kernel_log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 11004, Non-fatal, Link 30 minion")
        found = machine.findings()
        assert of(found, "bad") == [] and len(of(found, "warn")) == 1

    def test_errors_of_the_bus(self, machine: Machine) -> None:
        machine.kernel_log("pcieport 0000:00:04.0: AER: Uncorrected (Fatal) error received: 0000:13:00.0")
        assert of(machine.findings(), "bad")[0].check == "PCIe errors"
        machine.kernel_log("pcieport 0000:00:04.0: AER: Corrected error received: 0000:13:00.0")
        found = machine.findings()
        assert of(found, "bad") == [] and len(of(found, "warn", "PCIe errors")) == 1
        machine.kernel_log("pcieport 0000:00:04.0: AER: enabled with IRQ 35")
        assert of(machine.findings(), "warn") == []

    def test_an_unknown_number_is_doubtful(self, machine: Machine) -> None:
        machine.kernel_log(self.XID.format(999))
        assert "Xid 999" in of(machine.findings(), "warn")[0].says

    def test_a_log_file_where_the_buffer_cannot_be_read(self, machine: Machine) -> None:
        machine.remove("/dev/kmsg")
        assert "no log file" in of(machine.findings(), "unseen", "Xid")[0].says
        machine.put("/var/log/kern.log", f"Nov 28 10:00:00 node1 kernel: [ 9000.000000] {self.XID.format(79)}\n")
        assert len(of(machine.findings(), "bad", "Xid")) == 1

    def test_lines_that_mention_it_are_no_event(self, machine: Machine) -> None:
        machine.kernel_log("my-monitor: looking for Xid 79 in the log", "NVRM: loading NVIDIA UNIX Open Kernel Module")
        assert of(machine.findings(), "bad") == []


class TestAmd:
    def card(self, machine: Machine, number: int, errors: str = "ue: 0\nce: 0", width: str = "16") -> None:
        place = f"/sys/devices/pci0000:80/0000:{0x80 + number:02x}:00.0"
        for name, text in (("vendor", "0x1002"), ("class", "0x120000"), ("product_name", "MI300X"),
            ("ras/umc_err_count", errors),
                           ("current_link_width", width), ("max_link_width", "16")):  # fmt: skip
            machine.put(f"{place}/{name}", text)
        machine.link(f"/sys/class/drm/card{number}/device", place)

    def test_memory_errors_and_widths(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=0, rdma=0)
        machine.put("/dev/kfd")
        self.card(machine, 0)
        self.card(machine, 1)
        found = machine.findings()
        assert of(found, "bad") == [] == of(found, "warn")
        assert "2 x MI300X" in of(found, "ok", "AMD GPUs")[0].says
        self.card(machine, 1, errors="ue: 4\nce: 9", width="8")
        found = machine.findings()
        assert [one.where for one in of(found, "bad")] == ["card1"] == [one.where for one in of(found, "warn")]

    def test_a_missing_device_file(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, gpus=0, rdma=0)
        self.card(machine, 0)
        assert "/dev/kfd" in of(machine.findings(), "warn")[0].says


class TestContainer:
    def test_a_missing_device_file(self, machine: Machine) -> None:
        machine.put("/.dockerenv")
        assert of(machine.findings(), "warn") == []
        machine.remove("/dev/nvidia-uvm")
        assert "nvidia-uvm" in of(machine.findings(), "warn", "container")[0].says

    def test_on_a_host_it_appears_with_the_first_program(self, machine: Machine) -> None:
        machine.remove("/dev/nvidia-uvm")
        assert of(machine.findings(), "warn") == []


def test_a_part_that_fails_takes_no_other_with_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("mldebug.cluster.health._rdma.look", broken)
    found = machine.findings()
    assert "oops" in of(found, "unseen", "RDMA ports")[0].says
    assert of(found, "ok", "NVLink")


def test_damaged_evidence_is_said_and_the_rest_is_judged(machine: Machine) -> None:
    node = machine.look()
    node["rdma"]["ports"][0]["rate"] = None
    node["cpus"] = {"allowed": 7}
    found = judge([node])
    assert {one.check for one in found if "cannot be judged" in one.says} >= {"CPUs"}
    assert of(found, "ok", "NVLink")


def test_an_empty_machine_has_a_reason_for_everything(tmp_path: Path) -> None:
    from mldebug.cluster.health._doctor import look
    from tests.cluster.doctor_kit import FakeRoot

    root = FakeRoot(tmp_path)
    node = look(root, None) | {"gpu": {"gpus": [], "why": "no driver", "error": 12}}
    found = judge([node])
    assert of(found, "bad") == []
    assert all("not visible here: " in one.says for one in of(found, "unseen"))
