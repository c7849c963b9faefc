"""Versions, libraries and variables: what must be the same everywhere, and what an old experiment has left behind."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, fine, gpus, many, part, settle, unseen, warn
from mldebug.cluster.health._names import KNOWN
from mldebug.cluster.health._root import NotVisible, Root

_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed", "mpi4py")
_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "UCX_", "FI_", "GLOO_", "MASTER_", "SLURM_NNODES", "SLURM_NODEID",
             "WORLD_SIZE",
             "LOCAL_WORLD_SIZE", "RANK", "GROUP_RANK", "NODE_RANK", "OMPI_COMM_WORLD_", "CUDA_VISIBLE_DEVICES",
             "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "LD_PRELOAD", "HSA_",
             "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # fmt: skip
_PRIVATE = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.I)
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib", "/opt/rocm/lib",
            "/usr/local/cuda/lib64", "/opt/amazon/ofi-nccl/lib", "/opt/hpcx/nccl_rdma_sharp_plugin/lib")  # fmt: skip
_LIBRARY = re.compile(r"lib(nccl|rccl|nccl-net|nccl-tuner|nccl-net-ofi)(?:-\w+)?\.so(?:\.[\d.]+)?$")

# Variable -> (the values that are a trouble, what they do, the level).
LEFT_OVER: dict[str, tuple[str, str]] = {
    "NCCL_P2P_DISABLE": (r"1", "GPUs of a node talk through host memory"),
    "NCCL_P2P_LEVEL": (r"LOC|0", "GPUs of a node talk through host memory"),
    "NCCL_SHM_DISABLE": (r"1", "GPUs of a node talk through the network"),
    "NCCL_IB_DISABLE": (r"1", "InfiniBand and RoCE are not used"),
    "NCCL_NET_GDR_LEVEL": (r"LOC|0", "network cards do not reach the memory of GPUs"),
    "NCCL_NET_GDR_DISABLE": (r"1", "network cards do not reach the memory of GPUs"),
    "NCCL_NVLS_ENABLE": (r"0", "reductions inside of NVSwitch are not used"),
    "NCCL_ALGO": (r".+", "NCCL cannot choose its algorithm"), "NCCL_PROTO": (r".+", "NCCL cannot choose its protocol"),
    "NCCL_MAX_NCHANNELS": (r".+", "NCCL cannot choose its channels"),
    "NCCL_MIN_NCHANNELS": (r".+", "NCCL cannot choose its channels"),
    "NCCL_MAX_CTAS": (r".+", "NCCL cannot choose its channels"),
    "NCCL_NTHREADS": (r".+", "NCCL cannot choose its threads"),
    "NCCL_BUFFSIZE": (r".+", "NCCL's buffers have another size"),
    "NCCL_NET": (r"Socket", "InfiniBand and RoCE are not used"),
    "NCCL_DEBUG": (r"TRACE|trace|INFO|info", "every rank writes a lot"),
    "NCCL_LAUNCH_MODE": (r"GROUP", "kernels of a group are started together"),
    "NCCL_COMM_ID": (r".+", "every communicator uses this one address"),
    "TORCH_NCCL_BLOCKING_WAIT": (r"1|true|TRUE", "each collective waits on the CPU"),
    "NCCL_BLOCKING_WAIT": (r"1|true|TRUE", "each collective waits on the CPU"),
    "CUDA_LAUNCH_BLOCKING": (r"1", "every kernel waits for the one before"),
    "TORCH_DISTRIBUTED_DEBUG": (r"DETAIL", "every collective is checked by another one"),
    "HSA_NO_SCRATCH_RECLAIM": (r"0", "scratch memory is taken and given back all the time"),
}  # fmt: skip


def look(root: Root) -> dict[str, Any]:
    """Versions of everything, the settings that NCCL reads, and the NCCL libraries that lie about."""
    env = {
        name: value[:400] for name, value in root.environ().items()
        if name.startswith(_PREFIXES) and not _PRIVATE.search(name)
    }  # fmt: skip
    home = root.environ().get("HOME", "/root")
    files = {path: _settings(root, path) for path in ("/etc/nccl.conf", f"{home}/.nccl.conf") if root.exists(path)}
    for path in [one for one, value in env.items() if one in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE") and value]:
        env.setdefault(f"{path}:missing", "" if root.exists(env[path]) else "1")
    return {
        "env": env, "files": files, "versions": _versions(root), "libraries": _libraries(root),
        "driver": _driver(root), "kernel": root.kernel(), "python": platform.python_version(),
        "system": _system(root), "fabric_manager": _runs(root, "nv-fabricmanage") if _sees_all(root) else None,
        "ofed": root.maybe("/sys/module/mlx5_core/version") or "",
    }  # fmt: skip


def _settings(root: Root, path: str) -> dict[str, str]:
    rows = [line.partition("#")[0].partition("=") for line in (root.maybe(path) or "").splitlines()]
    return {name.strip(): value.strip()[:400] for name, sign, value in rows if sign and name.strip()}


def _versions(root: Root) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _libraries(root: Root) -> list[str]:
    """Real paths of NCCL and its plugins where a loader would look for them."""
    found = set()
    places = [one for one in root.environ().get("LD_LIBRARY_PATH", "").split(":") if one.startswith("/")]
    for folder in [*places[:50], *_FOLDERS]:
        try:
            names = root.names(folder)
        except NotVisible:
            continue
        for name in names:
            if _LIBRARY.fullmatch(name):
                try:
                    found.add(root.real(f"{folder}/{name}"))
                except NotVisible:  # a link to nowhere
                    continue
    return sorted(found)[:40]


def _driver(root: Root) -> str:
    match = re.search(r"(?:Kernel Module\s+(?:for \S+\s+)?)(\d[\d.]+)", root.maybe("/proc/driver/nvidia/version") or "")
    return match.group(1) if match else ""


def _system(root: Root) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', root.maybe("/etc/os-release") or "", re.M)
    return match.group(1) if match else ""


def _sees_all(root: Root) -> bool:
    """Whether all processes of the machine are seen: not in a container, nor where /proc hides those of others."""
    return root.maybe("/proc/2/comm") == "kthreadd"


def _runs(root: Root, name: str) -> bool:
    try:
        numbers = [one for one in root.names("/proc") if one.isdecimal()]
    except NotVisible:
        return False
    return any((root.maybe(f"/proc/{number}/comm") or "").startswith(name) for number in numbers)


def settings(node: Node) -> dict[str, str]:
    """All NCCL settings of a node: of files, over them those of running ranks, over them the environment of doctor."""
    found: dict[str, str] = {}
    for rows in (part(node, "software", "files") or {}).values():
        found.update(rows)
    found.update(_of_ranks(node))
    found.update(part(node, "software", "env") or {})
    return found


def _of_ranks(node: Node) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank in part(node, "ranks", "found") or []:
        for name, value in rank.get("told", {}).items():
            if name in LEFT_OVER or name.startswith(("NCCL_", "TORCH_NCCL_", "RCCL_", "GLOO_")):
                found.setdefault(name, value)
    return found


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    seen = part(node, "software") or {}
    if "why" in seen:
        yield unseen("variables", str(seen["why"]))
        return
    yield from _variables(node, seen)
    yield from _versions_of(node, seen)


def _variables(node: Node, seen: Any) -> Iterator[Finding]:
    check, troubles = "variables", []
    env = seen.get("env") or {}
    running = _of_ranks(node)
    origins = {name: path for path, rows in (seen.get("files") or {}).items() for name in rows}
    for name, value in settings(node).items():
        path = "" if name in env or name in running else origins.get(name, "")
        place = f" in {path}" if path else "" if name in env else " in running ranks"
        undo = f"remove it from {path}" if path else f"unset {name}"
        if name in LEFT_OVER and re.fullmatch(LEFT_OVER[name][0], value):
            troubles.append(
                warn(check, f"{name}={value}{place}: {LEFT_OVER[name][1]}", f"{undo}, if nobody needs it any more")
            )
        elif env.get(f"{name}:missing"):
            troubles.append(bad(check, f"{name}={value}{place}: there is no such file", f"{undo}, or correct the path"))
        elif name.startswith("NCCL_") and ":" not in name and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.9)
            if near:
                troubles.append(
                    warn(check, f"{name}={value}{place} is nothing that NCCL reads", f"did you mean {near[0]}?")
                )
    troubles += _hca(node)
    ours = [name for name in settings(node) if name.startswith(("NCCL_", "TORCH_NCCL_", "RCCL_")) and ":" not in name]
    count = len([name for name in ours if name != "NCCL_VERSION"])  # that is a label of CUDA's images
    yield from settle(
        check, troubles, f"{many(count, 'setting')} of NCCL, none left over" if count else "no settings of NCCL"
    )


def _hca(node: Node) -> Iterator[Finding]:
    """NCCL_IB_HCA and NCCL_IB_GID_INDEX beside the ports that are there."""
    known, ports = settings(node), part(node, "rdma", "ports") or []
    setting = known.get("NCCL_IB_HCA", "")
    if setting and ports and not setting.startswith("^"):
        exact, words = (
            setting.startswith("="),
            [word.partition(":")[0] for word in setting.lstrip("=").split(",") if word],
        )
        devices = {port["device"] for port in ports}
        gone = [word for word in words if not any(one == word if exact else one.startswith(word) for one in devices)]
        if gone:
            say = bad if len(gone) == len(words) else warn
            yield say(
                "variables",
                f"NCCL_IB_HCA names {', '.join(gone[:4])}, and here are {', '.join(sorted(devices))}",
                "correct it, or unset NCCL_IB_HCA",
            )
    index = known.get("NCCL_IB_GID_INDEX", "")
    if index.isdecimal():
        for port in ports:
            if port["layer"] != "Ethernet" or port["state"] != "ACTIVE":
                continue
            kinds = [kind for number, _, kind, _ in port["gids"] if number == int(index)]
            if not kinds or "v2" not in kinds[0]:
                what = f"is {kinds[0]}" if kinds else "is empty"
                best = next((number for number, gid, kind, _ in port["gids"] if "v2" in kind and ":ffff:" in gid), None)
                hint = (
                    f"NCCL_IB_GID_INDEX={best}" if best is not None else "unset NCCL_IB_GID_INDEX, and let NCCL choose"
                )
                yield bad(
                    "variables",
                    f"NCCL_IB_GID_INDEX={index} {what} there",
                    hint,
                    f"{port['device']} port {port['port']}",
                )


def _versions_of(node: Node, seen: Any) -> Iterator[Finding]:
    check, versions = "NCCL", seen.get("versions") or {}
    found = [one for one in seen.get("libraries") or [] if re.search(r"/lib[nr]ccl\.so", one)]
    packaged = [f"{name} {version}" for name, version in versions.items() if name.startswith("nvidia-nccl")]
    if len(found) + len(packaged) > 1:
        shown = ", ".join([*packaged, *found][:4])
        says = f"{len(found) + len(packaged)} of them could be loaded: {shown}"
        yield warn(check, says, "keep one; `mldebug dist-test` says which one is really loaded, rank by rank")
    elif found or packaged:
        yield fine(check, (packaged or found)[0])
    elif gpus(node):
        yield unseen(check, "no library of it was found")
    words = {"driver": part(node, "gpu", "driver") or seen.get("driver"), "torch": versions.get("torch"),
             "kernel": seen.get("kernel"), "Python": seen.get("python"), "": seen.get("system")}  # fmt: skip
    yield fine("versions", ", ".join(f"{name} {value}".strip() for name, value in words.items() if value))


def uniform(node: Node) -> Mapping[str, str]:
    """What has to be the same on all nodes of a job."""
    seen = part(node, "software") or {}
    versions = seen.get("versions") or {}
    loaded = sorted({lib for rank in part(node, "ranks", "found") or [] for lib in rank.get("libraries") or ()})
    found = {
        "driver": part(node, "gpu", "driver") or seen.get("driver") or "", "kernel": seen.get("kernel", ""),
        "Python": seen.get("python", ""), "torch": versions.get("torch", ""), "OFED": seen.get("ofed", ""),
        "NCCL": ", ".join(
            [f"{name} {version}" for name, version in versions.items() if name.startswith("nvidia-nccl")]
            + [one for one in seen.get("libraries") or [] if re.search(r"/lib[nr]ccl\.so", one)]
        ),
        "net plugin": ", ".join(one for one in seen.get("libraries") or [] if re.search(r"nccl-(net|tuner)", one)),
        "loaded NCCL": ", ".join(loaded),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}
