"""The products of a model against what torch counts in the model itself, where configs come from, and the advice."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.perf.matmul._advice import advise, last_wave
from mldebug.perf.matmul._config import SHORT_NAMES, load_config
from mldebug.perf.matmul._model import _visible, model_shapes
from mldebug.perf.matmul._model_report import model_report, to_measure
from mldebug.perf.matmul._shapes import Matmul, Shape
from mldebug.perf.matmul._swiglu import best_swiglu, swiglu_of

Run = Callable[..., "subprocess.CompletedProcess[str]"]
H100 = "NVIDIA H100 80GB HBM3"
SWEEP = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "flops_by_model.py"), run_name="sweep")
)


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "t5", "gemma", "gemma2", "phi3"]
)
def test_operations_are_those_that_torch_counts(model_type: str) -> None:
    config = SWEEP.small_config(model_type)
    shapes = model_shapes(config, seq=SWEEP.SEQ, batch=SWEEP.BATCH)
    assert shapes.flops() == SWEEP.counted(config)
    assert shapes.assumed == ""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_operations_at_full_size_on_the_meta_device(name: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seq = 1024
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](), attn_implementation="eager")
        ids, mask = torch.zeros(2, seq, dtype=torch.long), torch.zeros(2, 1, seq, seq)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    assert model_shapes(name, seq=seq, batch=2).flops() == counter.get_total_flops()


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "deepseek_v3"])
def test_forward_and_backward_are_three_forwards(model_type: str) -> None:
    config = SWEEP.small_config(model_type)
    shapes = model_shapes(config, seq=SWEEP.SEQ, batch=SWEEP.BATCH)
    assert shapes.flops(backward=True) == SWEEP.counted(config, backward=True)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-7b", 6.738e9, 6.738e9),
        ("llama2-70b", 68.98e9, 68.98e9),
        ("llama3-405b", 405.9e9, 405.9e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),
        ("deepseek-v3", 671e9, 37.6e9),
        ("gpt3-175b", 174.6e9, 174.6e9),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    shapes = model_shapes(name)
    assert shapes.params == pytest.approx(total, rel=0.002)
    assert shapes.active_params == pytest.approx(active, rel=0.003)


@pytest.mark.parametrize("name", sorted(SHORT_NAMES))
def test_short_names_are_whole_models(name: str) -> None:
    shapes = model_shapes(name, seq=512)
    assert shapes.assumed == "" and all(min(one.shape) > 0 for one in shapes.matmuls)


def test_the_backward_has_the_same_operations_in_other_shapes() -> None:
    one = Matmul("up", 10, 20, 30, batch=2, count=3)
    left, right = one.backward()
    assert (left.shape, right.shape) == ((10, 30, 20, 2), (30, 20, 10, 2))
    assert left.flops == right.flops == one.flops == 2 * 10 * 20 * 30 * 2 * 3


def test_ranks_of_tp_share_the_work() -> None:
    whole, part = model_shapes("llama2-70b", seq=1024), model_shapes("llama2-70b", seq=1024, tp=8)
    assert part.flops() == pytest.approx(whole.flops() / 8)
    shapes = {one.name: one.shape for one in part.matmuls}
    assert shapes["q"] == (1024, 1024, 8192, 1)
    assert shapes["k, v"] == (1024, 128, 8192, 1)
    assert shapes["down"] == (1024, 8192, 3584, 1)
    assert shapes["scores"] == (1024, 1024, 128, 8)
    assert part.params == whole.params
    latent = {one.name: one.shape for one in model_shapes("deepseek-v3", seq=64, tp=8).matmuls}
    assert latent["q_a"] == (64, 1536, 7168, 1), "all ranks compute the narrow layer"
    assert latent["q_b"] == (64, 128 // 8 * 192, 1536, 1)


def test_experts_share_the_tokens_and_none_is_lost() -> None:
    for tokens in (1, 100, 4096):
        shapes = model_shapes("qwen3-30b-a3b", seq=tokens)
        expert = next(one for one in shapes.matmuls if one.name == "expert down")
        assert expert.m * expert.count == pytest.approx(48 * tokens * 8)
        assert expert.m == max(1, round(tokens * 8 / 128))


@pytest.mark.parametrize(("seq", "window"), [(1, 0), (7, 0), (7, 3), (7, 7), (7, 50)])
def test_pairs_under_the_mask(seq: int, window: int) -> None:
    pairs = sum(not window or row - column < window for row in range(seq) for column in range(row + 1))
    assert _visible(seq, window) == pytest.approx(pairs / seq**2)


def test_windows_are_counted_for_the_layers_that_have_them() -> None:
    config = {**SHORT_NAMES["gemma-7b"], "model_type": "gemma2", "sliding_window": 256}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 14
    shapes = model_shapes(config, seq=1024)
    scores = {one.name: (one.count, one.useful) for one in shapes.matmuls if one.name.endswith("scores")}
    assert scores == {"scores": (14, _visible(1024, 0)), "windowed scores": (14, _visible(1024, 256))}
    assert shapes.flops(causal=True) < shapes.flops()


def test_configs_come_from_files_folders_types_and_objects(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path / "config.json"), config, config.to_dict()):
        assert model_shapes(source).layout.kv_heads == 2
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 512}')
    assert model_shapes(tmp_path).layout.inter == 11008, "what a file leaves out is the default of the type"
    assert model_shapes("llama").flops(backward=True) == model_shapes("llama-7b").flops(backward=True)
    text = {"model_type": "llava", "text_config": dict(SHORT_NAMES["llama2-7b"]), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert model_shapes(tmp_path).params == model_shapes("llama2-7b").params


def test_a_folder_of_outputs_does_not_hide_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_shapes("llama-7b").layout.hidden == 4096


def test_a_repository_in_the_cache_of_the_hub(tmp_path: Path, run_python: Run) -> None:
    repository = tmp_path / "models--some--model"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(SHORT_NAMES["llama3-8b"]))
    source = "from mldebug.perf.matmul._model import model_shapes; print(model_shapes('some/model').params)"
    done = run_python(source, env={"HF_HUB_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == model_shapes("llama3-8b").params


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("llama-8", "llama-"),
        ("meta-llama/Llama-2-7b", "llama2-7b"),
        ("mamba", "not known"),
        ("bert", "not known"),
        ("qwen3_next", "not known"),
        ("./nowhere/config.json", "no such file"),
        ({"model_type": "llama", "rms_norm_eps": 1e-6, "num_attention_heads": "many"}, "config"),
        ({"hidden_size": 8}, "not known"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "multiple of the number of attention"),
    ],
    ids=str,
)
def test_what_is_no_model_is_said(source: Any, says: str) -> None:
    with pytest.raises(MldebugError) as caught:
        model_shapes(source)
    assert says in str(caught.value) and caught.value.hint


def test_a_descendant_of_llama_that_transformers_lacks_is_counted_as_llama_and_says_so() -> None:
    shapes = model_shapes({**SHORT_NAMES["llama-7b"], "model_type": "ours", "rms_norm_eps": 1e-6})
    assert shapes.flops() == model_shapes("llama-7b").flops()
    assert shapes.assumed == "layers of ours taken to be as in Llama"


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(MldebugError, match="holds a list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(MldebugError, match="no JSON"):
        load_config(tmp_path)
    with pytest.raises(UsageError, match=r"no config\.json"):
        (tmp_path / "empty").mkdir()
        load_config(tmp_path / "empty")
    with pytest.raises(UsageError, match="tp is 33"):
        model_shapes("llama-7b", tp=33)


def test_advice_names_the_size_and_a_better_one() -> None:
    found = advise(model_shapes("gpt2"))
    assert [(one.what, one.value, one.better, one.level) for one in found] == [("vocab", 50257, 50304, "must")]
    assert model_shapes("gpt2").advice() == found
    assert advise(model_shapes("llama-7b")) == ()
    odd = {**SHORT_NAMES["llama-7b"], "hidden_size": 4100, "intermediate_size": 11000, "head_dim": 100}
    odd.update(num_attention_heads=41, num_key_value_heads=41)
    by_name = {one.what: one for one in advise(model_shapes(odd))}
    assert (by_name["hidden"].better, by_name["hidden"].level) == (4160, "must")
    assert (by_name["intermediate"].better, by_name["intermediate"].level) == (11008, "could")
    assert (by_name["head dim"].better, by_name["head dim"].level) == (128, "must")
    assert "vocab" not in by_name


def test_advice_for_ranks_of_tp_and_for_smaller_numbers() -> None:
    by_name = {one.what: one for one in advise(model_shapes("gpt2", tp=5))}
    assert by_name["heads"].level == "must" and "tp 5" in by_name["heads"].line()
    assert by_name["vocab"].better % (5 * 64) == 0
    few = {one.what: one for one in advise(model_shapes("llama3-8b", tp=16))}
    assert "2 ranks" in few["kv heads"].why
    assert any(one.what == "vocab" and one.better == 50304 for one in advise(model_shapes("gpt2"), dtype="fp8"))
    wide = {**SHORT_NAMES["llama-7b"], "intermediate_size": 11008 + 64}
    assert advise(model_shapes(wide)) == ()
    assert [one.better for one in advise(model_shapes(wide), dtype="fp8")] == [11136]


def test_the_last_wave() -> None:
    assert last_wave(Matmul("one", 128, 256, 64, batch=132), H100) == 1
    assert last_wave(Matmul("one", 128, 256, 64, batch=133), H100) == pytest.approx(133 / 264)
    assert last_wave(Matmul("one", 128, 256, 64), "unheard of") is None


def test_a_report_sums_what_was_measured() -> None:
    model = model_shapes("llama-7b", seq=2048)
    shapes = to_measure(model)
    assert len(shapes) == len(set(shapes)) and (2048, 11008, 4096, 1) in shapes and (4096, 11008, 2048, 1) in shapes
    rates = dict.fromkeys(shapes, 600.0)
    report = model_report(model, rates, device_name=H100, mamf=730)
    assert report.rate == pytest.approx(600) and report.share == pytest.approx(600 / 730)
    assert report.step_ms == pytest.approx(model.flops(backward=True) / 600e9)
    assert report.layer_ms * 32 + report.head_ms == pytest.approx(report.step_ms)  # type: ignore[operator]
    assert report.best_mfu == pytest.approx(600 / 989.4)
    assert report.ok and report.missing == 0
    text = report.text()
    assert "82.2%" in text and max(map(len, text.splitlines())) <= 80
    assert report.to_dict()["products"][0]["shape"] == [2048, 4096, 4096, 1]


def test_a_slow_product_counts_by_its_time_and_a_missing_one_is_said() -> None:
    model = model_shapes("llama-7b", seq=2048)
    rates = dict.fromkeys(to_measure(model), 600.0)
    slow = {**rates, (2048, 32000, 4096, 1): 300.0}
    report = model_report(model, slow)
    head = model.matmuls[-1].flops
    assert report.head_ms == pytest.approx(head / 300e9 + 2 * head / 600e9)
    del rates[2048, 32000, 4096, 1]
    report = model_report(model, rates)
    assert (report.missing, report.step_ms, report.head_ms) == (1, None, None)
    assert report.rate == pytest.approx(600)
    assert "1 products were not measured" in report.text()


def _planted(fast: int) -> dict[Shape, float]:
    """Rates that get worse with the distance to a width, by 1% for each 64."""

    def rates(shapes: Iterable[Shape]) -> dict[Shape, float]:
        noise = random.Random(0)
        found = {}
        for m, n, k, batch in shapes:
            width = next(size for size in (m, n, k) if size not in (4096, 8192))
            found[m, n, k, batch] = 700 * (1 - 0.01 * abs(width - fast) / 64) * (1 + 0.0005 * noise.random())
        return found

    widths = range(64, 20000, 64)
    shapes = [
        one for i in widths for one in ((8192, i, 4096, 1), (8192, 4096, i, 1), (4096, i, 8192, 1), (i, 4096, 8192, 1))
    ]
    return rates([one for one in shapes if not {4096, 8192} >= set(one[:3])])


def test_the_best_width_is_the_fastest_and_among_equals_the_nearest() -> None:
    report = best_swiglu(4096, 10922, rates=_planted(11264))
    assert report.measured and report.best in (11200, 11264)
    assert abs(report.best - 11264) <= 64
    flat = dict.fromkeys(_planted(11264), 700.0)
    assert best_swiglu(4096, 11010, rates=flat).best == 11008
    assert max(map(len, report.text().splitlines())) <= 80


def test_without_a_device_the_best_width_is_the_nearest_multiple() -> None:
    report = best_swiglu(4096, measure=False)
    assert (report.asked, report.best, report.measured) == (10922, 11008, False)
    assert best_swiglu(5120, 13653, tp=8, measure=False).best == 13312
    assert "10922 is one of 2" in report.text()
    llama = swiglu_of(model_shapes("llama-7b"), measure=False)
    assert llama is not None and llama.best == 11008
    assert swiglu_of(model_shapes("gpt2"), measure=False) is None
    with pytest.raises(UsageError, match="hidden is 0"):
        best_swiglu(0, 5)
