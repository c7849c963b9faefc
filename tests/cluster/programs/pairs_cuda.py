"""What looks after the workers of a live pair matrix on a machine without GPUs that believes it has them.

torch.cuda answers as it does with devices, clocks are events, and the messages go over gloo. Whatever is asked of CUDA
that no fake is here for ends the worker, as CPU builds of torch have none.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from mldebug.cluster.dist import _device
from mldebug.cluster.pairs import _node


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


class Node(_node.Node):
    def load(self) -> None:
        super().load()
        import torch

        assert not torch.cuda.is_initialized()  # what is forked afterwards could not use it

    def work(self, local: int, wire: Any) -> None:
        import torch
        import torch.distributed as dist

        set_to: list[int] = []
        init, real = dist.init_process_group, _device.Device.__init__
        torch.cuda.device_count = lambda: 4
        torch.cuda.set_device = set_to.append
        torch.cuda.synchronize = lambda: None
        torch.cuda.Event = Event

        def name(device: torch.device) -> str:
            assert set_to == [local] and device == torch.device("cuda", local)
            device_of.torch_device = torch.device("cpu")  # tensors are made after this
            return "NVIDIA H100 80GB HBM3"

        def device(self: Any, backend: str, number: int) -> None:
            global device_of
            real(self, backend, number)
            device_of = self

        def init_process_group(backend: str, *, device_id: Any, **more: Any) -> None:
            assert backend == "nccl" and device_id is not None
            init("gloo", **more)

        torch.cuda.get_device_name = name
        _device.Device.__init__ = device
        dist.init_process_group = init_process_group
        super().work(local, wire)


if __name__ == "__main__":
    sys.exit(_node.main(Node))
