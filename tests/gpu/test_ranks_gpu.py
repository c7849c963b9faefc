"""The pytest plugin on GPUs: ranks with NCCL, and the count of GPUs that a test may ask for."""

from __future__ import annotations

import os

import pytest

from mldebug.testing import require_gpus

pytestmark = pytest.mark.gpu


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    total = torch.ones(1, device="cuda") * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()


@require_gpus(1)
@pytest.mark.ranks(1, backend="nccl", timeout=100)
def test_one_rank() -> None:
    assert _sum_of_ranks() == 1


@require_gpus(2)
@pytest.mark.ranks(2, backend="nccl", timeout=100)
def test_two_ranks() -> None:
    assert _sum_of_ranks() == 3
