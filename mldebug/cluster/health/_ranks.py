"""Ranks that run on this node: what they were told of the world, which NCCL they loaded, and which GPU they use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, fine, gpus, part
from mldebug.cluster.health._limits import capabilities, limits
from mldebug.cluster.health._root import NotVisible, Root
from mldebug.core.cpus import allowed

_MOST = 64
_KEPT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "CUDA_LAUNCH_BLOCKING",
    "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
_PLACES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_SETTINGS = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_")
_LIBRARY = re.compile(r"(/\S*/lib(?:nccl|rccl|nccl-net|nccl-tuner|fabric|nccl-net-ofi)[^/\s]*\.so[^\s]*)")


def look(root: Root) -> dict[str, Any]:
    """Processes with RANK and WORLD_SIZE in their environment, or those of MPI, that this user may look at."""
    found: list[dict[str, Any]] = []
    for name in root.names("/proc"):
        if not name.isdecimal() or len(found) >= _MOST:
            continue
        try:
            words = dict(
                word.partition("=")[::2]
                for word in root.data(f"/proc/{name}/environ").decode("utf-8", "replace").split("\0")
            )
        except NotVisible:
            continue
        place = next((pair for pair in _PLACES if all(words.get(one, "").isdecimal() for one in pair)), None)
        if place is not None:
            found.append(_rank(root, name, words, place))
    # A DataLoader worker or a compiler has the environment of its rank.
    own = {rank["pid"] for rank in found}
    main = [rank for rank in found if rank["parent"] not in own]
    return {"found": sorted(main, key=lambda rank: (rank["job"], rank["rank"]))}


def _rank(root: Root, pid: str, words: dict[str, str], place: tuple[str, str]) -> dict[str, Any]:
    told = {name: value[:400] for name, value in words.items() if name in _KEPT or name.startswith(_SETTINGS)}
    rank: dict[str, Any] = {
        "pid": int(pid), "parent": 0, "rank": int(words[place[0]]), "world": int(words[place[1]]),
        "job": _job(words),
        "told": told, "caps": capabilities(root, pid),
    }  # fmt: skip
    with contextlib.suppress(NotVisible, IndexError, ValueError):
        rank["parent"] = int(root.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    with contextlib.suppress(NotVisible, KeyError):
        rank["memlock"] = limits(root, pid)["memlock"][0]
    with contextlib.suppress(NotVisible):
        rank["cpus"] = allowed(root, pid)
    with contextlib.suppress(NotVisible):
        text = root.data(f"/proc/{pid}/maps", 8 << 20).decode("utf-8", "replace")
        rank["libraries"] = sorted(set(_LIBRARY.findall(text)))[:20]
    return rank


def _job(words: dict[str, str]) -> str:
    """What ranks of one job share, as far as their environment tells it."""
    step = ".".join(words[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in words)
    return step or words.get("TORCHELASTIC_RUN_ID") or words.get("MASTER_ADDR", "")


def judge(node: Node) -> Iterator[Finding]:
    """Two ranks on one GPU, and different libraries in the ranks of one node."""
    ranks = part(node, "ranks", "found") or []
    if not ranks:
        return
    yield fine("ranks", f"{len(ranks)} run here")
    yield from _same_gpu(node, ranks)
    loaded = {lib for rank in ranks for lib in rank.get("libraries", ()) if re.search(r"/lib[nr]ccl\.so", lib)}
    if len(loaded) > 1:
        yield bad(
            "NCCL", f"the ranks here have loaded {len(loaded)} different ones: {', '.join(sorted(loaded))}",
            "one environment for all ranks: look at LD_LIBRARY_PATH, LD_PRELOAD and `pip list | grep nccl`",
        )  # fmt: skip


def _same_gpu(node: Node, ranks: list[Any]) -> Iterator[Finding]:
    """A rank's GPU is the one where it holds most memory: all of them often have a little on the first one."""
    numbers = {rank["pid"]: rank["rank"] for rank in ranks}
    held: dict[int, list[tuple[int, int]]] = {}
    for gpu in gpus(node):
        for pid, used in gpu.get("processes", ()):
            if pid in numbers:
                held.setdefault(pid, []).append((used, gpu["index"]))
    home: dict[int, list[int]] = {}
    for pid, places in held.items():
        most, index = max(places, key=lambda place: (place[0], -place[1]))
        if most or len(places) == 1:
            home.setdefault(index, []).append(numbers[pid])
    # Instances of one GPU may have a rank each.
    whole = [gpu["index"] for gpu in gpus(node) if not (gpu.get("mig") or [0])[0]]
    empty = [index for index in whole if index not in home]
    for index, sharing in home.items():
        if len(sharing) > 1 and empty and index in whole:
            names = ", ".join(map(str, sorted(sharing)))
            yield bad(
                "duplicate GPU",
                f"ranks {names} are all on it, and GPU {empty[0]} has no rank",
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else, or one GPU per task",
                f"GPU {index}",
            )
