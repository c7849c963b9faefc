"""doctor over many nodes: the odd one out, evidence from files, other nodes over ssh, and counters that grow."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import collect_doctor, doctor, judge_doctor, load_doctor
from mldebug.cluster.health._doctor import look
from mldebug.cluster.health._load import is_idle
from mldebug.cluster.health._load import look as put_load
from mldebug.cluster.health._remote import MARK
from mldebug.core.errors import UsageError
from tests.cluster.doctor_kit import GIB, Machine, judge, of

Plant = Callable[[Machine], Any]


def fleet(folder: Path, count: int = 4, **plants: Plant) -> list[dict[str, Any]]:
    """The evidence of node1, node2 ...; `plants` put a fault into some of them."""
    nodes = []
    for number in range(1, count + 1):
        machine = Machine(folder / f"node{number}", gpus=2, rdma=2, name=f"node{number}")
        plants.get(f"node{number}", lambda _: None)(machine)
        nodes.append(machine.look())
    return nodes


def test_a_healthy_fleet_is_well_and_its_lines_are_folded(tmp_path: Path) -> None:
    report = doctor({"nodes": fleet(tmp_path), "failed": [], "notes": []})
    assert report.ok and report.counts["bad"] == report.counts["warn"] == 0
    (one,) = [one for one in report.findings if one.check == "NVLink"]
    assert one.hosts == ("node1", "node2", "node3", "node4")


def test_many_nodes_are_a_short_table_for_people_and_whole_in_json(tmp_path: Path) -> None:
    def loopback(machine: Machine) -> None:
        machine.root.known[machine.root.name] = ["127.0.1.1"]

    plants = {f"node{number}": loopback for number in range(1, 7)}
    report = doctor({"nodes": fleet(tmp_path, 12, **plants), "failed": [], "notes": []})
    lines = report.text(width=110).splitlines()
    bad = [line for line in lines if line.startswith("BAD")]
    assert len(bad) == 4 and "node[4-6]: 3 more like these" in bad[3]
    assert len([line for line in lines if line.startswith("ok    interface")]) == 1
    assert any("node1 is 127.0.1.1" in line for line in lines)
    assert len(report.to_dict()["culprits"]) == 6
    assert len(lines) < 60


def libraries(version: str) -> Plant:
    return lambda machine: machine.put(f"/usr/lib/x86_64-linux-gnu/libnccl.so.{version}")


def plugin(machine: Machine) -> None:
    machine.put("/usr/lib/x86_64-linux-gnu/libnccl-net.so")


def driver(machine: Machine) -> None:
    machine.nvml.driver = "550.54.15"


def fewer_links(machine: Machine) -> None:
    for gpu in machine.nvml.gpus:
        gpu["links"] = [1] * 12 + [0] * 6


def mtu(machine: Machine) -> None:
    for index in range(2):
        machine.roce(index, mtu=1500)


ODD: dict[str, tuple[Plant, Plant, str, str, str]] = {
    # what is planted in node3, what all have, level, check, a word
    "net plugin": (plugin, lambda _: None, "bad", "net plugin", "libnccl-net.so"),  # NCCL issue 1634
    "no plugin": (lambda _: None, plugin, "bad", "net plugin", "none, most nodes have /usr/lib"),
    "NCCL": (libraries("2.18.3"), libraries("2.21.5"), "bad", "NCCL", "2.18.3"),
    "driver": (driver, lambda _: None, "warn", "driver", "550.54.15"),
    "kernel": (lambda m: setattr(m.root, "version", "6.2.0"), lambda _: None, "warn", "kernel", "6.2.0"),
    "links": (fewer_links, lambda _: None, "bad", "NVLink", "12 links"),
    "a GPU less": (lambda m: [m.nvml.gpus.pop(), m.remove("/dev/nvidia1")], lambda _: None, "bad", "GPUs",
        "1 GPUs, most"),
    "a port less": (lambda m: m.port(1, state="1: DOWN", phys_state="2: Polling"), lambda _: None, "bad",
        "RDMA ports", "1 active"),
    "slow ports": (lambda m: [m.port(i, rate="200 Gb/sec (4X HDR)") for i in (0, 1)], lambda _: None, "bad",
        "RDMA ports", "200 Gb/s at most"),
    "MTU": (mtu, lambda m: [m.roce(i) for i in (0, 1)], "bad", "RDMA MTU", "1500 bytes, most other nodes have 9000"),
    "VBIOS": (lambda m: [m.gpu(i).update(vbios="96.00.30") for i in (0, 1)], lambda _: None, "warn", "VBIOS",
        "96.00.30"),
    "variable": (lambda m: m.root.env.update(NCCL_CROSS_NIC="1"), lambda _: None, "warn", "variables",
        "NCCL_CROSS_NIC is 1"),
    "conf": (lambda m: m.put("/etc/nccl.conf", "NCCL_IB_TC=106"), lambda _: None, "warn", "variables",
        "NCCL_IB_TC is 106"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_the_odd_one_out_is_named(tmp_path: Path, name: str) -> None:
    plant, usual, level, check, word = ODD[name]
    nodes = fleet(
        tmp_path,
        node1=usual,
        node2=usual,
        node3=lambda m: (usual(m) if name in ("MTU",) else None, plant(m)),
        node4=usual,
    )
    found = [one for one in of(judge(nodes), level, check) if one.hosts == ("node3",)]
    assert any(word in one.says for one in found), judge(nodes)[:3]
    assert all(one.hosts == ("node3",) for one in of(judge(nodes), "bad"))


@pytest.mark.parametrize("name", ODD)
def test_what_all_nodes_have_alike_is_not_odd(tmp_path: Path, name: str) -> None:
    plant, _, _, check, _ = ODD[name]
    found = judge(fleet(tmp_path, **{f"node{number}": plant for number in range(1, 5)}))
    assert not [one for one in found if one.level in ("bad", "warn") and "most" in one.says], check


def test_two_nodes_that_differ_are_both_named(tmp_path: Path) -> None:
    found = judge(fleet(tmp_path, 2, node1=libraries("2.18.3"), node2=libraries("2.21.5")))
    assert {one.hosts for one in of(found, "bad", "NCCL")} == {("node1",), ("node2",)}


def test_of_two_nodes_the_one_with_fewer_gpus_is_a_doubt(tmp_path: Path) -> None:
    found = judge(fleet(tmp_path, 2, node2=lambda m: [m.nvml.gpus.pop(), m.remove("/dev/nvidia1")]))
    (one,) = of(found, "warn", "GPUs")
    assert one.hosts == ("node2",) and "1 GPUs, others have 2" in one.says


class TestIdentities:
    def test_a_cloned_machine(self, tmp_path: Path) -> None:
        nodes = fleet(tmp_path, 2)
        nodes[1]["gpu"] = nodes[0]["gpu"]
        found = of(judge(nodes), "bad", "duplicate GPU")
        assert len(found) == 2 and found[0].hosts == ("node1", "node2")

    def test_an_address_of_two_nodes(self, tmp_path: Path) -> None:
        nodes = fleet(tmp_path, 2, node2=lambda m: m.root.faces.update(eth0=["10.1.0.1"]))
        (one,) = [
            one for one in of(judge(nodes), "bad", "host name") if "10.1.0.1 is an address of 2 nodes" in one.says
        ]
        assert one.hosts == ("node1", "node2")

    def test_docker_has_the_same_address_everywhere_and_that_is_well(self, tmp_path: Path) -> None:
        def docker(machine: Machine) -> None:
            machine.root.faces["docker0"] = ["172.17.0.1"]
            machine.put("/sys/class/net/docker0/operstate", "up")

        assert of(judge(fleet(tmp_path, 2, node1=docker, node2=docker)), "bad") == []

    def test_two_nodes_of_one_name(self, tmp_path: Path) -> None:
        nodes = fleet(tmp_path, 2)
        nodes[1]["net"]["own"]["name"] = "node1"
        assert "NCCL_HOSTID" in of(judge(nodes), "warn", "host name")[0].hint

    def test_a_name_that_leads_to_the_loopback_is_bad_for_several_nodes(self, tmp_path: Path) -> None:
        found = judge(fleet(tmp_path, 2, node2=lambda m: m.root.known.update(node2=["127.0.1.1"])))
        (one,) = of(found, "bad")
        assert (one.check, one.hosts) == ("host name", ("node2",))


class TestWorlds:
    """pith-train issue 91: every node met only itself, and trained alone."""

    def first(self, **more: str) -> Plant:
        return lambda machine: machine.process(800, {"RANK": "0", "WORLD_SIZE": "2", **more})

    def test_a_world_on_each_node(self, tmp_path: Path) -> None:
        plant = self.first(SLURM_JOB_ID="77", SLURM_STEP_ID="0", MASTER_ADDR="localhost")
        (one,) = of(judge(fleet(tmp_path, 2, node1=plant, node2=plant)), "bad")
        assert one.check == "world" and one.hosts == ("node1", "node2") and "world size 2" in one.says

    def test_two_jobs_of_one_node_each_are_not_bad(self, tmp_path: Path) -> None:
        steps = [self.first(SLURM_JOB_ID="77", SLURM_STEP_ID=step) for step in "01"]
        found = judge(fleet(tmp_path, 2, node1=steps[0], node2=steps[1]))
        assert of(found, "bad") == [] == of(found, "warn")
        alike = self.first(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
        found = judge(fleet(tmp_path / "b", 2, node1=alike, node2=alike))
        assert of(found, "bad") == [] and len(of(found, "warn", "world")) == 1

    def test_one_job_over_both_is_well(self, tmp_path: Path) -> None:
        def second(machine: Machine) -> None:
            machine.process(800, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_JOB_ID": "77"})

        assert of(judge(fleet(tmp_path, 2, node1=self.first(SLURM_JOB_ID="77"), node2=second)), "bad") == []

    def test_a_master_that_is_somebody_else_on_one_node(self, tmp_path: Path) -> None:
        def knows(address: str) -> Plant:
            def plant(machine: Machine) -> None:
                machine.root.env["MASTER_ADDR"] = "head"
                machine.root.known["head"] = [address]

            return plant

        nodes = fleet(tmp_path, 3, node1=knows("10.1.0.1"), node2=knows("10.1.0.1"), node3=knows("10.9.9.9"))
        (one,) = of(judge(nodes), "bad")
        assert (one.check, one.hosts) == ("MASTER_ADDR", ("node3",)) and "10.9.9.9 here" in one.says


@pytest.mark.parametrize(
    ("ahead", "level"), [(-300.0, "bad"), (300.0, "bad"), (-5.0, "warn"), (5.0, "warn"), (0.3, None)]
)
def test_clocks(tmp_path: Path, ahead: float, level: str | None) -> None:
    nodes = fleet(tmp_path, 2)
    for node, skew in zip(nodes, (0.0, ahead), strict=True):
        node["clock"] = {"asked": 1000.0, "sent": 1001.0 + skew, "answered": 1001.2}
    found = judge(nodes)
    assert [one.hosts for one in found if one.check == "clock" and one.level == level] == [("node2",)] * (
        level is not None
    )
    assert bool(of(found, "ok", "clock")) == (level is None)


class TestWatch:
    @pytest.mark.parametrize(
        ("grow", "level", "check", "where"),
        [
            (lambda m: m.gpu(1).update(ecc_uncorrected=1), "bad", "ECC", "GPU 1"),
            (lambda m: m.gpu(1).update(ecc_corrected=9), "warn", "ECC", "GPU 1"),
            (lambda m: m.gpu(1).update(replays=50), "warn", "PCIe errors", "GPU 1"),
            (lambda m: m.gpu(0).update(link_errors={(5, "replay"): 3}), "bad", "NVLink errors", "GPU 0"),
            (lambda m: m.port(1, **{"counters/link_downed": "1"}), "bad", "RDMA errors", "mlx5_1 port 1"),
            (lambda m: m.port(1, **{"counters/symbol_error": "12"}), "warn", "RDMA errors", "mlx5_1 port 1"),
            (lambda m: m.port(1, **{"hw_counters/out_of_sequence": "12"}), "warn", "RDMA errors", "mlx5_1 port 1"),
            (lambda m: m.kernel_log("NVRM: Xid (PCI:0000:10:00): 31, pid=1, x"), "bad", "Xid", ""),
        ],
    )
    def test_what_grew_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grow: Plant, level: str, check: str, where: str
    ) -> None:
        machine = Machine(tmp_path, gpus=2, rdma=2)
        monkeypatch.setattr("mldebug.cluster.health._doctor.time.sleep", lambda seconds: grow(machine))
        found = judge([machine.look(watch=10.0)])
        assert any("grew by" in one.says and one.where == where for one in of(found, level, check)), found[:4]

    def test_counters_that_are_high_and_stand_still_are_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine(tmp_path, gpus=2, rdma=2)
        machine.gpu(0).update(link_errors={(5, "replay"): 3000}, replays=77, ecc_corrected=5)
        machine.port(1, **{"counters/symbol_error": "90000", "counters/link_downed": "4"})
        monkeypatch.setattr("mldebug.cluster.health._doctor.time.sleep", lambda seconds: None)
        found = judge([machine.look(watch=10.0)])
        assert of(found, "bad") == [] == of(found, "warn")
        assert "none of" in of(found, "ok", "watch")[0].says

    def test_ctrl_c_makes_the_window_shorter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine(tmp_path, gpus=2, rdma=2)

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("mldebug.cluster.health._doctor.time.sleep", interrupt)
        evidence = collect_doctor(watch=600, root=machine.root, nvml=machine.nvml)
        assert evidence["notes"][0].startswith("interrupted")
        assert of(judge_doctor(evidence), "ok", "watch")


class TestLoad:
    def test_a_gpu_that_somebody_uses_is_left_alone(self, tmp_path: Path) -> None:
        from tests.cluster.doctor_kit import Values

        machine = Machine(tmp_path, gpus=2)
        machine.gpu(0)["processes"] = [Values(pid=1, usedGpuMemory=GIB)]
        machine.gpu(1)["memory"] = Values(total=80 * GIB, used=30 * GIB)
        node = machine.look()
        assert not any(map(is_idle, node["gpu"]["gpus"]))
        assert put_load(machine.nvml, node) == {"gpus": {}, "why": "GPU 0, 1 in use: left alone"}

    def test_a_load_that_fails_says_why_and_leaves_nothing(self, tmp_path: Path) -> None:
        """torch sees no device of that name."""
        pytest.importorskip("torch")
        machine = Machine(tmp_path, gpus=1)
        seen = put_load(machine.nvml, machine.look(), seconds=0.2, deadline=60)
        assert seen["gpus"] == {} and "torch" in seen["why"]

    def test_a_load_that_does_not_start_in_time_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mldebug.cluster.health._load._PROGRAM", "import time; time.sleep(60)")
        machine = Machine(tmp_path, gpus=1)
        monkeypatch.setattr("mldebug.cluster.health._load._AFTER", 0.2)
        seen = put_load(machine.nvml, machine.look(), seconds=0.1, deadline=0.3)
        assert seen["gpus"] == {} and "did not start in time" in seen["why"]

    def test_facts_of_the_samples(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = """
