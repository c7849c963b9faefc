"""dist-test where something is in its way: few open files, a folder full of traps, strangers, damaged files, ways that
carry little, signals. It says so in a line or a document, and never with a traceback."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mldebug.cluster.dist._collector import Collector, Config
from mldebug.cluster.dist._evidence import empty, load_evidence, new_rank
from mldebug.cluster.dist._judge import judge_dist_test
from mldebug.cluster.dist._probe import LARGE, answer, send_large, some_of_other_hosts
from mldebug.cluster.dist._report import make_report
from mldebug.cluster.dist._wire import connects, listen
from mldebug.core.errors import MldebugError, UsageError
from tests.at_once import AtOnce, chosen
from tests.bed import bed as beds

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).parent / "programs" / "dist_test.py")
WAITS = {"DIST_LIGHT": "1", "DIST_FAULT": '{"ranks": [1], "at": "init", "do": "wait"}'}
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("collectors")]


@pytest.fixture(scope="module")
def collectors(request: pytest.FixtureRequest) -> Iterator[AtOnce]:
    """Those that wait for ranks that do not come, all at once, from the first test on."""
    lines, comes = chosen(request, "line"), chosen(request, "come")
    with AtOnce(len(lines) + len(comes) or 1) as found:
        for come in comes:
            found.add(come, partial(met, come))
        for line in lines:
            found.add(line, partial(with_stranger, line))
        yield found


def env(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def command(*words: str) -> list[str]:
    return [sys.executable, PROGRAM, "--backend", "gloo", "--json", *words]


# What is around it


def test_too_few_open_files_are_said() -> None:
    limited = ["/bin/sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *command("--nproc", "40")]
    done = subprocess.run(limited, env=env(DIST_LIGHT="1"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith("cannot start rank ") and "too many open files" in error["message"]
    assert "ulimit" in error["hint"]


def test_modules_of_the_folder_are_not_taken(tmp_path: Path) -> None:
    """As in a checkout of PyTorch, which has a folder torch that cannot be imported."""
    pytest.importorskip("torch")
    for name in ("torch", "selectors", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    words = [sys.executable, "-c", "import sys; sys.path[0:1] = []; from mldebug.cli import main; sys.exit(main())"]
    words += ["dist-test", "--backend", "gloo", "--nproc", "2", "--bytes", "4"]
    done = subprocess.run(words, env=env(), cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0 and done.stdout.startswith("dist-test: all is well: 2 ranks"), done.stderr


@pytest.mark.skipif(bool(beds.missing()), reason=f"no namespaces: {beds.missing()}")
def test_a_loopback_that_is_down_is_no_fault_of_ours() -> None:
    words = ["unshare", "--net", *command("--nproc", "2", "--timeout", "2")]
    done = subprocess.run(words, env=env(DIST_LIGHT="1"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert "network unreachable" in error["message"] and "ip link set lo up" in error["hint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_signals_leave_nothing_behind(number: signal.Signals) -> None:
    process = subprocess.Popen(
        command("--nproc", "2"), env=env(**WAITS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children = _children_once_there(process.pid, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    # A terminal that closed has nobody to read a report.
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert "Traceback" not in err and (not out or json.loads(out)["ended"] == "interrupted")
    for _ in range(100):
        alive = [pid for pid in children if _runs(pid)]
        if not alive:
            break
        time.sleep(0.05)
    assert alive == []


def _children_once_there(pid: int, count: int) -> list[int]:
    found: list[int] = []
    for _ in range(2000):
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if len(found) >= count:
            time.sleep(0.5)
            return found
        time.sleep(0.05)
    raise AssertionError(f"only {found} were started")


def _runs(pid: int) -> bool:
    try:
        return "dist_rank.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"t":' * 50_000, b"9" * 5000, b'{"t": "hello", "job": []}'])
def test_a_stranger_does_not_end_the_collector(collectors: AtOnce, line: bytes) -> None:
    ended, report = collectors[line]
    assert ended and report["culprits"][0]["kind"] == "missing"


def with_stranger(line: bytes) -> tuple[bool, dict[str, Any]]:
    """Whether the collector came to its end, and its report."""
    listener = listen(address="127.0.0.1")
    place = ("127.0.0.1", listener.getsockname()[1])
    collector = Collector(Config(1, "job", timeout=1.5), listener, lambda evidence: make_report(evidence).to_dict())
    thread = threading.Thread(target=collector.run, daemon=True)
    thread.start()
    stranger = connects([place], 1.0)[place]
    assert not isinstance(stranger, str)
    stranger.setblocking(True)
    stranger.sendall(line + b"\n")
    thread.join(100.0)
    stranger.close()
    return not thread.is_alive(), collector.report


# Who speaks of rank 0


def test_who_does_not_find_rank_0_says_who_it_is() -> None:
    evidence = {**empty(3, "gloo", 15.0), "ended": "no collector", "missing_why": "no collector answers on h1: refused"}
    evidence["ranks"]["1"] = new_rank(1, 0, "h2", "", 11, 10)
    (one,) = judge_dist_test(evidence).culprits
    assert (one.rank, one.reason) == (0, "no collector answers on h1: refused (seen by rank 1 on h2)")


def test_who_cannot_resolve_the_name_of_rank_0_is_to_blame_itself() -> None:
    why = "the host of rank 0, h9 (MASTER_ADDR=h9), cannot be resolved here"
    evidence = {**empty(3, "gloo", 15.0), "ended": "no collector", "missing_why": why}
    evidence["ranks"]["1"] = new_rank(1, 0, "h2", "", 11, 10)
    (one,) = judge_dist_test(evidence).culprits
    assert (one.rank, one.host, one.reason) == (1, "h2", why) and "getent hosts" in one.hint


# Ways that carry little


def test_data_that_comes_and_data_that_does_not() -> None:
    well, deaf = listen(address="127.0.0.1"), listen(address="127.0.0.1")
    answer(well)
    socks = []
    for listener in (well, deaf, well):
        sock = socket.create_connection(listener.getsockname())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        socks.append(sock)
    first, second, third = send_large(socks, 1.0)
    assert first is not None and third is not None and max(first, third) < 1.0
    assert second is None
    for sock in (*socks, well, deaf):
        sock.close()


def test_a_peer_that_closes_is_no_answer() -> None:
    listener = listen(address="127.0.0.1")
    sock = socket.create_connection(listener.getsockname())
    listener.close()
    assert send_large([sock], 2.0) == [None]
    sock.close()


@pytest.mark.parametrize("hosts, most", [(1, 0), (2, 1), (5, 4), (8, 7), (512, 10)])
def test_each_rank_tries_one_rank_of_some_hosts_and_every_host_is_tried(hosts: int, most: int) -> None:
    peers = [[rank, f"n{rank // 2}", "10.0.0.1", 1] for rank in range(2 * hosts)]
    tried: set[object] = set()
    for rank in range(2 * hosts):
        chosen = some_of_other_hosts(rank, peers)
        assert len(chosen) <= most and all(int(str(one)) // 2 != rank // 2 for one in chosen)
        tried |= chosen
    assert len(tried) == (2 * hosts if most else 0)


def ways(*rows: tuple[int, int, float]) -> dict[str, Any]:
    """Evidence of three hosts: seconds from rank to rank."""
    evidence = empty(3, "gloo", 15.0)
    for rank in range(3):
        evidence["ranks"][str(rank)] = new_rank(rank, 0, f"h{rank + 1}", "", 11, 10)
    for source, target, seconds in rows:
        evidence["ranks"][str(source)]["large"].append([target, f"h{target + 1}", "10.0.0.1", 5, seconds])
    return evidence


def test_a_slow_sender_is_named() -> None:
    rows = [(0, 1, 0.002), (0, 2, 0.003), (1, 0, 0.002), (1, 2, 0.002), (2, 0, 4.1), (2, 1, 3.9)]
    (one,) = judge_dist_test(ways(*rows)).culprits
    assert (one.kind, one.rank, one.host) == ("slow", 2, "h3")
    assert "h3 -> h1, 256 KiB took 4.1 s, and 2 ms as a rule" in one.reason and one.fatal


def test_a_slow_receiver_is_named() -> None:
    rows = [(0, 1, 0.002), (0, 2, 3.0), (1, 0, 0.002), (1, 2, 2.9), (2, 0, 0.002), (2, 1, 0.003)]
    assert [one.rank for one in judge_dist_test(ways(*rows)).culprits] == [2]


@pytest.mark.parametrize("rows", [
    [(0, 1, 0.02), (1, 0, 0.9)],
    [(0, 1, 1.4), (0, 2, 1.5), (1, 0, 1.2), (2, 0, 1.6)],  # a slow network, or a machine with much to do
    [],
])  # fmt: skip
def test_ways_that_are_no_slower_than_the_others_are_well(rows: list[tuple[int, int, float]]) -> None:
    assert judge_dist_test(ways(*rows)).culprits == ()


def test_large_packets_that_vanish_are_the_receivers() -> None:
    evidence = ways()
    for rank in (0, 1):
        evidence["ranks"][str(rank)]["reach"].append([2, "h3", "10.0.0.3", 5, f"{LARGE >> 10} KiB do not come through"])
    (one,) = judge_dist_test(evidence).culprits
    assert one.rank == 2 and "h1 -> h3 (10.0.0.3):5 256 KiB do not come through, and 1 more ways" in one.reason
    assert "MTU" in one.hint


# Files that are damaged

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**40, -1, math.nan, math.inf, "²", "٣", "\x1b[31m", "9" * 400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
QUIET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None,
    derandomize=True,
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [way, *(one for name, item in items for one in places(item, (*way, name)))]


def damaged(document: Any, way: tuple[Any, ...], junk: Any) -> Any:
    """The document with something else, or nothing (`...`), in one place."""
    if not way:
        return None if junk is ... else junk
    document = copy.deepcopy(document)
    inner = document
    for name in way[:-1]:
        inner = inner[name]
    if junk is ...:
        del inner[way[-1]]
    else:
        inner[way[-1]] = junk
    return document


def recorded() -> dict[str, Any]:
    """Evidence with something of everything in it."""
    evidence = ways((0, 1, 0.02), (1, 2, 3.0))
    evidence |= {"ended": "a rank failed", "seconds": 3.0, "plan": {"0": "h1"}, "hosts": {"h3": "no ssh"}}
    evidence["wrong"] = [
        {"rank": 1, "check": "reduce fp32 4 B", "source": 0, "count": 1, "of": 1, "index": 0, "got": 1.0, "want": 2.0}
    ]
    evidence["left_out"] = [["reduce bf16", "not supported"]]
    evidence["clashes"] = [{"rank": 1, "host": "h3", "pid": 5, "why": "rank 1 is already taken"}]
    for name, one in evidence["ranks"].items():
        one["checks"] = {"memory": {"bytes": 1 << 30, "seconds": 0.1}, "copy": {"to_GBps": 20.0}}
        one["reach"] = [[2, "h3", "10.0.0.3", 5, "refused"]]
        one["error"] = {"type": "RuntimeError", "message": "NCCL error", "after": 1.0} if name == "1" else None
        one["code"], one["skew"], one["apart"] = -9 if name == "2" else None, 3600.5, []
        one["facts"] = {
            "torch": "2", "cuda": "13", "driver": "", "nccl": "2.28", "backend": "nccl", "python": "3",
            "device": {"kind": "cuda", "index": 0, "uuid": "GPU-1", "name": "H100", "pci": "0", "numa_node": "0",
                       "local_cpulist": "0-3"},
            "interfaces": {"eth0": {"addresses": ["10.0.0.1"], "mtu": 1500, "state": "up"}},
            "hostname": {"name": "h1", "addresses": ["127.0.1.1"]}, "door": ["127.0.0.1", 5], "cpus": [0, 1],
            "environment": {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": name}, "libraries": ["/a/libnccl.so.2"],
            "infiniband": ["mlx5_0/1 DOWN"], "shm": 1, "memlock": 2, "topology": {"NVLinks": "18 of 18 up"},
            "master": ["10.0.0.1"], "plugins": [name],
        }  # fmt: skip
    return evidence


RECORDED = recorded()
PLACES = places({"evidence": RECORDED})


@QUIET
@given(data=st.data())
def test_a_damaged_file_is_judged_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    told = damaged({"evidence": RECORDED}, data.draw(st.sampled_from(PLACES)), data.draw(JUNK | st.just(...)))
    file = tmp_path / "run.json"
    file.write_text(json.dumps(told))
    _judged(file)


def test_each_part_may_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for way in PLACES:
        file.write_text(json.dumps(damaged({"evidence": RECORDED}, way, ...)))
        _judged(file)


@QUIET
@given(cut=st.integers(0, 6000), junk=st.binary(max_size=5))
def test_a_file_that_was_cut(tmp_path: Path, cut: int, junk: bytes) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(json.dumps(RECORDED).encode()[:cut] + junk)
    _judged(file)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"evidence":' * 50_000, "1" * 5000, "", "\0", "NaN", "[]"])
def test_what_is_no_evidence_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(UsageError):
        load_evidence(file)


@pytest.mark.parametrize("world", [0, -3, 10**9, 10**30, True, 2.5, "4", None])
def test_a_world_that_cannot_be_is_refused(tmp_path: Path, world: Any) -> None:
    """It is counted through for ranks that are missing."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**RECORDED, "world": world}))
    with pytest.raises(UsageError, match="damaged"):
        load_evidence(file)


