"""What collectives reached on other machines (busbw), and what the links between GPUs are specified for."""

from __future__ import annotations

import csv
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BusbwReference:
    """One figure: `busbw` in 10^9 bytes a second as nccl-tests defines it, for payloads of `nbytes` (0: not stated).

    `kind` is "measured", or "threshold" for the least that a fleet's owner accepts.
    """

    platform: str
    gpu: str
    gpus: int
    nodes: int
    collective: str
    nbytes: int
    busbw: float
    kind: str
    notes: str
    source: str


@dataclass(frozen=True)
class LinkReference:
    """The links of one GPU to the other GPUs of its node: `gbps` is 10^9 bytes a second one way, all links together."""

    gpu: str
    name: str
    gbps: float
    source: str


def busbw_references(
    gpu: str, *, gpus: int, nodes: int = 1, collective: str = "all_reduce", nbytes: int = 0, kind: str = ""
) -> tuple[BusbwReference, ...]:
    """The figures for this GPU on that many GPUs and nodes, those nearest in size to `nbytes` first.

    `gpu` is the name that torch or NVML give, `gpus` the world size. With `nbytes` 0 the largest payload is first;
    figures for a mean over sizes are last. Empty where nothing is known.

        busbw_references("NVIDIA H100 80GB HBM3", gpus=8, nbytes=1 << 30)[0].busbw
    """
    wanted = gpu_kind(gpu)
    found = [
        row
        for row in _table()
        if (row.gpu, row.gpus, row.nodes, row.collective) == (wanted, gpus, nodes, collective)
        and kind in ("", row.kind)
    ]
    aim = math.log2(nbytes) if nbytes > 0 else math.inf

    def distance(row: BusbwReference) -> float:
        if row.nbytes == 0:
            return math.inf
        return abs(math.log2(row.nbytes) - aim) if nbytes > 0 else -row.nbytes

    return tuple(sorted(found, key=distance))


def expected_busbw(
    gpu: str, *, gpus: int, nodes: int = 1, collective: str = "all_reduce", nbytes: int
) -> BusbwReference | None:
    """The measured figure whose payload is within a factor of four of `nbytes`, or None where there is none.

    expected_busbw("NVIDIA H200", gpus=8, nbytes=16 << 30).busbw  # 482.26
    """
    for row in busbw_references(gpu, gpus=gpus, nodes=nodes, collective=collective, nbytes=nbytes, kind="measured"):
        if row.nbytes and nbytes > 0 and abs(math.log2(row.nbytes / nbytes)) <= 2:
            return row
    return None


def link_gbps(gpu: str) -> LinkReference | None:
    """What the makers specify for the links between the GPUs of a node; None for a GPU that has none that we know.

    link_gbps("NVIDIA H100 80GB HBM3").gbps  # 450.0
    """
    kind = gpu_kind(gpu)
    if kind not in _LINKS:
        return None
    name, gbps, source = _LINKS[kind]
    return LinkReference(kind, name, gbps, source)


def gpu_kind(name: str) -> str:
    """`H100 SXM` for `NVIDIA H100 80GB HBM3`: chip and form, as the tables here name them; "" for a name without chip.

    gpu_kind("NVIDIA A100 80GB PCIe")  # "A100 PCIe"
    """
    low = name.lower()
    chip = re.search(r"\b(gb[23]00|gh200|b[23]00|h[128]00|h20|a[18]00|v100|mi\d{3}[axp]?)(?![a-z\d])", low)
    if chip is None or " mig " in low:
        return ""
    if chip[1].startswith("mi"):
        return f"{chip[1].upper()} OAM"
    form = "PCIe" if "pcie" in low else "NVL" if re.search(r"\bnvl\b", low) else "SXM"
    return f"{chip[1].upper()} {form}"


_NVLINK = "NVIDIA datasheet, half of the sum of both ways"
_XGMI = "AMD product page, seven links"
_LINKS = {
    "GB300 SXM": ("NVLink 5", 900.0, _NVLINK),
    "GB200 SXM": ("NVLink 5", 900.0, _NVLINK),
    "B300 SXM": ("NVLink 5", 900.0, _NVLINK),
    "B200 SXM": ("NVLink 5", 900.0, _NVLINK),
    "GH200 SXM": ("NVLink 4", 450.0, _NVLINK),
    "H200 SXM": ("NVLink 4", 450.0, _NVLINK),
    "H200 NVL": ("NVLink 4 bridge", 450.0, _NVLINK),
    "H100 SXM": ("NVLink 4", 450.0, _NVLINK),
    "H100 NVL": ("NVLink 4 bridge", 300.0, _NVLINK),
    "H100 PCIe": ("NVLink 4 bridge", 300.0, _NVLINK),
    "H800 SXM": ("NVLink 4", 200.0, _NVLINK),
    "H20 SXM": ("NVLink 4", 450.0, _NVLINK),
    "A100 SXM": ("NVLink 3", 300.0, _NVLINK),
    "A100 PCIe": ("NVLink 3 bridge", 300.0, _NVLINK),
    "A800 SXM": ("NVLink 3", 200.0, _NVLINK),
    "V100 SXM": ("NVLink 2", 150.0, _NVLINK),
    "MI300X OAM": ("xGMI", 448.0, _XGMI),
    "MI325X OAM": ("xGMI", 448.0, _XGMI),
    "MI355X OAM": ("xGMI", 535.5, _XGMI),
    "MI350X OAM": ("xGMI", 535.5, _XGMI),
}


@functools.cache
def _table() -> tuple[BusbwReference, ...]:
    with Path(__file__).with_name("busbw_reference.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            BusbwReference(
                platform=row["platform"],
                gpu=row["gpu"],
                gpus=int(row["gpus"]),
                nodes=int(row["nodes"]),
                collective=row["collective"],
                nbytes=int(row["bytes"] or 0),
                busbw=float(row["gbps"]),
                kind=row["kind"],
                notes=row["notes"],
                source=row["source"],
            )
            for row in csv.DictReader(file)
        )
