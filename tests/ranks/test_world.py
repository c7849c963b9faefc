"""rank() and its kin: what launchers leave, which of it is normal nesting, and which contradicts itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types

import pytest

from mldebug.core.errors import MldebugError
from mldebug.ranks import host, job, local_rank, rank, world_size

from .rank_kit import clean, torchrun

HAND = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
TORCHRUN = {**HAND, "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "99", "SLURM_STEP_NUM_TASKS": "16"}  # fmt: skip


def srun(procid: int, tasks: int, **more: str) -> dict[str, str]:
    return {**SRUN, "SLURM_PROCID": str(procid), "SLURM_STEP_NUM_TASKS": str(tasks), **more}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clean().keys():
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(is_available=lambda: False))


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch):
    def put(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1)),
        (HAND, (5, 1, 16)),
        (TORCHRUN, (5, 1, 16)),
        (OPENMPI, (3, 1, 4)),
        (PMI, (2, 1, 4)),
        (SRUN, (5, 1, 16)),
        # torchrun, one on each node, started by srun or mpirun: their numbers are the nodes'
        ({**TORCHRUN, **srun(1, 4)}, (5, 1, 16)),
        ({**TORCHRUN, **srun(2, 4)}, (5, 1, 16)),  # its rendezvous may number the nodes differently
        ({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (5, 1, 16)),
        # mpirun by srun's daemons; mpiexec likewise; srun that speaks PMI
        ({**srun(1, 2), **OPENMPI}, (3, 1, 4)),
        ({**srun(1, 2), **PMI}, (2, 1, 4)),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "16"}, (5, 1, 16)),
        ({**OPENMPI, **SRUN, "PMI_RANK": "5", "PMI_SIZE": "16"}, (3, 1, 4)),
        # export RANK=$SLURM_PROCID in each task
        ({"RANK": "5", "WORLD_SIZE": "16", **SRUN}, (5, 1, 16)),
        # a program that starts ranks itself, one on each node by srun
        ({**HAND, **srun(0, 1)}, (5, 1, 16)),
        ({**HAND, **srun(1, 4)}, (5, 1, 16)),
        ({**HAND, **srun(3, 4)}, (5, 1, 16)),  # nodes in an order of its own
        # WORLD_SIZE alone, which agrees
        ({"WORLD_SIZE": "16", **SRUN}, (5, 1, 16)),
        # neither a batch script nor a shell in an allocation is a rank of the steps to come
        (srun(0, 8, SLURM_STEP_ID="4294967290"), (0, 0, 1)),
        (srun(0, 8, SLURM_STEP_ID="4294967291"), (0, 0, 1)),
        (srun(0, 8, SLURM_STEP_ID="batch"), (0, 0, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "64"}, (0, 0, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "64"}, (0, 0, 1)),
        (srun(0, 8, SLURM_PTY_PORT="4711"), (0, 0, 1)),
        # what srun starts from within such a shell is
        (srun(1, 8, SLURM_PTY_PORT="4711"), (1, 1, 8)),
        (srun(0, 8, SLURM_PTY_PORT="4711", SLURM_TASK_PID=str(os.getpid()), SLURM_LOCALID="0"), (0, 0, 8)),
        ({"RANK": " 0 ", "WORLD_SIZE": "1"}, (0, 0, 1)),
    ],
)
def test_ranks(env, environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    env(environment)
    assert (rank(), local_rank(), world_size()) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # one export for all tasks, by the batch script
        (
            {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", **SRUN},
            ["RANK=0", "WORLD_SIZE=16", "SLURM_PROCID=5", "exported once", "unset RANK LOCAL_RANK WORLD_SIZE"],
        ),
        # of an old job
        ({"RANK": "5", "WORLD_SIZE": "8", **SRUN}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=16", "left over"]),
        ({"WORLD_SIZE": "2", **SRUN}, ["WORLD_SIZE=2", "SLURM_STEP_NUM_TASKS=16", "unset WORLD_SIZE"]),
        ({"RANK": "0", **SRUN}, ["RANK=0", "SLURM_PROCID=5", "unset RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "4", **OPENMPI}, ["RANK=0", "OMPI_COMM_WORLD_RANK=3", "mpirun"]),
        ({"RANK": "0", "WORLD_SIZE": "4", **PMI}, ["RANK=0", "PMI_RANK=2"]),
        ({**OPENMPI, **PMI}, ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=2"]),
        ({"RANK": "8", "WORLD_SIZE": "8"}, ["rank 8 of 8 cannot be", "RANK=8 WORLD_SIZE=8", "unset RANK WORLD_SIZE"]),
        (srun(16, 16), ["rank 16 of 16", "SLURM_PROCID=16"]),
        ({"RANK": "3"}, ["RANK=3 is set and WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8 is set and RANK is not"]),
        ({"RANK": "two", "WORLD_SIZE": "8"}, ["RANK is 'two'"]),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, ["RANK is '-1'"]),
    ],
)
def test_contradictions(env, environment: dict[str, str], words: list[str]) -> None:
    env(environment)
    with pytest.raises(MldebugError) as caught:
        rank()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint


def test_a_local_rank_that_nobody_tells(env) -> None:
    env({"RANK": "1", "WORLD_SIZE": "2"})
    assert (rank(), world_size()) == (1, 2)
    with pytest.raises(MldebugError, match="LOCAL_RANK is not"):
        local_rank()


def test_an_interactive_shell_is_known_by_its_terminal(env) -> None:
    master, slave = os.openpty()
    shell = subprocess.Popen(["sleep", "60"], stdin=slave)
    try:
        env(srun(0, 8, SLURM_PTY_PORT="4711", SLURM_TASK_PID=str(shell.pid)))
        assert world_size() == 1
    finally:
        shell.kill()
        shell.wait()
        os.close(master)
        os.close(slave)


def fake(number: int, size: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: number, get_world_size=lambda: size
    )


class TestTorchDistributed:
    @pytest.mark.parametrize(
        ("environment", "said"),
        [({}, (3, 8)), (HAND, (5, 16)), (srun(0, 1), (3, 8)), (srun(0, 2, SLURM_LOCALID="0"), (3, 8))],
    )
    def test_it_is_followed(self, env, monkeypatch, environment, said) -> None:
        env(environment)
        monkeypatch.setitem(sys.modules, "torch.distributed", fake(*said))
        assert (rank(), world_size()) == said

    @pytest.mark.parametrize("environment", [HAND, TORCHRUN, SRUN, OPENMPI])
    def test_or_contradicted(self, env, monkeypatch, environment) -> None:
        env(environment)
        monkeypatch.setitem(sys.modules, "torch.distributed", fake(0, 16))
        with pytest.raises(MldebugError, match=r"torch.distributed says rank 0 of 16, and the environment"):
            rank()


class TestJob:
    @pytest.mark.parametrize(
        ("environment", "name"),
        [
            ({**TORCHRUN, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "torchrun-none-n1:29500"),
            # any free port: two jobs on one node have the same words
            ({**TORCHRUN, "MASTER_ADDR": "n1", "MASTER_PORT": "0"}, f"torchrun-none-launcher-{os.getppid()}"),
            ({**SRUN, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "slurm-77.3"),
            ({**SRUN, **OPENMPI, "PMIX_NAMESPACE": "12/3 x"}, "mpi-12_3_x"),
            ({**PMI, "PALS_APID": "ab-1"}, "mpi-ab-1"),
            ({**HAND, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "master-n1:29500"),
            (HAND, f"launcher-{os.getppid()}"),
            ({}, f"session-{os.getsid(0)}"),
        ],
    )
    def test_names(self, env, environment, name) -> None:
        env(environment)
        assert job() == name

    def test_a_name_is_short_and_plain(self, env) -> None:
        env({**TORCHRUN, "TORCHELASTIC_RUN_ID": "ä/../" * 99})
        assert len(job()) <= 200 and "/" not in job() and job().isascii()

    def test_wrappers_around_a_rank_are_no_launcher(self) -> None:
        program = "from mldebug.ranks import job; print(job())"
        found = subprocess.run(
            ["bash", "-c", f"echo $PPID; bash -c '\"$0\" -c \"{program}\"; true' {sys.executable}; true"],
            env=clean(**HAND), capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert found == [str(os.getpid()), f"launcher-{os.getpid()}"]


PROGRAM = (
    "import sys; from mldebug.ranks import *; "
    "sys.stdout.write(f'{rank()} {local_rank()} {world_size()} {job()} {\"torch\" in sys.modules}\\n')"
)


def test_real_torchrun(tmp_path) -> None:
    (tmp_path / "p.py").write_text(PROGRAM)
    done = subprocess.run(torchrun(tmp_path / "p.py", ranks=2), env=clean(), capture_output=True, text=True, check=True)
    lines = sorted(done.stdout.split("\n"))[1:]
    assert [line.split()[:3] for line in lines] == [["0", "0", "2"], ["1", "1", "2"]]
    assert len({line.split()[3] for line in lines}) == 1 and lines[0].endswith("False")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_real_mpirun() -> None:
    command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", PROGRAM]
    environment = clean(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.split("\n"))[1:]
    assert [line.split()[:3] for line in lines] == [["0", "0", "2"], ["1", "1", "2"]]
    assert len({line.split()[3] for line in lines}) == 1 and lines[0].split()[3].startswith("mpi-")


def test_host() -> None:
    assert host() == os.uname().nodename
