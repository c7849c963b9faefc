"""Configs as published models have them, with what goes beyond the defaults of their class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import SafetensorError

from mldebug import MldebugError, tiny_model
from mldebug.core.errors import UsageError
from mldebug.tiny.model._checks_config import check_ids
from mldebug.tiny.model._processor import write_processor
from mldebug.tiny.model._shrink import shrink
from mldebug.tiny.model._source import resolve
from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._processor import processed

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip


def source(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TestQuantized:
    """A checkpoint's config says how its weights are stored; those of the tiny model are not stored that way."""

    @pytest.mark.parametrize(
        "stored",
        [
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ],
    )
    def test_is_left_out_and_said(self, stored: dict[str, Any], tmp_path: Path) -> None:
        config = {**LLAMA, "quantization_config": stored}
        report = tiny_model(source(tmp_path / "source", config), tmp_path / "tiny")
        assert report.ok, report.text()
        assert "quantization_config" not in json.loads((tmp_path / "tiny" / "config.json").read_text())
        assert report.changes["quantization_config"] == (stored, None)
        assert any(stored["quant_method"] in note for note in report.notes)

    def test_at_any_level(self) -> None:
        config = {"model_type": "llava", "text_config": {**LLAMA, "quantization_config": {"quant_method": "awq"}}}
        assert "quantization_config" not in shrink(config).config["text_config"]


def test_float16_is_trained_in_float32(tmp_path: Path) -> None:
    report = tiny_model("llama", dtype="float16")
    assert report.ok, report.text()
    assert "in float32" in report.checks["loss"].why
    assert report.dtype == "float16" and "float16" in report.checks["dtypes"].why


class TestIdsInLists:
    """Settings for generation in a config: ids in lists of lists."""

    CONFIG: ClassVar[dict[str, Any]] = {
        "model_type": "marian", "vocab_size": 58101, "pad_token_id": 58100, "eos_token_id": 0,
        "bad_words_ids": [[58100], [7, 58099]], "forced_decoder_ids": [[1, 50259], [2, 50359]],
    }  # fmt: skip

    def test_are_mapped_as_the_others_are(self) -> None:
        shrunk = shrink(self.CONFIG)
        assert shrunk.config["bad_words_ids"][0] == [shrunk.config["pad_token_id"]]
        assert [place for place, _token in shrunk.config["forced_decoder_ids"]] == [1, 2]
        found = [token for word in shrunk.config["bad_words_ids"] for token in word]
        found += [token for _place, token in shrunk.config["forced_decoder_ids"]]
        assert max(found) < shrunk.config["vocab_size"] and len(set(found)) == 5

    def test_those_of_whisper_can_be_generated(self, tmp_path: Path) -> None:
        config = resolve("whisper").config | {"forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]]}
        report = tiny_model(source(tmp_path / "source", config))
        assert report.checks["generate"].ok and report.checks["ids"].ok, report.text()

    def test_one_past_the_vocabulary_fails_the_check(self, tmp_path: Path) -> None:
        report = tiny_model("marian")
        report.model.config.bad_words_ids = [[1, 9999]]
        ok, why = check_ids(report.model, tmp_path, {}, None)
        assert not ok and "bad_words_ids = 9999" in why

    def test_words_of_generation(self, tmp_path: Path) -> None:
        folder = source(tmp_path / "source", LLAMA)
        settings = {"bad_words_ids": [[128009], [5, 128001]], "eos_token_id": [128001, 128009]}
        (folder / "generation_config.json").write_text(json.dumps(settings))
        report = tiny_model(folder, tmp_path / "tiny")
        made = json.loads((tmp_path / "tiny" / "generation_config.json").read_text())
        assert made["bad_words_ids"] == [[made["eos_token_id"][1]]]  # 5 went, and with it the word
        assert report.ok, report.text()


def test_labels_stay_however_many(tmp_path: Path) -> None:
    names = {str(number): f"class {number}" for number in range(1000)}
    config = {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 768, "image_size": 224,
        "id2label": names, "label2id": {name: int(number) for number, name in names.items()},
    }  # fmt: skip
    report = tiny_model(source(tmp_path / "source", config), tmp_path / "tiny")
    assert report.ok, report.text()
    assert report.model.config.num_labels == 1000 and report.model.config.id2label[999] == "class 999"


class TestWindows:
    @pytest.mark.parametrize(
        ("window", "positions", "expected"), [(262144, 131072, (128, 128)), (4096, 32768, (16, 128))]
    )
    def test_one_that_cuts_nothing_off_still_does_not(
        self, window: int, positions: int, expected: tuple[int, int]
    ) -> None:
        config = {**resolve("phi3").config, "sliding_window": window, "max_position_embeddings": positions}
        tiny = shrink(config).config
        assert (tiny["sliding_window"], tiny["max_position_embeddings"]) == expected

    def test_one_that_cuts_off_does_so_with_fewer_positions(self) -> None:
        config = {**resolve("mistral").config, "sliding_window": 4096, "max_position_embeddings": 32768}
        assert shrink(config, overrides={"max_position_embeddings": 8}).config["sliding_window"] == 4


class TestArchitectures:
    def test_one_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        report = tiny_model(source(tmp_path / "source", {**LLAMA, "architectures": ["MyLlamaForScoring"]}))
        assert report.architecture == "LlamaForCausalLM"
        assert any("MyLlamaForScoring" in note for note in report.notes)

    def test_one_of_another_type_is_not_built(self, tmp_path: Path) -> None:
        report = tiny_model(
            source(tmp_path / "source", {**LLAMA, "architectures": ["Qwen2VLForConditionalGeneration"]})
        )
        assert report.architecture == "LlamaForCausalLM" and report.ok, report.text()


def test_answers_at_places_of_the_input(tmp_path: Path) -> None:
    """A classifier whose decoder reads the input, one layer deep."""
    config = {
        "architectures": ["BartForSequenceClassification"], "model_type": "bart", "decoder_layers": 1,
        "id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"},
        "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
    }  # fmt: skip
    report = tiny_model(source(tmp_path / "source", config))
    assert report.ok, report.text()


