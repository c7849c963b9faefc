"""Pair matrices in files: what is read, and what is said of files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mldebug.cluster import load_pairs, save_pairs
from mldebug.cluster.pairs._files import merge_pairs
from mldebug.core.errors import MldebugError, UsageError
from tests.cluster.simulate import planted


def write(folder: Path, text: str, name: str = "pairs.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_csv(tmp_path: Path) -> None:
    rows = "a-1.x:0,b:GPU-77,45.5,ok\nb:GPU-77,a-1.x:0,,hang\n[::1]:0,b:GPU-77,3e1,OK\n"
    evidence = load_pairs(write(tmp_path, "src,dst,gbps,status\n" + rows))
    assert evidence["gpus"] == ["a-1.x:0", "b:GPU-77", "[::1]:0"]
    assert evidence["gbps"] == [45.5, None, 30.0]
    assert evidence["status"] == ["ok", "hang", "ok"]


def test_csv_of_other_programs(tmp_path: Path) -> None:
    """A byte order mark, comments, other separators, more columns, other words, no status, line ends of Windows."""
    text = (
        "\ufeff# made by hand\r\n\r\nRound;SRC;dst;latency_us;gbps;host\r\n3;a:0;a:1;7.5;12;x\r\n4;a:1;a:0;;nan;x\r\n"
    )
    evidence = load_pairs(write(tmp_path, text))
    assert evidence["gbps"] == [12.0, None]
    assert evidence["status"] == ["ok", "missing"]
    assert evidence.get("round") == [3, 4]
    assert evidence.get("latency_us") == [7.5, None]
    rows = "a:0,a:1,-1,Timed out\na:1,a:0,4,CORRUPT\na:0,a:2,4,odd thing\na:2,a:0,4,slow\na:2,a:1,,\n"
    evidence = load_pairs(write(tmp_path, "src,dst,gbps,status\n" + rows))
    assert evidence["status"] == ["hang", "wrong", "error", "ok", "missing"]
    assert evidence["notes"] == ["status 'odd thing' of 1 pair is not known and is taken for an error"]


@pytest.mark.parametrize(
    ("written", "gbps"),
    [
        ("24.3 GB/s", 24.3),
        ("24.3GBps", 24.3),
        ("24.3 gbps", 24.3),  # as the header is written
        ("194.4 Gb/s", 24.3),
        ("194.4Gbit/s", 24.3),
        ("24300 MB/s", 24.3),
        ("24300000000 B/s", 24.3),
        ("24.3 GBytes/sec", 24.3),
        ("25 GiB/s", 26.8435456),
        ("1,234.5", 1234.5),
        ("24,3", 24.3),
        ("2,430", 2430.0),
        ("--", None),
    ],
)
def test_a_bandwidth_with_its_unit(tmp_path: Path, written: str, gbps: float | None) -> None:
    evidence = load_pairs(write(tmp_path, f'src,dst,gbps,status\na:0,a:1,"{written}",\n'))
    assert evidence["gbps"] == [pytest.approx(gbps)]


def test_a_comma_is_a_point_where_it_parts_no_columns(tmp_path: Path) -> None:
    evidence = load_pairs(write(tmp_path, "src;dst;gbps;status\na:0;a:1;24,300 GB/s;ok\na:1;a:0;9,5;ok\n"))
    assert evidence["gbps"] == [24.3, 9.5]


@pytest.mark.parametrize("text", ["24 apples", "1.2.3", "GB/s", "24 GB/s or so"])
def test_what_is_no_bandwidth_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="should be a number"):
        load_pairs(write(tmp_path, f"src,dst,gbps,status\na:0,a:1,{text},ok\n"))


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("Completed", "ok"),
        ("ok (slow)", "ok"),
        ("no error", "ok"),
        ("timed out after 30 s", "hang"),
        ("deadlock", "hang"),
        ("ncclSystemError", "error"),
        ("RuntimeException: 5", "error"),
        ("aborted", "error"),
    ],
)
def test_words_of_other_programs(tmp_path: Path, word: str, status: str) -> None:
    evidence = load_pairs(write(tmp_path, f"src,dst,gbps,status\na:0,a:1,4,{word}\n"))
    assert (evidence["status"], evidence["notes"]) == ([status], [])


def test_a_word_that_is_not_known_is_fine_where_most_have_it_and_moved_something(tmp_path: Path) -> None:
    rows = "a:0,a:1,4,fertig\na:1,a:0,4,fertig\na:0,a:2,4,fertig\na:2,a:0,0,kaputt\n"
    evidence = load_pairs(write(tmp_path, "src,dst,gbps,status\n" + rows))
    assert evidence["status"] == ["ok", "ok", "ok", "error"]
    assert "'fertig' of 3 pairs is not known and is taken for ok" in evidence["notes"][0]
    assert "'kaputt' of 1 pair is not known and is taken for an error" in evidence["notes"][1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("src,dst\na:0,a:1\n", "line 1: the header 'src,dst' has no gbps"),
        ("hello\n", "line 1: the header 'hello' has no src and no dst and no gbps"),
        ("src,dst,gbps,status\n", "has no pairs"),
        ("src,dst,gbps,status\na:0,a:1,1,ok\n\na:0,a:1\n", "line 4: 2 values where the header has 4"),
        ("src,dst,gbps,status\na:0,a:1,fast,ok\n", "line 2: gbps is 'fast', and should be a number"),
        ("src,dst,gbps,status\na:0,a:1,-4,ok\n", "line 2: gbps is -4, and a bandwidth is not negative"),
        ("src,dst,gbps,status\na:0,,4,ok\n", "line 2: dst is '', and should be host:gpu"),
        ("src,dst,gbps,status\na:0,:1,4,ok\n", "line 2: dst is ':1', and should be host:gpu"),
        ("src,dst,gbps,status\na:0,b,4,ok\n", "line 2: dst is 'b': some names are host:gpu and some are not"),
        ("src,dst,gbps,round\na:0,a:1,4,x\n", "line 2: round is 'x', and should be a number"),
        ('src,dst,gbps,status\n"a:0,a:1,4,ok\n', "line 2: 1 values where the header has 4"),
        ("[", "line 1: this is no JSON"),
        ("{}", "has no list of pairs"),
        ('[{"src": "a:0"}]', "pair 1: .* is no object with src, dst and gbps"),
        ('[{"src": "a:0", "dst": 7, "gbps": 1}]', "pair 1: dst is 7, and should be host:gpu"),
        ('[{"src": "a:0", "dst": "a:1", "gbps": [1]}]', "pair 1: gbps is '\\[1\\]', and should be a number"),
        ('{"gpus": ["a:0"], "src": [0], "dst": ["a"], "gbps": [1], "status": ["ok"]}', "columns that are no"),
        ('{"gpus": ["a:0", "a:1"], "matrix": [[0, 1]]}', "a row for each of 2 GPUs"),
    ],
)  # fmt: skip
def test_wild_files_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_pairs(write(tmp_path, text))
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_pairs(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"src,dst\xff\xfe")
    with pytest.raises(UsageError, match="it is not text"):
        load_pairs(tmp_path / "bytes.csv")
    with pytest.raises(MldebugError, match="cannot write"):
        save_pairs(planted(0).evidence, tmp_path / "no" / "folder.csv")


def test_json_forms(tmp_path: Path) -> None:
    pairs = [{"src": "a:0", "dst": "a:1", "gbps": 4, "round": 1}, {"src": "a:1", "dst": "a:0", "status": "dead"}]
    for document in (pairs, {"pairs": pairs}):
        evidence = load_pairs(write(tmp_path, json.dumps(document), "pairs.json"))
        assert (evidence["status"], evidence.get("round")) == (["ok", "dead"], [1, None])
    square = {"gpus": ["a:0", "a:1"], "matrix": [[None, 4.0], [None, 0]]}
    evidence = load_pairs(write(tmp_path, json.dumps(square), "pairs.json"))
    assert (evidence["gbps"], evidence["status"]) == ([4.0, None], ["ok", "missing"])


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.json"])
def test_what_is_saved_is_read_again(tmp_path: Path, name: str) -> None:
    evidence = planted(0, "path flaps", (2, 4)).evidence
    save_pairs(evidence, tmp_path / name)
    again = load_pairs(tmp_path / name)
    assert again["status"] == evidence["status"]
    assert again.get("round") == evidence.get("round")
    assert again["gbps"] == pytest.approx(evidence["gbps"], rel=1e-5)
    named = [[part["gpus"][one] for one in part["dst"]] for part in (again, evidence)]
    assert named[0] == named[1]


def test_several_files_are_one_matrix(tmp_path: Path) -> None:
    one = load_pairs(write(tmp_path, "src,dst,gbps\na:0,a:1,4\n"))
    two = load_pairs(write(tmp_path, "src,dst,gbps,round\na:1,b:0,5,2\n"))
    whole = merge_pairs([one, two])
    assert whole["gpus"] == ["a:0", "a:1", "b:0"]
    assert (whole["src"], whole["dst"], whole.get("round")) == ([0, 1], [1, 2], [None, 2])
