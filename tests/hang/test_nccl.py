"""What NCCL answers from outside of a job: its protocol, its JSON with its flaw, and what is believed of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mldebug.hang import Evidence, judge
from mldebug.hang._nccl import Watcher, _of_this_node, ask_ras, gpus, joined, parse_ras, ras_address


def rank(number: int, pid: int, host: str = "10.0.0.1", **counts: int) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status,
        "collective_counts": {"Broadcast": 0, "AllReduce": 0, **counts},
    }  # fmt: skip


def missing(number: int, pid: int, host: str = "10.0.0.1", **state: bool) -> dict[str, Any]:
    status = {"unresponsive": False, "considered_dead": False, **state}
    return {"rank": number, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status}


def answer(ranks: list[dict[str, Any]], gone: list[dict[str, Any]], name: str = "0xabc") -> str:
    """As NCCL 2.28.9 writes it: with a comma left out in missing_ranks."""
    group = {
        "hash": name, "size": len(ranks) + len(gone), "ranks_count": len(ranks), "missing_ranks_count": len(gone),
        "ranks": ranks, "missing_ranks": gone,
    }  # fmt: skip
    document = {"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [group], "ras": {}}
    head, mark, tail = json.dumps(document, indent=2).partition('"missing_ranks":')
    return head + mark + tail.replace('"nvml_dev": 0,', '"nvml_dev": 0')


class Server:
    """Answers like NCCL's RAS, or not quite."""

    def __init__(self, body: str, replies: dict[str, str] | None = None) -> None:
        self.heard: list[str] = []
        self._body = body
        self._replies = {"CLIENT": "SERVER PROTOCOL 2\n", "TIMEOUT": "OK\n", "SET": "OK\n"} | (replies or {})
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            link, _ = self._socket.accept()
        except OSError:
            return
        with link, link.makefile("rwb") as stream:
            for raw in stream:
                line = raw.decode().strip()
                self.heard.append(line)
                if line == "VERBOSE STATUS":
                    stream.write(self._body.encode())
                    return
                stream.write(self._replies[line.split()[0]].encode())
                stream.flush()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any) -> Server:
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_the_answer_of_ras_is_read_with_the_comma_that_it_leaves_out(serve: Callable[..., Server]) -> None:
    server = serve(answer([rank(0, 11, AllReduce=12), rank(1, 12, AllReduce=12)], [missing(2, 13)]))
    found = ask_ras(server.address)
    assert found is not None
    group = found["communicators"][0]
    assert (group["hash"], group["size"], found["version"]) == ("0xabc", 3, "2.28.9")
    assert [one["counts"]["AllReduce"] for one in group["ranks"]] == [12, 12]
    assert group["missing_ranks"][0]["pid"] == 13
    assert server.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize(
    ("body", "replies"),
    [
        ("", None),
        ("{", None),
        ("[]", None),
        ('{"nccl_version": "2.30", "communicators": [{"hash": "0x1"}]}', None),
        (answer([], []), {"SET": "ERROR: Unknown command SET FORMAT json\n"}),  # before 2.28.9
        (answer([], []), {"CLIENT": "220 mail.example.org ESMTP\n"}),
    ],
)
def test_an_answer_that_is_not_understood_is_none(
    serve: Callable[..., Server], body: str, replies: dict[str, str] | None
) -> None:
    assert ask_ras(serve(body, replies).address) is None


def test_nobody_there_and_nobody_who_answers_take_no_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert ask_ras(deaf.getsockname()[:2], timeout=0.2) is None
        port = deaf.getsockname()[1]
    assert ask_ras(("127.0.0.1", port)) is None


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "localhost:4000"}, ("localhost", 4000)),
        ({"NCCL_RAS_ADDR": "[::1]:4000"}, ("::1", 4000)),
        ({"NCCL_RAS_ADDR": "nonsense"}, ("localhost", 28028)),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_where_ras_listens(environment: dict[str, str], address: tuple[str, int] | None) -> None:
    assert ras_address([environment]) == address


def watcher(*answers: str, pids: tuple[int, ...]) -> Watcher:
    watching = Watcher({pid: {} for pid in pids})
    for text in answers:
        watching._looks.append(_of_this_node(parse_ras(text), set(pids)))
    return watching


