"""tools/mamf-finder.py: the classic flags, and tables of the classic form."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.core.device import find_device
from mldebug.core.errors import UsageError
from mldebug.perf.matmul._classic import classic_search

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mamf-finder.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_tables_have_the_classic_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "mm.out"
    result = classic_search(
        [[64, 128], [128], [64, 192]], dtype="float32", device=find_device("cpu"), iterations=3, warmup=1, output=path,
        notes="a note", ranges="m=[64, 128] | n=[128] | k=[64, 192]", heat=0.05,
    )  # fmt: skip
    shown, kept = capsys.readouterr().out, path.read_text()
    for text in (shown.replace("\r", "\n"), kept):
        assert "** Dtype: float32" in text and "a note" in text and "Warming up the accelerator" in text
        rows = re.findall(
            r"^ +(\d+) \| +[\d.]+\(mean\) +[\d.]+\(median\) +[\d.]+\(max\) @ (\S+) +\| best: +[\d.]+\(mean\)"
            r" +[\d.]+\(median\) +[\d.]+\(max\) TFLOPS$", text, re.MULTILINE,
        )  # fmt: skip
        assert rows == [("1", "64x128x64"), ("2", "64x128x192"), ("3", "128x128x64"), ("4", "128x128x192")]
        assert "Tried 4 shapes => the best outcomes were:" in text
        for kind in ("mean", "median", "max"):
            rate, shape = result.best[kind]
            assert f"{kind + ':':<8}{rate:.1f} TFLOPS @ {'x'.join(map(str, shape or ()))} (MxNxK)" in text
        assert "Across 4 shapes in range: m=[64, 128] | n=[128] | k=[64, 192] in this run:" in text
        assert "geometric mean:" in text and "Elapsed time: 0:00:0" in text
    assert len(result.means) == 4 and result.ended == ""


def test_a_shape_without_room_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = classic_search(
        [[1 << 18, 64], [1 << 18, 64], [64]], dtype="float32", device=find_device("cpu"), iterations=2, warmup=1,
        output=tmp_path / "mm.out", heat=0.0,
    )  # fmt: skip
    assert list(result.failed) == [(1 << 18, 1 << 18, 64)]
    assert "left out: 262144x262144x64: out of memory" in capsys.readouterr().out


def test_an_empty_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no shape in these ranges"):
        classic_search([[], [64], [64]], device=find_device("cpu"), output=tmp_path / "mm.out")


def test_the_classic_command_line(run_torch: Run, tmp_path: Path) -> None:
    words = "--m_range 0 129 64 --n 64 --k 64 --num_iterations 3 --num_warmup_iterations 1 --dtype float32"
    done = run_torch(TOOL, *words.split(), "--output_file=mm.txt", "--notes", "a try", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "mm.txt").read_text()
    for text in (done.stdout, kept):
        assert "** Command line:\n" in text and "mamf-finder.py --m_range 0 129 64" in text and "a try" in text
        assert "Across 2 shapes in range: m=[0, 129, 64] | n=[64] | k=[64] in this run:" in text


def test_wrong_usage_is_two_lines_and_no_traceback(run_torch: Run, tmp_path: Path) -> None:
    words = ("--m", "64", "--n", "64", "--k_range", "0", "0", "8", "--dtype", "float32", "--no-verbose")
    done = run_torch(TOOL, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mamf-finder: there is no shape in these ranges\nhint: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--m_range", "0", "10", "0", "--n", "4", "--k", "4"), "the step of --m_range is 0"),
        (("--m", "64", "--n", "-64", "--k", "64"), "--n has a size of -64"),
        (("--m", "64", "--n", "64", "--k", "64", "--num_iterations", "0"), "0 iterations after 50"),
    ],
    ids=["step", "size", "iterations"],
)
def test_numbers_that_cannot_be_are_wrong_usage(
    words: tuple[str, ...], complaint: str, run_torch: Run, tmp_path: Path
) -> None:
    done = run_torch(TOOL, *words, cwd=tmp_path)
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr
