"""The report as a page: whole, escaped, loads nothing, small at any number of ranks."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mldebug.hang import Evidence, load_evidence, save_evidence, spy
from mldebug.hang._html import page

EVIDENCE = Path(__file__).parent / "evidence"
EMPTY = {"meta"}


class Reader(HTMLParser):
    """Reads a page strictly: what is opened is closed, and all addresses are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def load(name: str) -> Evidence:
    return load_evidence([EVIDENCE / f"{name}.json"])


@pytest.mark.parametrize("name", ["rank0_save_checkpoint", "dataloader_fork_lock", "slow_loader", "init_missing_rank"])
def test_the_page_is_whole_and_says_the_verdict_first(name: str) -> None:
    report = spy(load(name))
    found = read(page(report))
    assert found.open == []
    assert found.addresses == [] and "script" not in found.tags
    words = [word.strip() for word in found.words if word.strip()]
    assert words[0] == words[1] == report.headline  # the title, and the first line
    assert words[2] == report.verdict.text


def test_all_text_of_the_job_is_escaped() -> None:
    evidence = load("dataloader_fork_lock")
    bad = "<script>alert('x')</script>\u202e\x1b[31m"
    evidence["notes"].append(bad)
    evidence["hosts"].append({"host": bad, "status": "timeout", "why": bad})
    for rank in evidence["ranks"]:
        rank.update(host=bad, command=bad, why=bad)
        for sample in [*rank["samples"], *(one for child in rank["children"] for one in child["samples"])]:
            for thread in sample["threads"]:
                thread["name"] = bad if thread["name"] != "MainThread" else "MainThread"
                for frame in thread["frames"]:
                    frame.update(name=bad, file=f"/job/{bad}")
    text = page(spy(evidence))
    assert "<script" not in text
    assert "\u202e" not in text and "\x1b" not in text
    assert read(text).open == []


@pytest.mark.parametrize("spread", [False, True])
def test_four_thousand_ranks_take_a_few_megabytes(spread: bool) -> None:
    evidence = load("rank0_save_checkpoint")
    samples = evidence["ranks"][1]["samples"]
    for number in range(4, 4096):
        rank = copy.copy(evidence["ranks"][1])
        rank.update(rank=number, pid=10_000 + number, host=f"node{number // 8}")
        if spread:
            rank["samples"] = copy.deepcopy(samples)
            for sample in rank["samples"]:
                sample["threads"][0]["frames"][-1]["line"] = number
        evidence["ranks"].append(rank)
    text = page(spy(evidence))
    assert len(text) < 3_000_000
    assert "[0]" in text and "4096 ranks" in text


def test_a_name_that_ends_in_html_gets_the_page(tmp_path: Path) -> None:
    path = tmp_path / "job.html"
    save_evidence(load("gil_hog_regex"), path)
    assert path.read_text().startswith("<!doctype html>")
    assert path.stat().st_mode & 0o777 == 0o600
