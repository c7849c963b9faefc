"""all_reduce_bench.py and its kin under their classic names: options and tables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

FORKED = Path(__file__).resolve().parents[1] / "forked.py"
TOOLS = Path(__file__).resolve().parents[2] / "tools"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
NAMES = ("all_reduce_bench.py", "all_gather_object_vs_all_reduce.py", "all_gather_object_vs_all_gather.py")


def run(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / name), *words], cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )


def torchrun(run_torch: Run, folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The same with ranks that torchrun forks."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv_endpoint", "localhost:0")
    return run_torch(FORKED, *launch, "--rdzv_backend", "c10d", TOOLS / name, *words, cwd=folder, timeout=110)


def test_the_table_of_all_payloads(tmp_path: Path) -> None:
    """By the command of the classic script, to the letter: python -u -m torch.distributed.run --nproc_per_node=2 ..."""
    words = ("--num_iterations", "2", "--num_warmup_iterations", "1", "--payload_size_in_gib", "0.0001")
    launch = ("-u", "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_endpoint", "localhost:0")
    command = [sys.executable, *launch, "--rdzv_backend", "c10d", str(TOOLS / NAMES[0]), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\nEnvironment:\n- software: torch=\S+, .*\n- hardware: .+$", done.stdout, re.MULTILINE)
    assert "The average bandwidth of all_reduce over 2 ranks (1 warmups / 2 trials):" in done.stdout
    assert re.search(
        r"\| payload \|    busbw   \|    algbw   \|\n\| ------: \| ---------: \| ---------: \|\n", done.stdout
    )
    assert re.search(r"^\| 104\.9KiB \| +\d+\.\d\dGBps \| +\d+\.\d\dGBps \|$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^Legend: 1KiB = 2\*\*10 Bytes, .*\n +1GBps = 10\*\*9 Bytes per second", done.stdout, re.MULTILINE
    )
    assert "Elapsed time: 0:0" in done.stdout and list(tmp_path.glob("busbw-mean-*-2.png"))


def test_the_profile_of_one_payload(run_torch: Run, tmp_path: Path) -> None:
    words = ("--backend", "gloo", "--nproc", "2", "--num_iterations", "7", "--profile_stability")
    assert run(tmp_path, NAMES[0], *words).returncode == 2
    done = run_torch(TOOLS / NAMES[0], *words, "--payload_size_in_gib", "0.0001", cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\| +\d+\.\d\dGBps \| +\d+\.\d\dGBps \|$", done.stdout, re.MULTILINE)) == 7
    assert list(tmp_path.glob("busbw-profile-*-2.png"))


@pytest.mark.parametrize("name, other", [(NAMES[1], "all_reduce"), (NAMES[2], "all_gather")])
def test_objects_against_tensors(run_torch: Run, tmp_path: Path, name: str, other: str) -> None:
    done = torchrun(run_torch, tmp_path, name, "--calls", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^all_gather_object=[\d.e-]+$", done.stdout, re.MULTILINE)) == 2
    assert len(re.findall(rf"^{other} *=[\d.e-]+$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    "words",
    [
        (NAMES[0], "--payload_size_in_gib", "0"),
        (NAMES[0], "--backend", "gloo", "--nproc", "1"),
        (NAMES[1], "--calls", "0"),
        (NAMES[2], "--calls", "-3"),
    ],
    ids=["payload", "one rank", "reduce", "gather"],
)
def test_numbers_that_cannot_be_are_wrong_usage(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_under_mpirun_only_the_first_rank_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    from mldebug.cluster.collectives._classic import run_classic
    from mldebug.cluster.collectives._options import Options
    from mldebug.cluster.collectives._report import CommsReport, judged
    from mldebug.cluster.collectives._run import new_evidence

    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    report = judged({**new_evidence(Options()), "ended": "interrupted"})
    shown: list[CommsReport] = []
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert run_classic("tool", lambda: report, shown.append) == 130
        assert len(shown) == lines
