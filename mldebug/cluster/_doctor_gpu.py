"""The GPUs one by one: there, alive, their memory, their clocks and power, their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster._doctor_finding import (
    Finding,
    Node,
    bad,
    by,
    fine,
    gpus,
    hidden,
    majority,
    many,
    median,
    part,
    settle,
    size,
    unseen,
    warn,
)
from mldebug.cluster._doctor_nvml import HANGS
from mldebug.cluster._doctor_pci import NVIDIA

Gpu = Mapping[str, Any]

# Reasons for a low clock, by NVML's bits.
_IDLE, _SETTING, _POWER_CAP, _HW, _SW_HEAT, _HW_HEAT, _BRAKE = 0x1, 0x2, 0x4, 0x8, 0x20, 0x40, 0x80
_BRAKES = (
    (_HW_HEAT, "the hardware slows it down, as it is too hot", "check fans, air flow and the heat sink"),
    (_BRAKE, "the power supply slows it down (power brake)", "check the power supply of the server and its cables"),
    (_SW_HEAT, "the driver slows it down, as it is too hot", "check fans and air flow"),
    (
        _HW,
        "the hardware slows it down: heat or power",
        "check cooling and power supply; `nvidia-smi -q -d PERFORMANCE`",
    ),
)
_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    yield from _present(node)
    if gpus(node):
        for check in (_ecc, _rows, _throttle, _power, _heat, _settings, _fabric):
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
    if not any("ecc_uncorrected" in gpu for gpu in found):
        yield from hidden(check, found, "ecc_uncorrected")
        return
    troubles = []
    modes = {gpu["index"]: gpu["ecc_mode"][0] for gpu in found if "ecc_mode" in gpu}
    _, odd = majority(modes)
    for gpu in found:
        if gpu.get("ecc_uncorrected"):
            says = f"{gpu['ecc_uncorrected']} uncorrected memory errors since the driver was loaded"
            troubles.append(
                bad(
                    check,
                    says,
                    f"drain the node, `nvidia-smi --gpu-reset -i {gpu['index']}`, run a memory test",
                    where(gpu),
                )
            )
        elif gpu.get("ecc_uncorrected_ever"):
            says = (
                f"{gpu['ecc_uncorrected_ever']} uncorrected memory errors in its life, none since the driver was loaded"
            )
            troubles.append(warn(check, says, "keep an eye on it: `nvidia-smi -q -d ECC,ROW_REMAPPER`", where(gpu)))
        if gpu["index"] in odd:
            state = "on" if modes[gpu["index"]] else "off"
            troubles.append(
                warn(
                    check,
                    f"it is {state}, unlike its siblings",
                    f"`nvidia-smi -i {gpu['index']} -e {1 - modes[gpu['index']]}`, and reboot",
                    where(gpu),
                )
            )
        if "ecc_mode" in gpu and gpu["ecc_mode"][0] != gpu["ecc_mode"][1]:
            troubles.append(
                warn(check, "a change of its mode waits for a reboot", "reboot, or reset the GPU", where(gpu))
            )
    yield from settle(check, troubles, f"no uncorrected errors on {many(len(found), 'GPU')}")


def _rows(node: Node) -> Iterator[Finding]:
    check, found = "memory rows", gpus(node)
    told = [gpu for gpu in found if "remapped" in gpu or "retired_pending" in gpu]
    if not told:
        yield from hidden(check, found, "remapped")
        return
    troubles = []
    for gpu in told:
        _, _, pending, failed = gpu.get("remapped", (0, 0, 0, 0))
        spent = gpu.get("rows", {}).get("none", 0)
        if failed:
            troubles.append(
                bad(check, "a row could not be remapped", "replace the GPU: it has no spare rows there", where(gpu))
            )
        elif pending or gpu.get("retired_pending"):
            troubles.append(
                bad(
                    check,
                    "a bad row waits for a reset to be replaced",
                    f"`nvidia-smi --gpu-reset -i {gpu['index']}`, or reboot",
                    where(gpu),
                )
            )
        elif spent:
            troubles.append(
                warn(check, f"{spent} banks have no spare rows left", "plan to replace the GPU", where(gpu))
            )
    remapped = sum(gpu["remapped"][0] + gpu["remapped"][1] for gpu in told if "remapped" in gpu)
    yield from settle(check, troubles, f"{remapped} remapped, none pending, none failed")


def _throttle(node: Node) -> Iterator[Finding]:
    """Clocks: under load where that was tried; on an idle GPU only the brakes count."""
    check, found = "clocks", gpus(node)
    loads = part(node, "load", "gpus") or {}
    if not loads and not any("throttle" in gpu for gpu in found):
        yield from hidden(check, found, "throttle")
        return
    troubles = []
    for gpu in found:
        load = loads.get(str(gpu.get("uuid")))
        bits = (load or {}).get("throttle", gpu.get("throttle", 0))
        for bit, says, hint in _BRAKES:
            if bits & bit:
                troubles.append((bad if load else warn)(check, says, hint, where(gpu)))
                break
        if load and bits & _SETTING:
            troubles.append(
                warn(
                    check,
                    "somebody has set its clocks",
                    f"`nvidia-smi -i {gpu['index']} -rac; nvidia-smi -i {gpu['index']} -rgc`",
                    where(gpu),
                )
            )
    for group in by([gpu for gpu in found if str(gpu.get("uuid")) in loads], lambda gpu: gpu.get("name")).values():
        troubles += _slower(group, loads, "sm_clock", 0.9, "MHz under load", check)
        troubles += _slower(group, loads, "tflops", 0.85, "TFLOPS in a matmul", "matmul")
        troubles += _slower(group, loads, "h2d_gbps", 0.7, "GBps from the host", "PCIe copies")
    clocks = [load["sm_clock"] for load in loads.values() if "sm_clock" in load]
    if clocks:
        yield from settle(check, troubles, f"{_span(clocks)} MHz under load")
    else:
        yield from settle(check, troubles, "nothing slows them down now; --load looks under load")
    if why := part(node, "load", "why"):
        yield unseen("load", str(why))


def _span(values: list[Any]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def _slower(
    group: list[Gpu], loads: Mapping[str, Any], fact: str, share: float, unit: str, check: str
) -> list[Finding]:
    """Who does much less than its siblings."""
    values = {gpu["index"]: loads[str(gpu["uuid"])].get(fact) for gpu in group}
    told = {index: value for index, value in values.items() if value}
    usual = median(told.values())
    return [
        bad(
            check, f"{value:.0f} {unit}, its siblings {usual:.0f}",
            "`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE` of it and of a sibling", f"GPU {index}",
        )
        for index, value in told.items()
        if len(told) > 2 and value < share * usual
    ]  # fmt: skip


def _power(node: Node) -> Iterator[Finding]:
    check, found = "power limit", gpus(node)
    told = [gpu for gpu in found if "power_limit" in gpu and "power_default" in gpu]
    if not told:
        yield from hidden(check, found, "power_limit")
        return
    troubles = [
        warn(
            check, f"{gpu['power_limit'] / 1000:.0f} W, and the default is {gpu['power_default'] / 1000:.0f} W",
            f"`nvidia-smi -i {gpu['index']} -pl {gpu['power_default'] // 1000}`, if nobody wants it so", where(gpu),
        )
        for gpu in told
        if gpu["power_limit"] < gpu["power_default"]
    ]  # fmt: skip
    watts = sorted({gpu["power_limit"] // 1000 for gpu in told})
    yield from settle(check, troubles, " and ".join(f"{one} W" for one in watts))


def _heat(node: Node) -> Iterator[Finding]:
    check, found = "temperature", gpus(node)
    told = [gpu for gpu in found if "temperature" in gpu]
    if not told:
        yield from hidden(check, found, "temperature")
        return
    troubles = [
        bad(
            check,
            f"{gpu['temperature']} C, it slows down at {gpu['temperature_slow']} C",
            "check fans and air flow",
            where(gpu),
        )
        for gpu in told
        if 0 < gpu.get("temperature_slow", 0) <= gpu["temperature"]
    ]
    degrees = [gpu["temperature"] for gpu in told]
    yield from settle(check, troubles, f"{_span(degrees)} C")


def _settings(node: Node) -> Iterator[Finding]:
    """Persistence, MIG, compute mode: what an administrator has set."""
    found = gpus(node)
    off = [gpu for gpu in found if gpu.get("persistence") == 0]
    if off:
        names = "all GPUs" if len(off) == len(found) else ", ".join(where(gpu) for gpu in off)
        yield warn(
            "persistence",
            f"off on {names}: each start of a job waits for the driver",
            "`nvidia-smi -pm 1`, or run nvidia-persistenced",
        )
    elif any("persistence" in gpu for gpu in found):
        yield fine("persistence", "on")
    else:
        yield from hidden("persistence", found, "persistence")
    mig = {gpu["index"]: gpu["mig"][0] for gpu in found if "mig" in gpu}
    _, odd = majority(mig)
    troubles = [
        warn(
            "MIG",
            f"{'on' if mig[index] else 'off'}, unlike its siblings",
            f"`nvidia-smi -i {index} -mig {1 - mig[index]}`",
            f"GPU {index}",
        )
        for index in odd
    ]
    troubles += [
        warn("MIG", "a change of its mode waits for a reset", "reset the GPU, or reboot", where(gpu))
        for gpu in found
        if "mig" in gpu and gpu["mig"][0] != gpu["mig"][1]
    ]
    on = sum(mig.values())
    says = f"on for {on} GPUs: no NVLink and no peer access there" if on else "off"
    yield from settle("MIG", troubles, says if mig else "")
    modes = [gpu for gpu in found if gpu.get("compute_mode") in _MODES]
    yield from settle("compute mode", (
        (bad if gpu["compute_mode"] == 2 else warn)(
            "compute mode", _MODES[gpu["compute_mode"]], f"`nvidia-smi -i {gpu['index']} -c 0`", where(gpu)
        )
        for gpu in modes
    ), "")  # fmt: skip
    busy = [
        gpu for gpu in found if gpu.get("memory", {}).get("used", 0) > 0.1 * gpu.get("memory", {}).get("total", 1 << 60)
    ]
    if busy:
        used = ", ".join(f"{where(gpu)} {size(gpu['memory']['used'])}" for gpu in busy[:8])
        yield fine("in use", f"memory is taken on {len(busy)} of {len(found)}: {used}")


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
    elif switches and part(node, "software", "fabric_manager") is False:
        if part(node, "container", "kind"):
            yield unseen(check, "it runs outside of this container, and this driver does not tell of the fabric")
        else:
            yield bad(check, f"{len(switches)} NVSwitches and no nv-fabricmanager runs", hint)
    elif switches:
        yield fine(check, "it runs")
