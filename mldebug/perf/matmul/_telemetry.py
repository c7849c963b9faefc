"""What the card says of itself while it works: clocks, power, temperature, and why it clocks no higher."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mldebug.core.device import Device

_EVERY = 0.1  # seconds

# Bits of NVML's reasons for a clock below the highest one.
_REASONS = (
    (0x2, "application clocks"),
    (0x4, "power limit"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal, by software"),
    (0x40, "thermal, by hardware"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
)
# What says that the card, its cooling or its supply is in trouble. A power limit that is reached is how they are made.
TROUBLE = ("hardware slowdown", "thermal, by software", "thermal, by hardware", "power brake")


@dataclass(frozen=True)
class Sample:
    """One look: MHz, W, degrees Celsius, and the reasons for the clock. What is not told is None."""

    at: float  # of time.monotonic()
    sm_mhz: int | None
    memory_mhz: int | None
    watts: float | None
    celsius: int | None
    reasons: int | None


class Telemetry:
    """`with Telemetry(device) as telemetry:` looks ten times a second, in a thread. Empty where there is no NVML."""

    def __init__(self, device: Device) -> None:
        self.samples: list[Sample] = []
        self._nvml = device.nvml()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.limits = self._limits()

    def __enter__(self) -> Telemetry:
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._look, name="mldebug-nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2)

    def summary(self, since: float, until: float) -> dict[str, Any]:
        """Medians between two moments of time.monotonic(), and the share of the looks that had each reason."""
        return summary([one for one in self.samples if since <= one.at <= until], self.limits)

    def _look(self) -> None:
        while not self._over.wait(_EVERY):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        assert self._nvml is not None
        nvml, handle = self._nvml

        def ask(name: str, *more: Any) -> Any:
            with contextlib.suppress(Exception):  # each card leaves some of it out
                return getattr(nvml, name)(handle, *more)
            return None

        new = "nvmlDeviceGetCurrentClocksEventReasons"
        reasons = ask(new if hasattr(nvml, new) else "nvmlDeviceGetCurrentClocksThrottleReasons")
        milliwatts = ask("nvmlDeviceGetPowerUsage")
        return Sample(
            time.monotonic(), ask("nvmlDeviceGetClockInfo", 1), ask("nvmlDeviceGetClockInfo", 2),
            None if milliwatts is None else milliwatts / 1e3, ask("nvmlDeviceGetTemperature", 0), reasons,
        )  # fmt: skip

    def _limits(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._nvml is not None:
            nvml, handle = self._nvml
            with contextlib.suppress(Exception):
                found["watts_limit"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
            with contextlib.suppress(Exception):
                found["sm_mhz_max"] = int(nvml.nvmlDeviceGetMaxClockInfo(handle, 1))
        return found


def summary(samples: Sequence[Sample], limits: dict[str, Any]) -> dict[str, Any]:
    """The medians of some samples with the limits of the card; {} for none."""
    if not samples:
        return {}
    found: dict[str, Any] = {"samples": len(samples), **limits}
    for name in ("sm_mhz", "memory_mhz", "watts", "celsius"):
        values = [value for one in samples if (value := getattr(one, name)) is not None]
        if values:
            found[name] = round(statistics.median(values), 1)
            if name == "sm_mhz":
                found["sm_mhz_range"] = [min(values), max(values)]
    told = [one.reasons for one in samples if one.reasons is not None]
    shares = {name: sum(bool(bits & bit) for bits in told) / len(told) for bit, name in _REASONS if told}
    found["throttle"] = {name: round(share, 3) for name, share in shares.items() if share > 0}
    return found
