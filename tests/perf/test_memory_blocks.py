"""Blocks of CUDA memory as torch's snapshot tells of them, and what would help where memory ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mldebug.perf.memory import _blocks
from mldebug.perf.memory._advice import advice
from mldebug.perf.memory._blocks import CudaBlocks, classes_of
from mldebug.perf.memory._card import Card
from mldebug.perf.memory._host import Host
from mldebug.perf.memory._live import LATER, Live
from mldebug.perf.memory._reading import Reading
from mldebug.perf.memory._sites import Site
from mldebug.perf.memory._steps import _by_site

GIB = 1 << 30
HERE = str(Path(__file__).resolve())


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def frames_of_forward() -> list[dict[str, Any]]:
    line = Net.forward.__code__.co_firstlineno + 1
    inside = {"filename": str(Path(torch.__file__).parent / "functional.py"), "line": 7, "name": "relu"}
    return [inside, {"filename": HERE, "line": line, "name": "forward"}]


def test_blocks_in_use_by_stack_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(size: int, state: str, address: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
        return {"size": size, "requested_size": size, "state": state, "address": address, "frames": frames}

    forward = frames_of_forward()
    segments = [
        {
            "device": 1,
            "address": 1000,
            "blocks": [
                block(100, "active_allocated", 1000, forward),
                block(50, "inactive", 1100, []),
                block(60, "active_allocated", 1150, forward),
                block(300, "active_allocated", 1210, []),
            ],
        },
        {"device": 0, "address": 9000, "blocks": [block(999, "active_allocated", 9000, [])]},
    ]
    monkeypatch.setattr(_blocks.torch.cuda.memory, "_snapshot", lambda device=None: {"segments": segments})
    first, second = CudaBlocks(lambda *_: None).look(1, {1210: "parameter"}, classes_of([Net()]))
    assert (first.kind, first.nbytes, first.count, first.site.line) == ("parameter", 300, 1, "")
    assert (second.kind, second.nbytes, second.count, second.site.module) == ("tensor", 160, 2, "Net")
    assert second.site.line.endswith(f"test_memory_blocks.py:{forward[1]['line']}")


def test_one_place_that_makes_two_kinds_is_one_size() -> None:
    """Models that are kept, of which only the parameters of the last one are known by its optimizer."""
    site = Site("", "train.py:19", "train.py:19")
    kinds = [Live(site, "tensor", 900, 9), Live(site, f"parameter{LATER}", 100, 1), Live(site, "parameter", 70, 1)]
    assert _by_site(kinds)[site] == Live(site, "tensor", 1000, 10)


@pytest.mark.parametrize(
    ("kinds", "asked", "others", "first"),
    [
        ({"tensor": 60 * GIB, "parameter": 10 * GIB}, 8 * GIB, 0, "activations"),
        ({"optimizer state": 40 * GIB, "parameter": 20 * GIB}, 8 * GIB, 0, "optimizer states"),
        ({"parameter": 40 * GIB, "gradient": 20 * GIB}, 8 * GIB, 0, "weights and gradients"),
        ({"tensor": 60 * GIB}, 2 * GIB, 0, "torch holds 4.00GiB that is free"),
        ({"tensor": 60 * GIB}, 8 * GIB, 20 * GIB, "other processes hold 20.00GiB"),
    ],
)
def test_what_would_help(kinds: dict[str, int], asked: int, others: int, first: str) -> None:
    card = Card("cuda:0", 0, 70 * GIB, 74 * GIB, 70 * GIB, total=80 * GIB, others=others, other_processes=1)
    reading = Reading("x", 0, 1, "h", 0.0, card, Host(GIB, GIB, None, None))
    assert advice(reading, kinds, asked)[0].startswith(first)
