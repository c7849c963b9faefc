"""Inputs for any model: keyword arguments that its forward takes, made from its config and signature."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._calls import NUMBER, checked_call
from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._labels import add_labels
from mldebug.tiny.model.inputs._makers import ALWAYS, NEVER, Values, makers_for
from mldebug.tiny.model.inputs._special import SPECIAL
from mldebug.tiny.model.inputs._text import placeholder

TRIES = 60  # forwards to spend on finding the shapes


@checked_call(length=NUMBER, batch=NUMBER, seed=NUMBER)
def example_inputs(
    model: Any,
    *,
    length: int | None = None,
    batch: int = 1,
    tokenizer: Any = None,
    processor: Any = None,
    seed: int = 0,
    labels: bool = True,
) -> dict[str, Any]:
    """Keyword inputs with which `model` runs forward, and gives a loss where its class takes labels.

    `length` is the number of tokens of a text (16 without it, never more than the model has positions). With a
    `processor` a real picture and sound go through it; a `tokenizer` alone gives the text. Otherwise the shapes come
    from config and signature, and are tried until the forward takes them. No shape that it takes: MldebugError with
    the reason that the forward gave.

        inputs = example_inputs(model)
        model(**inputs).loss.backward()
    """
    if not hasattr(model, "config") or not hasattr(model, "forward"):
        raise UsageError(f"{type(model).__name__} is no model of transformers", "give a model with a config")
    facts = Facts(model, length, batch, seed)
    if processor is not None:
        from mldebug.tiny.model.inputs._processor import processed

        inputs = processed(facts, processor)
        _run(facts, inputs)
    else:
        inputs = _search(facts)
        if tokenizer is not None and set(inputs) <= {"input_ids", "attention_mask", "decoder_input_ids", "use_cache"}:
            from mldebug.tiny.model.inputs._processor import with_words

            inputs = with_words(inputs, tokenizer)
    if labels:
        inputs = add_labels(facts, inputs, lambda tried: _run(facts, tried))
    return inputs


def _search(facts: Facts) -> Values:
    """Try shapes until the forward takes them. An error that says what it wants is believed first."""
    extra: list[str] = []
    special = SPECIAL.get(facts.config.model_type)
    furthest: Exception | None = None
    most = -1
    seen: set[str] = set()
    for attempt in range(TRIES):
        inputs: Values = {}
        try:
            inputs = _make(facts, extra)
            if special is not None:
                special(facts, inputs)
            inputs = {name: value for name, value in inputs.items() if value is not None}
            facts.calls = 0
            _run(facts, inputs)
            return inputs
        except Exception as exc:
            if facts.calls > most:  # the attempt that got furthest says what is really wrong
                furthest, most = exc, facts.calls
            state = f"{facts.count}{facts.image_size}{facts.frames}{extra}{facts.choice}"
            if attempt == 0 and "ache" in str(exc) + _where(exc) and "use_cache" not in extra:
                extra.append("use_cache")  # a cache is for generation
                continue
            if state in seen or not (_believe(facts, exc, extra, inputs) or _next_choice(facts)):
                break
            seen.add(state)
    reason = str(furthest).strip().split("\n")[0][:300]
    raise MldebugError(
        f"no example inputs for {type(facts.model).__name__}: {type(furthest).__name__}: {reason}",
        "give it a processor, or call it with inputs of your own",
    ) from furthest


def _make(facts: Facts, extra: list[str]) -> Values:
    facts.generator.manual_seed(facts.generator.initial_seed())
    wanted = [name for name in ALWAYS if name in facts.parameters]
    if "pixel_values" in wanted or "pixel_values_images" in wanted:
        wanted = [name for name in wanted if name != "pixel_values_videos" or name in facts.required()]
    if "input_ids" not in wanted and "decoder_input_ids" not in wanted:
        wanted = [name for name in wanted if name not in ("attention_mask", "mm_token_type_ids")]
    if "input_ids" not in wanted and "attention_mask" in wanted and "attention_mask" not in facts.required():
        wanted.remove("attention_mask")
    for part, names in _TOWERS.items():
        if part in facts.config_dict and facts.config_dict[part] is None:  # it was left out of the model
            wanted = [name for name in wanted if name not in names or name in facts.required()]
    wanted += [name for name in [*facts.required(), *extra] if name not in wanted]
    made: Values = {}
    for name in wanted:
        if name == "input_ids":
            _count_features(facts, made)
        makers = makers_for(facts, name)
        if makers:
            made[name] = makers[min(facts.choice.get(name, 0), len(makers) - 1)](facts, made)
    return made


_TOWERS = {
    "vision_config": ("pixel_values", "pixel_values_videos", "image_position_ids", "image_sizes", "image_grid_thw"),
    "audio_config": ("input_features", "input_features_mask", "input_values"),
}

_GETTERS = {
    "image": ("get_image_features", ("pixel_values", "pixel_values_images", "image_pixel_values", "flattened_patches")),
    "video": ("get_video_features", ("pixel_values_videos",)),
    "audio": ("get_audio_features", ("input_features", "input_values", "audio_input_features")),
}


def _count_features(facts: Facts, made: Values) -> None:
    """Ask the model itself how many features an image or a sound turns into: each needs one placeholder in the text."""
    for kind, (getter, sources) in _GETTERS.items():
        if kind in facts.count or placeholder(facts, kind) is None or not any(name in made for name in sources):
            continue
        facts.count[kind] = (
            _features_of(facts, getter, sources, made) or 1
        )  # the forward itself says where it is another number


def _features_of(facts: Facts, getter: str, sources: tuple[str, ...], made: Values) -> int | None:
    for owner in (facts.model, getattr(facts.model, "model", None), getattr(facts.model, "thinker", None)):
        method = getattr(owner, getter, None)
        if method is None:
            continue
        names = inspect.signature(method).parameters
        tries = [{name: value for name, value in made.items() if name in names}]
        if not tries[0]:  # a decorator hides what it takes
            tries = [{name: made[name] for name in sources if name in made}, made]
        for given in tries:
            with torch.no_grad(), contextlib.suppress(Exception):  # the forward itself will say why
                return _rows(method(**given))
    return None


def _rows(found: Any) -> int | None:
    """How many feature vectors there are in what a get_..._features returned."""
    pooled = getattr(found, "pooler_output", None)
    if pooled is None:
        pooled = (
            getattr(found, "last_hidden_state", None) if not isinstance(found, (list, tuple, torch.Tensor)) else found
        )
    if isinstance(pooled, torch.Tensor):
        return pooled.numel() // pooled.shape[-1] if pooled.dim() > 1 else 1
    if isinstance(pooled, (list, tuple)):
        counts = [_rows(item) for item in pooled if isinstance(item, (torch.Tensor, list, tuple))]
        return sum(count or 0 for count in counts) or None
    return None


def _run(facts: Facts, inputs: Values) -> Any:
    """The forward, without gradients. Counts the calls of modules that came to their end."""

    def count(*_given: Any) -> None:
        facts.calls += 1

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        with torch.no_grad(), _quiet_random(facts):
            return facts.model(**inputs)
    finally:
        handle.remove()


@contextlib.contextmanager
def _quiet_random(facts: Facts) -> Iterator[None]:
    """The forward draws the same numbers each time, and the caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(facts.generator.initial_seed())
        yield