def test_a_field_that_the_class_sets_is_no_difference(tmp_path: Path) -> None:
    config = {
        "architectures": ["VisionEncoderDecoderModel"], "model_type": "vision-encoder-decoder", "pad_token_id": 1,
        "decoder_start_token_id": 2, "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "trocr", "is_decoder": True, "add_cross_attention": True},
    }  # fmt: skip
    report = tiny_model(source(tmp_path / "source", config))
    assert report.checks["diff"].ok, report.text()


class TestWhatIsSetByHand:
    """What depends on a field that was set follows it, so that the model still runs."""

    @pytest.mark.parametrize(
        ("name", "value", "heads", "kv"),
        [
            ("num_key_value_heads", 3, 6, 3),
            ("num_key_value_heads", 1, 4, 1),
            ("num_attention_heads", 7, 7, 1),
            ("num_attention_heads", 6, 6, 3),
            ("num_attention_heads", 2, 2, 1),
            ("hidden_size", 30, 3, 1),
            ("hidden_size", 64, 4, 2),
        ],
    )
    def test_heads_and_widths(self, name: str, value: int, heads: int, kv: int, tmp_path: Path) -> None:
        report = tiny_model(source(tmp_path / "source", LLAMA), set={name: value})
        config = report.model.config
        assert report.ok, report.text()
        assert getattr(config, name) == value
        assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv)
        assert config.intermediate_size < 200

    def test_experts_for_experts_per_token(self) -> None:
        tiny = shrink(resolve("mixtral").config, overrides={"num_experts_per_tok": 5}).config
        assert (tiny["num_local_experts"], tiny["num_experts_per_tok"]) == (6, 5)

    def test_what_was_as_wide_stays_so(self) -> None:
        tiny = shrink(resolve("qwen2_5_vl").config, overrides={"text_config.hidden_size": 64}).config
        assert tiny["vision_config"]["out_hidden_size"] == tiny["text_config"]["hidden_size"] == 64

    def test_a_hidden_size_that_was_asked_for_is_the_largest(self) -> None:
        tiny = shrink(resolve("qwen2_5_vl").config, hidden=32).config
        assert max(tiny["text_config"]["hidden_size"], tiny["vision_config"]["hidden_size"]) == 32

    def test_number_of_labels(self, tmp_path: Path) -> None:
        config = {
            "model_type": "bert",
            "architectures": ["BertForTokenClassification"],
            "id2label": {"0": "O", "1": "B"},
        }
        report = tiny_model(source(tmp_path / "source", config), set={"num_labels": 3})
        assert report.ok, report.text()
        assert report.model.config.id2label == {0: "O", 1: "B", 2: "LABEL_2"}
        assert report.model.classifier.out_features == 3

    def test_number_of_labels_that_is_none(self) -> None:
        with pytest.raises(UsageError, match="num_labels is 0"):
            shrink(resolve("bert").config, overrides={"num_labels": 0})

    def test_an_error_of_the_config_is_whole(self, tmp_path: Path) -> None:
        with pytest.raises(MldebugError, match=r"num_hidden_layers.*expected int, got str"):
            tiny_model("llama", set={"num_hidden_layers": "abc"})


