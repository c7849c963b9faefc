"""What the tests of the perf room share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """What looks through all objects sees those made in the tests, as it would in a program of its own. Else it sees
    all that the files before have loaded as well, of which there are a million, again at each look."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
