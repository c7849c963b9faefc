"""rank(), local_rank(), world_size(), host(), job(): who this process is, or an error where it is told two things."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mldebug.core import world as _core
from mldebug.core.errors import MldebugError
from mldebug.core.world import Claim, claims


def rank() -> int:
    """The number of this process among all of the job's, from 0; 0 where no launcher started it.

    Raises MldebugError where launchers, or a launcher and torch.distributed, contradict each other.

        if rank() == 0:
            save(model)
    """
    return who().rank


def local_rank() -> int:
    """The number of this process among those of its node, from 0: usually that of its GPU.

    Raises MldebugError as `rank` does, and where a job of several processes does not say it.

        torch.cuda.set_device(local_rank())
    """
    me = who()
    if me.local_rank is None:
        raise MldebugError(
            f"the local rank of rank {me.rank} of {me.size} is not known: {me.source} does not tell it, and LOCAL_RANK "
            "is not set",
            "start it with torchrun, or set LOCAL_RANK in each process: under srun `export LOCAL_RANK=$SLURM_LOCALID`",
        )
    return me.local_rank


def world_size() -> int:
    """How many processes the job has; 1 where no launcher started this one. Raises MldebugError as `rank` does.

    batch = 512 // world_size()
    """
    return who().size


def host() -> str:
    """The name of this machine, as it calls itself.

    print(f"{host()} has data in {path}")
    """
    return socket.gethostname()


def job() -> str:
    """A name of the job that all its ranks on this node share, with no spaces and no slashes.

    cache = f"/tmp/cache-{job()}"
    """
    return _core.job()


@dataclass(frozen=True)
class Who:
    """One process among its peers. `local_size` is how many are on this node, where that is known."""

    rank: int
    local_rank: int | None
    size: int
    local_size: int | None
    source: str  # where it was read, in words


def who() -> Who:
    """What the environment says, held against an initialised torch.distributed."""
    me = identify(os.environ)
    dist = distributed()
    if dist is None:
        return me
    number, size = int(dist.get_rank()), int(dist.get_world_size())
    if (me.rank, me.size) == (number, size):
        return me
    local = _count(os.environ, "LOCAL_RANK")
    if me.size > 1 and not _starts(Claim("", number, local, size, ()), me.rank, me.size):
        raise MldebugError(
            f"torch.distributed says rank {number} of {size}, and the environment rank {me.rank} of {me.size} "
            f"({me.source})",
            "give init_process_group the launcher's numbers (leave out rank= and world_size=), or start the program "
            "without that launcher",
        )
    return Who(number, local if size > 1 else 0, size, None, "torch.distributed")


def distributed() -> Any:
    """torch.distributed if the program has loaded and initialised it; it is never imported here."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist
    return None


def node_name() -> str:
    """This node's name among the job's: two agents of torchrun on one machine are two nodes."""
    return os.environ.get("GROUP_RANK", "") if "TORCHELASTIC_RUN_ID" in os.environ else host()


def identify(env: Mapping[str, str]) -> Who:
    """Who a process with this environment is. Raises MldebugError where it contradicts itself."""
    _check_pairs(env)
    found = claims(env)
    for one in found:
        _check_range(one)
    if not found:
        return Who(0, 0, 1, 1, "no launcher")
    inner = found[0]
    if inner.launcher != "torchrun" or not _by_torchrun(env):
        _compare(inner, found[1:])
    local = inner.local_rank
    same = [one for one in found if (one.rank, one.size) == (inner.rank, inner.size)]
    if local is None:
        local = next((one.local_rank for one in same if one.local_rank is not None), None)
    if local is None and inner.size == 1:
        local = 0
    source = "no launcher" if not inner.names else _values(env, inner)
    return Who(inner.rank, local, inner.size, _local_size(env, [one.launcher for one in same], inner.size), source)


