"""`mldebug comms` with ranks on this host, over gloo: what is measured, and what is left when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster.collectives._save import load
from mldebug.cluster.collectives._table import COLLECTIVES
from tests.at_once import AtOnce, chosen

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "comms.py"
TORCHRUN = ROOT / "tests" / "forked.py"
QUICK = ("--backend", "gloo", "-n", "2", "-w", "1")


def start(*words: str, faults: Any = (), **more: Any) -> subprocess.Popen[str]:
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COMMS_FAULTS": json.dumps(list(faults)),
        "COMMS_MARK": " ".join(words),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(run_torch: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """Its status, stdout and stderr. What looks after the ranks is forked of it, and so are they."""

    def run(*words: str, faults: Any = ()) -> tuple[int, str, str]:
        case = case_of(words[words.index("-o") + 1]) if "-o" in words else "comms_node"
        env = {"OMP_NUM_THREADS": "1", "COMMS_FAULTS": json.dumps(list(faults)), "COMMS_CASE": case}
        done = run_torch(PROGRAM, *words, timeout=60, env=env)
        return done.returncode, done.stdout, done.stderr

    return run


def case_of(mark: object) -> str:
    """What the processes are called that are forked for this file."""
    return f"c{zlib.crc32(str(mark).encode()):08x}"


def left_behind(mark: Path) -> list[str]:
    """Processes that have `mark` in their command line or environment, or are called so, once what ends has had time
    to."""
    limit = time.monotonic() + 5
    while (found := marked(mark)) and time.monotonic() < limit:
        time.sleep(0.1)
    return found


def marked(mark: Path) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) != os.getpid():
            try:
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                name = (folder / "comm").read_text().strip()
            except OSError:
                continue
            if str(mark).encode() in text or name == case_of(mark):
                found.append(folder.name)
    return found


def test_all_collectives_deliver_what_they_should(run: Run, tmp_path: Path) -> None:
    status, out, err = run(
        "comms", "all", "--nproc", "3", *QUICK, "-b", "4K", "-e", "64K", "-f", "16", "-d", "float,bf16", "-r", "1",
        "-o", str(tmp_path / "all.json"), "--wide",
    )  # fmt: skip
    assert status == 0, out + err
    told = load(str(tmp_path / "all.json"))
    assert {(row["collective"], row["dtype"]) for row in told["rows"]} == {
        (name, dtype) for name in COLLECTIVES for dtype in ("float32", "bfloat16")
    }
    cells = [row[place] for row in told["rows"] for place in ("out_of_place", "in_place") if place in row]
    assert len(told["rows"]) == 36 and all(cell["wrong"] == 0 and cell["busbw"] > 0 for cell in cells)
    assert {cell["mode"] for cell in cells} == {"in turn"} and {len(cell["by_rank"]) for cell in cells} == {3}
    assert "# Out of bounds values : 0 OK" in out
    both = next(line for line in out.splitlines() if line.split()[2:5] == ["float32", "none", "-1"])
    assert len(both.split()) == 5 + 8 + len(["in", "turn"])


# What rank 1 does -> (in which step, how it ended, a part of why)
ENDS = {
    "stop": ("check", "hang", "is stopped (SIGSTOP)"),
    "hang": ("warm", "hang", "did not come as far as the others"),
    "kill": ("time", "dead", "killed by SIGKILL, while calls were timed"),
    "oom": ("warm", "memory", "out of memory"),
}


@dataclass(frozen=True)
class Told:
    """What came of one with a fault."""

    status: int
    out: str
    err: str
    path: Path
    left: list[str]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Those that wait for a rank, all at once."""

    def ends(do: str, path: Path) -> Told:
        words = ("--nproc", "3", *QUICK, "-e", "128K", "--timeout", "4", "-o", str(path))
        faults = [{"rank": 1, "step": ENDS[do][0], "bytes": 65536, "do": do}]
        return Told(*run("allreduce", *words, faults=faults), path, left_behind(path))

    with AtOnce(len(ENDS)) as found:
        for do in chosen(request, "do"):
            found.add(do, partial(ends, do, tmp_path_factory.mktemp(do) / "run.jsonl"))
        yield found


@pytest.mark.parametrize("do", ENDS)
def test_what_was_measured_is_kept_and_the_culprit_named(ended: AtOnce, do: str) -> None:
    _, how, why = ENDS[do]
    found: Told = ended[do]
    told = load(str(found.path))
    assert found.status == 1, found.out + found.err
    assert (told["ended"], told["culprits"]) == (how, [1]) and why in told["why"]
    assert [row["bytes"] for row in told["rows"]] == [32768]
    assert found.out.startswith("comms: ended early") and "hint: " in found.out
    assert found.left == []


def test_wrong_contents_are_counted(run: Run, tmp_path: Path) -> None:
    status, out, _ = run(
        "allreduce", "--nproc", "2", *QUICK, "-e", "64K", "-o", str(tmp_path / "run.json"),
        faults=[{"rank": 1, "step": "call", "do": "corrupt"}],
    )  # fmt: skip
    told = load(str(tmp_path / "run.json"))
    assert status == 1 and "2 WRONG values" in out and "# Out of bounds values : 2 FAILED" in out
    assert told["culprits"] == [1] and [row["in_place"]["wrong"] for row in told["rows"]] == [1, 1]


