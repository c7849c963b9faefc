"""The table of peaks against what the makers print: with sparsity, so twice the dense figure."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from mldebug.perf.matmul._peaks import accelerator, known_devices, theoretical_tflops

# Device -> dtype -> TFLOPS with 2:4 sparsity, from the data sheet of each.
PRINTED = {
    "NVIDIA GB200": {"bf16": 5000, "tf32": 2500, "fp8": 10000, "int8": 10000, "nvfp4": 20000},
    "NVIDIA B200": {"bf16": 4500, "tf32": 2200, "fp8": 9000, "int8": 9000, "nvfp4": 18000},
    "NVIDIA GB300": {"bf16": 5000, "tf32": 2500, "fp8": 10000},
    "NVIDIA H100 80GB HBM3": {"bf16": 1979, "fp16": 1979, "tf32": 989, "fp8": 3958, "int8": 3958},
    "NVIDIA H200": {"bf16": 1979, "tf32": 989, "fp8": 3958, "int8": 3958},
    "NVIDIA GH200 480GB": {"bf16": 1979, "tf32": 989, "fp8": 3958, "int8": 3958},
    "NVIDIA H100 NVL": {"bf16": 1671, "tf32": 835, "fp8": 3341, "int8": 3341},
    "NVIDIA H200 NVL": {"bf16": 1671, "tf32": 835, "fp8": 3341, "int8": 3341},
    "NVIDIA H100 PCIe": {"bf16": 1513, "tf32": 756, "fp8": 3026, "int8": 3026},
    "NVIDIA A100-SXM4-80GB": {"bf16": 624, "tf32": 312, "int8": 1248},
    "NVIDIA A100 80GB PCIe": {"bf16": 624, "tf32": 312, "int8": 1248},
    "NVIDIA A30": {"bf16": 330, "tf32": 165, "int8": 661},
    "NVIDIA A40": {"bf16": 299.4, "tf32": 149.6, "int8": 598.6},
    "NVIDIA A10": {"bf16": 250, "tf32": 125, "int8": 500},
    "NVIDIA L40S": {"bf16": 733, "tf32": 366, "fp8": 1466, "int8": 1466},
    "NVIDIA L40": {"bf16": 362.1, "tf32": 181, "fp8": 724, "int8": 724},
    "NVIDIA L4": {"bf16": 242, "tf32": 120, "fp8": 485, "int8": 485},
    "NVIDIA RTX 6000 Ada Generation": {"fp8": 1457},
    "NVIDIA GeForce RTX 5090": {"bf16": 419, "fp8": 838, "nvfp4": 3352},
    "NVIDIA GeForce RTX 4090": {"bf16": 330.4, "fp8": 660.6, "int8": 1321.2},
    "AMD Instinct MI300X": {"bf16": 2614.9, "tf32": 1307.4, "fp8": 5229.8, "int8": 5229.8},
    "AMD Instinct MI355X": {"bf16": 5033.2, "fp8": 10066.3, "int8": 10066.3},
}


@pytest.mark.parametrize("name", PRINTED)
def test_dense_peaks_are_half_of_what_is_printed_with_sparsity(name: str) -> None:
    for dtype, printed in PRINTED[name].items():
        assert theoretical_tflops(name, dtype) == pytest.approx(printed / 2, rel=0.025), dtype


def test_fp4_of_blackwell_ultra_is_printed_without_sparsity_too() -> None:
    """1,080 PFLOPS dense of 72 GPUs, and 108 of 8: three quarters of the figures with sparsity."""
    assert theoretical_tflops("NVIDIA GB300", "nvfp4") == pytest.approx(1_080_000 / 72)
    assert theoretical_tflops("NVIDIA B300 SXM6 AC", "nvfp4") == pytest.approx(108_000 / 8)


@pytest.mark.parametrize(("name", "bf16"), [("NVIDIA H20", 148), ("NVIDIA H800", 989.4)])
def test_cards_for_one_market(name: str, bf16: float) -> None:
    """Their sheets print dense figures."""
    assert theoretical_tflops(name, "bf16") == bf16


def test_the_short_names_that_are_shown_are_understood() -> None:
    names = known_devices()
    assert len(names) > 40 and all((kind := accelerator(name)) and kind.name.endswith(name) for name in names)


def test_a_machine_without_a_gpu_says_which_it_knows_and_the_line_to_type(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    words = ("--tokens-per-second", "25600", "--model", "llama2-7b", "--gpus", "8")
    done = run_python("-m", "mldebug", "mfu", *words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert "name the one that it ran on with --device" in " ".join(done.stdout.split()) and "H100 SXM" in done.stdout
    assert done.stderr == f"for example: mldebug mfu {' '.join(words)} --device H100\n"
    assert max(map(len, done.stdout.splitlines())) <= 80
