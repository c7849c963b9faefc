"""Which blocks of CUDA memory are in use, by the stack that asked for them: torch's own memory history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mldebug.perf.memory._live import Live
from mldebug.perf.memory._sites import site_of_names


class CudaBlocks:
    """Has torch's allocator keep the Python stack of each block in use, and reads them.

    What is kept is bounded by the blocks in use. An allocation costs about 2 us more; nothing waits for the device.
    Where CUDA is not in use yet it begins when CUDA does, so that the process can still be forked.
    """

    def __init__(self, when_out_of_memory: Callable[[int, int], None]) -> None:
        self._when_out_of_memory = when_out_of_memory
        self._open = False
        self._ours = False

    def begin(self) -> None:
        """Begin now, or as soon as CUDA is in use."""
        self._open = True
        torch.cuda._lazy_call(self._begin)  # type: ignore[no-untyped-call,unused-ignore]

    def end(self) -> None:
        """Leave the allocator as it was. The observer cannot be taken off, and does nothing from now on."""
        self._open = False
        if self._ours:
            self._ours = False
            torch.cuda.memory._record_memory_history(None)

    def look(
        self, device: int, kinds: dict[int, str], classes: dict[str, list[tuple[int, int, str]]] | None = None
    ) -> list[Live]:
        """The blocks in use on a device, the largest first. `kinds` says what is at an address, and `classes` in which
        class's `forward` a line is. The stack of a block that a backward made begins at the call of backward."""
        sums: dict[tuple[Any, str], list[int]] = {}
        for segment in torch.cuda.memory._snapshot(device)["segments"]:
            if segment["device"] != device:
                continue
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    kind = kinds.get(block.get("address", address), "tensor")
                    frames = [(frame["filename"], frame["line"]) for frame in block.get("frames", ())]
                    site = site_of_names(frames, _module_of(frames, classes or {}))
                    entry = sums.setdefault((site, kind), [0, 0])
                    entry[0] += block["size"]
                    entry[1] += 1
                address += block["size"]
        found = [Live(site, kind, nbytes, count) for (site, kind), (nbytes, count) in sums.items()]
        return sorted(found, key=lambda live: -live.nbytes)

    def _begin(self) -> None:
        if not self._open:
            return
        # Whoever records already knows why, and what they keep has what is needed here.
        if not any(self._history_is_on()):
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
            self._ours = True
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # builds for the CPU have none
        if attach is not None:
            attach(self._observe)

    @staticmethod
    def _history_is_on() -> list[bool]:
        is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        return [bool(is_on())] if is_on is not None else []

    def _observe(self, device: int, asked: int, _allocated: int, _free: int) -> None:
        if self._open:
            self._when_out_of_memory(device, asked)


def classes_of(models: Iterable[torch.nn.Module]) -> dict[str, list[tuple[int, int, str]]]:
    """Where the `forward` of each class in the models is: file -> (first line, last line, class)."""
    found: dict[str, set[tuple[int, int, str]]] = {}
    for model in models:
        for kind in {type(module) for module in model.modules()}:
            code = getattr(getattr(kind, "forward", None), "__code__", None)
            if code is not None:
                lines = [line for _, _, line in code.co_lines() if line is not None]
                found.setdefault(code.co_filename, set()).add((min(lines), max(lines), kind.__name__))
    return {file: sorted(entries) for file, entries in found.items()}


def _module_of(frames: list[tuple[str, int]], classes: dict[str, list[tuple[int, int, str]]]) -> str:
    """The class in whose `forward` the innermost frame is that is in one."""
    for filename, line in frames:
        for first, last, name in classes.get(filename, ()):
            if first <= line <= last:
                return name
    return ""
