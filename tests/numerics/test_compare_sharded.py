"""A sharded run against that of one process: real ranks on gloo, put together again from their files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError
from mldebug.numerics import compare

TESTS = Path(__file__).resolve().parents[1]
FORKED = TESTS / "forked.py"
PROGRAM = TESTS / "programs" / "compare_sharded.py"


@pytest.fixture(scope="module")
def runs(run_torch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    launcher = [FORKED, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    kinds = ["ddp", "turns", "fsdp", "tp", "tp:samples", "tp-bad", "ddp-bad"]
    for head, what in (([], ["one"]), (launcher, kinds)):
        done = run_torch(*head, PROGRAM, folder, *what, timeout=120)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", ["ddp", "turns", "fsdp", "tp"])
def test_healthy(runs: Path, kind: str) -> None:
    report = compare(runs / "one", runs / kind)
    assert report.ok, report.text()
    assert report.compared == 56
    assert report.not_compared == 0
    assert report.weights == []
    assert any("samples of the ranks together" in note for note in report.notes) == (kind != "tp")


def test_shards_of_which_only_samples_are_there(runs: Path) -> None:
    report = compare(runs / "one", runs / "tp:samples")
    assert report.ok, report.text()
    assert report.compared > 40
    assert report.not_compared  # plain local tensors do not say where they lie
    assert any("record with a larger one" in note for note in report.notes)


def test_a_bad_shard_is_named(runs: Path) -> None:
    report = compare(runs / "one", runs / "tp-bad")
    assert (report.kind, report.module, report.forward) == ("jump", "blocks.1.up", 0), report.text()
    assert "weights of blocks.1.up differ" in report.reading


def test_the_rank_of_a_bad_weight_is_named(runs: Path) -> None:
    report = compare(runs / "one", runs / "ddp-bad")
    assert report.module == "blocks.1.up"
    assert "on rank 1" in report.reading


def test_a_missing_rank_is_said(runs: Path, tmp_path: Path) -> None:
    for kind in ("ddp", "tp"):
        shutil.copytree(runs / kind, tmp_path / kind, ignore=shutil.ignore_patterns("rank1*"))
    assert "b: no recording of rank 1 of 2" in compare(runs / "one", tmp_path / "tp").notes
    with pytest.raises(MldebugError, match="no recording of rank 1 of 2"):
        compare(runs / "one", tmp_path / "ddp")
