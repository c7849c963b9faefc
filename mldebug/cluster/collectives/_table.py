"""The collectives that are measured: how much each sends and receives, and what its busbw is. No torch here.

The definitions of size, algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from mldebug.core.errors import UsageError

OPS = ("sum", "prod", "min", "max", "avg")

# Spellings of nccl-tests and short ones -> as torch spells them.
_DTYPES = {
    "int8": "int8", "uint8": "uint8", "int32": "int32", "int64": "int64", "half": "float16", "fp16": "float16",
    "float16": "float16", "float": "float32", "fp32": "float32", "float32": "float32", "double": "float64",
    "fp64": "float64", "float64": "float64", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn",
    "f8e4m3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
_WIDTHS = {
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4,
    "int32": 4, "float64": 8, "int64": 8,
}  # fmt: skip
ALL_DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64")


@dataclass(frozen=True)
class Collective:
    """One collective. `split` says which side is cut into a part for each rank: none, send, receive or both.

    `places` are the ways in which it is measured: out_of_place, in_place.
    """

    name: str
    split: str = "none"
    reduces: bool = False
    rooted: bool = False
    places: tuple[str, ...] = ("out_of_place", "in_place")

    def factor(self, world: int) -> float:
        """busbw / algbw."""
        if self.name == "all_reduce":
            return 2 * (world - 1) / world
        return 1.0 if self.name in ("broadcast", "reduce", "sendrecv") else (world - 1) / world

    def by_nccl(self, place: str) -> bool:
        """Whether NCCL itself is called, as torch does not have it."""
        return place == "out_of_place" and self.name in ("all_reduce", "reduce", "broadcast")

    def counts(self, nbytes: int, width: int, world: int) -> tuple[int, int]:
        """(elements sent, elements received) by a rank. Parts are multiples of 16 bytes, as nccl-tests has them."""
        count = nbytes // width
        if self.split == "none":
            return count, count
        part = count // world // (16 // width) * (16 // width)
        return {"send": (part * world, part), "receive": (part, part * world), "both": (part * world, part * world)}[
            self.split
        ]


COLLECTIVES = {
    one.name: one
    for one in (
        Collective("all_reduce", reduces=True),
        Collective("all_gather", "receive"),
        Collective("reduce_scatter", "send", reduces=True),
        Collective("alltoall", "both", places=("out_of_place",)),
        Collective("broadcast", rooted=True),
        Collective("reduce", reduces=True, rooted=True),
        Collective("gather", "receive", rooted=True),
        Collective("scatter", "send", rooted=True),
        Collective("sendrecv", places=("out_of_place",)),
    )
}


def dtype_name(text: str) -> str:
    """`float32` for `float`; an unknown one is a UsageError.

    dtype_name("bf16")  # "bfloat16"
    """
    if text.lower() not in _DTYPES:
        raise UsageError(f"there is no dtype {text!r} here", f"one of {', '.join(_WIDTHS)}")
    return _DTYPES[text.lower()]


def width_of(dtype: str) -> int:
    return _WIDTHS[dtype]


def sizes_of(first: int, last: int, factor: float, step: int) -> list[int]:
    """The payloads from `first` to `last`, each `factor` times the one before, or `step` bytes more."""
    found = [first]
    while len(found) < 10_000:
        following = found[-1] + step if step else int(found[-1] * factor)
        if following > last or following <= found[-1]:
            break
        found.append(following)
    return found


def size_text(nbytes: int) -> str:
    """`16 MiB`, `48 KiB`, `1000 B`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
