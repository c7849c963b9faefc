"""`mldebug pairs` where more than one thing goes wrong: hosts that are all gone, noise with tails, many ports."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from mldebug.cluster import PairsEvidence, load_pairs, pair_matrix  # noqa: E402
from mldebug.cluster._start import check_place, is_own  # noqa: E402
from mldebug.cluster.dist._where import Where  # noqa: E402
from mldebug.cluster.pairs import _live as live  # noqa: E402
from mldebug.cluster.pairs import _ping_worker as worker  # noqa: E402
from mldebug.core.errors import MldebugError  # noqa: E402
from tests.bed import bed as beds  # noqa: E402
from tests.bed.bed import Bed  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "NCCL_", "GLOO_", "MASTER_")


def matrix(rate: Any, nodes: int, gpus: int, **more: Any) -> PairsEvidence:
    size = nodes * gpus
    src, dst = np.nonzero(~np.eye(size, dtype=bool))
    found: PairsEvidence = {
        "schema": 1, "gpus": [f"n{at // gpus}:{at % gpus}" for at in range(size)], "src": src.tolist(),
        "dst": dst.tolist(), "gbps": rate[src, dst].tolist(), "status": ["ok"] * len(src), "notes": [], **more,
    }  # fmt: skip
    return found


def tails(seed: int, nodes: int = 4, gpus: int = 8) -> Any:
    """Bandwidths whose noise has heavy tails: now and then one measurement strays by half."""
    rng = np.random.default_rng(seed)
    node = np.arange(nodes * gpus) // gpus
    rate = np.where(node[:, None] == node[None, :], 350.0, 45.0)
    return rate * np.clip(1 + 0.05 * rng.standard_t(3, rate.shape), 0.35, 1.6)


def test_noise_with_tails_is_no_culprit() -> None:
    verdicts = [pair_matrix(matrix(tails(seed), 4, 8)).verdict for seed in range(24)]
    assert [verdict.culprits for verdict in verdicts] == [()] * len(verdicts)


def test_faults_in_noise_with_tails() -> None:
    for seed in range(6):
        rate = tails(seed)
        rate[9, :] *= 0.4
        assert pair_matrix(matrix(rate, 4, 8)).verdict.culprits == ("n1:1",), seed
        rate = tails(seed)
        rate[3, 20] *= 0.15
        assert pair_matrix(matrix(rate, 4, 8)).verdict.culprits == ("n0:3 -> n2:4",), seed


def test_two_pairs_that_were_slow_on_busy_cpus_are_no_gpu() -> None:
    rate = np.full((4, 4), 1.5)
    rate[:, 2] = (0.55, 0.58, 0.0, 1.5)
    assert pair_matrix(matrix(rate, 1, 4, backend="gloo")).verdict.kind == "none"
    rate[:, 2] = rate[2, :] = 0.2
    assert pair_matrix(matrix(rate, 1, 4, backend="gloo")).verdict.culprits == ("n0:2",)


def test_hosts_that_are_known_to_be_missing_are_bad_however_many() -> None:
    names = ["a", "b", "c"]
    ends = [(one, other) for one in range(3) for other in range(3) if one != other]
    evidence: PairsEvidence = {
        "schema": 1, "gpus": names, "src": [one for one, _ in ends], "dst": [other for _, other in ends],
        "gbps": [None] * 6, "status": ["missing"] * 6, "notes": [],
        "blame": [{"gpu": name, "what": "missing", "why": "it is off", "with": [], "round": 0} for name in "bc"],
    }  # fmt: skip
    verdict = pair_matrix(evidence).verdict
    assert set(verdict.culprits) == {"b", "c"} and "it is off" in verdict.reading
    del evidence["blame"]
    assert pair_matrix(evidence).verdict.kind == "none"  # a file says nothing of who was to blame


def test_hosts_that_all_went_are_all_named() -> None:
    evidence = matrix(np.ones((3, 3)), 3, 1, blame=[])
    evidence["gpus"] = ["a", "b", "c"]
    evidence["status"], evidence["gbps"] = ["dead"] * 6, [None] * 6
    evidence["blame"] = [{"gpu": name, "what": "dead", "why": f"{name} is silent", "with": []} for name in "abc"]
    assert set(pair_matrix(evidence).verdict.culprits) == {"a", "b", "c"}


# Ports


@pytest.fixture
def silent() -> Iterator[list[int]]:
    """Ports whose connections never come about: nobody takes what waits there."""
    socks: list[socket.socket] = []
    ports = []
    for _ in range(4):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        ports.append(listener.getsockname()[1])
        socks.append(listener)
        for _ in range(3):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            socks.append(sock)
    yield ports
    for sock in socks:
        sock.close()


def test_reach_tells_silent_ports_from_others(silent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOOKS", 1)
    with socket.socket() as free, socket.socket() as good:
        free.bind(("127.0.0.1", 0))
        good.bind(("127.0.0.1", 0))
        good.listen(16)
        refused, fine = free.getsockname()[1], good.getsockname()[1]
        peers = [["a", "127.0.0.1", [silent[0], silent[1], fine, silent[2]]], ["b", "127.0.0.1", [fine, refused]]]
        found = worker.reach({"peers": peers, "seconds": 0.5})
    assert found["failed"] == {
        "a": {str(port): "filtered (timeout)" for port in silent[:3]}, "b": {str(refused): "refused"},
    }  # fmt: skip


def test_reach_of_many_that_are_silent_does_not_take_for_ever(
    silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of the ports of a host say enough: the others are not waited for."""
    monkeypatch.setattr(worker, "LOOKS", 1)
    monkeypatch.setattr(worker, "BATCH", 12)
    many = [silent[number % 4] for number in range(4)] + list(range(1, 6))
    peers = [[f"h{number}", "127.0.0.1", many] for number in range(8)]
    began = time.monotonic()
    failed = worker.reach({"peers": peers, "seconds": 0.3})["failed"]
    assert set(failed) == {f"h{number}" for number in range(8)}
    assert time.monotonic() - began < 4.0


