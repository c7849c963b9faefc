"""Evidence in files: damaged ones are one clear error, the same one twice counts once, a full disk loses nothing."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang import load_evidence, save_evidence, spy
from mldebug.hang._html import page
from mldebug.hang._stacks_out import folded, speedscope

EVIDENCE = Path(__file__).parent / "evidence"
FILES = ["skip_collective", "dataloader_worker", "nccl/ddp_record"]
ODD = [None, "x", "", -1, 1e308, 10**30, [], {}, [[]], True, {"a": 1}, [None], "\ud800"]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document; of lists the first two entries."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value[:2]):
            yield from paths(one, (*path, index))


def changed(document: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """The document with another value at a path, or with nothing there."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value:
        inner[path[-1]] = value[0]
    else:
        del inner[path[-1]]
    return document


def use(path: Path) -> None:
    report = spy(load_evidence([path]))
    report.text()
    report.json()
    page(report)
    folded(report.evidence)
    speedscope(report.evidence)


@pytest.mark.parametrize("name", FILES)
def test_a_document_with_one_thing_missing_or_odd_is_read_or_refused(name: str, tmp_path: Path) -> None:
    document = json.loads((EVIDENCE / f"{name}.json").read_text())
    path, refused = tmp_path / "damaged.json", 0
    places = list(paths(document))
    places = places[:: max(1, len(places) // 80)]
    for number, place in enumerate(places):
        for damaged in (changed(document, place), changed(document, place, ODD[number % len(ODD)])):
            path.write_text(json.dumps(damaged))
            try:
                use(path)
            except UsageError as error:
                refused += 1
                assert str(path) in error.message
                assert error.hint == "give a file that `mldebug spy -o FILE` wrote"
    assert refused > len(places) / 2


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"null", b"1e999", b"[" * 200_000, b'{"a":' * 100_000, b"\0" * 1000,
        b'{"schema": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "list", "null", "inf", "deep", "deep object", "zeros", "huge number"],
)  # fmt: skip
def test_what_is_no_evidence_is_one_clear_error(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"job\.json is no(t JSON| evidence)") as caught:
        load_evidence([path])
    assert "mldebug spy -o FILE" in caught.value.hint


def test_a_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    data = (EVIDENCE / "p2p_ring.json").read_bytes()
    path = tmp_path / "cut.json"
    for size in range(0, len(data) - 2, len(data) // 40):
        path.write_bytes(data[:size])
        with pytest.raises(UsageError, match="is not JSON"):
            load_evidence([path])


def test_the_same_file_twice_counts_its_ranks_once() -> None:
    path = EVIDENCE / "skip_collective.json"
    once, twice = load_evidence([path]), load_evidence([path, path])
    assert twice["ranks"] == once["ranks"]
    assert twice["hosts"] == once["hosts"]
    assert spy(twice).verdict == spy(once).verdict


def test_an_older_file_is_there_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = load_evidence([EVIDENCE / "p2p_ring.json"])
    path = tmp_path / "job.json"
    path.write_text("what was there")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MldebugError, match=r"cannot write .*job\.json: no space left on device"):
        save_evidence(evidence, path)
    assert path.read_text() == "what was there"
    assert os.listdir(tmp_path) == ["job.json"]
    monkeypatch.undo()
    save_evidence(evidence, path)
    assert load_evidence([path]) == evidence
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("")
    (tmp_path / "link.json").symlink_to("there.json")
    save_evidence(load_evidence([EVIDENCE / "p2p_ring.json"]), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there.json").stat().st_size > 1000
