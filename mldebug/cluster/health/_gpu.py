"""The GPUs one by one: there, alive, their memory, their settings, the fabric they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import (
    Finding,
    Node,
    bad,
    by,
    fine,
    gpus,
    hidden,
    majority,
    many,
    part,
    settle,
    size,
    unseen,
    warn,
)
from mldebug.cluster.health._nvml import HANGS
from mldebug.cluster.health._pci import NVIDIA

Gpu = Mapping[str, Any]

_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    yield from _present(node)
    if gpus(node):
        for check in (_ecc, _rows, _settings, _fabric):
            yield from check(node)


def where(gpu: Gpu) -> str:
    return f"GPU {gpu['index']}"


def _present(node: Node) -> Iterator[Finding]:
    """Whether all GPUs that the machine has are here."""
    check = "GPUs"
    shown = part(node, "gpu", "gpus") or []
    for gpu in shown:
        if gpu.get("fatal"):
            yield bad(
                check,
                str(gpu["fatal"]),
                "drain the node and reboot it; Xid lines in the kernel log say why",
                where(gpu),
            )
    on_bus = [one for one in part(node, "pci", "devices") or [] if one["what"] == "gpu" and one["vendor"] == NVIDIA]
    usable = [one for one in on_bus if one.get("driver", "nvidia") not in ("vfio-pci", "nouveau")]
    why, error = str(part(node, "gpu", "why") or ""), part(node, "gpu", "error")
    files = part(node, "container", "gpu_files") or []
    if not shown and why:
        if not on_bus and not files and error not in (18, HANGS):
            if not part(node, "amd", "gpus"):
                yield unseen(check, f"no GPU on the PCI bus; {why}")
            return
        if on_bus and not usable:
            held = ", ".join(sorted({one["driver"] for one in on_bus}))
            yield warn(check, f"{len(on_bus)} on the PCI bus, and {held} holds them: CUDA cannot use them", _OTHER)
            return
        yield from _no_library(node, check, why, error, len(on_bus), bool(files))
        return
    alive = gpus(node)
    missing = len(usable) - len(shown)
    if missing > 0 and len(files) != len(shown):
        names = {gpu.get("bus") for gpu in shown}
        lost = ", ".join(one["address"] for one in usable if one["address"] not in names)
        yield bad(
            check, f"{len(usable)} are on the PCI bus and the driver shows {len(shown)}: {lost} is missing",
            "read the kernel log for this address; reboot, and reseat the card if it stays away",
        )  # fmt: skip
    elif missing > 0:
        yield fine(check, f"this job or container was given {len(shown)} of {len(usable)}")
    elif alive and len(alive) == len(shown):
        models = by(alive, lambda gpu: gpu.get("name"))
        yield fine(check, ", ".join(f"{len(group)} x {model}" for model, group in models.items()))
    elif not shown:
        yield unseen(check, "the driver shows none")


_OTHER = "install the NVIDIA driver, if they are for training; vfio-pci keeps them for virtual machines"
# NVML's errors, and ours for an NVML that hangs -> what to do.
_NO_NVML = {
    HANGS: "`dmesg | grep -i nvrm` says which GPU; drain the node and reboot it",
    9: "`modprobe nvidia`, and read `dmesg | grep -i nvrm`",
    12: "start the container with --gpus all (or the NVIDIA runtime), or install the driver",
    18: "reboot, or unload and load the nvidia modules: the driver was updated while it was in use",
}


def _no_library(node: Node, check: str, why: str, error: Any, count: int, files: bool) -> Iterator[Finding]:
    """GPUs that NVML says nothing of: the driver's fault, or only that of a Python package."""
    if error not in _NO_NVML:
        hint = "pip install nvidia-ml-py" if error == 0 else "`nvidia-smi` may say more"
        yield unseen(check, f"{count} on the PCI bus, but {why}", hint)
    elif error != HANGS and not files and part(node, "container", "kind"):
        yield warn(check, f"{count} on the PCI bus, none for this container: {why}", _NO_NVML[error])
    else:
        yield bad(check, f"{count} on the PCI bus, and none can be used: {why}", _NO_NVML[error])


def _ecc(node: Node) -> Iterator[Finding]:
    check, found = "ECC", gpus(node)
    if any("ecc_uncorrected" in gpu for gpu in found):
        yield from settle(check, _ecc_troubles(check, found), f"no uncorrected errors on {many(len(found), 'GPU')}")
    else:
        yield from hidden(check, found, "ecc_uncorrected")


def _ecc_troubles(check: str, found: list[Gpu]) -> Iterator[Finding]:
    modes = {gpu["index"]: gpu["ecc_mode"] for gpu in found if "ecc_mode" in gpu}
    _, odd = majority({index: now for index, (now, _) in modes.items()})
    for gpu in found:
        index, now, ever = gpu["index"], gpu.get("ecc_uncorrected", 0), gpu.get("ecc_uncorrected_ever", 0)
        if now:
            says = f"{now} uncorrected memory errors since the driver was loaded"
            yield bad(check, says, f"drain the node, {_reset(index)}, run a memory test", where(gpu))
        elif ever:
            says = f"{ever} uncorrected memory errors in its life, none since the driver was loaded"
            yield warn(check, says, "keep an eye on it: `nvidia-smi -q -d ECC,ROW_REMAPPER`", where(gpu))
        state, planned = modes.get(index, (0, 0))
        if index in odd:
            hint = f"`nvidia-smi -i {index} -e {1 - state}`, and reboot"
            yield warn(check, f"it is {'on' if state else 'off'}, unlike its siblings", hint, where(gpu))
        if state != planned:
            yield warn(check, "a change of its mode waits for a reboot", "reboot, or reset the GPU", where(gpu))