import json, os, sys, time
print(json.dumps({"ready": 1}), flush=True)
time.sleep(0.8)
print(json.dumps({"device": 0, "uuid": os.environ["CUDA_VISIBLE_DEVICES"], "h2d_gbps": 50.0, "tflops": 600.0}),
    flush=True)
"""
        monkeypatch.setattr("mldebug.cluster.health._load._PROGRAM", program)
        machine = Machine(tmp_path, gpus=1)
        node = machine.look()
        machine.gpu(0).update(gen=5, clock_1=1755, throttle=4)
        seen = put_load(machine.nvml, node, seconds=0.5)
        (facts,) = seen["gpus"].values()
        assert facts == {
            "pcie_gen": 5,
            "pcie_width": 16,
            "sm_clock": 1755,
            "throttle": 4,
            "h2d_gbps": 50.0,
            "tflops": 600.0,
        }


class TestFiles:
    def test_reports_and_evidence_merge_and_judge_the_same(self, tmp_path: Path) -> None:
        nodes = fleet(tmp_path, 2, node2=lambda m: m.gpu(0).update(ecc_uncorrected=1))
        whole = doctor({"nodes": nodes, "failed": [], "notes": []})
        (tmp_path / "report.json").write_text(doctor({"nodes": nodes[:1], "failed": [], "notes": []}).json())
        (tmp_path / "line.jsonl").write_text("a banner\n" + MARK + json.dumps(nodes[1]) + "\n")
        again = doctor(load_doctor([tmp_path / "report.json", tmp_path / "line.jsonl"]))
        assert again.findings == whole.findings and not again.ok

    def test_many_documents_in_one_file(self, tmp_path: Path) -> None:
        lines = [doctor({"nodes": [node], "failed": [], "notes": []}).json() for node in fleet(tmp_path, 3)]
        (tmp_path / "all.jsonl").write_text("\n".join(lines) + "\n")
        assert len(load_doctor([tmp_path / "all.jsonl"])["nodes"]) == 3

    @pytest.mark.parametrize("text", ["", "no json", "[1, 2]", '{"schema": 1, "ranks": []}'])
    def test_what_is_no_evidence_is_a_usage_error(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UsageError):
            load_doctor([tmp_path / "x.json"])
        with pytest.raises(UsageError, match="no such file"):
            load_doctor([tmp_path / "y.json"])

    def test_signs_that_a_terminal_obeys_are_escaped(self, tmp_path: Path) -> None:
        (node,) = fleet(tmp_path, 1)
        node["software"]["env"] = {"NCCL_ALGO": "\x1b[2Jevil"}
        node["host"] = "no\x1b[2Jde"
        text = doctor({"nodes": [node], "failed": [], "notes": []}).text()
        assert "\x1b" not in text and "evil" in text

    def test_a_node_of_which_nothing_is_known_is_bad(self, tmp_path: Path) -> None:
        evidence = {
            "nodes": fleet(tmp_path, 1),
            "failed": [{"host": "node9", "why": "the network does not reach it"}],
            "notes": [],
        }
        report = doctor(evidence)
        assert not report.ok and report.findings[0].hosts == ("node9",)
        assert report.to_dict()["culprits"][0]["hosts"] == ["node9"]


SSH = """\
#!{python}
import sys, time
host, command = sys.argv[sys.argv.index("--") + 1 :]
if host.startswith("refused"):
    sys.exit("ssh: connect to host %s port 22: Connection refused" % host)
