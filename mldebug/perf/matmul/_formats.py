"""The number formats of a matmul: how their random data is made, and which call of torch multiplies them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mldebug.core.device import Device
from mldebug.core.errors import UsageError
from mldebug.perf.matmul._blocks import Shape
from mldebug.perf.matmul._peaks import canonical_dtype

Call = Callable[[], Any]

# The names in the order in which they are listed to people.
DTYPES = (
    "bfloat16", "float16", "float32", "tf32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "int8", "mxfp8", "nvfp4",
)  # fmt: skip
SCALINGS = ("tensor", "row")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of a 4-bit float without its sign
_CHUNK = 1 << 26  # numbers that are made at a time


@dataclass(frozen=True)
class Format:
    """One dtype on one device, ready to multiply. Made by `find_format()`.

    `storage` is what a pool of its numbers is made of, `packed` how many numbers one element holds, `out` the dtype of
    the product, `multiple` what m, n and k must be multiples of.
    """

    dtype: str
    device: Device
    storage: torch.dtype
    out: torch.dtype
    packed: int = 1
    multiple: int = 1
    scaling: str = ""  # of fp8: one scale for a tensor or one for each row
    fast_accum: bool = False

    def random(self, elements: int, generator: torch.Generator) -> torch.Tensor:
        """A pool of so many elements with normal random numbers (int8: evenly spread ones)."""
        pool = torch.empty(elements, dtype=self.storage, device=self.device.torch_device)
        for start in range(0, elements, _CHUNK):
            part = pool[start : start + _CHUNK]
            if self.dtype == "int8":
                part.random_(-127, 128, generator=generator)
            elif self.dtype == "nvfp4":
                part.copy_(_packed_e2m1(part.numel(), self.device.torch_device, generator))
            elif self.storage in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                part.normal_(generator=generator)
            else:
                numbers = torch.empty(part.numel(), dtype=torch.float32, device=self.device.torch_device)
                part.copy_(numbers.normal_(generator=generator))
        return pool

    def call(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, shape: Shape, scales: tuple[torch.Tensor, ...]
    ) -> Call:
        """What multiplies A (m, k) with the transpose of B (n, k), both flat, into `out` (m, n), as a Linear does.

        With a batch there are so many of each. A format that has no batched product is a NotImplementedError.
        """
        m, n, k, batch = (*shape, 1)[:4]
        if batch > 1:
            if self.storage not in _PLAIN:
                raise NotImplementedError(f"there is no batched product of {self.dtype}")
            left, right = a.view(batch, m, k), b.view(batch, n, k).transpose(1, 2)
            return functools.partial(torch.bmm, left, right, out=out.view(batch, m, n))
        left, right = a.view(m, k // self.packed), b.view(n, k // self.packed).t()
        result = out.view(m, n)
        if self.dtype == "int8":
            return functools.partial(torch._int_mm, left, right, out=result)
        if self.storage in _PLAIN:
            return functools.partial(torch.mm, left, right, out=result)
        if self.dtype == "nvfp4":
            left = a.view(torch.float4_e2m1fn_x2).view(m, k // 2)
            right = b.view(torch.float4_e2m1fn_x2).view(n, k // 2).t()
        scale_a, scale_b = scales
        return functools.partial(
            torch._scaled_mm,
            left,
            right,
            scale_a,
            scale_b,
            out_dtype=self.out,
            use_fast_accum=self.fast_accum,
            out=result,
        )

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """While entered, torch multiplies float32 as this format says; what it did before comes back."""
        if self.storage != torch.float32:
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def scales(self, shape: Shape) -> tuple[torch.Tensor, ...]:
        """Those of A and B, all of them 1; none for formats without.

        Blocks of 32 (mxfp8) or 16 (nvfp4) numbers have a scale each, padded to tiles of 128 by 4.
        """
        m, n, k = shape[:3]
        device = self.device.torch_device
        if self.dtype == "int8" or self.storage in _PLAIN:
            return ()
        if self.dtype in ("mxfp8", "nvfp4"):
            across = -(-k // (32 if self.dtype == "mxfp8" else 16) // 4) * 4
            sizes = [-(-rows // 128) * 128 * across for rows in (m, n)]
            if self.dtype == "mxfp8":  # an exponent alone: 127 is 2 to the power of 0
                one, other = (torch.full((size,), 127, dtype=torch.uint8, device=device) for size in sizes)
                return one.view(torch.float8_e8m0fnu), other.view(torch.float8_e8m0fnu)
            one, other = (torch.ones(size, device=device).to(torch.float8_e4m3fn) for size in sizes)
            return one, other
        if self.scaling == "row":
            return torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        return torch.ones((), device=device), torch.ones((), device=device)


_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def find_format(device: Device, dtype: str, scaling: str = "tensor", fast_accum: bool = True) -> Format:
    """The format of this name (as torch spells it, or bf16, fp8 ...), tried out with a small product.

    `scaling` and `fast_accum` are for fp8 alone. A UsageError says which formats this device does have.
    """
    name = canonical_dtype(dtype)
    if dtype.lower() == "fp8" and device.kind == "rocm" and _works(device, _made(device, "float8_e4m3fnuz", scaling)):
        name = "float8_e4m3fnuz"  # what the CDNA3 generation has in the place of e4m3fn
    if scaling not in SCALINGS:
        raise UsageError(f"scaling is {scaling!r}", f"it is one of {', '.join(SCALINGS)}")
    made = _made(device, name, scaling, fast_accum)
    why = _works(device, made) if made is not None else "this torch does not have it"
    if made is None or why:
        others = [one for one in DTYPES if one != name and _works(device, _made(device, one, "tensor")) == ""]
        raise UsageError(
            f"{name}{f' with one scale a {scaling}' if scaling != 'tensor' else ''} cannot be multiplied on "
            f"{device.name}: {why}",
            f"it multiplies {', '.join(others)}",
        )
    return made


def _made(device: Device, name: str, scaling: str, fast_accum: bool = True) -> Format | None:
    """The format without a trial; None where this torch or this kind of device cannot have it."""
    if name == "tf32":
        # Elsewhere torch would quietly multiply in float32.
        can = device.kind == "cuda" and device.module.get_device_capability(device.index) >= (8, 0)
        return Format(name, device, torch.float32, torch.float32) if can else None
    if name == "int8":
        return Format(name, device, torch.int8, torch.int32, multiple=8)
    if name == "mxfp8":
        if not hasattr(torch, "float8_e8m0fnu"):
            return None
        return Format(name, device, torch.float8_e4m3fn, torch.bfloat16, multiple=32, scaling="block of 32")
    if name == "nvfp4":
        if not hasattr(torch, "float4_e2m1fn_x2"):
            return None
        return Format(name, device, torch.uint8, torch.bfloat16, packed=2, multiple=32, scaling="block of 16")
    storage = getattr(torch, name, None)
    if not isinstance(storage, torch.dtype):
        return None
    if name.startswith("float8"):
        return Format(name, device, storage, torch.bfloat16, multiple=16, scaling=scaling, fast_accum=fast_accum)
    return Format(name, device, storage, storage) if storage in _PLAIN else None


def _works(device: Device, made: Format | None) -> str:
    """ "" if a small product succeeds, else why it does not."""
    if made is None:
        return "this torch does not have it"
    try:
        generator = torch.Generator(device.torch_device).manual_seed(1)
        size = 256
        pool = made.random(size * size // made.packed, generator)
        out = torch.empty(size * size, dtype=made.out, device=device.torch_device)
        with made.precision():
            made.call(pool, pool, out, (size, size, size), made.scales((size, size, size)))()
        device.synchronize()
    except Exception as exc:  # each release and device refuses in its own way
        return " ".join(str(exc).split())[:160].rstrip(".") or type(exc).__name__
    return ""


def _packed_e2m1(elements: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers rounded to 4-bit floats, two in a byte."""
    numbers = torch.empty(2 * elements, dtype=torch.float32, device=device).normal_(generator=generator).mul_(2)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_E2M1)], device=device)
    codes = torch.bucketize(numbers.abs(), middles).to(torch.uint8) | (numbers < 0).to(torch.uint8) << 3
    return codes[::2] | codes[1::2] << 4
