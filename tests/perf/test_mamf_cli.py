"""`mldebug mamf`: what its options mean, and what is refused before torch is loaded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.cli import main
from mldebug.cli._mamf import Parser, _shapes, add_arguments

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_help_loads_no_torch_and_fits_80_columns(run_python: Run) -> None:
    done = run_python(
        "import sys; from mldebug.cli import main; main(['mamf', '--help']); print({'torch', 'numpy'} & {*sys.modules})"
    )
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "set()" and max(map(len, lines)) <= 80


def test_ranges_are_the_classic_ones() -> None:
    parser = Parser(prog="mldebug mamf")
    add_arguments(parser)
    args = parser.parse_args(
        ["--exhaustive", "--m_range", "0", "256", "64", "--n", "8", "16", "--k-range", "1", "4", "2"]
    )
    assert _shapes(args) == [(m, n, k) for m in (64, 128, 192) for n in (8, 16) for k in (1, 3)]
    assert _shapes(parser.parse_args(["--shape", "1x2x3", "--shape", "4x5x6"])) == [(1, 2, 3), (4, 5, 6)]
    assert _shapes(parser.parse_args([])) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--shape", "8192x8192"], "is not MxNxK"),
        (["--m", "64"], "sizes and ranges are for --exhaustive"),
        (["--exhaustive", "--m", "64", "--n", "64"], "--exhaustive needs --k or --k-range"),
        (["--exhaustive", "--m-range", "64", "0", "8", "--n", "1", "--k", "1"], "--m-range 64 0 8 is empty"),
        (["--seq", "128"], "--seq, --batch and --tp are for --model"),
        (["--resume", "a", "-o", "b"], "so -o has no meaning"),
        (["--all-gpus", "--index", "1"], "--index is for one device"),
        (["--resume", "no-such-file.jsonl", "--device", "cpu"], "cannot read no-such-file.jsonl"),
        (["-o", "no/such/folder/x"], "there is no folder"),
        (["--seconds", "0"], "is not a number of seconds above 0"),
    ],
)
def test_wrong_usage(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["mamf", *words])
    told = capsys.readouterr().err
    assert complaint in told and "\nhint: " in told
    assert status == 2


def test_a_model_s_products_are_reported_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path / "config.json"), "--seq", "64", "--device", "cpu", "--dtype", "fp32"]
    status = main(["mamf", *words, "--seconds", "3", "--json", "-o", str(tmp_path / "out.jsonl")])
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["model"]["products"] and all(one["tflops"] > 0 for one in report["also"])
    assert report["model"]["mamf"] == pytest.approx(report["sustained"])