def _reset(index: int) -> str:
    return f"`nvidia-smi --gpu-reset -i {index}`"


def _rows(node: Node) -> Iterator[Finding]:
    check, found = "memory rows", gpus(node)
    told = [gpu for gpu in found if "remapped" in gpu or "retired_pending" in gpu]
    if told:
        remapped = sum(sum(gpu["remapped"][:2]) for gpu in told if "remapped" in gpu)
        yield from settle(check, _row_troubles(check, told), f"{remapped} remapped, none pending, none failed")
    else:
        yield from hidden(check, found, "remapped")


def _row_troubles(check: str, told: list[Gpu]) -> Iterator[Finding]:
    for gpu in told:
        _, _, pending, failed = gpu.get("remapped", (0, 0, 0, 0))
        spent = gpu.get("rows", {}).get("none", 0)
        if failed:
            yield bad(check, "a row could not be remapped", "replace the GPU: it has no spare rows there", where(gpu))
        elif pending or gpu.get("retired_pending"):
            hint = f"{_reset(gpu['index'])}, or reboot"
            yield bad(check, "a bad row waits for a reset to be replaced", hint, where(gpu))
        elif spent:
            yield warn(check, f"{spent} banks have no spare rows left", "plan to replace the GPU", where(gpu))


def _settings(node: Node) -> Iterator[Finding]:
    """Persistence, MIG, compute mode: what an administrator has set."""
    found = gpus(node)
    off = [gpu for gpu in found if gpu.get("persistence") == 0]
    if off:
        names = "all GPUs" if len(off) == len(found) else ", ".join(where(gpu) for gpu in off)
        says = f"off on {names}: each start of a job waits for the driver"
        yield warn("persistence", says, "`nvidia-smi -pm 1`, or run nvidia-persistenced")
    elif any("persistence" in gpu for gpu in found):
        yield fine("persistence", "on")
    else:
        yield from hidden("persistence", found, "persistence")
    yield from _mig(found)
    for gpu in found:
        mode = gpu.get("compute_mode")
        if mode in _MODES:
            say, hint = (bad if mode == 2 else warn), f"`nvidia-smi -i {gpu['index']} -c 0`"
            yield say("compute mode", _MODES[mode], hint, where(gpu))
    memory = [(gpu, gpu["memory"]["used"], gpu["memory"]["total"]) for gpu in found if "memory" in gpu]
    busy = [f"{where(gpu)} {size(used)}" for gpu, used, total in memory if used > 0.1 * total]
    if busy:
        yield fine("in use", f"memory is taken on {len(busy)} of {len(found)}: {', '.join(busy[:8])}")


def _mig(found: list[Gpu]) -> Iterator[Finding]:
    check = "MIG"
    modes = {gpu["index"]: gpu["mig"] for gpu in found if "mig" in gpu}
    _, odd = majority({index: now for index, (now, _) in modes.items()})
    troubles = []
    for index, (now, planned) in modes.items():
        if index in odd:
            hint = f"`nvidia-smi -i {index} -mig {1 - now}`"
            troubles.append(warn(check, f"{'on' if now else 'off'}, unlike its siblings", hint, f"GPU {index}"))
        if now != planned:
            says = "a change of its mode waits for a reset"
            troubles.append(warn(check, says, "reset the GPU, or reboot", f"GPU {index}"))
    on = sum(now for now, _ in modes.values())
    says = f"on for {many(on, 'GPU')}: no NVLink and no peer access there" if on else "off"
    yield from settle(check, troubles, says if modes else "")


_STATES = {1: "not started", 2: "in progress"}
# Bits of the health that NVML tells: where they begin, and what 1 means there.
_HEALTH = (
    (0, "its bandwidth is degraded"),
    (2, "routes are being recovered"),
    (4, "a route is unhealthy"),
    (6, "it recovers from a timeout"),
)


def _fabric(node: Node) -> Iterator[Finding]:
    """The fabric manager of machines with NVSwitch: without it CUDA does not start, or NVLink is missing."""
    check, hint = (
        "fabric manager",
        "`systemctl restart nvidia-fabricmanager`, its version must be the driver's; then its log",
    )
    found = gpus(node)
    told = [gpu for gpu in found if gpu.get("fabric", {}).get("state")]
    switches = [one for one in part(node, "pci", "devices") or [] if one["what"] == "bridge"]
    troubles = []
    for gpu in told:
        fabric = gpu["fabric"]
        health = [says for shift, says in _HEALTH if fabric["health"] >> shift & 3 == 1]
        wrong = fabric["health"] >> 8 & 0xF
        if fabric["state"] in _STATES:
            troubles.append(bad(check, f"the fabric is {_STATES[fabric['state']]}", hint, where(gpu)))
        elif fabric["status"]:
            troubles.append(bad(check, f"the fabric failed to come up (status {fabric['status']})", hint, where(gpu)))
        elif health or wrong > 1:
            says = ", ".join(health) or f"its configuration is wrong (code {wrong})"
            troubles.append(
                bad(check, says, "`nvidia-smi -q | grep -A9 Fabric`, and the log of the fabric manager", where(gpu))
            )
    if told:
        yield from settle(check, troubles, "the fabric is complete")
    elif switches and not part(node, "software", "fabric_manager"):
        if part(node, "container", "kind") or part(node, "software", "fabric_manager") is None:
            yield unseen(check, "its process cannot be seen from here, and this driver does not tell of the fabric")
        else:
            yield bad(check, f"{len(switches)} NVSwitches and no nv-fabricmanager runs", hint)
    elif switches:
        yield fine(check, "it runs")