def test_what_is_whole_is_judged_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(make_report(RECORDED).json())
    assert judge_dist_test(load_evidence(file)) == judge_dist_test(RECORDED)


def _judged(file: Path) -> None:
    try:
        evidence = load_evidence(file)
    except MldebugError:
        return
    report = make_report(evidence, verbose=True)
    assert report.text()
    json.loads(report.json())


# Several nodes on one machine


@pytest.mark.parametrize("come", [2, 1])
def test_nodes_that_meet_over_a_loopback_address_are_no_worlds_apart(collectors: AtOnce, come: int) -> None:
    """As torchrun with two nodes on one machine; where the others do not come it is said in some seconds."""
    soon, kinds = collectors[come]
    assert not soon and "apart" not in kinds if come == 2 else soon and kinds[0] == "apart"


def met(come: int) -> tuple[bool, list[str]]:
    """What is said of two nodes of which so many come, and leave after some seconds; whether that was before."""
    listener = listen(address="127.0.0.1")
    place = ("127.0.0.1", listener.getsockname()[1])
    collector = Collector(Config(2, "job", timeout=30), listener, lambda evidence: make_report(evidence).to_dict())
    thread = threading.Thread(target=collector.run, daemon=True)
    thread.start()
    socks = []
    for rank in range(come):
        sock = connects([place], 1.0)[place]
        assert not isinstance(sock, str)
        told = {"t": "hello", "job": "job", "host": "h", "boot": "", "pid": 5, "world": 2, "local_world": 1}
        told |= {"apart": ["MASTER_ADDR=localhost is 127.0.0.1", "export it"], "ranks": [[rank, 0, 6]]}
        sock.sendall(json.dumps(told).encode() + b"\n")
        socks.append(sock)
    thread.join(8.0 if come == 2 else 15.0)
    soon = not thread.is_alive()
    for sock in socks:
        sock.close()
    thread.join(100.0)
    return soon, [one["kind"] for one in collector.report["culprits"]]
