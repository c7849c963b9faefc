"""Clocks, power and heat of GPUs. An idle GPU has low clocks: speed is judged under load, and against siblings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, by, gpus, hidden, median, part, settle, unseen, warn
from mldebug.cluster.health._gpu import Gpu, where

# Reasons for a low clock, by NVML's bits. An idle GPU (0x1) and the cap of its power (0x4) are as it should be.
_SETTING, _HW, _SW_HEAT, _HW_HEAT, _BRAKE = 0x2, 0x8, 0x20, 0x40, 0x80
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
# What a load measured -> the share of its siblings' that is too little, unit, check.
_SPEEDS = (
    ("sm_clock", 0.9, "MHz under load", "clocks"),
    ("tflops", 0.85, "TFLOPS in a matmul", "matmul"),
    ("h2d_gbps", 0.7, "GBps from the host", "PCIe copies"),
)


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    if gpus(node):
        yield from _clocks(node)
        yield from _power(node)
        yield from _heat(node)


def _clocks(node: Node) -> Iterator[Finding]:
    check, found = "clocks", gpus(node)
    loads = part(node, "load", "gpus") or {}
    if not loads and not any("throttle" in gpu for gpu in found):
        yield from hidden(check, found, "throttle")
        return
    clocks = [load["sm_clock"] for load in loads.values() if "sm_clock" in load]
    says = f"{_span(clocks)} MHz under load" if clocks else "nothing slows them down now; --load looks under load"
    yield from settle(check, [*_slowed(check, found, loads), *_slower(found, loads)], says)
    if why := part(node, "load", "why"):
        yield unseen("load", str(why))


def _slowed(check: str, found: list[Gpu], loads: Mapping[str, Any]) -> Iterator[Finding]:
    """Who is held back: bad under load, a doubt on an idle GPU."""
    for gpu in found:
        index, load = gpu["index"], loads.get(str(gpu.get("uuid")))
        bits = int((load or gpu).get("throttle", 0))
        for bit, says, hint in _BRAKES:
            if bits & bit:
                yield (bad if load else warn)(check, says, hint, where(gpu))
                break
        if load and bits & _SETTING:
            hint = f"`nvidia-smi -i {index} -rac; nvidia-smi -i {index} -rgc`"
            yield warn(check, "somebody has set its clocks", hint, where(gpu))


def _slower(found: list[Gpu], loads: Mapping[str, Any]) -> Iterator[Finding]:
    """Who does much less under load than its siblings."""
    hint = "`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE` of it and of a sibling"
    loaded = [gpu for gpu in found if str(gpu.get("uuid")) in loads]
    for group in by(loaded, lambda gpu: gpu.get("name")).values():
        for fact, share, unit, check in _SPEEDS:
            told = [(gpu, loads[str(gpu["uuid"])][fact]) for gpu in group if loads[str(gpu["uuid"])].get(fact)]
            usual = median(value for _, value in told)
            for gpu, value in told:
                if len(told) > 2 and value < share * usual:
                    yield bad(check, f"{value:.0f} {unit}, its siblings {usual:.0f}", hint, where(gpu))


def _power(node: Node) -> Iterator[Finding]:
    check, found = "power limit", gpus(node)
    told = [gpu for gpu in found if "power_limit" in gpu and "power_default" in gpu]
    if not told:
        yield from hidden(check, found, "power_limit")
        return
    troubles = []
    for gpu in told:
        now, usual = gpu["power_limit"] // 1000, gpu["power_default"] // 1000
        if now < usual:
            hint = f"`nvidia-smi -i {gpu['index']} -pl {usual}`, if nobody wants it so"
            troubles.append(warn(check, f"{now} W, and the default is {usual} W", hint, where(gpu)))
    watts = sorted({gpu["power_limit"] // 1000 for gpu in told})
    yield from settle(check, troubles, " and ".join(f"{one} W" for one in watts))


def _heat(node: Node) -> Iterator[Finding]:
    check, found = "temperature", gpus(node)
    told = [gpu for gpu in found if "temperature" in gpu]
    if not told:
        yield from hidden(check, found, "temperature")
        return
    troubles = []
    for gpu in told:
        now, limit = gpu["temperature"], gpu.get("temperature_slow", 0)
        if 0 < limit <= now:
            says = f"{now} C, it slows down at {limit} C"
            troubles.append(bad(check, says, "check fans and air flow", where(gpu)))
    yield from settle(check, troubles, f"{_span([gpu['temperature'] for gpu in told])} C")


def _span(values: list[Any]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])
