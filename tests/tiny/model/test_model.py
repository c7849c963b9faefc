"""tiny_model as a whole: what it writes, what it refuses, and that nothing is ever half written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mldebug import MldebugError, tiny_model
from mldebug.core.errors import UsageError
from mldebug.tiny._sizes import parse_bytes
from mldebug.tiny.model import _checks

TEXT = (
    "the quick brown fox jumps over the lazy dog while tiny models read long sentences about nothing in particular and "
    "every letter of the alphabet is there to be merged into pieces of words that a tokenizer can count"
)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tokenizer(size: int = 600) -> Any:
    """A byte-level BPE tokenizer with special tokens at its end, as large models have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=["<image>"]
    )


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A source with a tokenizer and settings for generation, and no weights."""
    folder = tmp_path / "source"
    made = tokenizer()
    made.save_pretrained(folder)
    ids = {f"{name}_token_id": getattr(made, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = transformers.LlamaConfig(
        vocab_size=len(made), hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"], dtype="bfloat16", rms_norm_eps=1e-5, **ids,
    )  # fmt: skip
    config.save_pretrained(folder)
    generation = {
        **ids,
        "eos_token_id": [ids["eos_token_id"], ids["pad_token_id"]],
        "temperature": 0.6,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class TestWhatItMakes:
    def test_a_model_type_gives_a_folder_and_a_report(self, tmp_path: Path) -> None:
        report = tiny_model("llama", tmp_path / "tiny")
        assert report.ok, report.text()
        assert report.path == tmp_path / "tiny" and report.architecture == "LlamaForCausalLM"
        assert sorted(path.name for path in report.path.iterdir()) == [
            "config.json", "generation_config.json", "mldebug_recipe.json", "model.safetensors",
        ]  # fmt: skip
        assert report.params == sum(parameter.numel() for parameter in report.model.parameters())
        assert report.bytes == (report.path / "model.safetensors").stat().st_size < 1e6
        again = transformers.AutoModelForCausalLM.from_pretrained(report.path)
        assert all(
            torch.equal(a, b)
            for a, b in zip(again.state_dict().values(), report.model.state_dict().values(), strict=True)
        )

    def test_only_the_folder_is_left(self, tmp_path: Path) -> None:
        tiny_model("llama", tmp_path / "tiny")
        assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    def test_the_document(self, tmp_path: Path) -> None:
        document = json.loads(tiny_model("llama", tmp_path / "tiny").json())
        assert {"ok", "checks", "params", "bytes", "seconds"} <= set(document)
        assert document["ok"] is True and document["checks"]["reload"] == {
            "ok": True,
            "why": "all 21 tensors bit-equal",
        }
        assert isinstance(document["seconds"], float) and set(document["times"]) == {"import", "build", "checks"}
        assert document["changes"]["hidden_size"][0] == 4096

    def test_the_text_has_a_line_for_each_check(self) -> None:
        report = tiny_model("llama")
        lines = report.text(width=100).splitlines()
        assert [line.split()[1] for line in lines if line.startswith("ok ")] == list(report.checks)
        assert lines[0].startswith("source") and lines[-1].startswith("time") and "import" in lines[-1]
        assert max(map(len, lines)) <= 100

    def test_without_a_folder_nothing_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        report = tiny_model("llama")
        assert report.ok and report.path is None and "not kept" in report.text()
        assert list(tmp_path.iterdir()) == []

    def test_the_seed_decides_the_weights(self) -> None:
        first, again, other = (tiny_model("llama", seed=seed).model.lm_head.weight for seed in (3, 3, 4))
        assert torch.equal(first, again) and not torch.equal(first, other)

    def test_sizes_and_fields_are_taken(self) -> None:
        report = tiny_model("llama", layers=3, hidden=32, vocab=100, dtype="bfloat16", set={"rms_norm_eps": 0.5})
        config = report.model.config
        assert (config.num_hidden_layers, config.hidden_size, config.vocab_size, config.rms_norm_eps) == (
            3,
            32,
            100,
            0.5,
        )
        assert report.ok and report.dtype == "bfloat16" and report.model.dtype == torch.bfloat16

    def test_the_callers_settings_are_left_alone(self) -> None:
        from transformers.utils import logging

        before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.random.get_rng_state()
        tiny_model("llama")
        assert logging.get_verbosity() == before[0] and logging.is_progress_bar_enabled() == before[1]
        assert torch.equal(torch.random.get_rng_state(), before[2])


class TestWithATokenizer:
    def test_one_map_for_tokenizer_config_and_generation(self, llama_folder: Path, tmp_path: Path) -> None:
        before = hashes(llama_folder)
        report = tiny_model(llama_folder, tmp_path / "tiny", vocab=320)
        assert report.ok, report.text()
        tiny = transformers.AutoTokenizer.from_pretrained(report.path)
        assert report.model.config.vocab_size == len(tiny) == 320
        assert report.model.config.eos_token_id == tiny.eos_token_id
        generation = json.loads((report.path / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [tiny.eos_token_id, tiny.pad_token_id]
        assert generation["temperature"] == 0.6
        assert tiny.decode(tiny(TEXT)["input_ids"]) == TEXT
        assert hashes(llama_folder) == before

    def test_what_the_source_says_stays(self, llama_folder: Path) -> None:
        report = tiny_model(llama_folder)
        config = report.model.config
        assert report.dtype == "bfloat16" and config.rms_norm_eps == 1e-5
        assert config.num_attention_heads // config.num_key_value_heads > 1 and config.num_key_value_heads > 1

    def test_a_tokenizer_of_elsewhere(self, tmp_path: Path) -> None:
        made = tokenizer()
        made.save_pretrained(tmp_path / "words")
        config = {
            "vocab_size": len(made),
            "bos_token_id": made.bos_token_id,
            "eos_token_id": made.eos_token_id,
            "model_type": "llama",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        report = tiny_model(tmp_path / "config.json", tmp_path / "tiny", tokenizer=tmp_path / "words")
        assert report.ok, report.text()
        assert (report.path / "tokenizer.json").exists()
        assert report.model.config.vocab_size == len(transformers.AutoTokenizer.from_pretrained(report.path))

    def test_its_ids_are_the_models(self, tmp_path: Path) -> None:
        tokenizer().save_pretrained(tmp_path / "words")
        report = tiny_model("llama", tmp_path / "tiny", tokenizer=tmp_path / "words")
        assert report.ok, report.text()
        made, config = transformers.AutoTokenizer.from_pretrained(report.path), report.model.config
        assert (config.bos_token_id, config.eos_token_id) == (made.bos_token_id, made.eos_token_id)
        again = tiny_model(from_recipe=report.path, output=tmp_path / "again")
        assert again.ok and hashes(again.path) == hashes(report.path)

    def test_a_vocabulary_below_the_floor_is_refused(self, llama_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(MldebugError, match="floor"):
            tiny_model(llama_folder, tmp_path / "tiny", vocab=50)
        assert not (tmp_path / "tiny").exists()


class TestProcessors:
    def test_a_picture_goes_through_the_saved_processor(self, tmp_path: Path) -> None:
        source = tmp_path / "vit"
        transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(source)
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": 224, "width": 224},
            "do_resize": True,
        }
        (source / "preprocessor_config.json").write_text(json.dumps(settings))
        report = tiny_model(source, tmp_path / "tiny")
        assert report.ok, report.text()
        assert report.checks["forward"].why.startswith("through the processor: pixel_values 1x3x")
        written = json.loads((tmp_path / "tiny" / "preprocessor_config.json").read_text())
        side = report.model.config.image_size
        assert side < 224 and written["size"] == {"height": side, "width": side}

    def test_sound_goes_through_the_saved_extractor(self, tmp_path: Path) -> None:
        source = tmp_path / "whisper"
        config = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
        config.save_pretrained(source)
        transformers.WhisperFeatureExtractor().save_pretrained(source)
        report = tiny_model(source, tmp_path / "tiny")
        assert report.ok, report.text()
        assert "through the processor: input_features" in report.checks["forward"].why

    def test_text_and_picture_together(self, tmp_path: Path) -> None:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        made, source = tokenizer(), tmp_path / "llava"
        image = made.convert_tokens_to_ids("<image>")
        pictures = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
        transformers.LlavaProcessor(
            pictures, made, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        ).save_pretrained(source)
        text = {"model_type": "llama", "vocab_size": len(made), "eos_token_id": made.eos_token_id}
        config = transformers.LlavaConfig(
            text_config=text, image_token_index=image, architectures=["LlavaForConditionalGeneration"]
        )
        config.save_pretrained(source)
        report = tiny_model(source, tmp_path / "tiny")
        assert report.ok, report.text()
        assert "through the processor: input_ids" in report.checks["forward"].why
        assert "pixel_values 1x3x" in report.checks["forward"].why

    def test_one_that_does_not_load_is_said(self, tmp_path: Path) -> None:
        source = tmp_path / "vit"
        transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(source)
        (source / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchImageProcessor"}')
        report = tiny_model(source)
        assert report.ok and report.checks["processor"].ok is None
        assert "nor is the source's" in report.checks["processor"].why
        assert "-    processor" in report.text()


def test_ids_of_generation_that_went_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "whisper"
    config = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
    config.save_pretrained(source)
    (source / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": config.eos_token_id,
                "decoder_start_token_id": config.decoder_start_token_id,
                "suppress_tokens": [1, 2, 40000, config.eos_token_id],
                "begin_suppress_tokens": [220, config.eos_token_id],
                "forced_decoder_ids": [[1, 50259], [2, config.eos_token_id]],
                "lang_to_id": {"<|en|>": 50259},
                "alignment_heads": [[3, 1]],
                "max_length": 448,
            }
        )
    )
    report = tiny_model(source, tmp_path / "tiny")
    assert report.ok, report.text()
    written = json.loads((tmp_path / "tiny" / "generation_config.json").read_text())
    eos = report.model.config.eos_token_id
    assert written["eos_token_id"] == eos and eos in written["suppress_tokens"]
    assert max(written["suppress_tokens"]) < report.model.config.vocab_size
    assert written.get("lang_to_id") == {} and "alignment_heads" not in written
    assert written["max_length"] == report.model.config.max_target_positions


class TestRecipe:
    def test_a_rebuild_is_equal_byte_for_byte(self, llama_folder: Path, tmp_path: Path) -> None:
        first = tiny_model(llama_folder, tmp_path / "first", vocab=320, seed=7)
        shutil.rmtree(llama_folder)  # the recipe does not need it
        again = tiny_model(from_recipe=tmp_path / "first" / "mldebug_recipe.json", output=tmp_path / "again")
        assert first.ok and again.ok, again.text()
        assert hashes(tmp_path / "first") == hashes(tmp_path / "again")
        assert again.checks["recipe"].why.startswith("all ") and "byte for byte" in again.checks["recipe"].why

    def test_the_recipe_alone_is_enough_where_there_is_no_tokenizer(self, tmp_path: Path) -> None:
        first = tiny_model("bert", tmp_path / "first", layers=1, hidden=32, dtype="float32", set={"hidden_act": "relu"})
        shutil.copyfile(first.path / "mldebug_recipe.json", tmp_path / "alone.json")
        files = hashes(first.path)
        shutil.rmtree(first.path)
        again = tiny_model(from_recipe=tmp_path / "alone.json", output=tmp_path / "again")
        assert again.ok and hashes(again.path) == files and again.model.config.hidden_act == "relu"

    def test_what_it_says(self, tmp_path: Path) -> None:
        tiny_model("llama", tmp_path / "tiny", layers=2, seed=5)
        recipe = json.loads((tmp_path / "tiny" / "mldebug_recipe.json").read_text())
        assert recipe["source"]["name"] == "llama" and len(recipe["source"]["sha256"]) == 64
        assert recipe["options"]["layers"] == 2 and recipe["options"]["seed"] == 5
        assert recipe["versions"]["transformers"] == transformers.__version__ and recipe["rules"] >= 1
        assert set(recipe["tensors"]) == set(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").state_dict()
        )
        assert str(tmp_path) not in json.dumps(recipe)

    def test_other_bytes_fail_the_check(self, tmp_path: Path) -> None:
        tiny_model("llama", tmp_path / "tiny")
        file = tmp_path / "tiny" / "mldebug_recipe.json"
        recipe = json.loads(file.read_text())
        recipe["options"]["seed"] = 1
        recipe["versions"]["transformers"] = "4.0.0"
        file.write_text(json.dumps(recipe))
        report = tiny_model(from_recipe=file)
        assert not report.ok and "model.safetensors differ" in report.checks["recipe"].why
        assert "transformers 4.0.0 then" in report.checks["recipe"].why

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "no such file"),
            ("{", "is no JSON"),
            ("[]", "is no recipe of a tiny model"),
            ('{"kind": "tiny-model", "schema": 99}', "has layout 99, this version reads 1"),
            ('{"kind": "tiny-model", "schema": 1}', "lacks source, options, tensors, files"),
        ],
    )
    def test_a_file_that_is_no_recipe(self, text: str | None, message: str, tmp_path: Path) -> None:
        if text is not None:
            (tmp_path / "recipe.json").write_text(text)
        with pytest.raises(MldebugError, match=message) as caught:
            tiny_model(from_recipe=tmp_path / "recipe.json", output=tmp_path / "tiny")
        assert caught.value.hint and not (tmp_path / "tiny").exists()


class TestBudget:
    def test_kept(self) -> None:
        report = tiny_model("llama", budget="1MB")
        assert report.checks["budget"].ok and report.checks["budget"].why.endswith("of 1.00 MB")

    def test_missed(self) -> None:
        report = tiny_model("llama", budget="10kB", vocab=512)
        assert not report.ok
        why = report.checks["budget"].why
        assert (
            "is over 10.0 kB" in why and "model.embed_tokens.weight 512x" in why and "vocab_size x hidden_size" in why
        )

    @pytest.mark.parametrize(
        ("text", "count"),
        [("1MB", 10**6), ("500 kB", 500_000), ("1.5MiB", 3 * 2**19), ("123", 123), (7, 7), (None, None)],
    )
    def test_sizes(self, text: Any, count: int | None) -> None:
        assert parse_bytes("the budget", text) == count

    @pytest.mark.parametrize("text", ["", "much", "0", "-1MB", "1XB", 0])
    def test_no_sizes(self, text: Any) -> None:
        with pytest.raises(UsageError, match="is no size"):
            parse_bytes("the budget", text)


class TestRefusals:
    def test_a_folder_that_is_not_empty(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(UsageError, match="exists and is not empty") as caught:
            tiny_model("llama", tmp_path)
        assert "--force" in caught.value.hint
        with pytest.raises(UsageError, match="holds no tiny model"):
            tiny_model("llama", tmp_path, force=True)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_force_replaces_an_earlier_tiny_model(self, tmp_path: Path) -> None:
        tiny_model("llama", tmp_path / "tiny")
        report = tiny_model("bert", tmp_path / "tiny", force=True)
        assert json.loads((report.path / "config.json").read_text())["model_type"] == "bert"
        assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    def test_an_empty_folder_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "tiny").mkdir()
        assert tiny_model("llama", tmp_path / "tiny").ok

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"source": "lama"}, "lama"),
            ({"source": "llama", "layers": 0}, "layers is 0"),
            ({"source": "llama", "dtype": "int8"}, "int8"),
            ({"source": "llama", "set": {"hidden_sizee": 3}}, "hidden_sizee"),
            ({"source": "llama", "model_class": "LlamaForCasualLM"}, "LlamaForCasualLM"),
            ({"source": "llama", "budget": "some"}, "is no size"),
            ({}, "no source"),
        ],
    )
    def test_bad_arguments_leave_nothing(self, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(MldebugError, match=message) as caught:
            tiny_model(output=tmp_path / "tiny", **arguments)
        assert caught.value.hint and list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}', '{"model_type": "no_such_type"}'])
    def test_a_config_that_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(MldebugError) as caught:
            tiny_model(tmp_path / "config.json", tmp_path / "tiny")
        assert caught.value.hint and [path.name for path in tmp_path.iterdir()] == ["config.json"]

    def test_a_generation_config_that_is_broken(self, llama_folder: Path, tmp_path: Path) -> None:
        (llama_folder / "generation_config.json").write_text("{")
        with pytest.raises(MldebugError, match=r"generation_config\.json"):
            tiny_model(llama_folder, tmp_path / "tiny")
        assert not (tmp_path / "tiny").exists()

    def test_no_place_to_put_it(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no folder") as caught:
            tiny_model("llama", tmp_path / "a" / "b")
        assert "mkdir" in caught.value.hint
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="is a file"):
            tiny_model("llama", tmp_path / "file")

    @pytest.mark.parametrize(
        "trouble", [KeyboardInterrupt(), RuntimeError("broken"), OSError(28, "No space left on device")]
    )
    def test_whatever_happens_nothing_is_half_written(
        self, trouble: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_subject: Any) -> Any:
            raise trouble

        monkeypatch.setattr(_checks, "run_checks", fail)
        with pytest.raises((type(trouble), MldebugError)):
            tiny_model("llama", tmp_path / "tiny")
        assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_is_in_the_report_and_the_folder_is_there(tmp_path: Path) -> None:
    report = tiny_model("llama", tmp_path / "tiny", budget="1kB")
    assert not report.ok and report.path.exists() and "FAIL budget" in report.text()