class TestIdsOfSeveralLevels:
    """A config around a text may name the text's vocabulary once more: its ids are of that one."""

    CONFIG: ClassVar[dict[str, Any]] = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 128257,
        "vocab_size": 128259,
        "text_config": {**LLAMA, "vocab_size": 128259, "pad_token_id": 128002},
        "vision_config": {"model_type": "idefics3_vision", "hidden_size": 1152, "image_size": 364, "patch_size": 14,
                          "num_attention_heads": 16, "num_hidden_layers": 27, "intermediate_size": 4304},
    }  # fmt: skip

    def test_stay_distinct(self, tmp_path: Path) -> None:
        report = tiny_model(source(tmp_path / "source", self.CONFIG))
        config = report.model.config
        text = config.text_config
        found = [config.image_token_id, text.pad_token_id, text.bos_token_id, *text.eos_token_id]
        assert len(set(found)) == 6 and sorted(found) == found[2:3] + found[3:4] + found[1:2] + found[4:] + found[:1]
        assert report.ok, report.text()

    def test_two_that_became_one_fail_the_check(self, tmp_path: Path) -> None:
        model = tiny_model(source(tmp_path / "source", self.CONFIG)).model
        model.config.image_token_id = model.config.text_config.pad_token_id
        ok, why = check_ids(model, tmp_path, resolve(tmp_path / "source").config, None)
        assert not ok and "text_config.pad_token_id" in why and "image_token_id" in why


class TestCodecs:
    def test_as_many_codebooks_as_the_decoder_takes(self) -> None:
        config = {
            "model_type": "musicgen",
            "audio_encoder": {
                "model_type": "encodec", "sampling_rate": 32000, "codebook_size": 2048, "target_bandwidths": [2.2],
                "upsampling_ratios": [8, 5, 4, 4],
            },
            "decoder": {"model_type": "musicgen_decoder", "num_codebooks": 4, "vocab_size": 2048, "pad_token_id": 2048},
            "text_encoder": {"model_type": "t5", "vocab_size": 32128},
        }  # fmt: skip
        tiny = shrink(config).config
        assert tiny["audio_encoder"]["target_bandwidths"] == [1.2]  # 6 bits for each code, where there were 11
        assert tiny["decoder"]["vocab_size"] == tiny["audio_encoder"]["codebook_size"] < 2048

    def test_channels_can_be_halved_at_each_upsampling(self) -> None:
        tiny = shrink(resolve("seamless_m4t_v2").config).config
        assert tiny["upsample_initial_channel"] >= 2 ** len(tiny["upsample_rates"])


