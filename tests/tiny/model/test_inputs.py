"""Inputs from config and signature, for every kind of architecture, and through real processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from mldebug.core.errors import MldebugError
from mldebug.tiny.model._forward import loss_of
from mldebug.tiny.model.inputs._make import example_inputs

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
WAVES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def _bert_choices() -> Any:
    return transformers.BertForMultipleChoice(transformers.BertConfig(**TEXT))


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION))


def _detection() -> Any:
    return transformers.YolosForObjectDetection(
        transformers.YolosConfig(**{**VISION, "image_size": [32, 48]}, num_detection_tokens=4)
    )


def _segmentation() -> Any:
    config = transformers.SegformerConfig(
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def _llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_id=9,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=9,
        video_token_id=10,
        vision_start_token_id=11,
        vision_end_token_id=12,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _speech() -> Any:
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**WAVES, ctc_zero_infinity=True))


def _series() -> Any:
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 3],
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        num_time_features=2,
        num_static_categorical_features=1,
        cardinality=[5],
        embedding_dimension=[3],
    )
    return transformers.TimeSeriesTransformerForPrediction(config)


def _patches() -> Any:
    config = transformers.PatchTSTConfig(
        context_length=32,
        num_input_channels=3,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        prediction_length=4,
    )
    return transformers.PatchTSTForPrediction(config)


def _layout() -> Any:
    return transformers.LayoutLMForTokenClassification(
        transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=64)
    )


def _protein() -> Any:
    return transformers.EsmForMaskedLM(transformers.EsmConfig(**{**TEXT, "pad_token_id": 1}, mask_token_id=32))


def _video() -> Any:
    return transformers.VideoMAEForVideoClassification(
        transformers.VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2)
    )


def _pairs() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config)


def _codec() -> Any:
    config = transformers.EncodecConfig(
        num_filters=4, upsampling_ratios=[4, 2], hidden_size=16, codebook_size=16, codebook_dim=16, num_lstm_layers=1
    )
    return transformers.EncodecModel(config)


def _decisions() -> Any:
    return transformers.DecisionTransformerModel(
        transformers.DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=32, n_head=2, n_layer=1)
    )


def _regions() -> Any:
    config = transformers.LxmertConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        l_layers=1,
        x_layers=1,
        r_layers=1,
        visual_feat_dim=24,
        max_position_embeddings=64,
    )
    return transformers.LxmertModel(config)


KINDS: dict[Callable[[], Any], set[str]] = {
    _llama: {"input_ids", "labels"},
    _bert_choices: {"input_ids", "labels"},
    _t5: {"input_ids", "decoder_input_ids", "labels"},
    _vit: {"pixel_values", "labels"},
    _detection: {"pixel_values"},  # its loss needs scipy
    _segmentation: {"pixel_values", "labels"},
    _llava: {"input_ids", "pixel_values", "labels"},
    _qwen2_vl: {"input_ids", "pixel_values", "image_grid_thw", "labels"},
    _whisper: {"input_features", "decoder_input_ids", "labels"},
    _speech: {"input_values", "labels"},
    _series: {"past_values", "past_time_features", "future_values", "static_categorical_features"},
    _patches: {"past_values"},
    _layout: {"input_ids", "bbox", "labels"},
    _protein: {"input_ids", "labels"},
    _video: {"pixel_values", "labels"},
    _pairs: {"input_ids", "pixel_values", "return_loss"},
    _codec: {"input_values"},
    _decisions: {"states", "actions", "timesteps"},
    _regions: {"input_ids", "visual_feats", "visual_pos"},
}


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__.strip("_"))
def test_forward_and_backward_run_for_each_kind(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    inputs = example_inputs(model)
    assert set(inputs) >= KINDS[build]
    loss = loss_of(model(**inputs))
    assert loss is not None and torch.isfinite(loss)
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_same_seed_gives_the_same_inputs_and_the_callers_generator_is_left_alone() -> None:
    model = _llama().eval()
    before = torch.random.get_rng_state()
    first, again, other = (example_inputs(model, seed=seed)["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_length_and_batch_are_kept_and_never_more_than_the_positions() -> None:
    model = _llama().eval()
    assert example_inputs(model, length=40, batch=3)["input_ids"].shape == (3, 40)
    assert example_inputs(model, length=10_000)["input_ids"].shape == (1, 128)


def test_text_ids_are_plain_and_end_with_eos() -> None:
    ids = example_inputs(_llama().eval(), length=60)["input_ids"]
    assert ids[0, -1] == 2 and not set(ids[0, :-1].tolist()) & {0, 1, 2}


def test_each_image_feature_has_its_placeholder() -> None:
    ids = example_inputs(_llava().eval())["input_ids"]
    assert int((ids == 9).sum()) == 16
    ids = example_inputs(_qwen2_vl().eval())["input_ids"][0].tolist()
    assert ids.count(9) == 4 and ids[ids.index(9) - 1] == 11


def test_floats_have_the_dtype_of_the_model() -> None:
    model = _vit().to(torch.bfloat16).eval()
    assert example_inputs(model)["pixel_values"].dtype == torch.bfloat16


def test_a_forward_that_nothing_fits_gives_its_own_reason() -> None:
    class Refuses(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            raise ValueError("not today")

    with pytest.raises(MldebugError, match=r"no example inputs for Refuses: ValueError: not today"):
        example_inputs(Refuses(transformers.LlamaConfig(**TEXT)).eval())


def test_no_labels_where_none_are_asked_for() -> None:
    assert "labels" not in example_inputs(_llama().eval(), labels=False)


class TestProcessors:
    def test_an_image_processor_alone(self) -> None:
        model = _vit().eval()
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        inputs = example_inputs(model, processor=ViTImageProcessorPil(size={"height": 32, "width": 32}))
        assert inputs["pixel_values"].shape == (1, 3, 32, 32) and "labels" in inputs

    def test_one_of_another_size_is_named(self) -> None:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        with pytest.raises(MldebugError, match="ViTImageProcessorPil and ViTForImageClassification do not fit"):
            example_inputs(_vit().eval(), processor=ViTImageProcessorPil(size={"height": 64, "width": 64}))

    def test_a_feature_extractor_alone(self) -> None:
        extractor = transformers.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=16000)
        inputs = example_inputs(_speech().eval(), processor=extractor)
        assert inputs["input_values"].shape == (1, 8000)

    def test_text_and_image_together(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        words = {
            "<unk>": 0,
            "<s>": 1,
            "</s>": 2,
            **{f"w{index}": index for index in range(3, 9)},
            "<image>": 9,
            "A": 10,
            "tiny": 11,
        }
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", additional_special_tokens=["<image>"]
        )
        size = {"height": 32, "width": 32}
        images = CLIPImageProcessorPil(size=size, crop_size=size)
        processor = transformers.LlavaProcessor(
            images,
            fast,
            patch_size=8,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,
        )
        inputs = example_inputs(_llava().eval(), processor=processor)
        assert inputs["pixel_values"].shape == (1, 3, 32, 32) and int((inputs["input_ids"] == 9).sum()) == 16
