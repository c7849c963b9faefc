"""The role of a config's field, read from its name and value: a width, heads, layers, ids and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Nested dicts that are values, not configs with fields of their own.
OPAQUE = frozenset((
    "id2label", "label2id", "rope_parameters", "rope_scaling", "per_layer_config", "quantization_config",
    "task_specific_params",
    "detectron2_config_args", "auto_map", "pruned_heads", "generation_config", "mtp_per_layer_config", "compress_rates",
    "max_value_projector_patch_to_query_dict", "custom_pipelines", "backbone_kwargs",
))  # fmt: skip


@dataclass
class Level:
    """One config among the nested ones. `path` is "" for the outermost."""

    path: str
    fields: dict[str, Any]
    parent: Level | None = None

    @property
    def type(self) -> str:
        return str(self.fields.get("model_type", ""))

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def number(self, key: str) -> int:
        """The field's value if it is a number, else 0."""
        value = self.fields.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0


def levels(config: dict[str, Any], path: str = "", parent: Level | None = None) -> Iterator[Level]:
    """The config and each config in it, outer ones first."""
    level = Level(path, config, parent)
    yield level
    for key, value in config.items():
        if isinstance(value, dict) and key not in OPAQUE:
            yield from levels(value, level.at(key), level)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_ints(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_int(item) for item in value)