_MISMATCH = re.compile(
    r"(image|video|audio|multimodal|placeholder)[^.\n]{0,60}?tokens?[^.\n]{0,60}?"
    r"(?:do not|don't|does not) match.{0,20}?tokens: (\d+),?\s*(?:and )?\w*\s*features:? ?(\d+)",
    re.IGNORECASE | re.DOTALL,
)


def _believe(facts: Facts, exc: Exception, extra: list[str], inputs: Values) -> bool:
    """Change what the error asks to change. False where it asks for nothing that can be changed."""
    text = str(exc)
    if found := _MISMATCH.search(text):
        kind = found[1].lower() if found[1].lower() in _GETTERS else "image"
        features, now = int(found[3]), facts.count.get(kind, 0)
        width = facts.number("hidden_size", within=("text_config", "llm_config", "language_config"))
        if features == now and width and now % width == 0:  # some count the numbers, not the vectors
            features = now // width
        if features != now and features < 20000:
            facts.count[kind] = features
            return True
    found = re.search(r"image placeholder tokens \((\d+)\) does not match .{0,60}?\((\d+)\)", text)
    if found and int(found[2]) != facts.count.get("image"):
        facts.count["image"] = int(found[2])
        return True
    if found := re.search(r"size \(?(\d+)\D{1,4}(\d+)\)? ?doesn't match.*?\(?(\d+)\D{1,4}(\d+)\)?", text):
        wanted = int(found[3]), int(found[4])
        if wanted != facts.size:
            facts.image_size = wanted
            return True
    found = re.search(r"to be of length (\d+), but found (\d+)", text)
    if found and facts.frames != int(found[1]):
        facts.frames = int(found[1])
        return True
    found = re.search(r"is not a multiple of (\d+)", text)
    if found and facts.step != int(found[1]):
        facts.step = int(found[1])
        return True
    for name in facts.parameters:
        missing = name not in inputs and name not in extra and name not in NEVER
        named = missing and re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)
        if missing and (named or name in _none_at_fault(exc)) and makers_for(facts, name):
            extra.append(name)
            return True
    return False


def _where(exc: Exception) -> str:
    """The files in which an error arose."""
    return " ".join(
        frame.f_code.co_filename.rpartition("/")[2] for frame, _line in traceback.walk_tb(exc.__traceback__)
    )


def _none_at_fault(exc: Exception) -> set[str]:
    """The variables that are None in the lines on which a forward failed over None."""
    if "NoneType" not in str(exc):
        return set()
    found: set[str] = set()
    for frame, line in list(traceback.walk_tb(exc.__traceback__))[-4:]:
        words = re.findall(r"[a-z]\w+", linecache.getline(frame.f_code.co_filename, line))
        found |= {word for word in words if word in frame.f_locals and frame.f_locals[word] is None}
    return found


def _next_choice(facts: Facts) -> bool:
    """Count on through the shapes of all inputs that have several, those with the fewest fastest."""
    several = [
        (name, len(makers_for(facts, name)))
        for name in (*ALWAYS, *facts.required())
        if name in facts.parameters and len(makers_for(facts, name)) > 1
    ]
    facts.count.clear()
    facts.image_size = facts.frames = None
    for name, shapes in sorted(dict(several).items(), key=lambda item: item[1]):
        now = facts.choice.get(name, 0) + 1
        if now < shapes:
            facts.choice[name] = now
            return True
        facts.choice[name] = 0
    return False
