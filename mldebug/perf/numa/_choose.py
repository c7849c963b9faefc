"""Which CPUs a rank is bound to, and why: sysfs, the present affinity and the other ranks of the node decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mldebug.core.cpus import cpu_list
from mldebug.core.machine import Root
from mldebug.perf.numa._gpus import Gpu
from mldebug.perf.numa._nodes import Near, Nodes, cores, described, near_gpu, nearest, online_cpus, share

_GIVE = "give the job CPUs of all sockets: SLURM --exclusive or --cpus-per-task, docker --cpuset-cpus"


@dataclass(frozen=True)
class Choice:
    """`cpus` to bind to: never empty, and those of before where nothing is to be changed. `near` is what was found,
    `node` the NUMA node that the CPUs are of (-1: not known)."""

    cpus: frozenset[int]
    near: Near
    changes: bool
    why: str
    trouble: bool = False
    notes: tuple[str, ...] = ()
    hint: str = ""
    node: int = -1


def choose(root: Root, gpu: Gpu, nodes: Nodes, allowed: frozenset[int]) -> Choice:
    """The allowed CPUs near a GPU; those of the next node where none of them is allowed and one is nearer than the
    others."""
    near = near_gpu(root, gpu, nodes)
    if len(nodes.with_cpus) == 1:
        only = nodes.with_cpus[0]
        return Choice(allowed, near, False, "one NUMA node, so all CPUs are equally near", node=only)
    if not near.cpus and near.node >= 0:  # memory without CPUs, as the node of a GPU of its own may be
        return _next_node(nodes, near, allowed, f"its NUMA node {near.node} has no CPUs")
    if not near.cpus:
        return Choice(allowed, near, False, near.why, trouble=True, hint="numactl --hardware shows what is known here")
    usable = near.cpus & allowed
    what = f"NUMA node {near.node}" if near.node >= 0 else "near"
    if not usable:
        return _next_node(nodes, near, allowed, f"none of its CPUs ({cpu_list(near.cpus)}, {what}) may be used here")
    name = f", {gpu.name}" if gpu.name else ""
    place = f"GPU {gpu.index} ({gpu.address}{name})"
    where = f"NUMA node {near.node} near {place}" if near.node >= 0 else f"near {place}"
    if usable == allowed:
        return Choice(allowed, near, False, f"all of them are near {place} already", node=near.node)
    left_out = (near.cpus & online_cpus(root)) - allowed
    notes = (f"{len(left_out)} more near it may not be used here",) if left_out else ()
    return Choice(usable, near, True, where, notes=notes, node=near.node)


def _next_node(nodes: Nodes, near: Near, allowed: frozenset[int], why: str) -> Choice:
    found = nearest(nodes, near.node, set(allowed)) if near.node >= 0 else None
    if found is None:
        far = sorted(node for node in nodes.with_cpus if nodes.cpus[node] & allowed)
        which = f"; those of node{'s' * (len(far) != 1)} {cpu_list(far)} are" if far else ""
        return Choice(allowed, near, False, f"{why}{which}", trouble=True, hint=_GIVE)
    node, distance = found
    usable = nodes.cpus[node] & allowed
    says = f"NUMA node {node}, the next one (distance {distance}): {why}"
    trouble = bool(near.cpus)
    hint = _GIVE if trouble else ""
    return Choice(usable, near, usable != allowed, says, trouble=trouble, hint=hint, node=node)


def split(root: Root, mine: Choice, place: int, of: int) -> Choice:
    """The part of `mine` for one of the `of` ranks that share these CPUs; places count from 0."""
    if of < 2:
        return mine
    most = -(-len(mine.near.cpus or mine.cpus) // of)
    if len(mine.cpus) <= most and not mine.changes:
        return replace(mine, notes=(*mine.notes, f"not split: no more than a share of 1/{of} already"))
    part = frozenset(share(root, set(mine.cpus), place, of))
    if len(mine.cpus) < of:
        note = f"not split: {of} ranks share {described(mine.cpus)} CPUs"
        return replace(mine, notes=(*mine.notes, note), trouble=True, hint=_GIVE)
    counted = len(cores(root, set(part)))
    note = f"part {place + 1} of {of} of the CPUs that ranks share: {counted} core{'s' * (counted != 1)}"
    return replace(mine, cpus=part, changes=True, notes=(*mine.notes, note))


def position(root: Root, nodes: Nodes, allowed: frozenset[int], place: int, others: Sequence[Gpu]) -> tuple[int, int]:
    """Which of the GPUs that would be bound to the same CPUs `others[place]` is, and their number."""
    found = [choose(root, one, nodes, allowed) for one in others]
    mine = found[place]
    # One that has trouble and is left where it is has the same CPUs without being near them.
    same = [at for at, its in enumerate(found) if (its.cpus, its.trouble) == (mine.cpus, mine.trouble)]
    return same.index(place), len(same)
