"""Which class of models a config is for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny.model._quirks import CLASSES


def class_of(config: Mapping[str, Any], model_class: str | None = None, trust_remote_code: bool = False) -> Any:
    """The class of models that a config is for."""
    import transformers

    model_type = str(config.get("model_type"))
    if model_class is not None:
        found = getattr(transformers, model_class, None)
        if found is None or not inspect.isclass(found):
            import difflib

            near = difflib.get_close_matches(model_class, dir(transformers), 1)
            raise UsageError(
                f"transformers has no class {model_class}",
                f"did you mean {near[0]}?" if near else "see its documentation",
            )
        found = _concrete(found, config)
        if not _takes(found, model_type):
            wanted = getattr(found.config_class, "model_type", "")
            raise UsageError(
                f"{model_class} is for models of the type {wanted}, and the source is of the type {model_type}",
                "choose another class, or none",
            )
        return found
    auto_map = config.get("auto_map")
    if trust_remote_code and isinstance(auto_map, Mapping):
        for key in (
            "AutoModelForCausalLM",
            "AutoModelForImageTextToText",
            "AutoModelForSeq2SeqLM",
            "AutoModelForMaskedLM",
            "AutoModel",
        ):
            if key in auto_map:
                from transformers.dynamic_module_utils import get_class_from_dynamic_module

                return get_class_from_dynamic_module(
                    auto_map[key], str(config.get("_name_or_path") or "."), local_files_only=True
                )
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if inspect.isclass(found) and _takes(found, model_type):
            return found
    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    for table in _TABLES:
        name = _auto_names(table).get(model_type)
        if isinstance(name, (list, tuple)):
            name = name[0]
        found = getattr(transformers, name, None) if name else None
        if found is not None:
            return found
    if isinstance(auto_map, Mapping) and not trust_remote_code:
        raise MldebugError(
            f"the code of {model_type} comes with its config", "read that code, then --trust-remote-code"
        )
    found = _by_config_class(model_type)
    if found is None:
        raise MldebugError(
            f"transformers has no model class for the type {model_type}",
            "it is part of another model: name that, or give a model class",
        )
    return found


def _takes(found: Any, model_type: str) -> bool:
    """Whether a class of models takes configs of the type. One that says nothing is believed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wanted = getattr(found, "config_class", None)
    return wanted is None or model_type not in CONFIG_MAPPING or issubclass(CONFIG_MAPPING[model_type], wanted)


# The auto classes in the order in which their model is the most complete one. MODEL comes last: it has no head.
_TABLES = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_RNNT_MAPPING_NAMES", "MODEL_FOR_TDT_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES", "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES", "MODEL_FOR_INSTANCE_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES", "MODEL_FOR_KEYPOINT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES", "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES",
    "MODEL_FOR_TEXT_RECOGNITION_MAPPING_NAMES", "MODEL_FOR_TABLE_RECOGNITION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING_NAMES", "MODEL_FOR_IMAGE_MATTING_MAPPING_NAMES",
    "MODEL_FOR_POSE_ESTIMATION_MAPPING_NAMES", "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "MODEL_FOR_DECISION_MAPPING_NAMES", "MODEL_FOR_RETRIEVAL_MAPPING_NAMES", "MODEL_MAPPING_NAMES",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_FOR_IMAGE_MAPPING_NAMES", "MODEL_FOR_AUDIO_TOKENIZATION_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES",
)  # fmt: skip


def _auto_names(table: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    names: Mapping[str, Any] = getattr(modeling_auto, table, {})
    return names


def _concrete(found: Any, config: Mapping[str, Any]) -> Any:
    """An auto class stands for the class that it would make."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mapping = getattr(found, "_model_mapping", None)
    if mapping is None:
        return found
    config_class = CONFIG_MAPPING[str(config.get("model_type"))]
    if config_class not in mapping:
        raise UsageError(
            f"{found.__name__} has no model for the type {config.get('model_type')}", "choose another class, or none"
        )
    made = mapping[config_class]
    return made[0] if isinstance(made, (list, tuple)) else made


def _by_config_class(model_type: str) -> Any:
    """The model in the config's own package that takes this config, such as the text tower of a pair."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    package = config_class.__module__.rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    except ImportError:
        return None
    fits = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
        and value.__dict__.get("config_class", getattr(value, "config_class", None)) is config_class
        and "forward" in vars(value)
    ]  # fmt: skip
    return fits[-1] if fits else None
