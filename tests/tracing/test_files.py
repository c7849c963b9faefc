"""The text file of a traced process: what is in it after every way to die."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from mldebug.core.errors import UsageError
from mldebug.tracing._files import END, NAME, TraceFile


def test_a_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "new" / "folder")
    file.write(b"0:00:00 a.py:     1: x = 1\n")
    head, line = Path(file.path).read_bytes().splitlines()
    assert line == b"0:00:00 a.py:     1: x = 1"
    assert head.startswith(b"# mldebug trace 1 host=") and b" rank=0 world=1 pid=%d " % os.getpid() in head
    file.close()
    assert Path(file.path).read_bytes().splitlines()[-1].startswith(END)


def test_the_name_says_host_rank_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("socket.gethostname", lambda: "node-1/x")
    files = [TraceFile(tmp_path), TraceFile(tmp_path)]
    names = [os.path.basename(file.path) for file in files]
    assert names == [f"trace-node-1_x-5-{os.getpid()}.txt", f"trace-node-1_x-5-{os.getpid()}_2.txt"]
    match = NAME.fullmatch(names[1])
    assert match and match["rank"] == "5" and match["host"] == "node-1_x" and match["again"] == "2"


@pytest.mark.parametrize("compress", [False, True])
def test_rotation_loses_no_line_and_keeps_the_newest_pieces(tmp_path: Path, compress: bool) -> None:
    file = TraceFile(tmp_path, rotate=10_000, keep=3, compress=compress)
    for number in range(9000):
        file.write(b"line %d\n" % number)
    file.close()
    ending = ".txt.gz" if compress else ".txt"
    stem = file.path[: -len(".txt")]
    pieces = sorted(path for path in os.listdir(tmp_path) if path != os.path.basename(file.path))
    last = file.piece - 1
    assert pieces == sorted(f"{os.path.basename(stem)}.{n}{ending}" for n in range(last - 2, last + 1))
    data = b"".join(_read(f"{stem}.{n}{ending}") for n in range(last - 2, last + 1)) + Path(file.path).read_bytes()
    lines = [line for line in data.splitlines() if not line.startswith(b"#")]
    first = int(lines[0].split()[1])
    assert lines == [b"line %d" % number for number in range(first, 9000)]


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot write traces to"):
        TraceFile(tmp_path / "file")


def _read(path: str) -> bytes:
    if path.endswith(".gz"):
        with gzip.open(path) as file:
            return file.read()
    return Path(path).read_bytes()
