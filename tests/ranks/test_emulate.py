"""emulate(): several nodes on this machine, and nothing of them left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldebug.core.errors import UsageError
from mldebug.ranks import EmulateReport, emulate
from mldebug.ranks._emulate_nodes import environment, share_gpus
from mldebug.ranks._emulate_output import Output

from .rank_kit import FORKED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

PROGRAM = Path(__file__).parent / "programs" / "all_reduce_and_tell.py"
ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [
    sys.executable, "-c", "import sys; from mldebug.cli import _emulate; p = _emulate.PARSER(prog='mldebug emulate');"
    "_emulate.add_arguments(p); sys.exit(_emulate.run(p.parse_args(sys.argv[1:])))",
]  # fmt: skip


def _allowed() -> bool:
    words = ["unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "sh", "-c", "ip link add x0 type bridge"]
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip", path=path) is None:
        return False
    return subprocess.run(words, capture_output=True, check=False, env={"PATH": path}).returncode == 0


needs_namespaces = pytest.mark.skipif(not _allowed(), reason="namespaces need root and `ip`")
both_ways = pytest.mark.parametrize(
    "plain", [pytest.param(False, marks=needs_namespaces, id="namespaces"), pytest.param(True, id="plain")]
)


def run(command: list[str], **options: object) -> tuple[EmulateReport, list[str], list[str]]:
    """The report, the lines of the nodes, and what was told of them."""
    told: list[str] = []
    with tempfile.TemporaryFile() as out:
        report = emulate(command, stdout=out.fileno(), stderr=out.fileno(), tell=told.append, **options)  # type: ignore[arg-type]
        out.seek(0)
        return report, out.read().decode().splitlines(), told


def shell(text: str, **options: object) -> tuple[EmulateReport, list[str], list[str]]:
    return run(["bash", "-c", text], **options)


@pytest.fixture
def mark() -> Iterator[str]:
    """A number of seconds that no other process sleeps; after the test none may."""
    seconds = f"9{os.getpid()}{time.monotonic_ns() % 1000:03d}"
    yield seconds
    deadline = time.monotonic() + 5
    while (left := sleeping(seconds)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes of the nodes are left"


def sleeping(seconds: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(path.parent.name))
    return found


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@both_ways
def test_a_plain_torchrun_becomes_a_job_of_two_nodes(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = links()
    launch = [sys.executable, str(FORKED), "-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAM)]
    report, lines, told = run(launch, nodes=2, gpus_per_node=2, plain=plain)
    here = sorted(line for line in lines if " here " in line)
    assert (report.status, report.namespaces, len(here)) == (0, not plain, 4), lines
    for line in here:
        prefix, _here, host, *pairs = line.split()
        value = dict(pair.split("=") for pair in pairs)
        node = int(value["GROUP_RANK"])
        assert prefix == f"[node{node}]"
        assert (host == f"node{node}") is not plain
        assert int(value["RANK"]) == 2 * node + int(value["LOCAL_RANK"])
        assert (value["WORLD_SIZE"], value["LOCAL_WORLD_SIZE"], value["sum"]) == ("4", "2", "6")
    assert "plain processes: as --plain asks" in told[0] if plain else "a network of its own" in told[0]
    assert links() == before


def test_a_node_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = [sys.executable, str(FORKED), "-m", "torch.distributed.run", "--nproc-per-node", "1", str(PROGRAM), "1"]
    report, lines, told = run(launch, nodes=2, gpus_per_node=1, plain=True, grace=20)
    assert report.status == 1, lines
    assert any(line.startswith("[node1] ") and "exitcode  : 9" in line for line in lines)
    assert any("failed with status 1" in line for line in told)


@both_ways
def test_status_of_the_first_that_fails_and_the_others_are_ended(plain: bool, mark: str) -> None:
    text = f"if [ {{node}} = 1 ]; then exit 7; fi; (setsid sleep {mark} &); sleep {mark}"
    report, _lines, told = shell(text, nodes=3, plain=plain, grace=0.3)
    assert report.status == 7
    assert report.seconds < 10
    assert [node.status for node in report.nodes] == [143, 7, 143]
    assert "node1 failed with status 7; 2 more, which have 0.3 s to end" in told
    assert report.text().startswith("3 nodes, ")
    assert "node1 failed first, with status 7" in report.text()
    assert json.loads(report.json())["nodes"][1]["status"] == 7


@both_ways
def test_what_a_node_is_told(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")  # of an outer launcher
    text = "echo {node}/{nodes} $NODE_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT {master_addr}:{master_port}"
    text += ' "${RANK-none}" {other}'
    report, lines, _told = shell(text, nodes=2, plain=plain)
    assert report.ok
    for line in lines:
        _prefix, template, ranks, address, again, rank, other = line.split()
        assert template == ranks
        assert address == again
        assert (address == "10.77.7.1:29500") is not plain
        assert (rank, other) == ("none", "{other}")
    assert {line.split()[1] for line in lines} == {"0/2", "1/2"}


@needs_namespaces
def test_a_node_is_a_host_of_its_own() -> None:
    text = "hostname; ls /proc | grep -c '^[0-9]'; getent hosts node1 | head -1; ls /dev/shm | wc -l; touch /dev/shm/x"
    report, lines, _told = shell(text + "; ls /sys/class/net >/dev/null; sleep 0.2", nodes=2)
    own = [line.removeprefix("[node1] ") for line in lines if line.startswith("[node1] ")]
    assert report.ok
    assert own[0] == "node1"
    assert int(own[1]) < 20
    assert own[2].split() == ["10.77.7.2", "node1"]
    assert own[3] == "0"
    assert not Path("/dev/shm/x").exists()


def test_whole_lines_with_the_name_of_the_node() -> None:
    text = "for i in $(seq 300); do printf 'aaaaaaaaaaaa'; printf 'bbbbbbb %d\\n' $i; done; printf 'no end'"
    _report, lines, _told = shell(text, nodes=3, plain=True)
    for node in range(3):
        own = [line.removeprefix(f"[node{node}] ") for line in lines if line.startswith(f"[node{node}] ")]
        assert own == [*(f"aaaaaaaaaaaabbbbbbb {number}" for number in range(1, 301)), "no end"]
    _report, lines, _told = shell("echo bare", nodes=2, plain=True, prefix=False)
    assert lines == ["bare", "bare"]


def test_a_full_disk_does_not_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        report = emulate(["bash", "-c", "echo x; sleep 0.1; echo y"], nodes=2, plain=True, stdout=full.fileno())
    assert report.ok
    assert capfd.readouterr().err.count("lost from here on: No space left on device") == 1


def test_a_reader_that_went_away_is_told() -> None:
    read, write = os.pipe()
    os.close(read)
    assert Output(write).writer("[node0] ").take(b"x\n") is False
    os.close(write)


def start(*words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": path})  # fmt: skip


def wait_for(mark: str, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(sleeping(mark)) < number:
        assert time.monotonic() < deadline, "the nodes did not start"
        time.sleep(0.05)


@both_ways
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing_behind(plain: bool, number: int, mark: str) -> None:
    before = links()
    options = ["--plain"] if plain else []
    process = start(
        *options, "--nodes", "2", "--grace", "1", "--", "bash", "-c", f"(setsid sleep {mark} &); sleep {mark}"
    )
    wait_for(mark, 4)
    process.send_signal(number)
    _out, err = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], err
    assert "Traceback" not in err
    assert links() == before  # and the fixture looks for processes


def test_a_second_ctrl_c_kills(mark: str) -> None:
    process = start("--plain", "--grace", "60", "--", "bash", "-c", f"trap '' INT TERM; sleep {mark}; sleep {mark}")
    wait_for(mark, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_program_that_is_asked_to_end_may_do_so_in_its_own_way() -> None:
    text = "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    process = start("--plain", "--nodes", "1", "--", "bash", "-c", text)
    assert process.stdout is not None
    assert process.stdout.readline() == "[node0] ready\n"
    process.send_signal(signal.SIGINT)
    out, _err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "[node0] saved\n")


def test_timeout(mark: str) -> None:
    report, _lines, told = shell(f"sleep {mark}", plain=True, timeout=0.5, grace=3)
    assert (report.status, report.ended) == (124, "timeout")
    assert told[1:] == ["timeout: 0.5 s are over; the nodes have 3 s to end"]  # and no status of theirs


def test_nodes_that_do_not_end_when_asked_are_killed(mark: str) -> None:
    text = f"trap '' TERM; sleep {mark}; sleep {mark}"
    process = start("--plain", "--timeout", "0.3", "--grace", "0.1", "--", "bash", "-c", text)
    try:
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 124


def test_json_keeps_stdout_for_the_document() -> None:
    process = start("--plain", "--json", "--nodes", "2", "--", "bash", "-c", "echo hello")
    out, err = process.communicate(timeout=30)
    assert json.loads(out)["ok"]
    assert err.count("hello") == 2


@pytest.mark.parametrize("options", [{"nodes": 0}, {"nodes": 999}, {"gpus_per_node": -1}])
def test_numbers_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        emulate(["true"], **options)  # type: ignore[arg-type]


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no such program"):
        emulate(["no-such-program-here"])
    with pytest.raises(UsageError, match="no command"):
        emulate([])


@pytest.mark.parametrize(
    "words",
    ["torchrun --standalone train.py", "/x/torchrun --nproc-per-node 2 --no_python --standalone train.py",
     "python -m torch.distributed.run --nproc-per-node=2 --standalone train.py"],
)  # fmt: skip
def test_standalone_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match="--standalone makes each node a job of its own") as told:
        emulate(["env", *words.split()], nodes=2)
    assert "leave --standalone out" in str(told.value.hint)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [("torchrun --nproc-per-node 2 -m train --standalone", 2), ("train.py --standalone", 2),
     ("torchrun --standalone train.py", 1)],
)  # fmt: skip
def test_standalone_of_a_script_or_of_one_node_is_not(words: str, nodes: int) -> None:
    report, lines, _told = run(["echo", *words.split()], nodes=nodes, plain=True)
    assert report.ok
    assert f"[node0] {words}" in lines  # nodes come in any order


@pytest.mark.parametrize(
    ("real", "nodes", "each", "shares"),
    [
        ([], 2, 4, ["", ""]),
        (["0", "1", "2", "3"], 2, 2, ["0,1", "2,3"]),
        (["4", "5", "6", "7"], 2, 2, ["4,5", "6,7"]),
        (["0", "1"], 2, 2, ["0,1", "0,1"]),
        (["0"], 2, 4, ["0", "0"]),
        (["GPU-a", "GPU-b"], 2, 1, ["GPU-a", "GPU-b"]),
        (["0", "1"], 2, 0, ["", ""]),
    ],
)
def test_gpus_are_shared_out(real: list[str], nodes: int, each: int, shares: list[str]) -> None:
    found, words = share_gpus(real, nodes, each)
    assert found == shares
    assert ("share" in words) is (0 < len(real) < nodes * each)


def test_options_of_torchrun_win() -> None:
    def of(*words: str) -> dict[str, str]:
        return environment(["torchrun", *words, "train.py"], 1, 2, "10.0.0.1", 29500, "10.0.0.2", "")

    assert of()["PET_RDZV_ENDPOINT"] == "10.0.0.1:29500"
    assert of()["PET_NODE_RANK"] == "1"
    assert "PET_RDZV_ENDPOINT" not in of("--master_addr", "x")
    assert "PET_NODE_RANK" not in of("--rdzv-backend=c10d")
    assert of()["NCCL_HOSTID"] != environment(["x"], 0, 2, "a", 1, "a", "")["NCCL_HOSTID"]
