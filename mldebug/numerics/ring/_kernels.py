"""Triton kernels of the device ring, and a way to launch them that costs the host little.

Imported only where Triton is: the rest of the package reaches it through `_triton_ring`.

A ring is one int32 array with rows of 8. Row 0 is the header (first alarm, first near, spare), row 1 + s is slot s:
lo and hi as ordered keys of the float32 value, the smallest |x| as float32 bits, then the counts of NaN, +inf,
-inf, zero and subnormal elements.
"""
# Kernel sources are traced by Triton, not run by Python: types would say nothing about them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the kernels' FORMAT
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
BLOCK = 8192  # elements of one tile, for every format

_BLOCK = tl.constexpr(BLOCK)
_LANES = tl.constexpr(256)  # threads of a program
_PIECE = tl.constexpr(8)
_MAG = tl.constexpr(0x7FFFFFFF)  # all bits but the sign
_LOWEST = tl.constexpr(-(2**31))
_INF = tl.constexpr(0x7F800000)  # +inf as float32 bits
_DOWN = tl.constexpr(2.0**-80)  # brings every float32 so low that the squares of a chunk add up in float32
_UP = tl.constexpr(2.0**160)  # undoes it to the square, in float64


@triton.jit(do_not_specialize=["n", "slot", "strict"])
def record_kernel(ring, data, n, slot, strict, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Fold `n` elements at `data` into one slot. Program p takes the tiles p, p + programs, ..."""
    row = ring + (slot + 1) * 8
    alarm, near = _measure(row, data, n, tl.program_id(0), tl.num_programs(0), strict, FORMAT, ALIGNED)
    if alarm:
        tl.atomic_cas(ring, -1, slot, sem="relaxed")
    if near:
        tl.atomic_cas(ring + 1, -1, slot, sem="relaxed")


@triton.jit(do_not_specialize=["base", "count", "slots", "strict"])
def record_many_kernel(ring, table, base, count, slots, strict, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Program p folds chunk p: table row p is (address, index << 32 | elements); tensor `index` of `count` goes to
    slot base + index."""
    row = table + tl.program_id(0) * 2
    packed = tl.load(row + 1)
    data = tl.load(row).to(tl.pointer_type(tl.int32 if FORMAT == 0 else tl.int16))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    index = (packed >> 32).to(tl.int32)
    n = (packed & _MAG).to(tl.int32)
    alarm, near = _measure(ring + ((base + index) % slots + 1) * 8, data, n, 0, 1, strict, FORMAT, ALIGNED)
    if alarm:
        _claim(ring, index, base, count, slots)
    if near:
        _claim(ring + 1, index, base, count, slots)


@triton.jit
def squares_kernel(partial, table, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Program p sums the squares of chunk p: table row p is (address, place << 32 | elements) and place is where.

    The sum is not finite only where an element is not: squares of more than float32 can hold are added again, scaled.
    """
    row = table + tl.program_id(0) * 2
    packed = tl.load(row + 1)
    data = tl.load(row).to(tl.pointer_type(tl.int32 if FORMAT == 0 else tl.int16))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    n = (packed & _MAG).to(tl.int32)
    lane = tl.arange(0, _BLOCK // 4)
    total = tl.full([_BLOCK // 4], 0.0, tl.float32)
    for start in range(0, n, _BLOCK // 4):
        place = start + lane
        value = _as_float32(tl.load(data + place, mask=place < n, other=0), FORMAT)
        total += value * value
    narrow = tl.sum(total, 0)
    wide = narrow.to(tl.float64)
    if (narrow.to(tl.int32, bitcast=True) & _MAG) >= _INF:
        # Rare: read the chunk once more. The squares of 65,536 scaled elements stay below 2 ** 112.
        total = tl.full([_BLOCK // 4], 0.0, tl.float32)
        for start in range(0, n, _BLOCK // 4):
            place = start + lane
            value = _as_float32(tl.load(data + place, mask=place < n, other=0), FORMAT) * _DOWN
            total += value * value
        wide = tl.sum(total, 0).to(tl.float64) * _UP
    tl.store(partial + (packed >> 32), wide)


@triton.jit
def norms_kernel(norms, partial, spans):
    """Program i: the root of the sum of tensor i's chunks; spans row i is (first chunk, number of chunks)."""
    row = spans + tl.program_id(0) * 2
    first = tl.load(row)
    count = tl.load(row + 1)
    lane = tl.arange(0, _LANES)
    total = tl.full([_LANES], 0.0, tl.float64)
    for start in range(0, count, _LANES):
        place = start + lane
        total += tl.load(partial + first + place, mask=place < count, other=0.0)
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.sum(total, 0)))


