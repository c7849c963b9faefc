"""The device of one rank: which it is, and whether it can hold memory, multiply and be copied to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mldebug.core.errors import MldebugError

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
_BLOCK = 1 << 30  # bytes that are allocated at a time
_SPARED = 0.08  # of the free memory, for libraries that need some later
_COPY = 64 << 20


class Device:
    """`Device("auto", local_rank)` makes the device of this rank the current one; MldebugError where there is none."""

    def __init__(self, backend: str, local_rank: int) -> None:
        self.kind = _kind(backend)
        self.backend = _BACKENDS[self.kind] if backend in ("auto", "rccl") else backend  # torch calls RCCL nccl
        self.module: Any = getattr(torch, self.kind)
        self.index = 0
        if self.kind != "cpu":
            count = self.module.device_count()
            if count == 0:
                raise MldebugError(f"{self.backend} needs an accelerator, and torch {torch.__version__} sees none")
            # One device is all that a task sees where the launcher gives each its own.
            self.index = 0 if count == 1 else local_rank
            if self.index >= count:
                raise MldebugError(f"local rank {local_rank} has no device: {count} are visible here")
            self.module.set_device(self.index)
        self.torch_device = torch.device(self.kind, self.index) if self.kind != "cpu" else torch.device("cpu")

    def facts(self) -> dict[str, Any]:
        """Index, name and, where there is one, UUID, PCI address, NUMA node and the CPUs next to it."""
        if self.kind == "cpu":
            return {"kind": "cpu", "index": None, "name": "cpu", "uuid": ""}
        told = self.module.get_device_properties(self.index)
        found: dict[str, Any] = {
            "kind": self.kind, "index": self.index, "name": told.name, "uuid": str(getattr(told, "uuid", "")),
            "memory": int(told.total_memory), "visible": self.module.device_count(),
        }  # fmt: skip
        if hasattr(told, "pci_bus_id"):
            found["pci"] = f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"
            folder = Path("/sys/bus/pci/devices") / found["pci"]
            for name in ("numa_node", "local_cpulist"):
                try:
                    found[name] = (folder / name).read_text(encoding="ascii").strip()
                except OSError:
                    found[name] = ""
        return found

    def seconds(self, what: Callable[[], object], queued: Callable[[], object] | None = None) -> float:
        """What `what()` takes on the device, behind what was enqueued before. `queued` is called once all of it is
        enqueued."""
        if self.kind == "cpu":
            began = time.perf_counter()
            what()
            return time.perf_counter() - began
        start, stop = (self.module.Event(enable_timing=True) for _ in range(2))
        start.record()
        what()
        stop.record()
        if queued is not None:
            queued()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def sync(self) -> None:
        if self.kind != "cpu":
            self.module.synchronize()

    def checks(self, phase: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each check of the device by itself, as (name, what came out); a wrong result is a MldebugError."""
        for name, check in (("memory", self._memory), ("matmul", self._matmul), ("copy", self._copy)):
            phase(name)
            began = time.monotonic()
            result = check()
            yield name, {**result, "seconds": round(time.monotonic() - began, 3)}

    def _memory(self) -> dict[str, Any]:
        """Fill most of the free memory with the numbers of its words, and their complement, and read it again."""
        size = 32 << 20
        if self.kind != "cpu":
            free = self.module.mem_get_info()[0]
            size = int(free * (1 - _SPARED)) // (8 << 20) * (8 << 20)
        words = torch.arange(min(size, _BLOCK) // 8, dtype=torch.int64, device=self.torch_device)
        blocks = []
        for start in range(0, size - words.nbytes + 1, _BLOCK):
            blocks.append(
                torch.empty(min(_BLOCK, size - words.nbytes - start) // 8, dtype=torch.int64, device=self.torch_device)
            )
        for turn in (0, -1):
            for number, block in enumerate(blocks):
                torch.bitwise_xor(words[: block.numel()], turn ^ number << 32, out=block)
            bad = [
                (block.bitwise_xor_(turn ^ number << 32) != words[: block.numel()]).sum()
                for number, block in enumerate(blocks)
            ]
            wrong = sum(int(one) for one in bad)
            if wrong:
                raise MldebugError(
                    f"{wrong} words of {sum(block.numel() for block in blocks)} came back wrong from memory"
                )
        total = sum(block.nbytes for block in blocks) + words.nbytes
        del blocks, words
        if self.kind != "cpu":
            self.module.empty_cache()
        return {"bytes": total}

    def _matmul(self) -> dict[str, Any]:
        """Products of small whole numbers, which every dtype holds exactly, against the same on the CPU."""
        size = 64 if self.kind == "cpu" else 2048
        generator = torch.Generator().manual_seed(7)
        left, right = (torch.randint(-1, 2, shape, generator=generator) for shape in ((size, 256), (256, size)))
        want = left.to(torch.float32) @ right.to(torch.float32)
        if self.kind == "cpu":  # there another way to multiply is the reference
            want = (left.unsqueeze(2) * right.unsqueeze(0)).sum(1).to(torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            got = left.to(self.torch_device, dtype) @ right.to(self.torch_device, dtype)
            wrong = int((got.to(torch.float32).cpu() != want).sum())
            if wrong:
                raise MldebugError(
                    f"{wrong} of {want.numel()} results of a {dtype} matmul are wrong".replace("torch.", "")
                )
        return {"size": size}

    def _copy(self) -> dict[str, Any]:
        """To the device and back, from pinned memory."""
        if self.kind == "cpu":
            return {"left_out": "there is no device to copy to"}
        host = torch.arange(_COPY // 8, dtype=torch.int64).pin_memory()
        back = torch.empty_like(host).pin_memory()
        there = torch.empty_like(host, device=self.torch_device)
        rates = []
        for target, source in ((there, host), (back, there)):
            self.sync()
            began = time.monotonic()
            target.copy_(source, non_blocking=True)
            self.sync()
            rates.append(round(_COPY / (time.monotonic() - began) / 1e9, 1))
        if not torch.equal(host, back):
            raise MldebugError(f"{int((host != back).sum())} of {host.numel()} words came back wrong from the device")
        return {"to_GBps": rates[0], "from_GBps": rates[1]}


def _kind(backend: str) -> str:
    if backend in ("gloo", "mpi"):
        return "cpu"
    if backend in ("nccl", "rccl"):
        return "cuda"
    if backend == "xccl":
        return "xpu"
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cpu"
