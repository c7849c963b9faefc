"""Programs that mostly wait, run at once: each test takes the result of its own, and none waits for those after it.

@pytest.fixture(scope="module")
def told(request, bed):
    with AtOnce(4) as runs:
        for name in chosen(request, "name"):
            runs.add(name, lambda name=name: run_with_fault(bed, name))
        yield runs

@pytest.mark.parametrize("name", FAULTS)
def test_it_is_named(told, name):
    assert FAULTS[name] in told[name].stdout
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest


class AtOnce:
    """`most` runs at a time, in the order in which they were added; `self[key]` waits for one, and raises what it
    raised. Those that have not begun when the scope is left do not begin."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most)
        self._runs: dict[Any, Future[Any]] = {}

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, key: Any, run: Callable[[], Any]) -> None:
        self._runs[key] = self._pool.submit(run)

    def __getitem__(self, key: Any) -> Any:
        return self._runs[key].result()


def chosen(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values of a parametrized argument in the tests of this module that are to run, in their order."""
    found = {}
    for item in request.session.items:
        params = item.callspec.params if item.path == request.path and hasattr(item, "callspec") else {}
        if argument in params:
            found[params[argument]] = None
    return list(found)
