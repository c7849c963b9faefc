"""A real device under load: blocks of matmuls that are queued without waiting, so that it is never idle in between.

All shapes take their matrices from one pool of random numbers, each call from another place in it: its operands are
cold in the cache as those of a layer are, with no flush in between that would let the card cool down, and each call
writes another product.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from mldebug.core.device import Device, Mark, seconds_between
from mldebug.core.errors import MldebugError
from mldebug.perf.matmul._blocks import Ask, Block, Shape, flops_of, shape_text
from mldebug.perf.matmul._formats import Call, Format

_COLD = 3  # times the size of the cache that the operands of consecutive calls cover
_SETS = 64  # places in the pool at most
_KEPT = 512  # shapes whose calls are kept
_ALIGN = 256  # elements: where a matrix may begin
_SHARE = 0.4  # of the free memory for each of the two pools, at most


@dataclass
class _Queued:
    shape: Shape
    first: Mark | None
    last: Mark | None
    iterations: int
    error: str = ""


class TorchMachine:
    """`with TorchMachine(format, shapes=..., tflops=..., seed=0) as machine:` sets memory aside for these shapes.

    `tflops` is a first guess of the rate. A shape that does not fit gives blocks with an error. Not enough memory for
    any of them is a MldebugError.
    """

    def __init__(self, form: Format, *, shapes: Sequence[Shape], tflops: float, seed: int) -> None:
        self.form, self.device = form, form.device
        self._guess = tflops
        self._seconds: dict[Shape, float] = {}
        self._calls: dict[Shape, list[Call]] = {}
        self._turn = 0
        self._stack = contextlib.ExitStack()
        self._origin = time.monotonic()
        self.cold_bytes = _COLD * cache_bytes(self.device)
        generator = torch.Generator(self.device.torch_device).manual_seed(seed)
        wanted_in = max(_in_elements(form, shape) for shape in shapes) * 5 // 4 + 2 * _ALIGN
        wanted_out = max(_out_elements(shape) for shape in shapes) * 5 // 4 + _ALIGN
        free = self.device.memory()[0] * _SHARE
        least = max(self.cold_bytes // form.storage.itemsize, 2 * _ALIGN)
        self.pool = self._allocate(
            min(max(wanted_in, least), int(free / form.storage.itemsize)),
            lambda count: form.random(count, generator),
        )
        out_least = self.cold_bytes // 2 // form.out.itemsize
        self.out = self._allocate(
            min(max(wanted_out, out_least), int(free / form.out.itemsize)),
            lambda count: torch.empty(count, dtype=form.out, device=self.device.torch_device),
        )

    def __enter__(self) -> TorchMachine:
        self.device.set_current()
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(self.form.precision())
        self._start = self.device.mark()
        self._origin = time.monotonic()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        self._calls.clear()

    def now(self) -> float:
        return time.monotonic() - self._origin

    def fits(self, shape: Shape) -> bool:
        return (
            all(size % self.form.multiple == 0 for size in shape[:3])
            and _in_elements(self.form, shape) + _ALIGN <= self.pool.numel()
            and _out_elements(shape) <= self.out.numel()
            and min(shape) > 0
        )

    def run(self, asks: Sequence[Ask]) -> list[Block]:
        queued = [self._queue(ask) for ask in asks]
        marks = [one.last for one in queued if one.last is not None]
        if marks:
            self.wait(marks[-1])
        return [self._read(one) for one in queued]

    def wait(self, mark: Mark) -> None:
        """Until the device has passed the mark. Ctrl-C is heard meanwhile, which it is not in a synchronize."""
        while mark.event is not None and not mark.event.query():
            time.sleep(0.0003)

    def calls(self, shape: Shape) -> list[Call]:
        """One call for each place in the pool that this shape takes its operands from. They are to be made in turn."""
        if shape in self._calls:
            return self._calls[shape]
        if not self.fits(shape):
            raise MemoryError(self._why_not(shape))
        size_a, size_b = _sizes(self.form, shape)
        size_out = _out_elements(shape)
        step_in, step_out = _aligned(size_a) + _aligned(size_b), _aligned(size_out)
        bytes_of_set = step_in * self.form.storage.itemsize + size_out * self.form.out.itemsize
        sets = min(_SETS, max(2, -(-self.cold_bytes // bytes_of_set)))
        scales = self.form.scales(shape)
        calls = []
        at_in = at_out = 0
        for number in range(sets):
            # Where the pool is too short for another place it begins anew, a little further on than the last time.
            if at_in + _aligned(size_a) + size_b > self.pool.numel():
                at_in = min(_ALIGN * (number + 1), self.pool.numel() - _aligned(size_a) - size_b) // _ALIGN * _ALIGN
            if at_out + size_out > self.out.numel():
                at_out = 0
            a, b = self.pool[at_in : at_in + size_a], self.pool[at_in + _aligned(size_a) :][:size_b]
            calls.append(self.form.call(a, b, self.out[at_out : at_out + size_out], shape, scales))
            at_in, at_out = at_in + step_in, at_out + step_out
        if len(self._calls) >= _KEPT:
            del self._calls[next(iter(self._calls))]
        self._calls[shape] = calls
        return calls

    def seconds_of(self, shape: Shape) -> float:
        """How long one call takes, as far as is known."""
        return self._seconds.get(shape) or flops_of(shape) / (self._guess * 1e12)

    def failure(self, exc: BaseException) -> str:
        """Why a shape cannot be measured; raises what is no matter of the shape."""
        if self.device.out_of_memory(exc):
            text = " ".join(str(exc).split())[:200]
            return text if text.startswith(("out of memory", "does not fit")) else f"out of memory: {text}"
        if isinstance(exc, NotImplementedError):
            return str(exc)
        if isinstance(exc, RuntimeError) and "CUBLAS_STATUS_NOT_SUPPORTED" in str(exc):
            return "the BLAS does not support it"
        raise exc

    def _queue(self, ask: Ask) -> _Queued:
        each = self.seconds_of(ask.shape)
        lead = max(1, round(ask.lead / each)) if ask.lead else 0
        counted = max(1, round(ask.seconds / each))
        try:
            calls = self.calls(ask.shape)
            self._make(calls, lead)
            first = self.device.mark()
            self._make(calls, counted)
            last = self.device.mark()
        except (RuntimeError, MemoryError) as exc:
            return _Queued(ask.shape, None, None, 0, self.failure(exc))
        return _Queued(ask.shape, first, last, counted)

    def _make(self, calls: list[Call], count: int) -> None:
        """So many calls, going on with the place after the last one."""
        sets, turn = len(calls), self._turn
        for _ in range(count):
            turn += 1
            calls[turn % sets]()
        self._turn = turn

    def _read(self, queued: _Queued) -> Block:
        if queued.first is None or queued.last is None:
            return Block(queued.shape, 0.0, self.now(), 0.0, 0, queued.error)
        seconds = seconds_between(queued.first, queued.last)
        at = seconds_between(self._start, queued.last) - seconds / 2
        if seconds <= 0:
            return Block(queued.shape, 0.0, at, 0.0, 0, "the device's clock did not move")
        self._seconds[queued.shape] = seconds / queued.iterations
        tflops = flops_of(queued.shape) * queued.iterations / seconds / 1e12
        return Block(queued.shape, tflops, at, seconds, queued.iterations)

    def _allocate(self, count: int, make: object) -> torch.Tensor:
        """A pool of `count` elements, or of half, a quarter ... where there is no room: others use the device too."""
        assert callable(make)
        while True:
            try:
                pool: torch.Tensor = make(count)
                self.device.synchronize()
                return pool
            except (RuntimeError, MemoryError) as exc:
                if not self.device.out_of_memory(exc):
                    raise
                if count < 4096:
                    free, total = self.device.memory()
                    raise MldebugError(
                        f"no memory for the matrices on {self.device.name}: {free >> 20} of {total >> 20} MiB are free",
                        "end what uses the device, or take another one",
                    ) from exc
            self.device.empty_cache()
            count //= 2

    def _why_not(self, shape: Shape) -> str:
        wrong = [size for size in shape[:3] if size % self.form.multiple]
        if wrong:
            return f"does not fit: {wrong[0]} is no multiple of {self.form.multiple}, as {self.form.dtype} needs it"
        need = _in_elements(self.form, shape) * self.form.storage.itemsize
        need += _out_elements(shape) * self.form.out.itemsize
        free = self.pool.nbytes + self.out.nbytes + self.device.memory()[0]
        return f"out of memory: {shape_text(shape)} needs {need >> 20} MiB of {free >> 20} that are free"


def may_fit(form: Format, shape: Shape) -> bool:
    """Whether there can be memory for it at all: one that is far too large must not size the pools for all."""
    need = _in_elements(form, shape) * form.storage.itemsize + _out_elements(shape) * form.out.itemsize
    return need < form.device.memory()[0]


def first_rate(form: Format, seconds: float = 0.4) -> float:
    """About how many TFLOPS a device does: products that get larger until one takes a fortieth of `seconds`."""
    device, best = form.device, 0.0
    generator = torch.Generator(device.torch_device).manual_seed(1)
    began = time.monotonic()
    with torch.inference_mode(), form.precision():
        for power in range(8, 14):
            side = 2**power
            pool = form.random(side * side // form.packed, generator)
            out = torch.empty(side * side, dtype=form.out, device=device.torch_device)
            shape = (side, side, side)
            call = form.call(pool, pool, out, shape, form.scales(shape))
            call()
            device.synchronize()
            first = device.mark()
            for _ in range(3):
                call()
            last = device.mark()
            device.synchronize()
            took = seconds_between(first, last) / 3
            best = max(best, flops_of(shape) / max(took, 1e-9) / 1e12)
            if took > seconds / 40 or time.monotonic() - began > seconds:
                break
    return best


def cache_bytes(device: Device) -> int:
    """The size of the last cache before memory; 256 MiB, the largest there is, where torch does not say."""
    if device.kind == "cpu":
        return 32 << 20
    told = getattr(device.module, "get_device_properties", None)
    size = int(getattr(told(device.index), "L2_cache_size", 0)) if told is not None else 0
    return size if size and device.kind == "cuda" else 256 << 20  # on ROCm there is a larger one behind the L2


def multiprocessors(device: Device) -> int:
    """How many tiles a device computes at once; 1 where torch does not say."""
    told = getattr(device.module, "get_device_properties", None)
    if device.kind == "cpu" or told is None:
        return 1
    properties = told(device.index)
    return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 0) or 1)


def _in_elements(form: Format, shape: Shape) -> int:
    return sum(_aligned(size) for size in _sizes(form, shape))


def _sizes(form: Format, shape: Shape) -> tuple[int, int]:
    """Elements of A and of B."""
    m, n, k, batch = (*shape, 1)[:4]
    return batch * m * k // form.packed, batch * n * k // form.packed


def _out_elements(shape: Shape) -> int:
    m, n, _, batch = (*shape, 1)[:4]
    return batch * m * n


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
