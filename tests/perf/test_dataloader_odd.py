"""Datasets that give nothing are said to, at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils import data

from mldebug.core.errors import MldebugError, UsageError
from mldebug.perf.loader._bench import dataloader_bench


class Empty(data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Nothing(data.Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> None:
        return None


def test_a_stream_without_samples_is_no_lack_of_time() -> None:
    with pytest.raises(UsageError, match=r"the dataset \(Empty\) gives no samples"):
        dataloader_bench(Empty(), num_workers=[0, 1], seconds=300)


def test_samples_that_are_none() -> None:
    with pytest.raises(MldebugError, match="NoneType") as caught:
        dataloader_bench(Nothing(), num_workers=[0, 1], seconds=300)
    assert caught.value.hint.startswith("the dataset returns None")
