"""What the recorder remembers on the host: which module and tensor a slot belongs to, and which forward call."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mldebug.numerics._event import Role
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.replay._replay import Snapshot


# Modules that cannot write a mask: -inf in what they return is no constant but a value out of range.
_COMPUTE = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.RNNBase)


IN_GRAPH = "it ran in a CUDA graph, whose modules and inputs are gone"  # why a forward is not run again


class Watched:
    """One module under one recorder: its name, and the call sites of its tensors (made once, then shared)."""

    __slots__ = (
        "cls",
        "computes",
        "forwards",
        "half",
        "muted",
        "name",
        "next",
        "recorder",
        "ref",
        "root",
        "sites",
        "wrapper",
    )

    def __init__(self, recorder: DebugUnderflowOverflow, module: nn.Module, name: str, root: nn.Module) -> None:
        self.recorder = recorder
        self.forwards = recorder.forwards
        self.ref = weakref.ref(module)
        self.root = weakref.ref(root)
        self.name = name
        self.cls = type(module).__name__
        self.computes = isinstance(module, _COMPUTE)  # its outputs are sums of products: a -inf there is an overflow
        self.half = False  # one of its tensors is float16
        self.muted = False  # filtered out by include/exclude: counted, not measured
        self.wrapper = False  # an OptimizedModule: opens and closes the call of the module inside, measures nothing
        self.next: Watched | None = None  # the same module under a second recorder
        self.sites: dict[tuple[str, torch.dtype], Site] = {}

    def site(self, path: str, dtype: torch.dtype, role: Role) -> Site:
        """The call site of one tensor of this module."""
        key = (path, dtype)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(self, path, dtype, role)
            self.half = self.half or dtype is torch.float16
        return site

    def compiled_site(self, path: str, dtype: torch.dtype, role: Role) -> Site:
        """The same place in a compiled graph, which records only extremes."""
        key = (f"compiled {path}", dtype)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(self, path, dtype, role)
            site.extremes = True
            self.half = self.half or dtype is torch.float16
        return site


class Site:
    """Where a recorded tensor comes from: a module (None outside any), a path such as `output[0]`, a role, a dtype."""

    __slots__ = ("dtype", "extremes", "owner", "path", "role", "strict")

    def __init__(self, owner: Watched | None, path: str, dtype: torch.dtype, role: Role) -> None:
        self.owner = owner
        self.path = path
        self.dtype = dtype
        self.role = role
        self.extremes = False  # what is recorded are extremes, taken in a compiled graph
        loss = role == "loss" and "loss" in path  # not another value that check() is given, which may be a mask
        self.strict = loss or role == "parameter" or (role == "output" and owner is not None and owner.computes)

    @property
    def module(self) -> str | None:
        return None if self.owner is None else self.owner.name


class RowsOf(NamedTuple):
    """What a compiled graph tells of one tensor: the largest magnitudes of its rows, itself if it is returned."""

    watched: Watched
    path: str
    role: Role
    magnitudes: Tensor
    value: Tensor | None


class Batch:
    """Plain tensors of one device that are recorded together; `strict` where -inf alarms too."""

    def __init__(self, device: int, strict: bool, pairs: Sequence[tuple[Site, Tensor]]) -> None:
        self.device, self.strict = device, strict
        self.sites = [site for site, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        self.numels = array("q", [tensor.numel() for tensor in self.tensors])


@dataclass
class Call:
    """One forward of a root (or of a part of it that was called by itself)."""

    watched: Watched
    step: int
    batch: int
    micro_batch: int
    training: bool
    grad: bool
    first: int  # number of its first record
    end: int = -1
    depth: int = 0
    finished: bool = False  # its forward returned
    paused: bool = False  # under torch.jit.trace, torch.export or a functorch transform
    wrapped: bool = False  # entered through torch.compile's OptimizedModule
    implicit: bool = False  # opened by a compiled part that was called by itself; nothing tells when it ends
    token: bool = False  # continues a generation
    params_first: int = -1  # first record of the parameter pass made at its entry, -1 if none
    snapshot: Snapshot | None = None
    replay_reason: str = ""  # why there is no snapshot
    new_names: frozenset[str] = frozenset()  # parameters and buffers measured for the first time at its entry
    thread: int = 0
    names: dict[int, str] | None = None  # id -> name of the root's modules, if a stranger was met
    same_step: bool = False  # its parameter pass is not the first one of this step
    buffers: dict[int, int] = field(default_factory=dict)  # version by id at entry
    node: int = 0  # number of the first node of autograd that it could make

    @property
    def start(self) -> int:
        return self.first if self.params_first < 0 else self.params_first


def is_compiled(call: Call) -> bool:
    """Whether its root is compiled, by torch.compile or by its own compile()."""
    module = call.watched.ref()
    return call.wrapped or getattr(module, "_compiled_call_impl", None) is not None
