"""What no rule by role can know, as data: one entry per model type."""

from __future__ import annotations

from typing import Any

# Fields that the default config of a type lacks and that a model cannot do without.
FILL: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "aya_vision": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        }
    },
    "beit": {"out_indices": [3, 5, 7, 11]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 11], "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hiera": {"decoder_hidden_size": 512, "decoder_depth": 8, "decoder_num_heads": 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "informer": {"prediction_length": 24},
    "lfm2_moe": {"layer_types": [*["conv", "conv", "full_attention"] * 10, "conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "step3p5": {"sliding_window": 512},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {"prediction_length": 24},
    "wav2vec2-bert": {"vocab_size": 32},
}

# model_type -> {field: tiny value}. It holds for a config of that type at any level. Dotted names reach into a nested
# config, "**.name" into all of them, and "+name" is a field that the source may lack. Of values, "keep" is that of the
# source, "=name" that of another field, and "=4*name" four times that.
SET: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "align_vision_model": {
        "width_coefficient": 0.25,
        "depth_coefficient": 1.0,
        "in_channels": "keep",
        "out_channels": "keep",
        "hidden_dim": 320,
    },
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 164},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1], "num_res_blocks": 1},
    "aria": {"projector_patch_to_query_dict": {"16": 4}, "max_value_projector_patch_to_query_dict": 4},
    "bit": {"num_groups": 8},
    "bridgetower_vision_model": {"hidden_size": 64},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1], "num_res_blocks": 1},
    "clap_audio_model": {"spec_size": "keep", "window_size": "keep", "patch_embeds_hidden_size": 8, "hidden_size": 64},
    "clvp_encoder": {"hidden_size": 64, "num_attention_heads": 2},
    "cvt": {"depth": [1, 2, 3]},
    "dac": {"encoder_hidden_size": 4, "decoder_hidden_size": 64, "hidden_size": 64},
    "depth_pro": {"intermediate_hook_ids": [1, 0], "patch_size": "=patch_model_config.image_size"},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "sliding_attention", "mlp", "full_attention", "mlp"],
    },
    "dots3_note_audio_encoder": {
        "conv_output_size": "=16*downsample_hidden_size",
        "adapter_input_size": "=hidden_size",
    },
    "efficientnet": {
        "width_coefficient": 0.25,
        "depth_coefficient": 1.0,
        "in_channels": "keep",
        "out_channels": "keep",
        "hidden_dim": 320,
    },
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters.mrope_section": [1, 1, 2]},
    "esmfold2": {
        "atom_feature_dim": "keep",
        "single_inputs_size": 83,
        "**.output_dim": 16,
        "**.num_uid_rope_pairs": 1,
        "**.num_spatial_rope_pairs_per_axis": 1,
        "**.num_attention_heads": 2,
        "**.num_key_value_heads": 2,
        "**.head_dim": 8,
        "esmc_config.head_dim": 16,
    },
    "glm5_next_text": {"index_topk": 16},
    "glmasr_encoder": {"intermediate_size": "=4*hidden_size"},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "inkling_audio": {"mel_vocab_size": 16},
    "jamba": {"intermediate_size": 64},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1], "num_res_blocks": 1},
    "layoutlmv2": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8},
    "layoutlmv3": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "llama4_vision_model": {
        "hidden_size": 16,
        "intermediate_size": 64,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "mgp-str": {"num_bpe_labels": 256, "num_wordpiece_labels": 256},
    "mobilenet_v1": {"depth_multiplier": 0.125},
    "mobilenet_v2": {"depth_multiplier": 0.125},
    "mobilevitv2": {"width_multiplier": 0.25},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "neucodec": {"encoder_hidden_size": 2, "**.hidden_size": 32, "**.output_hidden_size": 32},
    "ovis2": {"hidden_size": "=text_config.hidden_size"},
    "qwen2_vl": {"vision_config.hidden_size": "=text_config.hidden_size"},
    "regnet": {"groups_width": 8},
    "rf_detr_dinov2": {
        "window_block_indexes": [0, 1],
        "num_hidden_layers": 2,
        "out_indices": [2],
        "out_features": ["stage2"],
        "stage_names": ["stem", "stage1", "stage2"],
    },
    "seggpt": {"image_size": [128, 64], "merge_index": 0},
    "shieldgemma2": {"+yes_token_index": 10, "+no_token_index": 11},
    "superglue": {"keypoint_detector_config.max_keypoints": 16},
    "timesfm": {"horizon_length": 32},
    "timesfm2_5": {"output_quantile_len": 32, "horizon_length": 32},
    "tvp": {"visual_prompt_size": 16, "num_frames": 4, "max_img_size": 64},
    "univnet": {"model_hidden_channels": 4, "kernel_predictor_hidden_channels": 8},
    "vipllava": {"vision_feature_layer": [-2, -3, -1, 0, 1]},
    "vitmatte": {"hidden_size": "=backbone_config.hidden_size"},
    "vits": {"upsample_initial_channel": 16},
    "voxtral_encoder": {"intermediate_size": "=4*hidden_size"},
    "xcodec2": {"encoder_hidden_size": 2, "**.hidden_size": 32, "**.output_hidden_size": 32},
}

# Sections of the rotary dimensions that a class takes where its config names none.
SECTIONS: dict[str, list[int]] = {
    "ernie4_5_vl_moe_text": [22, 22, 20],
    "glm4v_moe_text": [8, 12, 12],
    "glm4v_text": [8, 12, 12],
    "glm_image_text": [8, 12, 12],
    "glm_ocr_text": [8, 12, 12],
    "paddleocr_vl_text": [16, 24, 24],
    "qwen2_5_omni_talker": [16, 24, 24],
    "qwen2_5_omni_text": [16, 24, 24],
    "qwen2_5_vl_text": [16, 24, 24],
    "qwen2_vl_text": [16, 24, 24],
}

# The class to build where the auto classes name none, or one that is not the whole model.
CLASSES: dict[str, str] = {
    "shieldgemma2": "ShieldGemma2ForImageClassification",  # the auto classes' one does not load what it saves
}
