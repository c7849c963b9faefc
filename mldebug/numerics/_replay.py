"""Run one forward again, from its arguments and random state, to see what the cheap recorder did not look at."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mldebug.numerics._tensors import join, leaves, parts

MAX_BYTES = 256 << 20  # of inputs held by reference, and of buffers copied, for one forward
MAX_COPY = 64 << 20  # of an input that the model changes in place
_SMALL = 64 << 10  # a buffer that is copied before the first forward, when nobody knows yet whether it will change
_version = operator.attrgetter("_version")
_SIMPLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice, range, type)


class NotReplayable(Exception):
    """Why a forward cannot be run again, in words that go into the report."""


class Snapshot:
    """What one forward needs to run again. Tensors are held by reference and guarded by their version counters.

    Taking one reads nothing from a device. Of `buffers` those in `changing`, which a forward changes, are copied.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], params: Sequence[Tensor],
        buffers: Sequence[Tensor], changing: Sequence[Tensor], params_version: int, copy_inputs: bool = False,
    ) -> None:  # fmt: skip
        self.module = module
        self._objects: list[tuple[str, Any, tuple[int, ...]]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._inputs: list[tuple[str, Tensor]] = []
        self._bytes = 0
        self._copy_inputs = copy_inputs  # this model changes them in place
        self.args = tuple(self._hold(value, f"input[{i}]") for i, value in enumerate(args))
        self.kwargs = {key: self._hold(value, f"input.{key}") for key, value in kwargs.items()}
        self._params = params
        self._params_version = params_version
        self._all_buffers = buffers
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in changing]
        if self._bytes + sum(b.nbytes for b in changing) > MAX_BYTES:
            raise NotReplayable(f"its inputs and buffers take more than {MAX_BYTES >> 20} MB")
        self._training = module.training
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._rng = _rng_state(params)

    def _hold(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            copies = self._copy_inputs and value.nbytes <= MAX_COPY
            held = value.detach()
            if copies:
                held = held.clone()
            elif not value.is_inference():
                self._tensors.append((path, value.detach(), value._version))
            self._inputs.append((path, held))
            if value.requires_grad:
                held.requires_grad_()
            self._bytes += 0 if value.is_meta else value.numel() * value.element_size()
            return held
        if isinstance(value, _SIMPLE):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._hold(item, f"{path}[{i}]") for i, item in enumerate(value))
        if type(value) is dict:
            return {key: self._hold(item, join(path, key)) for key, item in value.items()}
        self._objects.append((path, value, _fingerprint(value)))
        return value

    def inputs_changed(self) -> bool:
        """Whether an input was changed in place since."""
        return any(tensor._version != version for _, tensor, version in self._tensors)

    def bad_inputs(self) -> list[str]:
        """Paths of the inputs that hold NaN or inf. One of -inf and a single other value is a mask, and fine."""
        return [path for path, tensor in self._inputs if any(_is_bad_input(part) for part in parts(tensor))]

    def why_not(self) -> str:
        """The reason why it can no longer be run again as it was; "" if it can."""
        for path, tensor, version in self._tensors:
            if tensor._version != version:
                return f"{path} was changed in place after the forward began"
        for path, value, fingerprint in self._objects:
            if _fingerprint(value) != fingerprint:
                return f"{path} ({type(value).__name__}) was changed by the forward"
        if versions(self._params) != self._params_version:
            return "the weights have changed since"
        return ""

    def restore_buffers(self) -> None:
        """Give the buffers that the forward changed (BatchNorm's statistics) their values from before it."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def run(self, finite_inputs: bool = False, finite_buffers: Sequence[Tensor] = ()) -> None:
        """Run the forward again as it was; buffers, random state and gradients are left as they are found.

        With `finite_inputs` bad inputs, and of `finite_buffers` all bad values, are replaced by zeros.
        Raises NotReplayable with the reason where it cannot be done.
        """
        if reason := self.why_not():
            raise NotReplayable(reason)
        buffers_now = [buffer.detach().clone() for buffer in self._all_buffers]
        # Putting a buffer back must not look like a change to a backward that is still to come.
        keep = getattr(torch.autograd, "_unsafe_preserve_version_counter")  # noqa: B009  # private, but the only way
        own = tuple(buffer for buffer in self._all_buffers if not buffer.is_inference())
        with keep(own) if own else contextlib.nullcontext():
            self._run(finite_inputs, finite_buffers, buffers_now)

    def _run(self, finite_inputs: bool, finite_buffers: Sequence[Tensor], buffers_now: Sequence[Tensor]) -> None:
        rng_now = _rng_state(self._params)
        training_now = self.module.training
        try:
            self.restore_buffers()
            with torch.no_grad():
                for buffer in finite_buffers:
                    buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            args, kwargs = (_finite(self.args), _finite(self.kwargs)) if finite_inputs else (self.args, self.kwargs)
            _set_rng_state(self._rng)
            if training_now != self._training:
                self.module.train(self._training)
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode(self._inference))
                stack.enter_context(torch.set_grad_enabled(self._grad))
                for kind, enabled, dtype in self._autocast:
                    if enabled or torch.is_autocast_enabled(kind):
                        # A cache of casts made before would outlive the weights' values.
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=True))
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_refuse_collectives())
                self.module(*args, **kwargs)
        finally:
            if training_now != self._training:
                self.module.train(training_now)
            with torch.no_grad():
                for buffer, now in zip(self._all_buffers, buffers_now, strict=True):
                    buffer.copy_(now)
            _set_rng_state(rng_now)


def _finite(value: Any) -> Any:
    """The same nest of arguments with zeros for bad values."""
    if isinstance(value, Tensor):
        bad = any(_is_bad_input(part) for part in parts(value))
        clean = torch.nan_to_num(value.detach(), nan=0.0, posinf=0.0, neginf=0.0) if bad else value
        return clean.requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_finite(item) for item in value)
    if type(value) is dict:
        return {key: _finite(item) for key, item in value.items()}
    return value


def _is_bad_input(part: Tensor) -> bool:
    finite = part[torch.isfinite(part)]
    if finite.numel() == part.numel():
        return False
    if torch.isnan(part).any() or torch.isposinf(part).any():
        return True
    return bool(finite.numel() and finite.min() != finite.max())


def check_model(tensors: Sequence[Tensor]) -> str:
    """Why no forward of a model with these parameters may be run again by one process alone; "" if it may."""
    for tensor in tensors:
        if hasattr(tensor, "_local_tensor"):
            return "its parameters are sharded (DTensor): a forward needs all ranks"
        if type(tensor).__name__ == "FlatParameter":
            return "its parameters are sharded (FSDP): a forward needs all ranks"
    return ""


def changing_buffers(modules: Sequence[nn.Module], known: set[int] | None) -> list[Tensor]:
    """The buffers that a forward in this mode will change: running statistics, and those seen to change before.

    Before the first forward (`known` is None) any may be one: all of them, unless they are large.
    """
    found: list[Tensor] = []
    for module in modules:
        if not module._buffers:
            continue
        # Native batch_norm updates its statistics without touching their version counter.
        norm = isinstance(module, _NormBase) and module.training and module.track_running_stats
        for buffer in module._buffers.values():
            if buffer is not None and (norm or (id(buffer) in known if known is not None else buffer.nbytes <= _SMALL)):
                found.append(buffer)
    return found


def versions(tensors: Sequence[Tensor]) -> int:
    try:
        return sum(map(_version, tensors))
    except RuntimeError:  # inference tensors have no counter
        return 0


def _fingerprint(value: Any) -> tuple[int, ...]:
    """Identity and version of the tensors inside an object that is not a plain container (a cache, a mask object)."""
    marks: list[int] = []
    stack, seen = [(value, 0)], {id(value)}
    while stack and len(seen) < 2000:
        item, depth = stack.pop()
        if isinstance(item, Tensor):
            marks += (id(item), 0 if item.is_inference() else item._version)
            continue
        if depth > 4 or isinstance(item, (*_SIMPLE, nn.Module)):
            marks += [hash(item)] if isinstance(item, (int, bool)) else []
            continue
        children = [leaf for _, leaf in leaves(item, "")] if isinstance(item, (tuple, list, dict)) else []
        children += list(getattr(item, "__dict__", {}).values())
        for child in children:
            if isinstance(child, (int, bool)) or id(child) not in seen:
                seen.add(id(child))
                stack.append((child, depth + 1))
    return tuple(marks)


RngState = tuple[Any, Any, Any, list[tuple[torch.device, Tensor]]]


def _rng_state(params: Sequence[Tensor]) -> RngState:
    """States of python, numpy (if loaded), torch on the CPU and on the devices of the parameters. No device is read."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if _on_cuda(params) else []
    return random.getstate(), state, torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in devices]


def _set_rng_state(state: RngState) -> None:
    python, numpy_state, cpu, devices = state
    random.setstate(python)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
    torch.set_rng_state(cpu)
    for device, value in devices:
        torch.cuda.set_rng_state(value, device)


def _on_cuda(params: Sequence[Tensor]) -> bool:
    return any(p.is_cuda for p in params[:1])


@contextlib.contextmanager
def _refuse_collectives() -> Iterator[None]:
    """Stop a replay at its first collective: the other ranks would not answer, and it would block for ever."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                raise NotReplayable(f"its forward uses a collective ({func.name()}), which needs all ranks")
            return func(*args, **(kwargs or {}))

    with Refuse():  # type: ignore[no-untyped-call,unused-ignore]
        yield