def test_each_process_gets_its_own_counts_and_not_those_of_another_node_with_its_number() -> None:
    first = answer([rank(0, 11, AllReduce=5), rank(1, 12, AllReduce=5), rank(2, 11, "10.0.0.2", AllReduce=4)], [])
    second = answer([rank(0, 11, AllReduce=6), rank(1, 12, AllReduce=6), rank(2, 11, "10.0.0.2", AllReduce=4)], [])
    watching = watcher(first, second, pids=(11, 12))
    assert watching.communicators(11) == [
        {
            "name": "0xabc", "size": 3, "rank": 0, "status": "running",
            "issued": [{"AllReduce": 5}, {"AllReduce": 6}],
        }
    ]  # fmt: skip
    assert watching.communicators(99) == []


def test_ranks_that_left_and_ranks_that_are_dead_are_told_apart() -> None:
    gone = [missing(1, 12), missing(2, 31, "10.0.0.2", considered_dead=True)]
    watching = watcher(answer([rank(0, 11, AllReduce=5)], gone), pids=(11, 12))
    assert [group["status"] for group in watching.communicators(12)] == ["left"]
    assert watching.notes() == ["NCCL takes rank 2 of 3 (pid 31 on 10.0.0.2) of a communicator for dead"]


def test_another_job_that_owns_the_port_is_not_taken_for_ours() -> None:
    watching = watcher(answer([rank(0, 50, AllReduce=5)], []), pids=(11, 12))
    assert watching.communicators(11) == []
    assert watching.notes() == []


def test_looks_that_follow_each_other_are_joined() -> None:
    one: Any = {
        "nccl": [{"name": "a", "size": 2, "rank": 0, "status": "running", "issued": [{"AllReduce": 1}]}],
        "gpus": [{"index": 0, "busy": [100]}],
    }
    two: Any = {
        "nccl": [{"name": "a", "size": 2, "rank": 0, "status": "running", "issued": [{"AllReduce": 2}]}],
        "gpus": [{"index": 0, "busy": [7]}],
    }
    groups, cards = joined([one, two])
    assert groups[0]["issued"] == [{"AllReduce": 1}, {"AllReduce": 2}]
    assert cards == [{"index": 0, "busy": [100, 7]}]


def test_a_machine_without_gpus_has_none() -> None:
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    assert gpus() == {}


# Recorded on two and four H200 by programs/nccl_skip.py and nccl_healthy.py; NCCL 2.28.9.
HUNG = {
    "ddp": ("skipped-collective", (2,), "program text"),
    "ddp_record": ("skipped-collective", (2,), "record of collectives"),
    "item": ("skipped-collective", (2,), "counts of NCCL"),
    "item_two": ("skipped-collective", (1,), "counts of NCCL"),
    "mixed": ("skipped-collective", (2,), "counts of NCCL"),
    "mixed_two": ("skipped-collective", (1,), "counts of NCCL"),
}


def load(name: str) -> Evidence:
    evidence: Evidence = json.loads((Path(__file__).parent / "evidence" / "nccl" / f"{name}.json").read_text())
    return evidence


@pytest.mark.parametrize("name", HUNG)
def test_a_rank_that_left_out_a_collective_on_gpus(name: str) -> None:
    kind, culprits, rests_on = HUNG[name]
    verdict = judge(load(name))
    assert (verdict.hung, verdict.kind, verdict.culprits) == (True, kind, culprits), verdict.text
    assert rests_on in verdict.rests_on


@pytest.mark.parametrize("name", ["long", "late", "alone"])
def test_slow_steps_on_gpus_are_no_hang(name: str) -> None:
    assert not judge(load(name)).hung


def test_ranks_that_issue_operations_move_though_their_stacks_stand_still() -> None:
    evidence = load("mixed")
    for one in evidence["ranks"]:
        for group in one["nccl"]:
            group["issued"][-1] = {**group["issued"][-1], "AllReduce": group["issued"][-1]["AllReduce"] + 1}
    assert not judge(evidence).hung


def test_without_the_use_of_the_gpus_a_busy_rank_is_not_taken_for_a_waiting_one() -> None:
    evidence = load("mixed")
    for one in evidence["ranks"]:
        del one["gpus"]
    assert not judge(evidence).hung
