"""A sample of the sweep over all model types: each kind once, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SWEEP = Path(__file__).parents[2] / "benchmarks" / "tiny_coverage.py"

SAMPLE = (
    # text: dense, grouped, one kv head, sparse, latent attention, hybrid, state space, per-layer lists
    "llama", "gpt2", "gemma2", "falcon", "mixtral", "deepseek_v3", "qwen3_next", "mamba2", "jamba", "gemma3n_text",
    "gpt_oss", "phi3",
    # encoders and pairs
    "bert", "deberta-v2", "modernbert", "longformer", "t5", "bart", "pegasus", "fsmt", "encoder-decoder",
    # images: patches, windows, convolutions, detection, depth, masks, pairs
    "vit", "swin", "convnext", "resnet", "segformer", "yolos", "dpt", "sam", "clip", "siglip",
    # images and text
    "llava", "qwen2_vl", "idefics3", "mllama", "paligemma",
    # sound, time
    "whisper", "wav2vec2", "encodec", "patchtst",
)  # fmt: skip


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_coverage", SWEEP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.warm()
    return module


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
@pytest.mark.parametrize("name", SAMPLE)
def test_sample(sweep: ModuleType, name: str) -> None:
    row = sweep.in_worker(name, 60.0, skip_full=True)
    assert sweep.compare([row]) == []
    assert set(sweep.failures(row)) <= set(json.loads(sweep.EXPECTED.read_text()).get(name, {}))


def test_sample_has_40_types() -> None:
    assert len(set(SAMPLE)) == 40


# --- the sweep itself


def test_a_failure_that_is_not_listed_and_a_pass_that_is(
    sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "expected.json"
    listed.write_text(json.dumps({"a": {"forward": "why"}}))
    monkeypatch.setattr(sweep, "EXPECTED", listed)
    bad, good = {"ok": False, "why": "broken"}, {"ok": True}
    assert sweep.compare([{"type": "a", "forward": bad}]) == []
    assert sweep.compare([{"type": "a", "forward": good}]) == ["listed, but passes: a forward"]
    assert sweep.compare([{"type": "b", "build": bad}]) == ["not listed: b build: broken"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_a_worker_that_hangs_or_dies_keeps_what_it_said(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def hang(name: str, send: object, upto: str, skip_full: bool) -> None:
        send({"build": {"ok": True}})  # type: ignore[operator]
        if name == "dies":
            os.kill(os.getpid(), 9)
        time.sleep(60)

    monkeypatch.setattr(sweep, "stages", hang)
    assert sweep.in_worker("hangs", 0.5, skip_full=True)["size"] == {"ok": False, "why": "more than 0.5 s"}
    died = sweep.in_worker("dies", 30.0, skip_full=True)
    assert died["build"]["ok"]
    assert "signal 9" in died["size"]["why"]


def test_a_half_written_line_is_done_again(sweep: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"type": "a"}\n{"type": "b", "bui')
    assert [row["type"] for row in sweep.read(file)] == ["a"]