def test_room_for_neighbours(tmp_path: Path) -> None:
    stat = tmp_path / "arp_cache"
    stat.write_text("entries  allocs table_fulls\n00000013 00000009 00000010\n00000013 00000009 00000002\n")
    assert worker.table_fulls(str(stat)) == 18
    stat.write_text("entries  allocs\n00000013 00000009\n")
    assert worker.table_fulls(str(stat)) == worker.table_fulls(str(tmp_path / "none")) == 0


# What only a machine with GPUs has


@pytest.mark.timeout(120)
def test_a_worker_asks_of_cuda_what_cuda_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators, on a machine that has none: names, clocks, what the process group is bound to."""
    pytest.importorskip("torch")
    program = ROOT / "tests" / "cluster" / "programs" / "pairs_cuda.py"
    monkeypatch.setattr(live, "PROGRAM", f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    for name in [name for name in os.environ if name.startswith((*LAUNCHERS, "RANK", "WORLD_SIZE", "LOCAL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # without it, or a device, nccl is wrong usage
    report = live.measure(live.Options(nproc=2, backend="nccl", bytes=64 << 20, timeout=60))
    assert report.evidence["status"] == ["ok", "ok"], report.evidence["notes"]
    assert report.evidence["device"] == "NVIDIA H100 80GB HBM3"
    assert all(value and value > 0 for value in (*report.evidence["gbps"], *report.evidence["latency_us"]))
    assert any("NVLink" in warning for warning in report.to_dict()["warnings"])  # memory of a CPU is no NVLink


def test_words_for_how_a_pair_ended(tmp_path: Path) -> None:
    words = {
        "timed-out": "hang", "NCCL timeout (30 s)": "hang", "Timed out": "hang", "worker died": "dead",
        "data mismatch": "wrong", "CUDA error: no access": "error", "not ok": "error", "-": "missing", "PASS": "ok",
    }  # fmt: skip
    path = tmp_path / "pairs.csv"
    rows = [f'a:0,b:{number},,"{word}"' for number, word in enumerate(words)]
    path.write_text("\n".join(["src,dst,gbps,status", *rows]))
    assert load_pairs(path)["status"] == list(words.values())


# Launchers


def test_rank_0_where_mpirun_is_not() -> None:
    assert is_own("127.0.0.1") and not is_own("192.0.2.7") and not is_own("no address")
    source = "the host of mpirun; if rank 0 is on another: -x MASTER_ADDR=HOST"
    check_place(Where(("127.0.0.1",), source, (29700,)))
    check_place(Where(("192.0.2.7",), "MASTER_ADDR=192.0.2.7", (29700,)))  # a service's address may be nobody's
    with pytest.raises(MldebugError, match="mpirun on another host") as told:
        check_place(Where(("192.0.2.7",), source, (29700,)))
    assert "-x MASTER_ADDR=" in str(told.value.hint)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := beds.missing():
        pytest.skip(f"no hosts: {why}")
    with Bed(3, tmp_path_factory.mktemp("hurt") / "bed") as found:
        yield found


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**env, "PYTHONPATH": str(ROOT)}


def nodes_of(bed: Bed, host: str) -> list[str]:
    """The pids of what measures on a host."""
    lines = bed.run(host, "ps", "-ww", "-eo", "pid,comm,args").stdout.splitlines()
    words = [line.split(None, 2) for line in lines if "_ping_node" in line]
    return [pid for pid, comm, _ in words if comm.startswith("python")]


@pytest.mark.timeout(120)
def test_hosts_that_all_stop_are_named_and_nothing_is_left(bed: Bed) -> None:
    stopped: list[str] = []

    def stop() -> None:
        for _ in range(400):
            found = {host: nodes_of(bed, host) for host in bed.hosts}
            if all(len(pids) >= 2 for pids in found.values()):  # else one may yet come that is not stopped
                for host, pids in found.items():
                    bed.run(host, "kill", "-STOP", *pids)
                    stopped.extend(pids)
                return
            time.sleep(0.02)

    breaker = threading.Thread(target=stop)
    breaker.start()
    command = (sys.executable, "-m", "mldebug", "pairs", "--ping", "--hosts", "h1,h2,h3", "--json", "--timeout", "4")
    done = bed.run("h1", *command, "--ssh-config", bed.ssh_config, timeout=90, env=environment())
    breaker.join()
    if len(stopped) < 6 or done.returncode == 0:
        pytest.skip("the run was over before its processes could be stopped")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    culprits = set(told["verdict"]["culprits"])  # once two are given up nothing is left to be done
    silent = {host for host in bed.hosts if f"{host}:0: {host} said nothing for" in " ".join(told["notes"])}
    assert culprits and culprits <= silent and len(silent) > 1, done.stdout
    if not told["pairs"].get("ok"):  # else one that was measured well with another before it stopped may be no culprit
        assert len(culprits) > 1, done.stdout
    for _ in range(50):
        left = [pid for host in bed.hosts for pid in nodes_of(bed, host)]
        if not left:
            break
        time.sleep(0.1)
    assert left == []


@pytest.mark.timeout(120)
def test_the_other_one_of_two_is_off(bed: Bed) -> None:
    bed.blackhole("h3")
    try:
        command = (sys.executable, "-m", "mldebug", "pairs", "--ping", "--hosts", "h1,h3", "--json", "--timeout", "4")
        done = bed.run("h1", *command, "--ssh-config", bed.ssh_config, timeout=90, env=environment())
    finally:
        bed.join("h3")
    assert done.returncode == 1, done.stdout
    assert json.loads(done.stdout)["verdict"]["culprits"] == ["h3"]


@pytest.mark.timeout(120)
def test_under_mpirun(bed: Bed) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    ping = (sys.executable, "-m", "mldebug", "pairs", "--ping", "--json")
    words = ("mpirun", "--allow-run-as-root", "--mca", "plm_rsh_args", f"-F {bed.ssh_config}", "-x", "PYTHONPATH")
    for hosts, more, status, text in (
        ("h1:2,h2:2", (), 0, '"ok": true'),
        ("h2:1,h3:1", (), 1, "hint: mpirun -x MASTER_ADDR=h2"),
        ("h2:1,h3:1", ("-x", "MASTER_ADDR=h2"), 0, '"ok": true'),
    ):
        done = bed.run("h1", *words, *more, "--host", hosts, *ping, timeout=60, env=environment())
        assert (done.returncode, text in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr
