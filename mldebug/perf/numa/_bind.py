"""bind_numa: bind this process to the CPUs near its GPU; numa_table: which those are, for each GPU."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

from mldebug.core.cpus import allowed as allowed_list
from mldebug.core.cpus import cpu_list, cpus
from mldebug.core.errors import UsageError
from mldebug.core.machine import NotVisible, Root
from mldebug.core.report import write
from mldebug.core.world import claims, world
from mldebug.perf.numa._choose import Choice, choose, position, split
from mldebug.perf.numa._gpus import Gpu, all_on_bus, list_gpus, load_nvml, torch_address, visible_gpus
from mldebug.perf.numa._memory import set_memory_policy
from mldebug.perf.numa._nodes import Near, Nodes, hex_mask, read_nodes
from mldebug.perf.numa._report import NumaReport, NumaRow, NumaTable

_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


class Machine(Root):
    """This machine, or one below a prefix, whose affinity is then that of its own /proc/self/status."""

    def __init__(self, prefix: str | os.PathLike[str] = "/", nvml: Any = None) -> None:
        super().__init__(prefix)
        self.nvml = load_nvml() if self.prefix == "/" else nvml

    def affinity(self) -> frozenset[int]:
        """The CPUs that this process may use; none where the system does not tell."""
        if self.prefix == "/" and hasattr(os, "sched_getaffinity"):
            return frozenset(os.sched_getaffinity(0))
        try:
            return frozenset(cpus(allowed_list(self, "self")))
        except NotVisible:
            return frozenset()

    def bind(self, mine: frozenset[int], before: frozenset[int]) -> None:
        """Bind all threads that have the affinity of `before`: one that was bound on purpose stays where it is."""
        os.sched_setaffinity(0, mine)  # of the calling thread, and what it starts from now on
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                if frozenset(os.sched_getaffinity(int(name))) == before:
                    os.sched_setaffinity(int(name), mine)


def bind_numa(
    device: int | None = None,
    *,
    split: bool = False,
    memory: Literal["prefer", "bind"] | None = None,
    quiet: bool = False,
) -> NumaReport:
    """Bind this process, its threads and what it starts to the CPUs near its GPU, and say so on stderr.

    `device` is the GPU's number as torch counts (CUDA_VISIBLE_DEVICES and its kin are heeded); without it that is the
    local rank, or the only GPU there is. CPUs come from sysfs (local_cpulist and numa_node of the PCI device), else
    from NVML, and only those of the present affinity count; where none is left, or nothing is near, all stays as it
    was, and the report says why. `split` gives ranks that share CPUs a part each, whole cores, without overlap.
    `memory` "prefer" takes memory from the node of the GPU first, "bind" only from there. Call it first in the program:
    memory that is touched already stays where it is. Raises UsageError for a wrong argument.

        from mldebug import bind_numa
        bind_numa()  # mldebug numa: rank 3 on node7: CPUs 32-63 (32), NUMA node 1 near GPU 3 (0000:9b:00.0)
    """
    report = bind(Machine(), device, share=split, memory=memory)
    if not quiet:
        write(f"{report.text()}\n", sys.stderr)
    return report


def numa_table(*, split: bool = False) -> NumaTable:
    """The CPUs near each GPU of this machine, and the masks for srun, one for each GPU; nothing is bound.

    `split` cuts the CPUs of GPUs that share a node into parts.

        print(numa_table(split=True).cpu_bind)  # mask_cpu:0xff,0xff00
    """
    return table(Machine(), share=split)


def bind(machine: Machine, device: int | None, *, share: bool, memory: str | None) -> NumaReport:
    """bind_numa() on a machine that may be a fake one."""
    if memory not in (None, "prefer", "bind"):
        raise UsageError(f"memory is {memory!r}", 'it takes "prefer", "bind" or None')
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
        raise UsageError(f"device is {device!r}", "it takes the number of a GPU as torch counts them, from 0")
    before = machine.affinity()
    if not before:
        left = _left(before, "this system does not tell which CPUs a process may use", True, "binding needs Linux")
        return _report(machine, None, left, before, before, "")
    nodes = read_nodes(machine)
    gpus = list_gpus(machine, machine.nvml)
    seen = visible_gpus(gpus, machine.environ(), machine.nvml)
    place, why = _mine(machine, seen, len(gpus), device, nodes, before)
    if place is None:
        return _report(machine, None, _left(before, why[0], trouble=bool(why[1]), hint=why[1]), before, before, "")
    gpu = seen[place]
    choice = choose(machine, gpu, nodes, before)
    if share:
        choice = _split(machine, choice, place, seen, nodes, before)
    if choice.changes:
        try:
            machine.bind(choice.cpus, before)
        except OSError as exc:
            why_not = f"the kernel refuses CPUs {cpu_list(choice.cpus)}: {(exc.strerror or str(exc)).lower()}"
            choice = _left(before, why_not, trouble=True, hint="a sandbox or cgroup may forbid sched_setaffinity")
    after = machine.affinity() if choice.changes else before
    said = ""
    if memory is not None:
        known = choice.node >= 0 and not choice.trouble
        said = (
            set_memory_policy(memory, choice.node) if known else "memory policy left as it was: no near node is known"
        )
    return _report(machine, gpu, choice, before, after, said)


def table(machine: Machine, *, share: bool) -> NumaTable:
    """numa_table() of a machine that may be a fake one."""
    before = machine.affinity()
    nodes = read_nodes(machine)
    gpus = list_gpus(machine, machine.nvml)
    seen = visible_gpus(gpus, machine.environ(), machine.nvml)
    rows: list[NumaRow] = []
    for gpu in gpus:
        choice = choose(machine, gpu, nodes, before)
        if share:
            others = seen if gpu in seen else gpus
            place, of = position(machine, nodes, before, others.index(gpu), others)
            choice = split(machine, choice, place, of)
        rank = seen.index(gpu) if gpu in seen else None
        node = choice.near.node if choice.near.node >= 0 else None
        rows.append(
            NumaRow(
                gpu.index, rank, gpu.address, gpu.name, node, cpu_list(choice.near.cpus), cpu_list(choice.cpus),
                hex_mask(choice.cpus), choice.changes, choice.trouble, choice.why,
            )
        )  # fmt: skip
    ranked = sorted((row for row in rows if row.local_rank is not None), key=lambda row: row.local_rank or 0)
    masks = tuple(row.mask for row in ranked)
    notes = [] if gpus else ["no GPU: neither NVML nor sysfs shows one"]
    shown = {node: cpu_list(found) for node, found in nodes.cpus.items()}
    bind_option = f"mask_cpu:{','.join(masks)}" if any(row.changes for row in ranked) else ""
    return NumaTable(world().host, cpu_list(before), shown, tuple(rows), masks, bind_option, tuple(notes))


def _mine(
    machine: Machine, seen: list[Gpu], count: int, device: int | None, nodes: Nodes, before: frozenset[int]
) -> tuple[int | None, tuple[str, str]]:
    """Which of the GPUs that are seen is this process'; or None, the reason, and a hint where that is trouble."""
    environ = machine.environ()
    if not seen:
        return None, _hidden(environ, count) if count else ("there is no GPU here to be near to", "")
    launched = claims(environ)
    local = launched[0].local_rank if launched else None
    number = device if device is not None else local
    if number is None and len({choose(machine, one, nodes, before).cpus for one in seen}) > 1:
        if launched:
            return None, ("the launcher does not say the local rank", "give the device, or set LOCAL_RANK")
        names = f"this process sees {len(seen)} GPUs, which are near different CPUs"
        return None, (f"{names}, and no launcher says which is its own", "")
    if number is None or (len(seen) == 1 and device is None):
        return 0, ("", "")
    if number >= len(seen):
        what = "device" if device is not None else "local rank"
        return None, (f"{what} {number} has no GPU: {len(seen)} are visible", "give the device of each rank")
    known = torch_address(number) if machine.prefix == "/" else None
    return next((place for place, one in enumerate(seen) if one.address == known), number), ("", "")


def _hidden(environ: Mapping[str, str], count: int) -> tuple[str, str]:
    """Why the variables leave no GPU of those that are there, and what to do."""
    name = next((name for name in _VARIABLES if name in environ), "")
    if not name:
        return "there is no GPU here to be near to", ""
    why, words = f"{name}={environ[name]!r} leaves no GPU of {count}", environ[name].split(",")
    if any(word.strip().startswith("MIG-") for word in words):
        return f"{why}: only NVML tells which GPU a MIG device is a part of", "pip install nvidia-ml-py"
    if len({word.strip() for word in words}) < len(words):
        return f"{why}: one that is named twice makes the list void", "name each GPU once"
    return why, "name GPUs that are there"


_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def _split(
    machine: Machine, choice: Choice, place: int, seen: list[Gpu], nodes: Nodes, before: frozenset[int]
) -> Choice:
    """By the GPUs of the ranks of this node, where all of them see the same; else by all GPUs of the machine."""
    gpu, size = seen[place], local_size(machine.environ())
    others: list[Gpu] = seen
    if size is not None and len(seen) > 1:
        others = seen[: max(size, place + 1)]
    elif size == 1:
        return choice
    else:
        there = [gpu if one.address == gpu.address else one for one in all_on_bus(machine)]
        rank = claims(machine.environ())[0].local_rank if size else None
        if size and rank is not None and len(there) < 2:  # there is one GPU, and all ranks are on it
            return split(machine, choice, min(rank, size - 1), size)
        if gpu in there:
            others, place = there, there.index(gpu)
    return split(machine, choice, *position(machine, nodes, before, place, others))


def local_size(environ: Mapping[str, str]) -> int | None:
    """How many ranks the launcher has started on this node; None where it does not say."""
    sizes = (int(environ[name]) for name in _SIZES if environ.get(name, "").isdecimal())
    return next(sizes, None) or _of_step(environ)


def _of_step(environ: Mapping[str, str]) -> int | None:
    """ "4(x2),3" is four tasks on each of the first two nodes of a step, and three on the next."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    node = environ.get("SLURM_NODEID", "")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    if len(set(counts)) == 1:
        return counts[0]
    asked = environ.get("SLURM_NTASKS_PER_NODE", "")  # of the batch job, where the step says nothing itself
    return int(asked) if asked.isdecimal() and not counts else None


def _left(before: frozenset[int], why: str, trouble: bool, hint: str) -> Choice:
    return Choice(before, Near(frozenset()), False, why, trouble=trouble, hint=hint)


def _report(
    machine: Machine, gpu: Gpu | None, choice: Choice, before: frozenset[int], after: frozenset[int], memory: str
) -> NumaReport:
    launched = claims(machine.environ())
    return NumaReport(
        host=world().host,
        rank=launched[0].rank if launched else 0,
        local_rank=(launched[0].local_rank or 0) if launched else 0,
        gpu=gpu.index if gpu is not None else None,
        address=gpu.address if gpu is not None else "",
        node=choice.near.node if choice.near.node >= 0 else None,
        before=cpu_list(before),
        cpus=cpu_list(after),
        count=len(after),
        mask=hex_mask(after),
        bound=choice.changes,
        trouble=choice.trouble,
        why=choice.why,
        memory=memory,
        notes=choice.notes,
        hint=choice.hint,
    )
