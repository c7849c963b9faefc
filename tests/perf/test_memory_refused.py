"""Backends and devices that are not here are named, with what there is."""

from __future__ import annotations

import pytest
import torch

from mldebug.cluster import comms, dist_test, pair_matrix
from mldebug.core.errors import UsageError
from mldebug.perf.memory._activations import activation_memory
from mldebug.perf.memory._distributed import distributed_memory


def test_a_backend_that_torch_does_not_have() -> None:
    with pytest.raises(UsageError, match="no backend 'glo'") as caught:
        distributed_memory("cpu:gloo,cuda:glo")
    assert "gloo" in caught.value.hint and "undefined" not in caught.value.hint
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("device", ["cud", "cpu:1", "xpu:99"])
def test_a_device_that_is_not_here(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        activation_memory("gpt2", sequence=8, device=device)


@pytest.mark.parametrize("check", [comms, dist_test, pair_matrix], ids=["comms", "dist_test", "pairs"])
def test_nccl_without_an_accelerator_starts_no_ranks(check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="nccl needs an accelerator"):
        check(nproc=2, backend="nccl")  # type: ignore[operator]