_ID = re.compile(
    r"(token_ids?|token_index|token_idx|tokens_ids|_patch_id|^(pad|bos|eos|unk|mask|sep|cls)_(index|idx|id)|"
    r"^(begin_)?suppress_tokens|decoder_fixing_codes|^(im|image|audio|video|vision|boi|eoi|boa|eoa)\w*_(start|"
    r"end|index)|^(start|end)_token|_token_start|_token_end|blank_id|eoi_id|boi_id|_token_pos)$"
)
# Sizes of kernels and steps, rates, and numbers of what is not part of the network.
_KEEP = re.compile(
    r"(^num_labels|dropout|drop_|_drop|eps|epsilon|_ratio|ratios?$|rate$|rates$|stride|strides|kernel|padding|"
    r"dilation|_type$|version|initializer|init_|_std|theta|coef|factor|_cost|loss|temperature|_index$|_idx$|"
    r"patch_size|patch_temporal|temporal|merge_size|version|_scale$|^scale$|scaling|bandwidth|^sampling|"
    r"frame_rate|hop_length|sample_rate|n_fft|_p$|_prob$|seed|chunk_size_feed_forward|type_vocab_size|"
    r"type_vocab_sizes|num_mel_bins|n_mels|mel_bins|mel_dim|num_classes|bucket|relative_attention|per_group|"
    r"downsample_rate|subsampling_(factor|rate)|n_window|window_size$|_lengths?$|durations|multiple_of|top_k$|"
    r"_size_ratio|max_new_tokens|num_beams|divisor|decoder_n_points|encoder_n_points|num_feature_levels|"
    r"number_output_channels|model_in_dim|^feature_size$|input_feat|mask_time|mask_feature_(prob|length|min)|"
    r"interval|period|offset|_step$|_steps$|pad_to_multiple|_multiple$|num_static|num_dynamic|"
    r"num_time_features|cardinality|^channels$|mem_|num_targets|compress$|reduction$|n_positions_rel|"
    r"max_distance|frequency)"
)
_POSITIONS = re.compile(
    r"(max_\w*position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|"
    r"max_sequence_length|max_seq_len|max_seq_length|model_max_length|max_positions?|^seq_length|^seq_len|max_text_positions|"
    r"max_speech_positions|block_size|text_max_position_embeddings|t2u_max_position_embeddings|position_embedding_size|max_pos_emb|"
    r"max_mel_tokens|max_text_tokens|max_temporal_embeddings|original_max_position_embeddings|pos_emb_time|rel_extent|"
    r"max_ep_len|max_audio_position_embeddings|max_image_position_embeddings|decoder_max_position_embeddings)$"
)
_WINDOW = re.compile(
    r"^(sliding_window|sliding_window_size|attention_chunk_size|local_attention|attention_window|window_length|swa_window|"
    r"local_window_size|local_attention_window_len|attention_window_size|.*_sliding_window|local_attn_chunk_length|"
    r"lsh_attn_chunk_length)$"
)
_VOCAB = re.compile(
    r"(vocab_size|vocab_sizes|codebook_size|num_codes|num_embeddings|^num_embeds|vocabulary_size|padded_vocab|n_vocab|"
    r"text_tokens_vocab|head_out_channels|hash_byte_group_vocab|vocab_size_per_layer_input|vocab_size_base|num_hash_buckets)$"
)
_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|layers|(\w+_)?(encoder|decoder)_layers|num_(encoder|decoder|cross|attention|text|vision|audio|"
    r"spatial|temporal|auxiliary|fusion|residual|adapter|self_attends|latent|transformer|refiner|global|predictor|resampler)_layers|depth|"
    r"\w*_depth|num_blocks|num_transformer_layers|\w+_num_(hidden_)?layers|\w+_n_layers|num_self_attends_per_block|"
    r"num_decoder_blocks|num_encoder_blocks_per|n_input_layers|n_recurrent_layers|n_output_layers|duration_predictor_layers|energy_predictor_layers|"
    r"pitch_predictor_layers|speech_decoder_postnet_layers|num_cross_attention_layers|num_mel_attn_blocks|layer_depth|"
    r"memory_attention_num_layers|memory_fuser_num_layers)$"
)
_NOT_LAYERS = re.compile(
    r"(kv_shared|nextn|max_window|dense_layers|num_hidden_groups|patch_embed|mlp_depth|lstm|feat_extract|^iou_head_depth)"
)
_STAGES = re.compile(
    r"^(depths|depth|blocks_per_stage|num_block_repeats|stage_num_blocks|num_hidden_layers|layer_depths|stage_numb_of_layers|n_attn_blocks|"
    r"num_layers|num_blocks|layers|encoder_depths|decoder_depths)$"
)
_EXPERTS = re.compile(
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts|n_experts|num_total_experts|zero_expert_num)$"
)
_TOPK = re.compile(
    r"^(num_experts_per_tok|num_experts_per_token|moe_top_k|top_k_experts|moe_k|moe_topk|num_selected_experts|num_expert_topk)$"
)
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group|num_limited_groups)$")
_KV = re.compile(r"(num_key_value_heads|n_kv_heads?|num_kv_heads|kv_n_heads|n_head_kv|num_key_value_heads_per_layer)$")
_HEADS = re.compile(
    r"(attention_heads|num_heads|n_heads?|num_attn_heads|_heads|num_query_heads|heads_per_ngram|num_attention_heads_per_layer|"
    r"num_attention_heads_per_stage|decoder_attention_head)$"
)
_HEAD_DIM = re.compile(
    r"(head_dim|^d_kv|^dim_head|_dim_head|head_size|attention_head_size|kv_channels|^d_head|mamba_d_head|key_dim|rope_dim|^linear_\w+_dim|"
    r"_head_dim|index_head_dim|head_width)$"
)
_IMAGE = re.compile(
    r"^(image_size|img_size|input_size|pretrain_image_size|input_image_size|crop_size|image_resolution|image_height|image_width|"
    r"max_image_size|min_image_size|max_img_size|prompt_image_size|train_image_size|vision_image_size|input_resolution|img_height|img_width)$"
)
_QUERIES = re.compile(
    r"^(num_queries|num_query_tokens|num_latents|latent_query_num|resampler_n_latents|resampler_num_latents|"
    r"perceiver_resampler_num_latents|num_denoising|two_stage_num_proposals|max_keypoints_|num_label_tokens|num_negatives|"
    r"train_num_points|num_(qa|object|attr)_labels|num_object_queries|topk_dcn|num_learnable_queries|num_prompt_tokens|num_uid_tokens|expert_capacity|"
    r"index_topk|index_topk_blocks|max_num_patches|num_codevectors_per_group|num_point_queries)$"
)
_POSITIONAL_GRID = re.compile(
    r"^(num_position_embeddings|posemb_grid_size|pos_emb_height|pos_emb_width|init_pos_emb_height|init_pos_emb_width)$"
)
_CHANNELS = re.compile(r"(num_channels|in_channels|in_chans|n_channels|audio_channels|input_channels|image_channels)$")
_CODEBOOKS = re.compile(
    r"^(num_codebooks|n_codebooks|num_code_groups|num_quantizers|audio_num_codebooks|codebook_num|n_codes_total)$"
)
_FILTERS = re.compile(r"^(num_filters|n_filters|decoder_num_filters|encoder_num_filters)$")
_HIDDEN = re.compile(
    r"^(pooler_output_size|hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|emb_dim|embedding_size|embedding_dim|\w*hidden_sizes?|embed_dims|hidden_dims|"
    r"embed_dim_per_stage|\w*_hidden_dim|d_latents|model_dim|n_embed|encoder_hidden_size|decoder_hidden_size|dim_model|width|"
    r"hidden_size_\w+|output_hidden_size|out_hidden_size|vision_hidden_size|text_hidden_size|audio_hidden_size|projection_dim|lm_hidden_size|"
    r"encoder_channels|backbone_channel_list|base_attn_unit_dims)$"
)
_NOT_HIDDEN = re.compile(r"(intermediate|ffn|mlp|moe|expert|feed_forward|head_hidden|per_layer_input)")
_WIDTH = re.compile(
    r"(hidden|dim|dims|dimension|size|sizes|width|widths|channels|channel|units|inner|ffn|rank|features|feature|d_ssm|per_layer_input|dff|d_ff|n_inner|inplanes|"
    r"planes|state|filters|mlp|intermediate|embd|embed|embeds|d_model|d_inner|_in|_out|d_proj|d_latents|channel_list|"
    r"projection|proj_dims|d_embed|ff)$"
)
_NOT_WIDTH = re.compile(
    r"(label_|^block_size|chunk|batch|window|buffer|queue|memory_size|cache|grid|background_size|feat_sizes|feature_sizes|bins|"
    r"pool|masked_unit|ngram|group_size|train_size|speaker|_fc$|segment|crop|state_dim|act_dim|task|prompt_|rel_pos|tokens|"
    r"d_conv|conv_L|max_|min_|resolution|relation|neighbors|tile|tubelet|expand|image_size|residx|feature_layer|keypoint_decoder)"
)


