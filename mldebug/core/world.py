"""Which rank this process is, read from what the launcher left in the environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """This process among its peers. `rank` counts over all nodes, `local_rank` over the processes of this node."""

    rank: int
    local_rank: int
    world_size: int
    host: str


def world() -> World:
    """Say which rank this process is; a process started by no launcher is rank 0 of 1.

    Reads torchrun's, Open MPI's, PMI's (MPICH, Intel MPI, Cray) and SLURM's variables and imports nothing of torch.

        if world().rank == 0:
            save(report)
    """
    host = socket.gethostname()
    for ranks, local_ranks, sizes in _LAUNCHERS:
        rank, size = _number(ranks), _number(sizes)
        if rank is not None and size is not None:
            return World(rank, _number(local_ranks) or 0, size, host)
    if _in_slurm_step():
        rank, size = _number(("SLURM_PROCID",)), _number(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
        if rank is not None and size is not None:
            return World(rank, _number(("SLURM_LOCALID",)) or 0, size, host)
    return World(0, 0, 1, host)


# For each launcher the variables of rank, local rank and world size. The inner launcher comes before the outer one:
# torchrun and mpirun are often started by srun, and then SLURM's numbers are those of the launcher.
_LAUNCHERS = (
    (("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",)),
    (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
    (("PMI_RANK",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"), ("PMI_SIZE",)),
)


def _in_slurm_step() -> bool:
    """A batch script runs once, as process 0, though SLURM_NTASKS already has the size of the steps to come."""
    step = any(name in os.environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID"))
    return step or bool(_number(("SLURM_PROCID",)))


def _number(names: tuple[str, ...]) -> int | None:
    """The first of these variables that holds a count."""
    for name in names:
        value = os.environ.get(name, "").strip()
        if value.isdecimal():
            return int(value)
    return None
