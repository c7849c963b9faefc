"""Where the collector of a job is: worked out by each rank from what its launcher said, without asking anybody."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from mldebug.cluster.dist._wire import ports, resolve
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.hosts import parse_hosts
from mldebug.core.world import claims

VARIABLE = "MLDEBUG_COLLECTOR"  # host:port, where nothing else says it


@dataclass(frozen=True)
class Where:
    """The host that rank 0 is on, by name or address, where that was read from, and the ports to try."""

    hosts: tuple[str, ...]
    source: str
    candidates: tuple[int, ...]

    def places(self) -> list[tuple[str, int]]:
        addresses = dict.fromkeys(address for host in self.hosts for address in resolve(host))
        return [(address, port) for address in addresses for port in self.candidates]

    def lost(self, why: Mapping[str, str], seconds: float) -> str:
        """In words: nobody was found, and what is to be thought of it."""
        names = []
        for host in self.hosts:
            found = [address for address in resolve(host) if address != host]
            names.append(f"{host} ({', '.join(found)})" if found else host)
        if not any(resolve(host) for host in self.hosts):
            return f"the host of rank 0, {', '.join(self.hosts)} ({self.source}), cannot be resolved here"
        kinds = sorted(set(why.values()))
        first, more = self.candidates[0], len(self.candidates) - 1
        ports_text = f"port {first}" + (f" and {more} others" if more else "")
        return (
            f"no collector answers on the host of rank 0, {', '.join(names)} ({self.source}), "
            f"{ports_text}: {' or '.join(kinds) or 'no answer'} for {seconds:g} s"
        )


def find(env: Mapping[str, str], job: str, world: int, local_world: int | None, told: str = "") -> Where:
    """Read it from `told` (host:port), MLDEBUG_COLLECTOR, MASTER_ADDR, SLURM's list of nodes or Open MPI's address."""
    if told := told or env.get(VARIABLE, ""):
        host, colon, port = told.rpartition(":")
        if not colon or not port.isdecimal() or not host:
            raise UsageError(f"{told!r} is no host:port", f"for example: {VARIABLE}=node1:29700")
        return Where((host.strip("[]"),), VARIABLE, (int(port),))
    candidates = tuple(ports(job))
    if host := env.get("MASTER_ADDR", ""):
        return Where((host,), f"MASTER_ADDR={host}", candidates)
    if local_world == world:
        return Where(("127.0.0.1",), "all ranks are on this host", candidates)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    if "SLURM_PROCID" in env and nodes:
        return Where((_first(nodes),), f"the first of SLURM's nodes {nodes}", candidates)
    if addresses := _of_mpirun(env):
        return Where(addresses, "the host of mpirun; if rank 0 is on another: -x MASTER_ADDR=HOST", candidates)
    raise UsageError(
        f"which host has rank 0 of these {world} ranks is not known: MASTER_ADDR is not set",
        "export MASTER_ADDR=<the host of rank 0>, for example mpirun -x MASTER_ADDR=node1 ...",
    )


def local_world(env: Mapping[str, str]) -> int | None:
    """How many ranks this node has, where the launcher says it."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"):
        if env.get(name, "").isdecimal():
            return int(env[name])
    if env.get("SLURM_STEP_NUM_NODES") == "1" or env.get("SLURM_NNODES") == "1":
        tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
        return int(tasks) if tasks.isdecimal() else None
    return None


def plan(env: Mapping[str, str], world: int) -> dict[str, str]:
    """Which host each rank is to be on, where SLURM says it: as many tasks on each node in turn as it lists."""
    nodes = env.get("SLURM_STEP_NODELIST", "")
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in tasks for _ in range(int(times or 1))]
    if "SLURM_PROCID" not in env or sum(counts) != world:
        return {}
    with contextlib.suppress(MldebugError, ValueError):  # no ClusterShell for the list: then hosts are not named
        hosts = [host for host, count in zip(parse_hosts(nodes), counts, strict=True) for _ in range(count)]
        return {str(rank): host for rank, host in enumerate(hosts)}
    return {}


def apart(env: Mapping[str, str]) -> tuple[str, ...]:
    """(why, hint) if the launchers' words show that nodes, or tasks, are worlds of their own; else nothing."""
    told = claims(env)
    inner, outer = told[0], told[-1]
    if inner.size < outer.size:
        names = f"{inner.launcher} was told of {inner.size} rank{'s' if inner.size > 1 else ''}"
        hint = f"unset {' '.join(inner.names)}, or start one {inner.launcher} for each node with all nodes in it"
        return f"{names}, and {outer.launcher} started {outer.size} tasks: each is a world of its own", hint
    nodes, local = env.get("SLURM_STEP_NUM_NODES", ""), local_world(env)
    many = outer.launcher == "srun" and nodes.isdecimal() and int(nodes) > 1
    if inner.launcher == "torchrun" and many and local == inner.size:
        hint = "torchrun --nnodes $SLURM_NNODES --rdzv-endpoint <first node>:29500 --rdzv-backend c10d ..."
        return f"torchrun has {local} ranks, all on this node, and srun started it on {nodes} nodes", hint
    master = env.get("MASTER_ADDR", "")
    addresses = resolve(master) if master else []
    # A name of the first host's own may well be a loopback address there, and nowhere else.
    elsewhere = (
        local is not None and local < inner.size and (inner.rank >= local or master in ("localhost", *addresses))
    )
    if elsewhere and addresses and all(map(_is_loopback, addresses)):
        hint = "export MASTER_ADDR=<the name of the first node>, and see that it is no loopback address in /etc/hosts"
        return f"MASTER_ADDR={master} is {addresses[0]}, which is each host itself, and the job has other hosts", hint
    return ()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _first(nodes: str) -> str:
    """`node003` of `node[003-005,9],other`: rank 0 is on the first node."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else nodes


def _of_mpirun(env: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses of the host that mpirun runs on, which has rank 0 as a rule."""
    said = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_SERVER_URI4", "") if "OMPI_COMM_WORLD_SIZE" in env else ""
    return tuple(address for group in re.findall(r"tcp://([0-9.,]+)", said) for address in group.split(",") if address)


def own_addresses(env: Mapping[str, str] = os.environ) -> list[str]:
    """Addresses under which other hosts may find this one: of its name and of its way out."""
    found = [address for address in resolve(socket.gethostname()) if not address.startswith(("127.", "::1", "fe80"))]
    ssh = env.get("SSH_CONNECTION", "").split()
    return list(dict.fromkeys([*found, *ssh[2:3]]))
