"""Recordings that were cut, edited or mixed up end in one sentence that says where, never in a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mldebug
from mldebug.core.errors import MldebugError

ODD: tuple[Any, ...] = (None, "x", -1, [], {"a": 1}, 1e308, [-1], True)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "good"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with mldebug.record_run(folder, ops=True):
        net(torch.ones(2, 4))
        net(torch.ones(2, 4, dtype=torch.complex64).real)
    return folder


def compared(good: Path, lines: list[Any]) -> str:
    """The message, "" where the recording is compared after all; any other exception is a failure."""
    other = good.with_name("other")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(good, other)
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (other / "rank0.jsonl").write_bytes(b"\n".join(texts) + b"\n")
    try:
        mldebug.compare(good, other).text()
    except MldebugError as error:
        return error.message
    return ""


def changed(lines: list[dict[str, Any]], at: int, **values: Any) -> list[dict[str, Any]]:
    return [*lines[:at], lines[at] | values, *lines[at + 1 :]]


def test_every_field_may_be_gone_or_odd(recording: Path) -> None:
    lines = [json.loads(text) for text in (recording / "rank0.jsonl").read_text().splitlines()]
    kinds: dict[str, int] = {}  # one line of each kind
    for at, line in enumerate(lines):
        kinds.setdefault(line["kind"] + line.get("role", "") + ("same" if "same" in line else ""), at)
    assert {"run", "model", "weight", "call", "left", "tensorop", "tensorinputsame"} <= set(kinds)
    assert compared(recording, lines) == ""
    damaged = 0
    for at in kinds.values():
        for key in lines[at]:
            less = {name: value for name, value in lines[at].items() if name != key}
            damaged += "damaged" in compared(recording, [*lines[:at], less, *lines[at + 1 :]])
            for odd in ODD:
                compared(recording, changed(lines, at, **{key: odd}))
    assert damaged >= 20


def test_the_line_is_named(recording: Path) -> None:
    lines = [json.loads(text) for text in (recording / "rank0.jsonl").read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line["kind"] == "weight")
    where = f"rank0.jsonl is damaged: line {at + 1} "
    assert compared(recording, changed(lines, at, sample="####")).endswith(where + "has a 'sample' that is no base64")
    assert where + "has a 'sample' of 3 bytes" in compared(recording, changed(lines, at, sample="AAAA"))
    assert compared(recording, [*lines[:at], b"\xff\x00", *lines[at + 1 :]]).endswith(where + "cannot be read")
    assert "has the number" in compared(recording, [*lines[: at + 1], *lines[at:]])
    loop = next(i for i, line in enumerate(lines) if "same" in line)
    assert "has 'same'" in compared(recording, changed(lines, loop, same=lines[loop]["n"]))
    assert compared(recording, [*lines, b'{"n": 99, "kin']) == ""  # cut off by the end of its process
