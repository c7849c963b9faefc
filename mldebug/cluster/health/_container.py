"""Containers: which one this is, and the device files that it was given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, fine, gpus, many, part, unseen, warn
from mldebug.cluster.health._root import NotVisible, Root

_FIRST = re.compile(r"docker|kubepods|containerd|libpod|lxc|enroot|apptainer")


def look(root: Root, shown: int = 0) -> dict[str, Any]:
    """The kind of container, "" for none, and the device files of GPUs and RDMA; `shown` is how many GPUs NVML has.

    Where there are more files than that, a cgroup may forbid some: SLURM gives a job its GPUs in this way.
    """
    files = {name: _names(root, folder) for name, folder in (("dev", "/dev"), ("rdma", "/dev/infiniband"))}
    dev = files["dev"] or []
    gpu_files = [one for one in dev if re.fullmatch(r"nvidia\d+", one)]
    forbidden = [one for one in gpu_files if 0 < shown < len(gpu_files) and root.is_forbidden(f"/dev/{one}")]
    return {
        "kind": _kind(root),
        "gpu_files": [one for one in gpu_files if one not in forbidden],
        "nvidia_files": [one for one in dev if one in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "gdrdrv")],
        "amd_files": [one for one in dev if one in ("kfd", "dri")],
        "rdma_files": files["rdma"] if files["rdma"] is not None else [],
    }


def _names(root: Root, folder: str) -> list[str] | None:
    try:
        return root.names(folder)
    except NotVisible:
        return None


def _kind(root: Root) -> str:
    environ = root.environ()
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "a pod of Kubernetes"
    if root.exists("/.dockerenv"):
        return "docker"
    if root.exists("/run/.containerenv"):
        return "podman"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "Apptainer"
    found = _FIRST.search(root.maybe("/proc/1/cgroup") or "")
    return found.group(0) if found else ""


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    check, seen = "container", part(node, "container") or {}
    if "why" in seen:
        yield unseen(check, str(seen["why"]))
        return
    kind = seen.get("kind")
    files = seen.get("nvidia_files") or []
    if kind and gpus(node) and "nvidia-uvm" not in files:
        hint = "start it with the NVIDIA runtime (--gpus all), or `nvidia-modprobe -u` on the host first"
        yield warn(check, f"{kind}: there is no /dev/nvidia-uvm, and CUDA does not start without it", hint)
    elif kind:
        shown = len(seen.get("gpu_files") or [])
        yield fine(
            check,
            f"{kind}, with device files of {many(shown, 'GPU')}" if shown else f"{kind}, without device files of GPUs",
        )
    else:
        yield fine(check, "none")