@triton.jit
def _as_float32(raw, FORMAT: tl.constexpr):
    if FORMAT == 0:
        return raw.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        return raw.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _claim(flag, index, base, count, slots):
    # The programs of a batch run in any order: a claim by a later tensor of this batch gives way, so that the flag
    # ends at the first one of the list. A claim from before the batch stays.
    slot = (base + index) % slots
    seen = tl.atomic_cas(flag, -1, slot, sem="relaxed")
    other = (seen - base + slots) % slots
    while (seen >= 0) & (other < count) & (other > index):
        found = tl.atomic_cas(flag, seen, slot, sem="relaxed")
        seen = tl.where(found == seen, slot, found)
        other = (seen - base + slots) % slots


@triton.jit
def _measure(out, data, n, first, step, strict, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Fold the tiles first, first + step, ... of `n` elements into the slot at `out`; (alarm, near) of these tiles.

    With `strict` (1 or 0) -inf alarms as well.

    All work is on the raw bits, moved to the top of 32. Their signed maximum is the largest value if any is >= 0,
    their unsigned maximum the lowest value if any is negative; where there is none, the smallest magnitude is that
    value. So no element needs an ordered key, and NaN and infinities show as the largest bits.
    """
    INF: tl.constexpr = 0x7C000000 if FORMAT == 2 else 0x7F800000
    TINY: tl.constexpr = 0x04000000 if FORMAT == 2 else 0x00800000  # the smallest normal number
    # Elements of one load of a thread: 16 bytes, where the address allows.
    WIDTH: tl.constexpr = (4 if FORMAT == 0 else 8) if ALIGNED else 1
    ROWS: tl.constexpr = _BLOCK // (WIDTH * _LANES)
    # Rows of one load for each thread, with axis 1 inside the thread: only the reductions after the loop cross
    # threads. (One 3-D load would leave it to the compiler's version which axes it spreads.)
    lane = tl.arange(0, _LANES)
    inner = lane[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([_LANES], _LOWEST, tl.int32)
    low = tl.full([_LANES], 0, tl.uint32)
    small = tl.full([_LANES], _MAG, tl.int32)
    zero = tl.full([_LANES], 0, tl.int32)
    tiny = tl.full([_LANES], 0, tl.int32)
    full = n // _BLOCK
    for tile in range(first, full, step):
        for row in tl.static_range(ROWS):
            bits = _bits(tl.load(data + (tile * _BLOCK + row * _LANES * WIDTH + inner)), FORMAT)
            mag = _magnitude(bits)
            top = tl.maximum(top, tl.max(bits.to(tl.int32, bitcast=True), 1))
            low = tl.maximum(low, tl.max(bits, 1))
            small = tl.minimum(small, tl.min(mag, 1))
            zero += tl.sum((mag == 0).to(tl.int32), 1)
            tiny += tl.sum((mag < TINY).to(tl.int32), 1)
    # The last, partial tile goes in pieces; lanes past the end read the last element again: no extreme changes.
    mine = (full >= first) & ((full - first) % step == 0)
    for start in range(full * _BLOCK, tl.where(mine, n, 0), _PIECE * _LANES):
        for part in tl.static_range(_PIECE):
            place = start + part * _LANES + lane
            bits = _bits(tl.load(data + tl.minimum(place, n - 1)), FORMAT)
            mag = _magnitude(bits)
            top = tl.maximum(top, bits.to(tl.int32, bitcast=True))
            low = tl.maximum(low, bits)
            small = tl.minimum(small, mag)
            zero += ((mag == 0) & (place < n)).to(tl.int32)
            tiny += ((mag < TINY) & (place < n)).to(tl.int32)
    most = tl.max(top, 0)
    least = tl.max(low, 0)
    closest = tl.min(small, 0)
    zeros = tl.sum(zero, 0)
    tinies = tl.sum(tiny, 0)
    nans = zeros * 0
    infs = zeros * 0
    minus = zeros * 0
    if (most >= INF) | (_magnitude(least) >= INF):
        # Rare: read the tiles once more, to count what is not finite and to take the extremes without NaN.
        top = tl.full([_LANES], _LOWEST, tl.int32)
        low = tl.full([_LANES], 0, tl.uint32)
        nan = tl.full([_LANES], 0, tl.int32)
        pos = tl.full([_LANES], 0, tl.int32)
        neg = tl.full([_LANES], 0, tl.int32)
        for tile in range(first, (n + _BLOCK - 1) // _BLOCK, step):
            for start in range(tile * _BLOCK, tl.minimum((tile + 1) * _BLOCK, n), _PIECE * _LANES):
                for part in tl.static_range(_PIECE):
                    place = start + part * _LANES + lane
                    bits = _bits(tl.load(data + tl.minimum(place, n - 1)), FORMAT)
                    mag = _magnitude(bits)
                    signed = bits.to(tl.int32, bitcast=True)
                    nan += ((mag > INF) & (place < n)).to(tl.int32)
                    pos += ((signed == INF) & (place < n)).to(tl.int32)
                    neg += ((mag == INF) & (signed < 0) & (place < n)).to(tl.int32)
                    top = tl.maximum(top, tl.where(mag > INF, _LOWEST, signed))
                    low = tl.maximum(low, bits * (mag <= INF).to(tl.uint32))
        most = tl.max(top, 0)
        least = tl.max(low, 0)
        nans = tl.sum(nan, 0)
        infs = tl.sum(pos, 0)
        minus = tl.sum(neg, 0)
        tl.atomic_add(out + 3, nans, mask=nans > 0, sem="relaxed")
        tl.atomic_add(out + 4, infs, mask=infs > 0, sem="relaxed")
        tl.atomic_add(out + 5, minus, mask=minus > 0, sem="relaxed")
    positive = most >= 0
    negative = (least >> 31) != 0
    hi = _widen(tl.where(positive, most, closest), FORMAT)
    lo = _widen(tl.where(negative, _magnitude(least), closest), FORMAT)
    # The ordered key of a float32: its bits if positive, the complement of its magnitude's bits if negative.
    some = closest <= INF  # else nothing but NaN
    tl.atomic_min(out, tl.where(negative, -1 - lo, lo), mask=some, sem="relaxed")
    tl.atomic_max(out + 1, tl.where(positive, hi, -1 - hi), mask=some, sem="relaxed")
    tl.atomic_min(out + 2, _widen(closest, FORMAT), mask=some, sem="relaxed")
    tl.atomic_add(out + 6, zeros, mask=zeros > 0, sem="relaxed")
    tl.atomic_add(out + 7, tinies - zeros, mask=tinies > zeros, sem="relaxed")
    # float32 bits of a quarter of the largest number, and of that number: its negative marks a mask, not an alarm.
    NEAR: tl.constexpr = 0x467FE000 if FORMAT == 2 else (0x7E7F0000 if FORMAT == 1 else 0x7E7FFFFF)
    MAX: tl.constexpr = 0x477FE000 if FORMAT == 2 else (0x7F7F0000 if FORMAT == 1 else 0x7F7FFFFF)
    above = positive & (hi >= NEAR) & (hi <= MAX)
    below = negative & (lo >= NEAR) & (lo < MAX)
    return nans + infs + strict * minus > 0, above | below


@triton.jit
def _bits(raw, FORMAT: tl.constexpr):
    if FORMAT == 0:
        return raw.to(tl.uint32, bitcast=True)
    else:
        return raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16


@triton.jit
def _magnitude(bits):
    return (bits & _MAG).to(tl.int32, bitcast=True)


@triton.jit
def _widen(mag, FORMAT: tl.constexpr):
    # Magnitude bits at the top of 32 -> the same magnitude as float32 bits.
    if FORMAT == 2:
        half = (mag >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        mag = half.to(tl.float32).to(tl.int32, bitcast=True)
    return mag


class Address:
    """A device address that Triton takes for a pointer argument."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


Launch = Callable[..., Any]


def launch_and_bind(
    kernel: Any, types: tuple[torch.dtype, ...], constants: tuple[int, ...], grid: int, *args: int
) -> Launch:
    """Launch `kernel` once in Triton's ordinary way and return a cheap `launch(grid, stream, *args)` for more.

    The first `len(types)` of `args` are device addresses. The cheap form calls the compiled kernel directly: the
    ordinary call works out the specialisation again each time, which costs the host several times more than the
    launch. It holds for addresses of the same alignment, on the same device. Where this Triton has another inner
    form, the ordinary call remains.
    """

    def ordinary(grid: int, stream: int, *args: int) -> Any:
        pointers = [Address(address, dtype) for address, dtype in zip(args, types, strict=False)]
        return kernel[(grid,)](*pointers, *args[len(types) :], *constants, num_warps=8, num_stages=1)

    compiled = ordinary(grid, 0, *args)
    try:
        call, head, as_tuple = _inner_call(compiled)
    except AttributeError:
        return ordinary
    direct = True

    def launch(grid: int, stream: int, *args: int) -> Any:
        nonlocal direct
        if direct:
            try:
                if as_tuple:
                    call(grid, 1, 1, stream, *head, args + constants)
                else:
                    call(grid, 1, 1, stream, *head, *args, *constants)
                return None
            except (TypeError, AttributeError):
                direct = False
        return ordinary(grid, stream, *args)

    return launch


def _inner_call(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """What to call, its arguments after the stream and before the kernel's own, and whether those go as one tuple."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    version = triton.__version__.rsplit(".", 1)[0]
    # The compiled launcher under `run` halves the cost of the call; its arguments are known for these versions.
    if version in ("3.6", "3.7") and not run.global_scratch_size and not run.profile_scratch_size:
        start = (function, run.launch_cooperative_grid, run.launch_pdl)
        if version == "3.6":
            return run.launch, (*start, None, None, packed, None, None, None), False
        return run.launch, (*start, packed, *[None] * 5, run.arg_annotations, run.kernel_signature), True
    return run, (function, packed, None, None, None), False
