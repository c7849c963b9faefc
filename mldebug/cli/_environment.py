"""`mldebug --version --json`: the environment as a bug report wants it, without loading torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mldebug import __version__
from mldebug.core.machine import NotVisible, Root

PACKAGES = (
    "torch", "transformers", "numpy", "datasets", "accelerate", "lightning", "pytorch-lightning", "deepspeed",
    "tokenizers", "safetensors", "triton", "flash-attn", "bitsandbytes", "peft", "py-spy", "rich", "nvidia-ml-py",
)  # fmt: skip
_NAMES = (
    "CUDA_", "NVIDIA_", "NCCL_", "RCCL_", "HIP_", "ROCR_", "HSA_", "MIOPEN_", "ZE_", "GLOO_", "UCX_", "FI_", "TORCH",
    "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "GOMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_",
    "DEEPSPEED_", "MLDEBUG_", "PYTHON", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS",
    "SLURM_PROCID", "OMPI_COMM_WORLD_",
)  # fmt: skip
_PRIVATE = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS(WORD|WD|PHRASE)?($|_)|KEY|CREDENTIAL|AUTH|COOKIE|BEARER", re.I)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_NVML_SECONDS = 5.0  # a driver that is ill may never answer


def environment() -> dict[str, Any]:
    """Versions, devices and variables of this process, as plain JSON values.

    Reads files and NVML only, so that it answers where `import torch` fails. Values of variables whose names look
    private are left out, as are users and passwords in URLs; the home folder is written `~`.

        json.dumps(environment(), indent=2)
    """
    root = Root()
    return {
        "schema": 1,
        "version": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": _without_home(sys.executable or ""),
        "os": _os(root),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "container": _container(root),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": _torch(),
        "gpus": _gpus(root),
        "packages": _packages(),
        "variables": variables(os.environ),
    }


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those that change how training runs, without what is private."""
    found = {}
    for name in sorted(env):
        if name.startswith(_NAMES):
            found[name] = "(hidden)" if _PRIVATE.search(name) else _without_home(_shown(env[name]))
    return found


def _shown(value: str) -> str:
    return _USER_IN_URL.sub("(hidden)@", value)[:400]


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?=[/:]|$)", "~", text) if len(home) > 1 else text


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(Exception):  # a damaged installation is no reason to say nothing
            found[name] = str(metadata.version(name))
    return found


def _torch() -> dict[str, Any]:
    """What torch was built with, from its own `version.py`: importing it takes seconds, and may be what fails."""
    try:
        spec = importlib.util.find_spec("torch")
    except Exception as exc:
        return {"problem": f"{type(exc).__name__}: {exc}"}
    if spec is None:
        return {"problem": "torch is not installed"}
    folder = Path(next(iter(spec.submodule_search_locations or ()), ""))
    facts: dict[str, Any] = {"path": _without_home(str(folder))}
    if spec.origin is None:
        facts["problem"] = "there is a folder torch without __init__.py: the installation is damaged"
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as exc:
        return {**facts, "problem": f"version.py cannot be read: {(exc.strerror or str(exc)).lower()}"}
    for name, key in (("__version__", "version"), ("cuda", "cuda"), ("hip", "rocm"), ("xpu", "xpu")):
        match = re.search(rf"^{name}\b[^=\n]*= *'([^'\n]*)'", text, re.M)
        if match:
            facts[key] = match[1]
    for library in ("nccl", "rccl", "cudnn"):
        if found := _wheel(library):
            facts[library] = found
    return facts


def _wheel(library: str) -> str | None:
    """The version of a library that came as a wheel beside torch."""
    for name in (f"nvidia-{library}-cu13", f"nvidia-{library}-cu12", f"nvidia-{library}", library):
        with contextlib.suppress(Exception):
            return str(metadata.version(name))
    return None


def _os(root: Root) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', root.maybe("/etc/os-release") or "", re.M)
    return match[1] if match else platform.platform()


def _container(root: Root) -> str | None:
    """What this process runs in, as far as it can be seen from inside."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if root.exists(path):
            return name
    for variable, name in (("APPTAINER_CONTAINER", "apptainer"), ("SINGULARITY_CONTAINER", "singularity")):
        if os.environ.get(variable):
            return name
    match = re.search(r"docker|kubepods|containerd|lxc|enroot", root.maybe("/proc/1/cgroup") or "")
    return match[0] if match else None


def _gpus(root: Root) -> dict[str, Any]:
    """Driver and cards: NVIDIA's from NVML, AMD's from /sys."""
    amd = _amd(root)
    if amd["cards"]:
        return amd
    answer: dict[str, Any] = {}
    thread = threading.Thread(target=_ask_nvml, args=(answer,), daemon=True)
    thread.start()
    thread.join(_NVML_SECONDS)
    if thread.is_alive():
        return {"cards": [], "problem": f"NVML did not answer in {_NVML_SECONDS:g} s: the driver hangs"}
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", root.maybe("/proc/driver/nvidia/version") or "")
    return {"cards": [], **({"driver": match[1]} if match else {}), **answer}


def _ask_nvml(answer: dict[str, Any]) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
        answer["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        answer["driver_cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        answer["cards"] = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception as exc:
        answer["problem"] = f"NVML: {exc}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _amd(root: Root) -> dict[str, Any]:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    cards = []
    with contextlib.suppress(NotVisible):
        for node in root.names(nodes):
            facts = root.maybe(f"{nodes}/{node}/properties") or ""
            if re.search(r"^simd_count [1-9]", facts, re.M):
                cards.append(root.maybe(f"{nodes}/{node}/name") or "AMD GPU")
    rocm = root.maybe("/opt/rocm/.info/version")
    driver = root.maybe("/sys/module/amdgpu/version")
    return {"cards": cards, **({"driver": driver} if driver else {}), **({"rocm": rocm} if rocm else {})}