if host.startswith("old"):
    sys.exit("mldebug: no command named 'doctor'")
if host.startswith("hang"):
    time.sleep(600)
if host.startswith("garbage"):
    print("{mark}{{not json"); sys.exit(0)
print("Welcome to " + host)
sys.stdout.write(open({folder!r} + "/" + host).read())
open({folder!r} + "/calls", "a").write(command + "\\n")
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which each file is what the host of its name says; ssh on PATH reads it."""
    folder = tmp_path / "answers"
    folder.mkdir()
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(python=sys.executable, folder=str(folder), mark=MARK))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return folder


class TestRemote:
    def say(self, folder: Path, machines: list[dict[str, Any]]) -> None:
        from mldebug.cluster.health._remote import answer

        for node in machines:
            (folder / str(node["host"])).write_text(answer(node))

    def test_nodes_that_answer_and_the_reason_for_each_that_does_not(self, answers: Path, tmp_path: Path) -> None:
        self.say(answers, fleet(tmp_path / "fleet", 2))
        told: list[tuple[int, int]] = []
        evidence = collect_doctor(
            hosts=["node1", "node2", "refused1", "old1", "hang1", "garbage1"], timeout=6.0, watch=0.5,
            progress=lambda done, asked: told.append((done, asked)),
        )  # fmt: skip
        assert [node["host"] for node in evidence["nodes"]] == ["node1", "node2"]
        reasons = {one["host"]: one["why"] for one in evidence["failed"]}
        assert "no sshd" in reasons["refused1"] and "install the same" in reasons["old1"]
        assert "no answer within" in reasons["hang1"] and "no answer" in reasons["garbage1"]
        assert (2, 6) in told
        assert "doctor --node --watch 0.5" in (answers / "calls").read_text()
        found = judge_doctor(evidence)
        assert {one.hosts for one in of(found, "bad")} == {("refused1",), ("old1",), ("hang1",), ("garbage1",)}
        assert of(found, "ok", "clock")

    def test_no_way_and_two_ways_are_usage_errors(self) -> None:
        with pytest.raises(UsageError, match="one of hosts and slurm"):
            collect_doctor(hosts="a", slurm="1")
        with pytest.raises(UsageError, match="watch is -1"):
            collect_doctor(watch=-1)


def test_this_machine_itself_takes_less_than_two_seconds() -> None:
    import time

    from mldebug.cluster.health._root import Root

    began = time.monotonic()
    node = look(Root())
    judge([node])
    assert time.monotonic() - began < (2 if not node["gpu"]["gpus"] else 20)
    json.dumps(node, allow_nan=False)
