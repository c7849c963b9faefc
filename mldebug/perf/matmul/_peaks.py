"""What the makers of accelerators say these can do: dense peaks of matrix products, and memory bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mldebug.core.errors import UsageError


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator as its maker specifies it, without sparsity.

    `tflops` has a peak in 10^12 operations a second by dtype, `bandwidth` is that of its memory in 10^9 bytes a second,
    `sms` how many units (SM, CU) tiles are spread over; 0 where that is not known.
    """

    name: str
    tflops: dict[str, float]
    bandwidth: float
    sms: int
    source: str
    note: str = ""


def theoretical_tflops(device_name: str, dtype: str) -> float | None:
    """The dense peak of a device in TFLOPS (TOPS for int8), or None where the maker names none that we know.

    `device_name` is what torch or NVML call it; `dtype` is torch's name or a short one. The makers' clocks are meant:
    a card whose power limit holds it below them stays below this figure whatever it computes.

        theoretical_tflops("NVIDIA H100 80GB HBM3", "bf16")  # 989.4
    """
    found = accelerator(device_name)
    return found.tflops.get(canonical_dtype(dtype)) if found else None


def accelerator(device_name: str) -> Accelerator | None:
    """The accelerator of that name, as torch, NVML or people write it; None for those not in the table.

    A part of a card (MIG) and relatives under a longer name (Laptop, Ti, SUPER) are not the card, and not found.

        accelerator("NVIDIA H100 PCIe").bandwidth  # 2039
    """
    name = device_name.lower().replace("(r)", "").replace("gaudi ", "gaudi")
    words = {word for word in re.findall(r"[a-z0-9]+", name) if not re.fullmatch(_HARMLESS, word)}
    named = [row for row in _TABLE if row[0] <= words]
    if not named or _cut_down(device_name):
        return None
    keys, found = max(named, key=lambda row: len(row[0]))
    return None if words - keys else found


def known_devices() -> tuple[str, ...]:
    """The accelerators of the table, by short names that `accelerator` takes.

    known_devices()[0]  # "GB300"
    """
    names = (re.sub(r"^(NVIDIA|AMD|Intel)( GeForce| Instinct)? ", "", row.name) for _, row in _TABLE)
    return tuple(name for name in names if " or " not in name)


def canonical_dtype(name: str) -> str:
    """torch's name of a dtype that may be given in short; an unknown one is a UsageError.

    canonical_dtype("bf16")  # "bfloat16"
    """
    word = name.lower().removeprefix("torch.")
    word = _SHORT.get(word, word)
    if word not in _DTYPES:
        raise UsageError(f"there is no matmul in {name!r}", f"one of {', '.join(_DTYPES)}")
    return word


_DTYPES = (
    "bfloat16", "float16", "float32", "tf32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "mxfp8", "mxfp4",
    "nvfp4",
)  # fmt: skip
_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "tfloat32": "tf32", "fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "float8_e4m3fnuz": "float8_e4m3fn", "float8_e5m2fnuz": "float8_e5m2",
    "i8": "int8", "fp4": "nvfp4",
}  # fmt: skip

# Words of a name that leave a card what it is: maker, family, form of the module, size and kind of its memory.
_HARMLESS = (
    r"nvidia|amd|intel|habana|tesla|geforce|quadro|instinct|generation|gpu|accelerator|sxm\d?|nvl\d+|oam|ac|\d+gi?b?"
    r"|hbm\w*"
)


def _cut_down(name: str) -> bool:
    """A slice of a card, and the cards made for one customer under the common name: fewer or more units than it."""
    return bool(re.search(r"\bMIG\b|\b[AH]100.*\b64GB", name, re.IGNORECASE))


def _row(
    key: str, name: str, sms: int, bandwidth: float, source: str, note: str = "", /, **peaks: float
) -> tuple[frozenset[str], Accelerator]:
    """A row of the table. Peaks are named in short; one that is left out the device lacks, or nobody states it."""
    if "bf16" in peaks:
        peaks.setdefault("f16", peaks["bf16"])
    tflops = {dtype: float(peaks[short]) for dtype, short in _COLUMNS.items() if short in peaks}
    return frozenset(key.split()), Accelerator(name, tflops, bandwidth, sms, source, note)


_COLUMNS = {
    "float64": "f64", "float32": "f32", "tf32": "tf32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8", "int8": "int8", "mxfp8": "mx8", "mxfp4": "mx4", "nvfp4": "nv4",
}  # fmt: skip
_HOPPER = dict(f64=66.9, f32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9, int8=1978.9)
_NVL = dict(f64=60.0, f32=60.0, tf32=417.5, bf16=835.5, fp8=1670.5, int8=1670.5)
_AMPERE = dict(f64=19.5, f32=19.5, tf32=156.0, bf16=312.0, int8=624.0)
_CDNA3 = dict(f64=163.4, f32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9, int8=2614.9)
_GCD = "one of the two dies of a module, which is what torch takes for a device"

