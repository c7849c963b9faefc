from __future__ import annotations

import socket

import pytest

from mldebug.core.world import World, world

PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PALS_", "MPI_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") or name.startswith(PREFIXES):
            monkeypatch.delenv(name)


TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "99", "SLURM_STEP_NUM_TASKS": "16"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1)),
        (TORCHRUN, (5, 1, 8)),
        (OPENMPI, (3, 1, 4)),
        (SRUN, (6, 2, 16)),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}, (1, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, (0, 0, 2)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (2, 1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "0"}, (2, 0, 4)),
        # srun --mpi=pmi2 tells the local rank in its own words only
        ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "16"}, (6, 2, 16)),
        # the inner launcher counts
        ({**SRUN, **TORCHRUN}, (5, 1, 8)),
        ({**SRUN, **OPENMPI}, (3, 1, 4)),
        # a batch script is one process, whatever its steps will be
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "64"}, (0, 0, 1)),
        # nor is a shell in an allocation, which is a step of its own, of whatever size
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, (0, 0, 1)),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4711"}, (0, 0, 1)),
        # launchers that contradict each other: it never fails
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, (0, 0, 2)),
        # half a set, or nonsense, is no launcher
        ({"RANK": "3"}, (0, 0, 1)),
        ({"RANK": "", "WORLD_SIZE": "8"}, (0, 0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, (0, 0, 1)),
        ({"RANK": "two", "WORLD_SIZE": "8"}, (0, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 0, 2)),
    ],
)
def test_world(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert world() == World(*expected, socket.gethostname())
