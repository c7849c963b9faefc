"""Which rank this process is, and of which job, read from what the launcher left in the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
    It never fails: of launchers that contradict each other the inner one is believed (`mldebug.ranks.rank` raises).

        if world().rank == 0:
            save(report)
    """
    host = socket.gethostname()
    for claim in claims(os.environ):
        return World(claim.rank, claim.local_rank or 0, claim.size, host)
    return World(0, 0, 1, host)


def job() -> str:
    """A name for this process's job that all of its ranks on this node share, with no spaces and no slashes.

    It is the launcher's own id (of torchrun, Open MPI, Cray PALS, or SLURM's job and step), else MASTER_ADDR and
    MASTER_PORT, else the number of the process that started the ranks, or the session where there is one process.

        lock = f"/tmp/{os.getuid()}-{job()}.lock"
    """
    kept = "".join(sign if (sign.isascii() and sign.isalnum()) or sign in "-_.:" else "_" for sign in _job(os.environ))
    return kept[:200]


@dataclass(frozen=True)
class Claim:
    """What one launcher says in the environment. `local_rank` is None where it does not say it."""

    launcher: str
    rank: int
    local_rank: int | None
    size: int
    names: tuple[str, ...]  # the variables that it was read from


def claims(env: Mapping[str, str]) -> list[Claim]:
    """What each launcher says, the inner ones first: torchrun and mpirun are often started by srun.

    A set of variables that is incomplete, or no number, is left out, as is SLURM's where it is not about this process:
    in a batch script and in an interactive shell.

        for claim in claims(os.environ):
            print(claim.launcher, claim.rank)
    """
    found = []
    for launcher, ranks, local_ranks, sizes in _LAUNCHERS:
        if launcher == "srun" and not _in_slurm_step(env):
            continue
        rank, local, size = _number(env, ranks), _number(env, local_ranks), _number(env, sizes)
        if rank is not None and size is not None:
            names = tuple(one[0] for one in (rank, local, size) if one is not None)
            found.append(Claim(launcher, rank[1], local[1] if local is not None else None, size[1], names))
    return found


_LAUNCHERS = (
    ("torchrun", ("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",)),
    ("mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
    ("PMI", ("PMI_RANK",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"), ("PMI_SIZE",)),
    ("srun", ("SLURM_PROCID",), ("SLURM_LOCALID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)

# The steps that SLURM makes for the shell of an allocation, a batch script, what is outside of steps, and waiting jobs.
_NO_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293", "interactive", "batch", "extern")


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """A batch script runs once, as process 0, though SLURM_NTASKS already has the size of the steps to come."""
    ids = [env[name] for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in env]
    if any(one in _NO_STEPS for one in ids):
        return False
    if not (ids or "SLURM_STEP_NUM_TASKS" in env):
        return (_number(env, ("SLURM_PROCID",)) or ("", 0))[1] > 0
    return not _in_shell_of_srun(env)


def _in_shell_of_srun(env: Mapping[str, str]) -> bool:
    """Whether somebody typed the command into `srun --pty bash`, which is a step of its own, of whatever size.

    What is started by srun from within such a shell inherits SLURM_PTY_PORT, but is the task itself.
    """
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_PROCID") != "0":
        return False
    task = env.get("SLURM_TASK_PID", "")
    if not task.isdecimal():
        return True
    try:
        return int(task) != os.getpid() and os.readlink(f"/proc/{task}/fd/0").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _job(env: Mapping[str, str]) -> str:
    address = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
    if run := env.get("TORCHELASTIC_RUN_ID", ""):
        if env.get("MASTER_PORT") == "0":  # any free one: another job of this node may have the same words
            address = f"launcher-{launcher()}"
        return f"torchrun-{run}-{address}"  # the run's id is "none" unless it is given
    for name in ("OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PALS_APID"):
        if value := env.get(name, ""):
            return f"mpi-{value}"
    if "OMPI_COMM_WORLD_SIZE" in env and (value := env.get("PMIX_NAMESPACE", "")):
        return f"mpi-{value}"
    if (value := env.get("SLURM_JOB_ID", "") or env.get("SLURM_JOBID", "")) and "SLURM_PROCID" in env:
        return f"slurm-{value}.{env.get('SLURM_STEP_ID', '') or env.get('SLURM_STEPID', '') or 'batch'}"
    if address.strip(":"):
        return f"master-{address}"
    if any(one.size > 1 for one in claims(env)):
        return f"launcher-{launcher()}"  # such as the proxy of mpiexec on this node
    return f"session-{os.getsid(0)}" if hasattr(os, "getsid") else f"pid-{os.getpid()}"


def launcher() -> int:
    """The pid of what started the ranks of this node: the nearest process above this one that is no rank itself.

    Wrappers around a rank (a shell, numactl) have its variables and do not count.

        print(f"started by {launcher()}")
    """
    name = next((one.names[0] for one in claims(os.environ)), "")
    above = os.getppid()
    mine = f"{name}={os.environ.get(name, '')}".encode()
    while name and above > 1:
        try:
            if mine not in Path(f"/proc/{above}/environ").read_bytes().split(b"\0"):
                break
            above = int(Path(f"/proc/{above}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:  # it is another user's, as slurmstepd is, and so no rank
            break
    return above


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these variables that holds a count, and the count."""
    for name in names:
        value = env.get(name, "").strip()
        if value.isdecimal():
            return name, int(value)
    return None
