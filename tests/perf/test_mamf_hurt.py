"""mamf where things go wrong: damaged result files, options without meaning, and what is known when a run is ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cli import main
from mldebug.cli._mamf import _ended_by_rule
from mldebug.core.errors import MldebugError
from mldebug.perf import mamf
from mldebug.perf.matmul._report import _filled
from mldebug.perf.matmul._results import read_results

BROKEN = Path(__file__).parent / "programs" / "mamf_broken.py"


def block(shape: Any, share: Any, phase: str = "round 1") -> str:
    return json.dumps({"kind": "block", "phase": phase, "shape": shape, "share": share, "tflops": 1.0})


def test_damaged_lines_of_a_result_file_are_left_out(tmp_path: Path) -> None:
    good = block([64, 64, 64], 0.5)
    bad = [
        block(shape, 0.5)
        for shape in (None, "x", 7, [], [1, 2], [0, 1, 2], [1, 2, 3, 4], ["a", 1, 2], [1.5, 2, 3], {"m": 1})
    ]
    bad += [block([32, 32, 32], share) for share in (None, "x", 0, -1, float("nan"), [])]
    bad += [block([16, 16, 16], 2.0, "model"), '{"kind": "block"}', "[]", "null", '{"kind": "blo']
    path = tmp_path / "out.jsonl"
    path.write_text("\n".join([json.dumps({"kind": "start", "tool": "mamf"}), *bad, good]))
    assert read_results(path)[1] == {(64, 64, 64): [0.5]}


def test_the_best_of_an_earlier_run_takes_part_again_where_shapes_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = mamf("fp32", device="cpu", seconds=1, shapes=[(256, 256, 256)], exhaustive=True, output=path)
    assert first.shape == (256, 256, 256)
    report = mamf("fp32", device="cpu", seconds=1, shapes=[(256, 256, 256), (8, 8, 8)], exhaustive=True, resume=path)
    assert report.shape == (256, 256, 256) and {one.shape for one in report.others} == {(8, 8, 8)}


def test_a_resumed_run_has_the_same_way_of_adding_up(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps({"kind": "start", "tool": "mamf", "dtype": "float32", "fast_accum": True}))
    with pytest.raises(MldebugError, match="this run"):
        mamf("fp32", device="cpu", resume=path)


@pytest.mark.parametrize("words", [("--scaling", "row"), ("--no-fast-accum",)], ids=" ".join)
def test_options_of_fp8_are_refused_for_other_dtypes(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mamf", *words]) == 2
    assert "is for fp8, and this multiplies bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "name"), [(KeyboardInterrupt(), "SIGINT"), (SystemExit(143), "SIGTERM")])
def test_a_signal_while_the_best_width_is_looked_for_does_not_lose_the_report(error: BaseException, name: str) -> None:
    def look(measure: bool | None) -> str:
        if measure is None:
            raise error
        return "by rule"

    assert _ended_by_rule(look, "") == ("by rule", name)
    assert _ended_by_rule(look, "SIGTERM") == ("by rule", "SIGTERM")


def test_a_signal_while_a_model_is_measured_leaves_a_figure(run_torch: Callable[..., Any], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 256, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "3", "--json", "--model", "config.json", "--seq", "32")
    done = run_torch(BROKEN, "SIGINT", "model", *words, "-o", "o.jsonl", env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    report = json.loads(done.stdout)
    assert report["ended"] == "SIGINT" and report["sustained"] > 0 and report["model"]


def test_sigterm_before_anything_is_known_is_said(run_torch: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "-o", "o.jsonl")
    done = run_torch(BROKEN, "SIGTERM", "warm-up", *words, env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert done.returncode == 143 and "ended by SIGTERM before anything was measured" in done.stderr


def test_a_long_file_name_stays_whole() -> None:
    path = f"/scratch/{'a-long-name/' * 9}mamf-node1-cuda0.jsonl"
    assert path in _filled(f"run          25 shapes in 9 s, every block in {path}", 80).split()