def test_a_slow_rank_is_named(run: Run) -> None:
    status, out, err = run(
        "allreduce", "--nproc", "3", *QUICK, "-e", "32K", faults=[{"rank": 2, "step": "", "do": "slow"}]
    )
    assert status == 0, out + err
    assert "slow: rank 2 on" in " ".join(out.split())


@pytest.mark.parametrize(
    "number, suffix", [(signal.SIGINT, ".jsonl"), (signal.SIGTERM, ".json")], ids=["SIGINT", "SIGTERM"]
)
def test_interrupted(tmp_path: Path, number: int, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    words = ("comms", "all_reduce", "--nproc", "2", "--backend", "gloo", "-n", "50", "-e", "16M", "-o", str(path))
    process = start(*words, start_new_session=True)
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not (path.exists() and '"in_place"' in path.read_text()):
        time.sleep(0.02)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=20)
    told = load(str(path))
    assert process.returncode == (130 if number == signal.SIGINT else 143), out + err
    assert told["ended"] == "interrupted" and 1 <= len(told["rows"]) < 10
    assert "ended early (interrupted)" in out and "Traceback" not in err
    assert left_behind(path) == []


def test_killed_outright_the_file_is_whole(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = start("allreduce", "--nproc", "2", "--backend", "gloo", "-n", "50", "-e", "16M", "-o", str(path))
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not (path.exists() and '"in_place"' in path.read_text()):
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=20)
    assert load(str(path))["ended"] == "killed" and load(str(path))["rows"]
    status, out, _ = run("comms", "--from", str(path))
    assert status == 1 and "ended early (killed)" in out


def test_under_torchrun_all_ranks_get_the_report(
    run_torch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, subprocess\nfrom mldebug.cluster import comms\nfrom tests.forked import forks\n"
        "subprocess.Popen = forks(1, 'comms_node')\n"
        "report = comms('sendrecv', first=4096, last=8192, iters=2, backend='gloo')\n"
        "text = f'{report.ok} {len(report.rows)} {report.best(\"sendrecv\"):.6g}'\n"
        "print(f'rank {os.environ[\"RANK\"]}: {text}\\n', end='')\n"
    )
    done = run_torch(
        TORCHRUN, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", script, timeout=90,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[0] for line in said] == ["rank 0", "rank 1"]
    assert len({line.split(": ")[1] for line in said}) == 1 and said[0].split()[2:4] == ["True", "2"]


def test_objects_and_stability(run_torch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_torch(OBJECTS, timeout=90)
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


OBJECTS = """
import subprocess

from mldebug.cluster import comms
from tests.forked import forks

subprocess.Popen = forks(2, "comms_node")
report = comms(objects=20, nproc=2, backend="gloo")
assert report.ok and set(report.evidence["objects"]["us"]) == {"all_gather_object", "all_gather", "all_reduce"}
assert "all_gather_object" in report.text() and max(map(len, report.text().splitlines())) <= 80
report = comms(stability=32768, iters=12, nproc=2, backend="gloo", min_busbw=1e6)
assert not report.ok and report.too_slow == ["all_reduce"]
assert len(report.evidence["stability"]["busbw"]) == 12 and "12 calls, a barrier before each" in report.text()
print("as it should be")
"""


def test_sizes_are_fitted_to_memory(run: Run, tmp_path: Path) -> None:
    status, out, err = run("allreduce", "--nproc", "2", *QUICK, "-b", "16K", "-e", "16T", "-f", "999999", "--json")
    told = json.loads(out)
    assert status == 0, err
    assert [row["bytes"] for row in told["rows"]] == [16384]
    assert told["notes"][0].startswith("the largest size is 16 KiB and not 15.26 GiB: rank")


@pytest.mark.parametrize("words", [("allreduc",), ("all_reduce", "-z", "-G", "2"), ("all_reduce", "-b", "1X")], ids=len)
def test_wrong_usage(run: Run, words: tuple[str, ...]) -> None:
    status, _, err = run("comms", *words)
    assert status == 2 and err.startswith("mldebug: ") and "hint: " in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("broadcast", "-r", "2", "--backend", "gloo"), "root is 2, and there are 2 ranks"),
        (("--nproc", "1"), "--nproc is 1, and a collective needs two ranks"),
    ],
    ids=["root", "one rank"],
)
def test_ranks_that_are_not_there_are_wrong_usage(run: Run, words: tuple[str, ...], complaint: str) -> None:
    status, _, err = run("comms", "--nproc", "2", *words)
    assert status == 2 and complaint in err


def test_an_average_of_integers_on_gloo_is_left_out_and_the_rest_measured(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("comms", "--nproc", "2", *QUICK, "-d", "int8,float", "--op", "avg", "-e", "32K")
    assert status == 0 and "all_reduce of int8 is not possible here: gloo averages no integers" in " ".join(out.split())
    assert "# all_reduce float32 avg" in out
