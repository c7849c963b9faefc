"""Calls of the NCCL that torch has loaded, for what torch.distributed does in place only: to reduce and to broadcast.

The signatures are those of nccl.h, which are stable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
    "float8_e4m3fn": 10, "float8_e5m2": 11,
}  # fmt: skip
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Identity(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Nccl:
    """A communicator of its own. `exchange(bytes | None)` hands the first rank's identity to all ranks.

    Raises OSError where torch has loaded no NCCL library that can be called.
    """

    def __init__(self, rank: int, world: int, exchange: Callable[[bytes | None], bytes]) -> None:
        self.library = _loaded()
        identity = Identity()
        if rank == 0:
            self._done(self.library.ncclGetUniqueId(ctypes.byref(identity)))
        told = exchange(bytes(identity) if rank == 0 else None)
        ctypes.memmove(ctypes.byref(identity), told, ctypes.sizeof(identity))
        self.comm = ctypes.c_void_p()
        self.library.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, Identity, ctypes.c_int,
        ]  # fmt: skip
        self._done(self.library.ncclCommInitRank(ctypes.byref(self.comm), world, identity, rank))

    def call(self, name: str, source: Any, target: Any, op: str, root: int) -> Callable[[], None]:
        """The call of all_reduce, reduce or broadcast, on the stream that is current when it is made."""
        kind = ctypes.c_int(_DTYPES[str(target.dtype).removeprefix("torch.")])
        send, receive = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())
        code, origin = ctypes.c_int(_OPS[op]), ctypes.c_int(root)
        count = ctypes.c_size_t(source.numel())
        function, middle = {
            "all_reduce": (self.library.ncclAllReduce, (code,)),
            "reduce": (self.library.ncclReduce, (code, origin)),
            "broadcast": (self.library.ncclBroadcast, (origin,)),
        }[name]

        def made() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._done(function(send, receive, count, kind, *middle, self.comm, stream))

        return made

    def _done(self, status: int) -> None:
        if status:
            text = self.library.ncclGetErrorString
            text.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {text(status).decode('utf-8', 'replace')}")


def _loaded() -> Any:
    """The library in this process's memory: torch may carry it in a package of its own, or link it into itself."""
    paths = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        if len(line.split(maxsplit=5)) == 6
    }
    named = sorted(path for path in paths if Path(path).name.startswith(("libnccl.so", "librccl.so")))
    inside = sorted(path for path in paths if Path(path).name.startswith("libtorch_cuda"))
    for path in [*named, *inside]:
        library = ctypes.CDLL(path)
        if hasattr(library, "ncclCommInitRank"):
            return library
    raise OSError("torch has loaded no NCCL library that can be called")