def test_a_text_is_as_long_as_its_own_positions(tmp_path: Path) -> None:
    report = tiny_model("speecht5", model_class="SpeechT5ForTextToSpeech")
    assert report.ok, report.text()
    assert "at 128 tokens" in report.checks["forward"].why


def test_a_sound_has_a_place_for_each_feature() -> None:
    report = tiny_model("qwen2_audio")
    assert report.ok, report.text()


def test_a_build_that_fails_on_numbers_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_given: Any, **_options: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("mldebug.tiny.model._build._make", wrong)
    monkeypatch.setattr("mldebug.tiny.model._build._undo", lambda shrunk, *_given: (shrunk, []))
    with pytest.raises(MldebugError, match="cannot be built small: division by zero"):
        tiny_model("llama")


class TestClear:
    @pytest.mark.parametrize("name", ["", " "])
    def test_a_source_without_a_name(self, name: str) -> None:
        with pytest.raises(UsageError, match="the source is empty"):
            resolve(name)

    def test_a_class_of_another_type(self) -> None:
        with pytest.raises(UsageError, match=r"GPT2LMHeadModel is for models of the type gpt2, and the source.*bert"):
            tiny_model("bert", model_class="GPT2LMHeadModel")


class TestProcessors:
    def test_tiles_and_tokens_follow(self, tmp_path: Path) -> None:
        folder = tmp_path / "source"
        folder.mkdir()
        stored = {
            "max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 1456}, "image_seq_len": 169,
            "image_grid_pinpoints": [[336, 672]],
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(stored))
        config = {
            "scale_factor": 2, "image_grid_pinpoints": [[56, 112]],
            "vision_config": {"image_size": 56, "patch_size": 14},
        }  # fmt: skip
        (tmp_path / "tiny").mkdir()
        write_processor(folder, tmp_path / "tiny", config, None)
        assert json.loads((tmp_path / "tiny" / "preprocessor_config.json").read_text()) == {
            "max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 112}, "image_seq_len": 4,
            "image_grid_pinpoints": [[56, 112]],
        }  # fmt: skip

    def test_number_of_tokens_of_an_image_in_the_config(self) -> None:
        config = {**TestIdsOfSeveralLevels.CONFIG, "image_seq_len": 169}
        assert shrink(config).config["image_seq_len"] == 4  # of 4 by 4 patches, each 2 by 2 joined

    def test_a_text_alone_is_no_picture(self) -> None:
        class Processor:
            image_processor = tokenizer = object()

            def __call__(self, text: Any = None, images: Any = None, **_options: Any) -> dict[str, Any]:
                if images is not None:
                    raise ValueError("the picture does not fit")
                return {"input_ids": torch.ones(1, 4, dtype=torch.long)}

        model = tiny_model("llava").model
        with pytest.raises(MldebugError, match="the picture does not fit"):
            processed(Facts(model, None, 1, 0), Processor())


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any, **_options: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(MldebugError, match=r"cannot write .*tiny: no space left on device"):
        tiny_model("llama", tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_axes_of_positions_make_as_many_as_there_are(tmp_path: Path) -> None:
    config = {
        "architectures": ["ReformerModelWithLMHead"], "model_type": "reformer", "axial_pos_shape": [512, 1024],
        "max_position_embeddings": 524288, "is_decoder": True,
    }  # fmt: skip
    report = tiny_model(source(tmp_path / "source", config))
    assert report.ok, report.text()
    tiny = report.model.config
    assert tiny.axial_pos_shape[0] * tiny.axial_pos_shape[1] == tiny.max_position_embeddings


@pytest.mark.parametrize("model_type", ["timesfm", "timesfm2_5"])
def test_a_forecast_is_no_size_left_behind(model_type: str) -> None:
    report = tiny_model(model_type)
    assert report.ok, report.text()
