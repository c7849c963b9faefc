"""What a few architectures want beside the common inputs, one small function each, by model type."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._makers import Values
from mldebug.tiny.model.inputs._text import placeholder


def _dia(facts: Facts, made: Values) -> None:
    """Several channels of codes, last."""
    decoder = facts.config_dict["decoder_config"]
    made["decoder_input_ids"] = facts.ints(facts.batch, 8, decoder["num_channels"], high=decoder["vocab_size"])


def _dia_decoder(facts: Facts, made: Values) -> None:
    made["input_ids"] = facts.ints(facts.batch, 8, facts.config.num_channels, high=facts.config.vocab_size)
    made["attention_mask"] = None
    made["encoder_hidden_states"] = facts.floats(facts.batch, 4, facts.config.cross_hidden_size)


def _csm_depth(facts: Facts, made: Values) -> None:
    """One code for each codebook, in order."""
    made["input_ids"] = facts.ints(facts.batch, max(2, facts.config.num_codebooks), high=facts.config.vocab_size)
    made["attention_mask"] = torch.ones_like(made["input_ids"])


def _moshi_depth(facts: Facts, made: Values) -> None:
    _csm_depth(facts, made)
    made["last_hidden_state"] = facts.floats(facts.batch, 1, facts.config.input_size)


def _flava(facts: Facts, made: Values) -> None:
    """Some patches of the picture are masked, and the codebook reads it at its own size."""
    image = made["pixel_values"]
    side = image.shape[-1] // facts.patch
    mask = torch.zeros(facts.batch, side, side, dtype=torch.long)
    mask[:, 0] = 1
    codebook = facts.config_dict.get("image_codebook_config") or {}
    groups = 2 ** (int(codebook.get("num_groups", 4)) - 1)
    made["bool_masked_pos"] = mask
    made["codebook_pixel_values"] = facts.floats(facts.batch, 3, side * groups, side * groups)


def _audio_lengths(facts: Facts, made: Values) -> None:
    """All clips in a row, with the length of each."""
    frames = 2 * facts.number("n_window", default=32)
    made["input_features"] = facts.floats(facts.mels, frames)
    made["feature_lens"] = torch.tensor([frames])
    made["aftercnn_lens"] = torch.tensor([(frames - 1) // 2 + 1])


def _realtime(facts: Facts, made: Values) -> None:
    """One token for each stretch of audio."""
    count = max(1, made["input_features"].shape[-1] // facts.number("audio_length_per_tok", default=8))
    made["input_ids"] = facts.ids(facts.batch, count)
    made["attention_mask"] = torch.ones_like(made["input_ids"])


def _rag(facts: Facts, made: Values) -> None:
    """Documents as a retriever hands them over."""
    documents = facts.number("n_docs", default=2)
    made["context_input_ids"] = facts.ids(facts.batch * documents, facts.length)
    made["context_attention_mask"] = torch.ones_like(made["context_input_ids"])
    made["doc_scores"] = facts.floats(facts.batch, documents)


def _seggpt(facts: Facts, made: Values) -> None:
    """The image is half as high as what the model sees: the prompt is put on top of it."""
    height, width = facts.size
    for name in ("pixel_values", "prompt_pixel_values", "prompt_masks"):
        made[name] = facts.floats(facts.batch, facts.channels, height // 2, width)


def _speech(facts: Facts, made: Values) -> None:
    """A second of sound for the encoder, and nothing that says the same again."""
    made.pop("input_features", None)
    made.pop("inputs", None)
    made["input_values"] = facts.floats(facts.batch, 16000)


def _splinter(facts: Facts, made: Values) -> None:
    """A question token to answer."""
    made["input_ids"][:, 1] = facts.config.question_token_id


def _sound_only(_facts: Facts, made: Values) -> None:
    """The forward takes sound or text, not both."""
    made["input_ids"] = made["attention_mask"] = None


def _frames_in_batch(facts: Facts, made: Values) -> None:
    """The frames of a video are rows of the batch."""
    made["pixel_values"] = facts.floats(facts.number("num_frames", default=8), facts.channels, *facts.size)


def _language(facts: Facts, made: Values) -> None:
    made["lang_ids"] = torch.zeros(facts.batch, dtype=torch.long)


def _reformer(facts: Facts, made: Values) -> None:
    """Trained only at the one length that its axial positions make."""
    length = math.prod(facts.config.axial_pos_shape)
    if facts.config.axial_pos_embds and length <= (facts.positions or 0):
        made["input_ids"] = facts.ids(facts.batch, length)
        made["attention_mask"] = torch.ones_like(made["input_ids"])


def _qwen2_audio(facts: Facts, made: Values) -> None:
    """A placeholder for each feature: of a single one it would think that the text is not expanded yet."""
    token, features = placeholder(facts, "audio") or 0, made["input_features"].shape[-1] // 4
    ids = made["input_ids"]
    plain = ids[ids != token].reshape(facts.batch, -1)[:, : max(2, (facts.positions or 128) - features)]
    sound = torch.full((facts.batch, features), token)
    made["input_ids"] = torch.cat([plain[:, :1], sound, plain[:, 1:]], dim=1)
    made["attention_mask"] = torch.ones_like(made["input_ids"])


def _robot(facts: Facts, made: Values) -> None:
    """One camera, and a chunk of actions to predict."""
    made["pixel_values"] = facts.floats(facts.batch, 1, facts.channels, *facts.size)
    made["pixel_attention_mask"] = torch.ones(facts.batch, 1, dtype=torch.bool)
    made["actions"] = facts.floats(facts.batch, facts.number("chunk_size"), facts.number("max_action_dim"))
    made["state"] = facts.floats(facts.batch, facts.number("max_state_dim"))


def _speech_frames(facts: Facts, made: Values) -> None:
    made["hidden_states"] = facts.floats(facts.batch, 64, facts.config.input_size)
    made["mask"] = torch.ones(facts.batch, 64, dtype=torch.bool)


def _detector(facts: Facts, made: Values) -> None:
    """One level of features with its positions."""
    width = facts.config.hidden_size
    made["vision_features"] = [facts.floats(facts.batch, width, 4, 4)]
    made["vision_pos_embeds"] = [facts.floats(facts.batch, width, 4, 4)]
    made["text_features"] = facts.floats(facts.batch, 6, width)


def _no_cache(_facts: Facts, made: Values) -> None:
    """The state that a cache keeps is changed in place, which gradients do not survive."""
    made["use_cache"] = False


def _delay(facts: Facts, made: Values) -> None:
    """An embedding of the delay that the tokens have."""
    made["t_cond"] = facts.floats(facts.batch, 1, facts.config.hidden_size)


def _drawing(facts: Facts, made: Values) -> None:
    """A picture to read and the grid of one to draw."""
    made["image_grid_thw"] = torch.tensor([facts.grid, facts.grid] * facts.batch)
    made["images_per_sample"] = torch.tensor([2] * facts.batch)


def _drafting(facts: Facts, made: Values) -> None:
    """States of several layers of the model that is helped, side by side."""
    width = facts.config.hidden_size
    wide = [module.in_features for module in facts.model.modules() if isinstance(module, torch.nn.Linear)]
    made["context_hidden_states"] = facts.floats(
        facts.batch, facts.length, max((size for size in wide if size % width == 0), default=width)
    )


SPECIAL: dict[str, Callable[[Facts, Values], None]] = {
    "glm_image": _drawing,
    "muse_glimmer_assistant": _drafting,
    "phi4_multimodal_audio": _speech_frames,
    "pi0": _robot,
    "rwkv": _no_cache,
    "sam3_detr_encoder": _detector,
    "sam3_lite_text_detr_encoder": _detector,
    "voxtral_realtime_text": _delay,
    "csm_depth_decoder_model": _csm_depth,
    "dia": _dia,
    "dia_decoder": _dia_decoder,
    "flava": _flava,
    "moshi_depth": _moshi_depth,
    "pop2piano": _sound_only,
    "qwen2_5_omni_audio_encoder": _audio_lengths,
    "qwen3_omni_moe_audio_encoder": _audio_lengths,
    "rag": _rag,
    "qwen2_audio": _qwen2_audio,
    "reformer": _reformer,
    "seggpt": _seggpt,
    "speech-encoder-decoder": _speech,
    "splinter": _splinter,
    "voxtral_realtime": _realtime,
    "xclip_vision_model": _frames_in_batch,
    "xmod": _language,
}
