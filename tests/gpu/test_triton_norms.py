"""Norms of many tensors in two launches, against plain torch, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from mldebug.numerics.ring._triton_norms import TritonNorms
from mldebug.numerics.ring._triton_ring import TritonRing

pytestmark = pytest.mark.gpu


@pytest.fixture
def norms() -> TritonNorms:
    device = torch.device("cuda", 0)
    if not TritonRing.available(device):
        pytest.skip("no CUDA device with Triton")
    return TritonNorms(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch(norms: TritonNorms, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [1, 7, 4096, 65535, 65536, 65537, 1_000_003, 50257 * 768]
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    tensors.append(torch.zeros(0, device="cuda", dtype=dtype))
    tensors.append(torch.randn(1001, device="cuda").to(dtype)[1:])  # not aligned
    assert TritonNorms.takes(tensors)
    expected = torch.stack([t.double().norm() for t in tensors])
    for _ in range(2):  # the second time from the kept table
        assert torch.allclose(norms.of(tensors).double(), expected, rtol=1e-5)


def test_mixed_dtypes_keep_their_order(norms: TritonNorms) -> None:
    tensors = [torch.full((10,), value, device="cuda", dtype=dtype) for value, dtype in (
        (1.0, torch.float32), (2.0, torch.float16), (3.0, torch.float32), (4.0, torch.bfloat16),
    )]  # fmt: skip
    assert norms.of(tensors).tolist() == pytest.approx([math.sqrt(10) * v for v in (1, 2, 3, 4)])


def test_nonfinite_and_new_values(norms: TritonNorms) -> None:
    tensors = [torch.ones(100, device="cuda"), torch.ones(200_000, device="cuda")]
    first = norms.of(tensors).tolist()
    tensors[0][50] = math.nan
    tensors[1][199_999] = math.inf
    second = norms.of(tensors).tolist()
    assert first == pytest.approx([10.0, math.sqrt(200_000)])
    assert math.isnan(second[0]) and second[1] == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e19, 1e25, 3e38])
def test_large_values_are_no_infinity(norms: TritonNorms, dtype: torch.dtype, value: float) -> None:
    tensors = [torch.full((size,), value, device="cuda").to(dtype) for size in (1, 1000, 65536, 70_001, 1_000_000)]
    tensors[1][::2] = 1e-3  # small beside large
    tensors += [torch.ones(70_001, device="cuda", dtype=dtype), torch.full((70_001,), value, device="cuda").to(dtype)]
    tensors[-1][69_999] = math.inf
    tensors += [torch.full((1001,), value, device="cuda").to(dtype)[1:], torch.full((9,), -math.inf, device="cuda")]
    tensors.append(torch.tensor([value, math.nan, math.inf], device="cuda").to(dtype))
    expected = [t.double().norm().item() for t in tensors]
    assert norms.of(tensors).tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert [math.isfinite(x) for x in norms.of(tensors).tolist()] == [t.isfinite().all().item() for t in tensors]


def test_the_norm_itself_may_be_more_than_float32_holds(norms: TritonNorms) -> None:
    tensors = [torch.full((300_000,), 3e38, device="cuda")]
    assert norms.of(tensors).item() == pytest.approx(3e38 * math.sqrt(300_000), rel=1e-5)


def test_does_not_wait(norms: TritonNorms) -> None:
    tensors = [torch.ones(100, device="cuda")]
    norms.of(tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms.of(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_same_bits_each_time(norms: TritonNorms) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3_000_001, device="cuda")]
    assert len({norms.of(tensors).item() for _ in range(20)}) == 1


def test_takes_only_what_it_can() -> None:
    good = torch.ones(4, device="cuda")
    assert not TritonNorms.takes([])
    assert not TritonNorms.takes([good, torch.ones(4)])
    assert not TritonNorms.takes([good.double()])
    assert not TritonNorms.takes([torch.ones(4, 4, device="cuda").t()])