def role_of(key: str, value: Any) -> str | None:
    """What the field is, or None where it is no size. Lists of whole numbers have the role of their numbers."""
    if not (is_int(value) or is_ints(value)):
        return None
    if _ID.search(key):
        return "id"
    if is_vocab(key, value):
        return "vocab"
    if isinstance(value, list) and _STAGES.search(key):
        return "stages"
    for role, pattern in _NAMED:
        if pattern.search(key):
            return role
    if is_int(value) and _LAYERS.search(key) and not _NOT_LAYERS.search(key):
        return "layers"
    if _KEEP.search(key):
        return None
    if _CHANNELS.search(key) and max(value if isinstance(value, list) else [value]) <= 16:
        return None  # of an image or a sound
    if _HEAD_DIM.search(key):
        return "head_dim"
    if _HIDDEN.search(key) and not _NOT_HIDDEN.search(key):
        return "hidden"
    if _WIDTH.search(key) and not _NOT_WIDTH.search(key):
        return "width"
    return None


_NAMED = (
    ("positions", _POSITIONS), ("window", _WINDOW), ("experts", _EXPERTS), ("topk", _TOPK), ("groups", _GROUPS),
    ("kv", _KV), ("heads", _HEADS), ("image", _IMAGE), ("queries", _QUERIES), ("grid", _POSITIONAL_GRID),
    ("codebooks", _CODEBOOKS), ("filters", _FILTERS),
)  # fmt: skip


def is_vocab(key: str, value: Any) -> bool:
    """Whether the field counts the entries of a table that ids look up."""
    return bool(_VOCAB.search(key)) and not key.startswith("type_vocab") and is_int(value)
