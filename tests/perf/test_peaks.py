"""Peaks by the names that torch and NVML give, against the arithmetic of their units, and the tables of references."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from mldebug.core import reference
from mldebug.core.errors import UsageError
from mldebug.core.reference import busbw_references, expected_busbw, gpu_kind, link_gbps
from mldebug.perf.matmul import _peaks, _references
from mldebug.perf.matmul._peaks import accelerator, canonical_dtype, theoretical_tflops
from mldebug.perf.matmul._references import METHODS, known_shapes, mamf_references


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA B200", "NVIDIA B200"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("A100-SXM4-40GB", "NVIDIA A100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 PCIe"),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM"),
        ("Tesla T4", "NVIDIA T4"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("AMD Instinct MI250X / MI250", "AMD Instinct MI250X or MI250"),
        ("Intel(R) Data Center GPU Max 1550", "Intel Data Center GPU Max 1550"),
        ("GAUDI3", "Intel Gaudi 3"),
        ("h100", "NVIDIA H100 SXM"),
    ],
)
def test_devices_are_found_by_the_names_that_drivers_give(name: str, found: str) -> None:
    kind = accelerator(name)
    assert kind is not None
    assert kind.name == found


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "Quadro RTX 6000",
        "GRID A100-10C",
        "AMD EPYC 9575F",
        "",
    ],
)
def test_relatives_and_parts_of_a_card_are_not_the_card(name: str) -> None:
    assert accelerator(name) is None
    assert theoretical_tflops(name, "bf16") is None


@pytest.mark.parametrize(
    ("name", "dtype", "units", "each", "mhz"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 132 * 4, 512, 1830),
        ("NVIDIA H100 80GB HBM3", "fp8", 132 * 4, 1024, 1830),
        ("NVIDIA H100 PCIe", "bf16", 114 * 4, 512, 1620),
        ("NVIDIA H100 80GB HBM3", "fp32", 132, 128, 1980),
        ("NVIDIA A100-SXM4-80GB", "bf16", 108 * 4, 256, 1410),
        ("NVIDIA A100-SXM4-80GB", "tf32", 108 * 4, 128, 1410),
        ("Tesla V100-SXM2-16GB", "fp16", 80 * 8, 64, 1530),
        ("NVIDIA GeForce RTX 4090", "bf16", 128 * 4, 64, 2520),
        ("AMD Instinct MI300X", "bf16", 304 * 4, 256, 2100),
        ("AMD Instinct MI355X", "bf16", 256 * 4, 512, 2400),
        ("AMD Instinct MI250X", "bf16", 110 * 4, 128, 1700),
        ("GAUDI2", "bf16", 2, 256 * 256, 1650),
        ("GAUDI3", "bf16", 8, 256 * 256, 1600),
    ],
)
def test_peaks_are_units_times_products_times_clock(name: str, dtype: str, units: int, each: int, mhz: int) -> None:
    peak = theoretical_tflops(name, dtype)
    assert peak == pytest.approx(units * each * 2 * mhz / 1e6, rel=0.006)


@pytest.mark.parametrize(("_keys", "kind"), _peaks._TABLE, ids=lambda value: getattr(value, "name", ""))
def test_no_row_is_a_figure_with_sparsity(_keys: frozenset[str], kind: _peaks.Accelerator) -> None:
    half, tf32, fp8 = (kind.tflops.get(name) for name in ("float16", "tf32", "float8_e4m3fn"))
    assert half and kind.bandwidth > 200
    if tf32:
        assert tf32 == pytest.approx(half / 2, rel=0.015), "half of float16 on all tensor cores"
    if fp8 and kind.name != "Intel Gaudi 3":
        assert fp8 == pytest.approx(2 * half, rel=0.03)
    assert kind.tflops.get("float32", 0) <= half


def test_what_a_device_lacks_has_no_peak() -> None:
    assert theoretical_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert theoretical_tflops("Tesla V100-SXM2-16GB", "bf16") is None
    assert canonical_dtype("torch.bfloat16") == canonical_dtype("BF16") == "bfloat16"
    with pytest.raises(UsageError, match="float7"):
        canonical_dtype("float7")


def test_every_measured_reference_is_of_a_known_device_and_below_its_peak() -> None:
    path = Path(_references.__file__).with_name("mamf_reference.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(_references._table()) > 30
    for row in rows:
        peak = theoretical_tflops(row["accelerator"], row["dtype"])
        assert peak is not None, row
        assert 0.4 < float(row["tflops"]) / peak < 1, row
        assert row["method"] in METHODS and row["source"], row
        assert canonical_dtype(row["dtype"]) == row["dtype"]


def test_a_reference_is_looked_up_by_device_dtype_and_method() -> None:
    best = mamf_references("NVIDIA H100 80GB HBM3", "bf16", "flushed")
    assert [(one.tflops, one.shape) for one in best] == [(794.5, (2048, 2048, 13312))]
    assert mamf_references("NVIDIA H100 80GB HBM3", "bf16", "sustained")[0].approximate
    assert mamf_references("NVIDIA H100 PCIe", "bf16") == ()
    small = mamf_references("NVIDIA A100-SXM4-40GB", "float16", "profiler")
    assert small[0].accelerator.endswith("40GB") and len(small) == 2
    assert known_shapes("float8_e4m3fn")[0] in [one.shape for one in mamf_references("GAUDI2", "fp8")]


def test_busbw_is_looked_up_by_gpu_count_and_size() -> None:
    whole = expected_busbw("NVIDIA H100 80GB HBM3", gpus=8, nbytes=16 << 30)
    assert whole is not None and whole.busbw == 483.05 and whole.kind == "measured"
    near = expected_busbw("NVIDIA H100 80GB HBM3", gpus=8, nbytes=3 << 20)
    assert near is not None and near.nbytes == 1 << 20
    assert expected_busbw("NVIDIA H100 80GB HBM3", gpus=3, nbytes=1 << 30) is None
    assert expected_busbw("NVIDIA H200", gpus=8, nbytes=8) is None, "32 KiB is no reference for 8 bytes"
    least = busbw_references("NVIDIA H200", gpus=8, nbytes=16 << 30, kind="threshold")
    assert {one.kind for one in least} == {"threshold"} and least[0].busbw in (431, 432)
    largest = busbw_references("NVIDIA A100-SXM4-80GB", gpus=8)[0]
    assert largest.nbytes == 16 << 30
    two = busbw_references("NVIDIA H100 80GB HBM3", gpus=16, nodes=2, nbytes=1 << 30)
    assert two and {one.nodes for one in two} == {2}


def test_rows_of_busbw_are_sound() -> None:
    for row in reference._table():
        assert gpu_kind(row.gpu) == row.gpu, row
        assert row.busbw > 0 and math.isfinite(row.busbw) and row.kind in ("measured", "threshold") and row.source
        link = link_gbps(row.gpu)
        if link is not None and row.nodes == 1 and row.notes.find("NVLS") < 0:
            assert row.busbw < 1.1 * link.gbps, "in-network sums aside no bus is faster than its links"


@pytest.mark.parametrize(
    ("name", "kind", "gbps"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 450),
        ("NVIDIA H100 NVL", "H100 NVL", 300),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe", 300),
        ("NVIDIA GB200", "GB200 SXM", 900),
        ("AMD Instinct MI300X", "MI300X OAM", 448),
        ("NVIDIA RTX A6000", "", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", None),
    ],
)
def test_links_by_kind_of_gpu(name: str, kind: str, gbps: float | None) -> None:
    assert gpu_kind(name) == kind
    link = link_gbps(name)
    assert (link.gbps if link else None) == gbps
