"""`mldebug mamf` on a GPU: a short search that holds when it is measured again, NVML's figures, other dtypes."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from mldebug.core.device import find_device, load_nvml, visible_gpus
from mldebug.core.errors import UsageError
from mldebug.perf import mamf
from mldebug.perf.matmul._measure import measure

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def test_what_a_short_search_finds_holds_when_it_is_measured_again(tmp_path: Path) -> None:
    report = mamf("bf16", seconds=20, output=tmp_path / "out.jsonl")
    print(report.text())
    again = measure([report.shape], seconds=8)[report.shape]
    print(f"again {again:.1f}")
    assert report.settled and not report.failed
    assert again == pytest.approx(report.sustained, rel=0.03)
    assert report.burst and report.burst > 0.95 * report.sustained
    assert report.seconds < 23
    if load_nvml() is not None:
        assert report.steady["watts"] > 100 and report.steady["sm_mhz"] > 300 and report.steady["samples"] >= 5


@pytest.mark.parametrize("dtype", ["fp16", "tf32", "fp8", "int8"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    report = mamf(dtype, seconds=3, shapes=[(4096, 4096, 4096)], output=tmp_path / "out.jsonl")
    print(report.text().splitlines()[:2])
    assert report.sustained > 0 and (report.share_of_peak is None or report.share_of_peak < 1)


def test_row_wise_fp8_without_fast_accumulation(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise scales need a Hopper or later")
    path = tmp_path / "out.jsonl"
    report = mamf("fp8", scaling="row", fast_accum=False, seconds=3, shapes=[(4096, 4096, 4096)], output=path)
    assert "one scale for each row, fast accumulation off" in " ".join(report.text().split())


def test_a_dtype_that_the_card_lacks_names_those_it_has(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has nvfp4")
    with pytest.raises(UsageError, match="nvfp4 cannot be multiplied on") as caught:
        mamf("nvfp4", output=tmp_path / "out.jsonl")
    assert "bfloat16" in caught.value.hint and "nvfp4" not in caught.value.hint


def test_want_of_memory_leaves_a_shape_out(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda")
    try:
        shapes = [(65536, 65536, 65536), (2048, 2048, 2048)]
        report = mamf("bf16", seconds=4, shapes=shapes, output=tmp_path / "out.jsonl")
    finally:
        del hog
        torch.cuda.empty_cache()
    assert report.shape == (2048, 2048, 2048)
    assert "out of memory" in report.failed["65536x65536x65536"]


def test_nvml_is_asked_for_the_same_card() -> None:
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("there is no NVML")
    device = find_device("cuda", torch.cuda.device_count() - 1)
    found = device.nvml()
    assert found is not None
    told = nvml.nvmlDeviceGetUUID(found[1])
    assert (told.decode() if isinstance(told, bytes) else told) == device.uuid
    visible = visible_gpus(nvml)
    assert len(visible) == torch.cuda.device_count()
    assert nvml.nvmlDeviceGetIndex(visible[device.index]) == device.physical_index()


def test_marks_take_the_device_s_time() -> None:
    from mldebug.core.device import seconds_between

    device = find_device("cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    device.synchronize()
    times = []
    for _ in range(5):
        first = device.mark()
        for _ in range(10):
            torch.mm(a, a)
        last = device.mark()
        device.synchronize()
        times.append(seconds_between(first, last))
    assert 1e-5 < statistics.median(times) < 1
