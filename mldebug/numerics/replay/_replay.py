"""Run one forward again, from its arguments and random state, to see what the cheap recorder did not look at."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mldebug.numerics._tensors import join, leaves, parts
from mldebug.numerics.replay._checkpoints import plain_checkpoints
from mldebug.numerics.replay._collectives import NotReplayable, refuse_collectives, shards_again

MAX_BYTES = 256 << 20  # of inputs held by reference, and of buffers copied, for one forward
MAX_COPY = 64 << 20  # of an input that the model changes in place
_SMALL = 64 << 10  # a buffer that is copied before the first forward, when nobody knows yet whether it will change
_version = operator.attrgetter("_version")
_SIMPLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice, range, type)


class Snapshot:
    """What one forward needs to run again. Tensors are held by reference and guarded by their version counters.

    Taking one reads nothing from a device. Of `buffers`, which come with their places, those in `changing`, which a
    forward changes, are copied.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], params: Sequence[Tensor],
        buffers: tuple[Sequence[Tensor], Sequence[tuple[dict[str, Any], str]]], changing: Sequence[Tensor],
        params_version: int, copy_inputs: bool = False, needs_all: str = "",
    ) -> None:  # fmt: skip
        self.module = module
        self.needs_all = needs_all  # why one rank alone may not run it again
        self._objects: list[tuple[str, Any, tuple[int, ...]]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._inputs: list[tuple[str, Tensor]] = []
        self._bytes = 0
        self._copy_inputs = copy_inputs  # this model changes them in place
        self.args = tuple(self._hold(value, f"input[{i}]") for i, value in enumerate(args))
        self.kwargs = {key: self._hold(value, f"input.{key}") for key, value in kwargs.items()}
        self._params = params
        self._params_version = params_version
        self._all_buffers, self._places = buffers
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

    def changed_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that the forward may have changed: what was there before it, and what is there now."""
        copied = {id(buffer) for buffer, _ in self._buffers}
        pairs = zip(self._all_buffers, (table.get(name) for table, name in self._places), strict=True)
        return [(old, now) for old, now in pairs if now is not None and (now is not old or id(old) in copied)]

    def inputs_changed(self) -> bool:
        """Whether an input was changed in place since."""
        return any(tensor._version != version for _, tensor, version in self._tensors)

    def bad_inputs(self) -> list[str]:
        """Paths of the inputs that hold NaN or inf. One of -inf and a single other value is a mask, and fine."""
        return [path for path, tensor in self._inputs if any(_is_bad_input(part) for part in parts(tensor))]

    def sample(self, path: str) -> int | None:
        """The index of the first bad row of an input, counted along its first dimension."""
        return next((first_bad_row(tensor) for name, tensor in self._inputs if name == path), None)

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

    def _put(self, buffers: Sequence[Tensor | None]) -> None:
        for (table, name), buffer in zip(self._places, buffers, strict=True):
            if name in table:
                table[name] = buffer

    def run(
        self, finite_inputs: bool = False, finite_buffers: Sequence[Tensor] = (),
        then: Callable[[Any], object] | None = None, with_all: bool = False,
    ) -> None:  # fmt: skip
        """Run the forward again as it was; buffers, random state and gradients are left as they are found.

        `then` is called with its output while all is as it was in that forward. With `finite_inputs`
        bad inputs, and of `finite_buffers` all bad values, are replaced by zeros. `with_all` says that all ranks of the
        job run it now, so that it may use collectives.
        Raises NotReplayable with the reason where it cannot be done.
        """
        if reason := self.why_not():
            raise NotReplayable(reason)
        buffers_now = [buffer.detach().clone() for buffer in self._all_buffers]
        # Putting a buffer back must not look like a change to a backward that is still to come.
        keep = getattr(torch.autograd, "_unsafe_preserve_version_counter")  # noqa: B009  # private, but the only way
        with contextlib.ExitStack() as stack:
            for buffer in self._all_buffers:
                if not buffer.is_inference():
                    stack.enter_context(keep(buffer))
            self._run(finite_inputs, finite_buffers, buffers_now, then, with_all)

    def _run(
        self, finite_inputs: bool, finite_buffers: Sequence[Tensor], buffers_now: Sequence[Tensor],
        then: Callable[[Any], object] | None, with_all: bool,
    ) -> None:  # fmt: skip
        rng_now = _rng_state(self._params)
        training_now = self.module.training
        # A forward may put another tensor in a buffer's place: the old one goes back there, and the new one afterwards.
        there = [table.get(name) for table, name in self._places]
        try:
            self._put(self._all_buffers)
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
                if then is not None:
                    stack.enter_context(plain_checkpoints())
                if with_all:
                    stack.enter_context(shards_again(self.module))
                else:
                    stack.enter_context(refuse_collectives())
                output = _without_wrapper(self.module)(*args, **kwargs)
                if then is not None:
                    then(output)
        finally:
            if training_now != self._training:
                self.module.train(training_now)
            self._put(there)
            with torch.no_grad():
                for buffer, now in zip(self._all_buffers, buffers_now, strict=True):
                    buffer.copy_(now)
            _set_rng_state(rng_now)


def _without_wrapper(module: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps: the wrapper's own forward would ask the other ranks to take part."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


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


def first_bad_row(tensor: Tensor) -> int | None:
    """Which entry of the first dimension is the first that holds NaN or inf."""
    pieces = parts(tensor) if tensor.dim() else []
    if len(pieces) != 1 or pieces[0].shape[0] != tensor.shape[0]:
        return None
    bad = ~torch.isfinite(pieces[0]).reshape(tensor.shape[0], -1).all(dim=-1)
    return int(bad.int().argmax()) if bool(bad.any()) else None


def _is_bad_input(part: Tensor) -> bool:
    finite = part[torch.isfinite(part)]
    if finite.numel() == part.numel():
        return False
    if torch.isnan(part).any() or torch.isposinf(part).any():
        return True
    return bool(finite.numel() and finite.min() != finite.max())


def check_model(tensors: Sequence[Tensor]) -> str:
    """Why no forward of a model with these parameters may be run again by one process alone; "" if it may.

    Raises NotReplayable where all of them together cannot either.
    """
    if any(type(tensor).__name__ == "FlatParameter" for tensor in tensors):
        raise NotReplayable("its parameters are sharded (FSDP): a forward needs all ranks")
    if any(hasattr(tensor, "_local_tensor") for tensor in tensors):
        return "its parameters are sharded (DTensor): a forward needs all ranks"
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
