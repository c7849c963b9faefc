"""MFU, HFU and MAMFU against closed forms, and the command."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cli import _mfu as command
from mldebug.core.errors import MldebugError, UsageError
from mldebug.perf.matmul._mfu import MfuReport, mfu

H100 = "NVIDIA H100 80GB HBM3"
LAYERS, HIDDEN, INTER, VOCAB, SEQ = 32, 4096, 11008, 32000, 4096  # llama2-7b
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTER) + VOCAB * HIDDEN


def llama(rate: float = 10000.0, **more: Any) -> MfuReport:
    return mfu(rate, "llama2-7b", **{"seq": SEQ, "device": H100, **more})


def test_operations_a_token_are_six_for_each_weight_and_twelve_for_attention() -> None:
    report = llama()
    attention = 12 * LAYERS * HIDDEN * SEQ
    assert report.attention_per_token == attention
    assert report.flops_per_token == 6 * WEIGHTS + attention
    assert report.six_n == 6 * (WEIGHTS + VOCAB * HIDDEN), "6N takes the embedding for work"
    assert report.tflops == pytest.approx(10000 * report.flops_per_token / 1e12)
    assert report.mfu == pytest.approx(report.tflops / 989.4)
    assert report.hfu == report.mfu


def test_a_causal_mask_leaves_half_of_attention() -> None:
    full, causal = llama(), llama(attention="causal")
    assert causal.attention_per_token == pytest.approx(full.attention_per_token * (SEQ + 1) / SEQ / 2)
    assert full.other_attention == causal.flops_per_token and causal.other_attention == full.flops_per_token


def test_gpus_share_the_rate() -> None:
    assert llama(64000.0, gpus=64).mfu == pytest.approx(llama(1000.0).mfu)


def test_what_is_computed_again_counts_for_hfu_alone() -> None:
    plain, full, attention = llama(), llama(recompute="full"), llama(recompute="attention")
    assert plain.mfu == full.mfu == attention.mfu
    layers = plain.flops_per_token - 6 * VOCAB * HIDDEN
    assert full.hfu / full.mfu == pytest.approx(1 + layers / 3 / plain.flops_per_token)  # type: ignore[operator]
    scores = plain.attention_per_token / 3
    assert attention.hfu / attention.mfu == pytest.approx(1 + scores / plain.flops_per_token)  # type: ignore[operator]


def test_of_experts_those_count_that_a_token_meets() -> None:
    report = mfu(1e5, "mixtral-8x7b", gpus=8, seq=SEQ, device=H100)
    assert report.active_params == pytest.approx(12.88e9, rel=0.001)
    assert report.params == pytest.approx(46.7e9, rel=0.001)
    assert report.flops_per_token == pytest.approx(6 * (report.active_params - 32000 * 4096) + 12 * 32 * 4096 * SEQ)
    assert "12.9 B active of 46.7 B" in report.text()


def test_the_ceiling_is_given_measured_or_what_others_measured(tmp_path: Path) -> None:
    assert llama().mamf == 730 and "sustained" in llama().mamf_source
    given = llama(mamf=650)
    assert (given.mamf, given.mamf_source) == (650, "given")
    assert given.mamfu == pytest.approx(given.tflops / 650)
    file = tmp_path / "mamf.json"
    file.write_text(json.dumps({"schema": 1, "sustained": 700.5, "dtype": "bfloat16"}))
    assert llama(mamf=file).mamf == 700.5
    with pytest.raises(UsageError, match="float16"):
        llama(mamf=file, dtype="fp16")
    lines = [{"kind": "start", "dtype": "bfloat16"}, {"kind": "report", "sustained": 701.5, "dtype": "bfloat16"}]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "blo')
    assert llama(mamf=file).mamf == 701.5, "the report among the lines of a run"
    for nothing in ("{}", "", "[]\n5", '{"kind": "start", "dtype": "bfloat16"}'):
        file.write_text(nothing)
        with pytest.raises(MldebugError, match="no report of mldebug mamf"):
            llama(mamf=file)
    with pytest.raises(MldebugError, match="no such file"):
        llama(mamf=tmp_path / "none.json")


def test_a_device_that_is_not_known_gives_a_rate_and_says_what_to_name() -> None:
    report = llama(device="Some GPU 9")
    assert (report.mfu, report.mamfu, report.ok) == (None, None, True)
    assert "hint: nothing is known of 'Some GPU 9'" in report.text() and f"{report.tflops:.1f} TFLOPS" in report.text()
    assert llama(device="Some GPU 9", peak=1000).mfu == pytest.approx(report.tflops / 1000)


def test_more_than_the_peak_is_trouble() -> None:
    report = llama(1e6)
    assert not report.ok and "more than the device can do" in report.text()
    assert llama(mamf=llama().tflops * 0.97).ok, "a ceiling is a measurement, and a little off"
    assert not llama(mamf=llama().tflops / 2).ok


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rate": 0.0}, "tokens_per_second is 0.0"),
        ({"rate": math.nan}, "tokens_per_second is nan"),
        ({"gpus": 0}, "gpus is 0"),
        ({"attention": "some"}, "attention is 'some'"),
        ({"recompute": "all"}, "recompute is 'all'"),
        ({"dtype": "float7"}, "float7"),
        ({"mamf": -1}, "mamf is -1"),
        ({"peak": math.inf}, "peak is inf"),
        ({"seq": -4}, "seq is -4"),
    ],
    ids=str,
)
def test_wrong_values_are_said(more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        llama(**more)
    assert says in caught.value.message and caught.value.hint


def run(*arguments: str) -> int:
    parser = command.PARSER(prog="mldebug mfu")
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_the_command_prints_lines_of_80_columns_and_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ("--tokens-per-second", "81920", "--model", "llama2-7b", "--gpus", "8", "--device", H100)
    assert run(*usual, "--recompute", "full") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "llama2-7b on 8 x NVIDIA H100 SXM, bfloat16, 4096 tokens a sequence"
    assert lines[1].split()[:2] == ["MFU", "47.7%"] and "HFU         63.3%" in text and "MAMFU       64.6%" in text
    assert max(map(len, lines)) <= 80
    output = tmp_path / "mfu.json"
    assert run(*usual, "--json", "--mamf", "700", "-o", str(output)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(output.read_text())
    assert document["mfu"] == pytest.approx(0.4769, abs=1e-4) and document["mamf"] == 700


def test_the_command_fails_for_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tokens-per-second", "1e9", "--model", "llama2-7b", "--device", "h100", "-q") == 1
    assert "hint: more than the device can do" in capsys.readouterr().out
    for wrong in (
        ("--tokens-per-second", "-3"),
        ("--tokens-per-second", "x"),
        ("--tokens-per-second", "1", "--gpus", "0"),
    ):
        with pytest.raises(UsageError):
            run(*wrong, "--model", "llama2-7b")


def test_help_is_80_columns_wide_and_loads_nothing_heavy(run_python: Callable[..., Any]) -> None:
    source = textwrap.dedent("""
        import sys
        from mldebug.cli import _mfu
        parser = _mfu.PARSER(prog="mldebug mfu", epilog=_mfu.EPILOG)
        _mfu.add_arguments(parser)
        print(parser.format_help())
        from mldebug.perf.matmul._mfu import mfu
        mfu(1000, "llama-7b", device="h100")
        assert not {"torch", "numpy", "rich", "transformers"} & set(sys.modules)
    """)
    done = run_python(source, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_palm_540b_and_gpt3_175b_come_out_as_published() -> None:
    """46.2% at 238.3 thousand tokens a second on 6144 TPU v4 (PaLM, appendix B); the formula of Narayanan et al."""
    palm = {"model_type": "llama", "hidden_size": 18432, "num_hidden_layers": 118, "num_attention_heads": 48}
    palm |= {"num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 73728, "vocab_size": 256000}
    palm |= {"max_position_embeddings": 2048, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    assert mfu(238_300, palm, gpus=6144, peak=275).mfu == pytest.approx(0.462, abs=0.0005)

    s, layers, h, v = 2048, 96, 12288, 51200
    gpt = {"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": 96, "vocab_size": v, "n_positions": s}
    again = mfu(1e5, gpt, gpus=1024, peak=312, recompute="full")
    assert again.hfu is not None
    hardware = again.hfu * 312e12 * 1024 / 1e5
    assert hardware == pytest.approx(96 * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h)), rel=1e-9)


def test_more_than_others_reached_is_said() -> None:
    report = llama(17_000.0)
    assert report.ok and report.mamfu is not None and report.mamfu > 1.0
    assert "more than others reached on this kind of GPU" in " ".join(report.text().split())