def _check_pairs(env: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE come together and are numbers, unless another launcher says the same."""
    others = [one for one in claims(env) if one.launcher != "torchrun"]
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        value = env.get(name, "").strip()
        if not value:
            continue
        if not value.isdecimal():
            raise MldebugError(f"{name} is {value!r}, which is no rank" if name == "RANK" else f"{name} is {value!r}",
                               f"`unset {name}`, or see what exports it")  # fmt: skip
        if env.get(other, "").strip():
            continue
        if not others:
            raise MldebugError(
                f"{name}={value} is set and {other} is not: half of what a launcher sets, as an `export` leaves it",
                f"start the program with torchrun, or `unset {name}` if it is to run alone",
            )
        said = others[0].rank if name == "RANK" else others[0].size
        if int(value) != said:
            raise _contradiction(env, f"{name}={value}", others[0], _why_half(name, others[0]), f"unset {name}")


def _check_range(one: Claim) -> None:
    if one.rank >= one.size:
        said = _values(os.environ, one)
        raise MldebugError(
            f"rank {one.rank} of {one.size} cannot be ({said}): ranks count from 0 and end below the size; one of them "
            "is probably left over from another job",
            f"`unset {' '.join(one.names)}`, and start the program with its launcher again",
        )


def _compare(inner: Claim, outer: list[Claim]) -> None:
    """Raise where an inner claim cannot have come from a program that the outer launcher started."""
    for other in outer:
        if (inner.rank, inner.size) == (other.rank, other.size) or other.size == 1:
            continue
        if inner.launcher == "torchrun":  # RANK and WORLD_SIZE, but no torchrun: exported by hand, or by a program
            if _starts(inner, other.rank, other.size):
                continue
            raise _contradiction(
                os.environ, _values(os.environ, inner), other, _why(inner, other), f"unset {' '.join(inner.names)}"
            )
        if other.launcher == "srun" or any(one.launcher == "srun" and _same(one, other) for one in outer):
            continue  # mpirun and mpiexec start one daemon a node by srun, which hands its own numbers down
        if inner.size == 1:
            continue
        raise _contradiction(
            os.environ,
            _values(os.environ, inner),
            other,
            "one of the two is left over from an mpirun around this one",
            f"unset {' '.join(other.names)}",
        )


def _same(one: Claim, other: Claim) -> bool:
    return (one.rank, one.size) == (other.rank, other.size)


def _starts(inner: Claim, rank: int, size: int) -> bool:
    """Whether a program that is `rank` of `size` can have started this process, as one of several on its node."""
    if size <= 0 or inner.size % size or inner.size == size:
        return False
    each = inner.size // size
    return inner.rank // each == rank or inner.local_rank == inner.rank % each


def _by_torchrun(env: Mapping[str, str]) -> bool:
    """torchrun's own children have its numbers, whatever started torchrun."""
    return "TORCHELASTIC_RUN_ID" in env or ("GROUP_RANK" in env and "LOCAL_WORLD_SIZE" in env)


def _contradiction(env: Mapping[str, str], said: str, other: Claim, why: str, mend: str) -> MldebugError:
    tasks = {"srun": "SLURM_PROCID", "mpirun": "OMPI_COMM_WORLD_RANK", "PMI": "PMI_RANK"}[other.launcher]
    return MldebugError(
        f"two ranks for one process: {said}, but {_values(env, other)} (from {other.launcher}); {why}",
        f"`{mend}` before {other.launcher} starts the tasks, or set RANK from ${tasks} in each task",
    )


def _why(inner: Claim, other: Claim) -> str:
    if inner.size == other.size:
        return "RANK was probably exported once, for all tasks, by the script around them"
    return "RANK and WORLD_SIZE are probably left over from another job, or from a shell around this one"


def _why_half(name: str, other: Claim) -> str:
    if name == "RANK":
        return "it was probably exported once, for all tasks"
    return f"it is probably that of another job, or counts nodes and not processes ({other.size} here)"


def _values(env: Mapping[str, str], one: Claim) -> str:
    return " ".join(f"{name}={env.get(name, '').strip()}" for name in one.names)


def _local_size(env: Mapping[str, str], launchers: list[str], size: int) -> int | None:
    names = {
        "torchrun": "LOCAL_WORLD_SIZE",
        "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI": "MPI_LOCALNRANKS",
        "srun": "",
    }
    for launcher in launchers:
        if (found := _count(env, names[launcher])) is not None:
            return found
        if launcher == "srun" and env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "")) == "1":
            return size
    return 1 if size == 1 else None


def _count(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "").strip()
    return int(value) if value.isdecimal() else None
