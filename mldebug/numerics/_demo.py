"""The demo: a tiny T5 is trained in fp16 until its feed-forward overflows, as mT5's did, and the recorder finds it."""

from __future__ import annotations

import importlib.resources
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport, NumericsWarning

_SEED = 2
_STEPS = 300  # a bound: the overflow comes after some 80 steps; other processors round differently
_BATCH, _LENGTH = 4, 16  # sentences and words
_PAD, _END, _MASK, _FIRST_WORD = 0, 1, 2, 3
_SUSPECT = "encoder.block.0.layer.1.DenseReluDense"
_PRETRAINED = 16.0  # times the initial size: weights of up to 10, as wi_0 and wi_1 of the pretrained mT5 have them
_RATE = 0.1  # of Adafactor: relative to the size of each weight, so large weights grow by large steps


def run_demo(progress: Callable[[str], None] | None = None) -> NumericsReport:
    """Train until the recorder stops the run, and return its report. Takes about 10 s on two cores, downloads nothing.

    `progress` gets a line of text every ten steps: the loss and the abs max of the feed-forward.

    Ctrl-C passes through, with the report of what was seen so far as its attribute `report`.

        report = run_demo(print)
        report.event.module  # "encoder.block.0.layer.1.DenseReluDense.wo"
    """
    tell = progress or _say_nothing
    tell("loading PyTorch and transformers")
    with _own_seed_and_one_thread():
        words, vocabulary = _read_text()
        model = _model(_FIRST_WORD + vocabulary)
        recorder = DebugUnderflowOverflow(model)
        recorder.quiet()  # whoever called this prints the report
        try:
            with recorder:
                return _train(model, words, recorder, tell)
        except KeyboardInterrupt as stopped:
            stopped.report = recorder.report  # type: ignore[attr-defined]
            raise


def _train(
    model: nn.Module, words: Tensor, recorder: DebugUnderflowOverflow, tell: Callable[[str], None]
) -> NumericsReport:
    """An ordinary training loop: fill in the masked words of the text."""
    from transformers import Adafactor

    adafactor: Any = Adafactor  # has no types
    optimizer = adafactor(model.parameters(), lr=_RATE, relative_step=False, scale_parameter=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    tell(f"training a T5 of {size:,} fp16 weights on {len(words)} words")
    largest = _AbsMax(model.get_submodule(f"{_SUSPECT}.wo"))
    try:
        for step in range(_STEPS):
            batch, masked = _batch(words)
            loss = model(input_ids=masked, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                tell(f"step {step:3}  loss {loss.item():6.2f}  abs max of the feed-forward {largest.value:6.0f}")
    except NumericsError as stopped:
        if stopped.report is not None:
            return stopped.report
        raise
    finally:
        largest.remove()
    return recorder.report


def _model(vocabulary: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = dict(
        vocab_size=vocabulary,
        d_model=32,
        d_kv=8,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
        pad_token_id=_PAD,
        eos_token_id=_END,
        decoder_start_token_id=_PAD,
    )
    model: nn.Module = T5ForConditionalGeneration(T5Config(**settings))
    with torch.no_grad():
        for weight in model.get_submodule(_SUSPECT).parameters():
            weight.mul_(_PRETRAINED)
    # half() takes `wo` along. Only from_pretrained knows that T5 keeps it in fp32, which is how mT5 was repaired.
    return model.half().train()


def _batch(words: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the same with three words in ten masked. Both (batch, length)."""
    starts = torch.randint(0, len(words) - _LENGTH, (_BATCH, 1))
    batch = words[starts + torch.arange(_LENGTH)]
    return batch, batch.masked_fill(torch.rand(batch.shape) < 0.3, _MASK)


def _read_text() -> tuple[Tensor, int]:
    """The words of the text as numbers, and how many different ones there are."""
    text = importlib.resources.files("mldebug.numerics").joinpath("demo_text.txt").read_text(encoding="utf-8")
    words = re.findall(r"[a-z]+|[.,:]", text.lower())
    numbers = {word: i for i, word in enumerate(sorted(set(words)), _FIRST_WORD)}
    return torch.tensor([numbers[word] for word in words]), len(numbers)


class _AbsMax:
    """The abs max of what a module returned last, for the lines of progress."""

    def __init__(self, module: nn.Module) -> None:
        self.value = 0.0
        self.remove = module.register_forward_hook(self._look).remove

    def _look(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.value = output.detach().abs().max().item()


@contextmanager
def _own_seed_and_one_thread() -> Iterator[None]:
    """The same run each time, and the caller's random state, threads and warnings as they were.

    Layers as small as these are slower on several threads. What the warnings say is in the report's notes.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericsWarning)
        torch.manual_seed(_SEED)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _say_nothing(_line: str) -> None:
    pass
