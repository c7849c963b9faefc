"""What one record of the device ring costs: GB/s over a tensor, and microseconds of host time. Prints one JSON line.

python tests/benchmarks/ring_kernel.py
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from mldebug.numerics.ring import _kernels
from mldebug.numerics.ring._triton_ring import TritonRing

MB = 1_000_000


def main() -> None:
    device = torch.device("cuda", 0)
    ring = TritonRing(device)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for dtype in (torch.bfloat16, torch.float32):
        for size in (16 * MB, 128 * MB, 800 * MB):
            # Enough tensors in turn that none is still in the cache when its turn comes again.
            tensors = [
                torch.randn(size // dtype.itemsize, device=device).to(dtype) for _ in range(max(2, 256 * MB // size))
            ]
            name = f"{str(dtype).removeprefix('torch.')}_{size // MB}MB_GBps"
            figures[name] = round(bandwidth(lambda tensor: ring.record(tensor, 0), tensors, size))
            del tensors

    small = torch.randn(1024, device=device)
    words, state = small.view(torch.int32), ring._ring
    kernel = _kernels.record_kernel

    def ordinary() -> None:
        kernel[(1,)](state, words, 1024, 0, 0, True, num_warps=8, num_stages=1)

    figures["host_us_record"] = host_us(lambda: ring.record(small, 0))
    figures["host_us_record_reset"] = host_us(lambda: ring.record(small, 0, reset=True))
    figures["host_us_ordinary_launch"] = host_us(ordinary)
    figures["host_us_publish"] = host_us(lambda: ring.publish(0, 512))
    parameters = [torch.randn(size, device=device) for size in [50257 * 768, 1024 * 768] + gpt2_block() * 12]
    figures["parameters"] = len(parameters)
    figures["host_us_record_many"] = host_us(lambda: ring.record_many(parameters, 0))
    size = 4 * sum(tensor.numel() for tensor in parameters)
    figures["record_many_GBps"] = round(bandwidth(lambda _: ring.record_many(parameters, 0), [small], size))
    print(json.dumps(figures))


def gpt2_block() -> list[int]:
    """Sizes of the parameters of one block of GPT-2 124M."""
    return [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]


def bandwidth(work: Callable[[torch.Tensor], None], tensors: list[torch.Tensor], size: int) -> float:
    """GB/s of `work` over the tensors in turn; median of 7 rounds, each of at least 32 calls."""
    rounds = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        calls = max(32, len(tensors))
        torch.cuda._sleep(4_000_000)  # the host gets ahead, so that launches do not show
        start.record()
        for i in range(calls):
            work(tensors[i % len(tensors)])
        end.record()
        end.synchronize()
        rounds.append(calls * size / start.elapsed_time(end) / 1e6)
    return statistics.median(rounds[1:])


def host_us(work: Callable[[], object]) -> float:
    """Microseconds of a call: the median over 20 groups of 50 calls, with the device's queue never full."""
    times = []
    for _ in range(22):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(50):
            work()
        times.append((time.perf_counter_ns() - start) / 50)
    return round(statistics.median(times[2:]) / 1000, 2)


if __name__ == "__main__":
    main()