# Without sparsity, for products that sum in float32 (GeForce cards do those at half rate), float64 and float32 by the
# matrix units where a device has such. Makers print the figures with sparsity, often twice these.
_TABLE = (
    _row("gb300", "NVIDIA GB300", 152, 8000, "NVIDIA GB300 NVL72 specifications, per GPU", f64=1.3, f32=80, tf32=1250,
         bf16=2500, fp8=5000, mx8=5000, mx4=15000, nv4=15000),
    _row("b300", "NVIDIA B300", 148, 8000, "NVIDIA DGX B300 datasheet, per GPU", f64=1.2, f32=75, tf32=1125, bf16=2250,
         fp8=4500, mx8=4500, mx4=13500, nv4=13500),
    _row("gb200", "NVIDIA GB200", 152, 8000, "NVIDIA GB200 NVL72 specifications, per GPU", f64=40, f32=80, tf32=1250,
         bf16=2500, fp8=5000, int8=5000, mx8=5000, mx4=10000, nv4=10000),
    _row("b200", "NVIDIA B200", 148, 7700, "NVIDIA HGX B200 datasheet, per GPU", f64=37, f32=75, tf32=1125, bf16=2250,
         fp8=4500, int8=4500, mx8=4500, mx4=9000, nv4=9000),
    _row("gh200", "NVIDIA GH200", 132, 4000, "NVIDIA GH200 datasheet", "the 144 GB one has 4900 GBps", **_HOPPER),
    _row("h200", "NVIDIA H200 SXM", 132, 4800, "NVIDIA H200 datasheet", **_HOPPER),
    _row("h200 nvl", "NVIDIA H200 NVL", 132, 4800, "NVIDIA H200 datasheet", **_NVL),
    _row("h100", "NVIDIA H100 SXM", 132, 3350, "NVIDIA H100 datasheet", **_HOPPER),
    _row("h100 nvl", "NVIDIA H100 NVL", 132, 3938, "NVIDIA H100 datasheet", **_NVL),
    _row("h100 pcie", "NVIDIA H100 PCIe", 114, 2039, "NVIDIA H100 datasheet", f64=51.2, f32=51.2, tf32=378, bf16=756.4,
         fp8=1512.9, int8=1512.9),
    _row("h800", "NVIDIA H800 SXM", 132, 3350, "NVIDIA H800 specifications", **{**_HOPPER, "f64": 1.0}),
    _row("h800 pcie", "NVIDIA H800 PCIe", 114, 2039, "NVIDIA H800 specifications", f64=0.8, f32=51.2, tf32=378,
         bf16=756.4, fp8=1512.9, int8=1512.9),
    _row("h20", "NVIDIA H20", 78, 4000, "NVIDIA H20 specifications", f64=1, f32=44, tf32=74, bf16=148, fp8=296,
         int8=296),
    _row("a100", "NVIDIA A100 SXM", 108, 2039, "NVIDIA A100 datasheet", "the 40 GB one has 1555 GBps",
         **_AMPERE),
    _row("a100 pcie", "NVIDIA A100 PCIe", 108, 1935, "NVIDIA A100 datasheet", "the 40 GB one has 1555 GBps",
         **_AMPERE),
    _row("a800", "NVIDIA A800 SXM", 108, 2039, "NVIDIA A800 datasheet", **_AMPERE),
    _row("a800 pcie", "NVIDIA A800 PCIe", 108, 1935, "NVIDIA A800 datasheet", **_AMPERE),
    _row("a30", "NVIDIA A30", 56, 933, "NVIDIA A30 datasheet", f64=10.3, f32=10.3, tf32=82, bf16=165, int8=330),
    _row("a40", "NVIDIA A40", 84, 696, "NVIDIA A40 datasheet", f32=37.4, tf32=74.8, bf16=149.7, int8=299.3),
    _row("a10", "NVIDIA A10", 72, 600, "NVIDIA A10 datasheet", f32=31.2, tf32=62.5, bf16=125, int8=250),
    _row("a10g", "NVIDIA A10G", 80, 600, "NVIDIA A10G datasheet", f32=35, tf32=35, bf16=70, int8=140),
    _row("rtx a6000", "NVIDIA RTX A6000", 84, 768, "NVIDIA RTX A6000 datasheet", f32=38.7, tf32=77.4, bf16=154.8,
         int8=309.7),
    _row("l40s", "NVIDIA L40S", 142, 864, "NVIDIA L40S datasheet", f32=91.6, tf32=183, bf16=362, fp8=733, int8=733),
    _row("l40", "NVIDIA L40", 142, 864, "NVIDIA L40 datasheet", f32=90.5, tf32=90.5, bf16=181, fp8=362, int8=362),
    _row("l20", "NVIDIA L20", 92, 864, "NVIDIA L20 specifications", f32=59.8, tf32=59.8, bf16=119.5, fp8=239, int8=239),
    _row("l4", "NVIDIA L4", 58, 300, "NVIDIA L4 datasheet", f32=30.3, tf32=60, bf16=121, fp8=242.5, int8=242.5),
    _row("rtx 6000 ada", "NVIDIA RTX 6000 Ada", 142, 960, "NVIDIA RTX 6000 Ada datasheet", f32=91.1,
         tf32=182.1, bf16=364.2, fp8=728.5, int8=728.5),
    _row("rtx 5090", "NVIDIA GeForce RTX 5090", 170, 1792, "NVIDIA RTX Blackwell whitepaper", f32=104.8, tf32=104.8,
         bf16=209.5, fp8=419, int8=838, mx8=419, mx4=1676, nv4=1676),
    _row("rtx 4090", "NVIDIA GeForce RTX 4090", 128, 1008, "NVIDIA Ada whitepaper", f32=82.6, tf32=82.6, bf16=165.2,
         fp8=330.3, int8=660.6),
    _row("rtx 3090", "NVIDIA GeForce RTX 3090", 82, 936, "NVIDIA GA102 whitepaper", f32=35.6, tf32=35.6, bf16=71.2,
         int8=284.7),
    _row("t4", "NVIDIA T4", 40, 320, "NVIDIA T4 datasheet", f32=8.1, f16=65, int8=130),
    _row("v100", "NVIDIA V100 SXM", 80, 900, "NVIDIA V100 datasheet", f64=7.8, f32=15.7, f16=125),
    _row("v100 pcie", "NVIDIA V100 PCIe", 80, 900, "NVIDIA V100 datasheet", f64=7, f32=14, f16=112),
    _row("v100s pcie", "NVIDIA V100S PCIe", 80, 1134, "NVIDIA V100 datasheet", f64=8.2, f32=16.4, f16=130),
    _row("p100", "NVIDIA P100 SXM", 56, 732, "NVIDIA P100 datasheet", f64=5.3, f32=10.6, f16=21.2),
    _row("p100 pcie", "NVIDIA P100 PCIe", 56, 732, "NVIDIA P100 datasheet", f64=4.7, f32=9.3, f16=18.7),
    _row("mi355x", "AMD Instinct MI355X", 256, 8000, "AMD MI355X product page", f64=78.6, f32=157.3, bf16=2516.6,
         fp8=5033.2, int8=5033.2, mx8=5033.2, mx4=10066.3),
    _row("mi350x", "AMD Instinct MI350X", 256, 8000, "AMD MI350X product page", f64=72.1, f32=144.2, bf16=2306.9,
         fp8=4613.7, int8=4613.7, mx8=4613.7, mx4=9227.5),
    _row("mi325x", "AMD Instinct MI325X", 304, 6000, "AMD MI325X product page", **_CDNA3),
    _row("mi300x", "AMD Instinct MI300X", 304, 5300, "AMD MI300X product page", **_CDNA3),
    _row("mi300a", "AMD Instinct MI300A", 228, 5300, "AMD MI300A product page", f64=122.6, f32=122.6, tf32=490.3,
         bf16=980.6, fp8=1961.2, int8=1961.2),
    _row("mi250x", "AMD Instinct MI250X", 110, 1638, "AMD MI250X product page, halved", _GCD, f64=47.9, f32=47.9,
         bf16=191.5, int8=191.5),
    _row("mi250x mi250", "AMD Instinct MI250X or MI250", 110, 1638, "AMD MI250X product page, halved",
         _GCD + "; of the MI250 it is 181 in bfloat16", f64=47.9, f32=47.9, bf16=191.5, int8=191.5),
    _row("mi250", "AMD Instinct MI250", 104, 1638, "AMD MI250 product page, halved", _GCD, f64=45.3, f32=45.3,
         bf16=181, int8=181),
    _row("mi210", "AMD Instinct MI210", 104, 1638, "AMD MI210 product page", f64=45.3, f32=45.3, bf16=181, int8=181),
    _row("mi100", "AMD Instinct MI100", 120, 1229, "AMD MI100 product page", f32=46.1, bf16=92.3, f16=184.6,
         int8=184.6),
    _row("data center max 1550", "Intel Data Center GPU Max 1550", 64, 1638,
         "Intel Data Center GPU Max specifications, halved", "one of the two tiles of a card, as torch sees it",
         f64=26.2, f32=26.2, tf32=209.7, bf16=419.4, int8=838.9),
    _row("gaudi2", "Intel Gaudi 2", 0, 2450, "Intel Gaudi 2 white paper", bf16=432, fp8=865),
    _row("gaudi3", "Intel Gaudi 3", 0, 3700, "Intel Gaudi 3 white paper, at the 1600 MHz it runs at", bf16=1677,
         fp8=1677),
)  # fmt: skip
