"""The verdict of a dist-test from evidence alone, without running anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import judge_dist_test
from mldebug.cluster.dist._evidence import empty, load_evidence, new_rank
from mldebug.cluster.dist._report import make_report, read_report
from mldebug.core.errors import MldebugError, UsageError


def evidence(world: int = 8, per_host: int = 4, *, ended: str = "done", **facts: Any) -> dict[str, Any]:
    """A healthy job on two hosts of four GPUs."""
    seen = empty(world, "nccl", 30.0)
    seen["ended"] = ended
    for rank in range(world):
        host, local, address = f"node{rank // per_host}", rank % per_host, f"10.0.0.{rank // per_host + 1}"
        one = new_rank(rank, local, host, f"boot {host}", 1000 + rank, 500 + rank)
        one |= {"done": ended == "done", "phase": "end", "step": 90, "local_world": per_host, "skew": 0.001}
        one["facts"] = {
            "torch": "2.13.0", "cuda": "12.8", "driver": "570.1", "nccl": "2.27.5", "python": "3.11", "kernel": "6.1",
            "backend": "nccl", "plugins": [], "nccl_conf": [], "peermem": "nvidia_peermem", "memlock": -1,
            "infiniband": [], "environment": {"NCCL_DEBUG": "WARN"}, "master": ["10.0.0.1"],
            "door": [address, 40000 + rank], "hostname": {"name": host, "addresses": [address]},
            "interfaces": {"eth0": {"addresses": [address], "mtu": 9000, "state": "up"}},
            "device": {"kind": "cuda", "index": local, "name": "H100", "uuid": f"{host}-{local}"}, **facts,
        }  # fmt: skip
        seen["ranks"][str(rank)] = one
    return seen


def first(seen: dict[str, Any]) -> tuple[str, int | None, str]:
    verdict = judge_dist_test(seen)
    return verdict.culprits[0].kind, verdict.culprits[0].rank, verdict.culprits[0].reason


def test_a_healthy_job_has_no_culprit() -> None:
    verdict = judge_dist_test(evidence())
    assert verdict.culprits == () and verdict.differences == () and verdict.waiting == ()


def test_a_plugin_on_a_part_of_the_hosts_is_the_odd_ones() -> None:
    seen = evidence(12)
    for rank in range(8, 12):
        seen["ranks"][str(rank)]["facts"]["plugins"] = ["/opt/lib/libnccl-net.so"]
    kind, rank, reason = first(seen)
    assert (kind, rank) == ("differs", 8)
    assert reason == "NCCL plugins found is /opt/lib/libnccl-net.so, and not there on most ranks (and 3 more)"
    assert judge_dist_test(seen).differences[0].odd == (8, 9, 10, 11)


@pytest.mark.parametrize(
    "name, value, what",
    [
        ("nccl", "2.18.1", "NCCL"),
        ("torch", "2.11.0", "torch"),
        ("cuda", "13.0", "CUDA"),
        ("nccl_conf", ["NCCL_ALGO=Ring"], "nccl.conf"),
        ("environment", {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}, "NCCL_ALGO"),
        ("environment", {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE"),
    ],
)
def test_what_breaks_collectives_is_a_culprit(name: str, value: Any, what: str) -> None:
    seen = evidence()
    seen["ranks"]["5"]["facts"][name] = value
    verdict = judge_dist_test(seen)
    assert [(one.kind, one.rank) for one in verdict.culprits] == [("differs", 5)]
    assert verdict.differences[0].what == what and verdict.culprits[0].reason.startswith(f"{what} is ")


@pytest.mark.parametrize(
    "name, value",
    [
        ("driver", "535.1"),
        ("peermem", ""),
        ("environment", {"NCCL_DEBUG": "INFO"}),
        ("environment", {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}),
        ("interfaces", {"eth0": {"addresses": ["10.0.0.2"], "mtu": 1500, "state": "up"}}),
    ],
)
def test_what_may_be_meant_is_shown_and_no_culprit(name: str, value: Any) -> None:
    seen = evidence()
    for rank in range(4, 8):
        seen["ranks"][str(rank)]["facts"][name] = value
    verdict = judge_dist_test(seen)
    assert verdict.culprits == () and [one.level for one in verdict.differences] == ["warn"]
    assert "node1" not in make_report(seen).text().partition("\n")[0]  # it is still all well


def test_two_ranks_on_one_gpu_and_the_same_number_on_two_hosts() -> None:
    seen = evidence()
    seen["ranks"]["6"]["facts"]["device"]["uuid"] = "node1-1"
    assert first(seen) == ("duplicate", 6, "uses the same GPU as rank 5")
    assert judge_dist_test(seen).culprits[0].gpu == "cuda:2 GPU-node1-1"


def test_a_clock_that_is_off_is_shown() -> None:
    seen = evidence()
    for rank in range(4):
        seen["ranks"][str(rank)]["skew"] = -75.0
    (found,) = judge_dist_test(seen).differences
    assert (found.what, found.level, found.odd) == ("time", "warn", (0, 1, 2, 3)) and "75 s behind" in found.words


def test_a_missing_rank_is_on_the_host_of_its_neighbours() -> None:
    seen = evidence(ended="not all ranks came within 30 s of each other")
    del seen["ranks"]["6"]
    culprits = judge_dist_test(seen).culprits
    assert [(one.kind, one.rank, one.host) for one in culprits] == [("missing", 6, "node1")]


def test_a_missing_host_has_no_name_without_a_plan_and_one_with_it() -> None:
    seen = evidence(ended="not all ranks came within 30 s of each other")
    for rank in range(4, 8):
        del seen["ranks"][str(rank)]
    assert [(one.rank, one.host) for one in judge_dist_test(seen).culprits] == [(rank, "") for rank in range(4, 8)]
    seen["plan"] = {str(rank): f"node{rank // 4}" for rank in range(8)}
    assert judge_dist_test(seen).culprits[0].host == "node1"


def stuck(**steps: int) -> dict[str, Any]:
    seen = evidence(ended="no rank got on for 30 s")
    for name, step in steps.items():
        one = seen["ranks"][name.removeprefix("r")]
        one |= {"step": step, "phase": f"phase {step}"}
    for one in seen["ranks"].values():
        one["age"] = 31.0
    return seen


def test_who_is_behind_is_blamed_and_who_waits_is_not() -> None:
    seen = stuck(r3=20, r5=20)
    verdict = judge_dist_test(seen)
    assert [(one.kind, one.rank, one.phase) for one in verdict.culprits] == [
        ("behind", 3, "phase 20"),
        ("behind", 5, "phase 20"),
    ]
    assert verdict.waiting == (0, 1, 2, 4, 6, 7)


def test_nobody_is_blamed_where_all_wait_in_the_same_place() -> None:
    kind, rank, reason = first(stuck())
    assert (kind, rank) == ("hang", None) and "none is behind the others" in reason


@pytest.mark.parametrize(
    "waits",
    [
        "all_reduce (torch/distributed/distributed_c10d.py:9)",
        "synchronize (torch/cuda/__init__.py:1219)\nDevice.sync (mldebug/cluster/dist/_device.py:62)",
        "Device.sync (mldebug/cluster/dist/_device.py:62)",
        "Collectives._send_recv (mldebug/cluster/dist/_collectives.py:190)",
    ],
)
def test_a_stack_outside_of_the_collective_tells_who_is_late(waits: str) -> None:
    seen = stuck()
    for name, one in seen["ranks"].items():
        one["stack"] = "read (data.py:3)" if name == "2" else waits
    assert first(seen)[:2] == ("behind", 2)


def test_the_first_cause_comes_before_what_follows_from_it() -> None:
    seen = stuck()
    seen["ranks"]["4"]["code"] = -9
    for name in ("0", "7"):
        seen["ranks"][name]["error"] = {
            "type": "RuntimeError",
            "message": "Connection closed by peer [10.0.0.2]",
            "after": 3.0,
        }
    verdict = judge_dist_test(seen)
    assert [(one.kind, one.rank, one.reason) for one in verdict.culprits] == [("dead", 4, "was ended by SIGKILL")]


def test_errors_that_only_follow_are_told_where_nothing_else_is_known() -> None:
    seen = stuck()
    for name, after in (("7", 2.0), ("0", 3.0)):
        seen["ranks"][name]["error"] = {"type": "DistBackendError", "message": "unhandled system error", "after": after}
    assert [one.rank for one in judge_dist_test(seen).culprits] == [7, 0]


def links(seen: dict[str, Any], source: int, targets: list[int], why: str = "filtered (timeout)") -> None:
    seen["ranks"][str(source)]["reach"] = [
        [rank, f"node{rank // 4}", *seen["ranks"][str(rank)]["facts"]["door"], why] for rank in targets
    ]


def test_a_host_that_nobody_reaches_is_blamed_and_not_those_who_tried() -> None:
    seen = evidence()
    for source in range(4):
        links(seen, source, [4, 5, 6, 7])
    found = judge_dist_test(seen).culprits
    assert {one.rank for one in found} == {4, 5, 6, 7} and all(one.fatal for one in found)
    assert "node0 -> node1 (10.0.0.2):40004 filtered (timeout), and 3 more ways" in found[0].reason


def test_a_rank_that_reaches_nobody_is_blamed_and_not_all_others() -> None:
    seen = evidence()
    links(seen, 6, [0, 1, 2, 3, 4, 5, 7])
    assert [one.rank for one in judge_dist_test(seen).culprits] == [6]


def test_an_address_that_leads_nowhere_is_told_with_the_interface_to_use() -> None:
    seen = evidence()
    for rank in range(4, 8):
        seen["ranks"][str(rank)]["facts"] |= {
            "door": ["172.17.0.1", 40000],
            "interfaces": {"docker0": {"addresses": ["172.17.0.1"]}, "ens3": {"addresses": ["10.0.0.2"]}},
            "environment": {"NCCL_SOCKET_IFNAME": "docker"},
        }
    culprit = judge_dist_test(seen).culprits[0]
    assert (culprit.rank, culprit.hint) == (4, "export NCCL_SOCKET_IFNAME=ens3 on node1")
    assert (
        "172.17.0.1, the address of docker0, which leads to no other host: NCCL_SOCKET_IFNAME=docker" in culprit.reason
    )


def wrong(check: str, source: int | None, rank: int) -> dict[str, Any]:
    return {"check": check, "source": source, "rank": rank, "count": 3, "of": 16, "index": 5, "got": 1.0, "want": 2.0}


def test_a_sender_whose_parts_are_wrong_everywhere_is_blamed() -> None:
    seen = evidence()
    seen["wrong"] = [wrong("all_reduce", None, rank) for rank in range(8)]
    seen["wrong"] += [wrong("all_gather", 3, rank) for rank in range(8) if rank != 3]
    verdict = judge_dist_test(seen)
    assert [(one.kind, one.rank, one.phase) for one in verdict.culprits] == [("wrong contents", 3, "all_gather")]


def test_a_receiver_that_gets_all_parts_wrong_is_blamed() -> None:
    seen = evidence()
    seen["wrong"] = [wrong("all_gather", source, 6) for source in range(8) if source != 6]
    assert [one.rank for one in judge_dist_test(seen).culprits] == [6]


def test_sums_alone_blame_nobody_where_all_are_wrong() -> None:
    seen = evidence()
    seen["wrong"] = [wrong("all_reduce", None, rank) for rank in range(8)]
    assert [(one.kind, one.rank) for one in judge_dist_test(seen).culprits] == [("wrong contents", None)]


def test_the_report_survives_json_and_a_file(tmp_path: Path) -> None:
    seen = stuck(r3=20)
    report = make_report(seen)
    told = json.loads(report.json())
    assert read_report(told).to_dict() == report.to_dict()
    path = tmp_path / "run.json"
    path.write_text(report.json())
    assert make_report(load_evidence(path)).text() == report.text()
    assert (
        report.text()
        .splitlines()[0]
        .startswith("dist-test: rank 3 on node0 (cuda:3 GPU-node0-3, pid 1003) did not get on")
    )


def test_files_that_are_no_evidence_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[1]", "{}", "no json", '{"ranks": {}, "world": 2, "schema": 99}'):
        path.write_text(text)
        with pytest.raises(UsageError):
            load_evidence(path)
    with pytest.raises(MldebugError, match="no such file"):
        load_evidence(tmp_path / "nothing")


def test_4096_ranks_are_judged_in_seconds() -> None:
    """With a host that nobody reaches there are 32,760 ways that fail."""
    report = empty(4096, "gloo", 15.0)
    for rank in range(4096):
        one = new_rank(rank, rank % 8, f"n{rank // 8:03d}", "", 5, 4)
        one["reach"] = [[to, "n100", "10.0.0.1", 5, "filtered (timeout)"] for to in range(800, 808) if to != rank]
        report["ranks"][str(rank)] = one
    report["wrong"] = [
        {"rank": one % 4096, "check": "c", "source": one * 7 % 4096, "count": 1, "of": 4, "index": 0, "got": 1.0,
         "want": 2.0} for one in range(5000)
    ]  # fmt: skip
    began = time.process_time()
    first, *_ = judge_dist_test({**report, "ended": "the ranks cannot reach each other"}).culprits
    assert first.host == "n100" and "and 4094 more ways" in first.reason
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("number", "word"), [(11, "PYTHONFAULTHANDLER"), (6, "PYTHONFAULTHANDLER"), (9, "dmesg")])
def test_who_crashed_is_told_what_to_do_next(number: int, word: str) -> None:
    ranks = {"0": {**new_rank(0, 0, "h0", "b", 1, 2), "code": -number}}
    culprit = judge_dist_test({**empty(1, "gloo", 15.0), "ranks": ranks, "ended": "a rank failed"}).culprits[0]
    assert culprit.kind == "dead" and word in culprit.hint


def test_a_torch_that_cannot_be_loaded_has_a_hint() -> None:
    error = {"type": "ImportError", "message": "libcudart.so.12: cannot open shared object file", "after": 1.0}
    ranks = {"0": {**new_rank(0, 0, "h0", "b", 1, 2), "error": error, "phase": "import"}}
    culprit = judge_dist_test({**empty(1, "gloo", 15.0), "ranks": ranks, "ended": "a rank failed"}).culprits[0]
    assert "import torch" in culprit.hint and "h0" in culprit.hint
