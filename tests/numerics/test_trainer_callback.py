"""OverflowCallback and `--debug underflow_overflow` with the real Trainer of transformers."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mldebug.numerics import NumericsError
from mldebug.numerics.frameworks._callback import OverflowCallback
from mldebug.numerics.frameworks._transformers import patch_transformers, watched_already

from .kit import INF, agrees, bits, hooks_now, tiny


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    import transformers
    import transformers.trainer

    return transformers


@pytest.fixture
def train(hf: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """Train a tiny GPT-2 for six steps; (the trainer, the losses it logged). `spoil` and `boom` are steps."""

    class Losses(hf.TrainerCallback):
        def __init__(self, spoil: int, boom: int) -> None:
            self.spoil, self.boom = spoil, boom
            self.losses: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == self.boom:
                raise KeyError("boom")
            if state.global_step == self.spoil:
                with torch.no_grad():
                    model.transformer.h[1].mlp.c_fc.bias[0] = INF

    def run(*callbacks: Any, spoil: int = -1, boom: int = -1, resume: Any = None, **options: Any) -> Any:
        model = tiny("gpt2")
        generator = torch.Generator().manual_seed(2)
        ids = [torch.randint(3, 64, (8,), generator=generator) for _ in range(32)]
        data = [{"input_ids": row, "labels": row} for row in ids]
        given = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 2, "max_steps": 6, "report_to": [],
            "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
            "dataloader_pin_memory": False,
        }  # fmt: skip
        own = Losses(spoil, boom)
        arguments = hf.TrainingArguments(**{**given, **options})
        trainer = hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[*callbacks, own])
        trainer.train(resume_from_checkpoint=resume)
        return trainer, own.losses

    return run


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_losses_and_weights_have_the_same_bits(train: Callable[..., Any], options: dict[str, Any]) -> None:
    plain, losses = train(**options)
    callback = OverflowCallback()
    watched, with_it = train(callback, **options)
    assert with_it == losses and bits(watched.model) == bits(plain.model)
    assert callback.report is not None and callback.report.ok and callback.report.steps == 6
    assert callback.recorder is None


def test_steps_are_those_of_the_optimizer(train: Callable[..., Any]) -> None:
    callback = OverflowCallback()
    train(callback, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    report = callback.report
    assert report is not None
    assert (report.steps, report.batches - report.eval_batches, report.eval_batches) == (6, 12, 2)


def test_an_event_ends_train_and_its_report_is_saved(train: Callable[..., Any], tmp_path: Path) -> None:
    before = hooks_now()
    callback = OverflowCallback()
    with pytest.raises(NumericsError) as caught:
        train(callback, spoil=2)
    agrees(caught.value.report.event, step=1, module="transformer.h.1.mlp.c_fc", kind="inf", phase="optimizer")
    saved = json.loads((tmp_path / "out" / "overflow_report.json").read_text())
    assert saved["event"]["module"] == "transformer.h.1.mlp.c_fc"
    assert (tmp_path / "out" / "overflow_report.html").stat().st_size > 1000
    assert hooks_now() == before and callback.recorder is None


def test_warn_goes_on_to_the_end(train: Callable[..., Any]) -> None:
    callback = OverflowCallback(on_event="warn", folder="")
    train(callback, spoil=2)
    assert callback.report is not None and callback.report.steps == 6
    agrees(callback.report.event, step=1, kind="inf")


def test_nothing_is_left_when_another_exception_ends_the_run(hf: ModuleType, train: Callable[..., Any]) -> None:
    before, own = hooks_now(), hf.Trainer.train
    callback = OverflowCallback()
    with pytest.raises(KeyError, match="boom"):
        train(callback, boom=3)
    assert hooks_now() == before and callback.recorder is None
    assert callback.report is not None and callback.report.event is None and callback.report.steps == 3
    del callback
    gc.collect()
    assert hf.Trainer.train is own


def test_a_resumed_run_goes_on_with_its_numbers_and_checkpoints_are_the_same(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    without, with_it = tmp_path / "without", tmp_path / "with"
    train(output_dir=str(without), save_strategy="steps", save_steps=3)
    train(OverflowCallback(), output_dir=str(with_it), save_strategy="steps", save_steps=3)
    names = [sorted(path.name for path in (folder / "checkpoint-3").iterdir()) for folder in (without, with_it)]
    states = [json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text()) for folder in (without, with_it)]
    assert names[0] == names[1] and states[0]["stateful_callbacks"] == states[1]["stateful_callbacks"]
    callback = OverflowCallback(folder="")
    with pytest.raises(NumericsError) as caught:
        train(callback, spoil=5, resume=str(with_it / "checkpoint-3"))
    agrees(caught.value.report.event, step=4)


def test_a_copy_starts_anew(hf: ModuleType) -> None:
    callback = OverflowCallback(on_event="warn")
    again = pickle.loads(pickle.dumps(callback))
    assert isinstance(again, OverflowCallback) and isinstance(again, hf.TrainerCallback)
    assert again._options == {"on_event": "warn"} and again.recorder is None


def test_the_flag_uses_our_recorder(hf: ModuleType, train: Callable[..., Any]) -> None:
    before, own = hooks_now(), (hf.trainer.DebugUnderflowOverflow, hf.debug_utils.DebugUnderflowOverflow)
    undo = patch_transformers()
    try:
        with pytest.raises(NumericsError) as caught:
            train(spoil=2, debug="underflow_overflow")
        assert caught.value.report.steps == 2
        assert hooks_now() == before
        train(debug="underflow_overflow")  # ends well
        assert hooks_now() == before
    finally:
        undo()
    assert (hf.trainer.DebugUnderflowOverflow, hf.debug_utils.DebugUnderflowOverflow) == own
    assert not hasattr(hf.Trainer.train, "__wrapped__")


def test_under_the_command_the_flag_adds_nothing(hf: ModuleType) -> None:
    undo = watched_already()
    try:
        model = tiny("gpt2")
        assert hf.debug_utils.DebugUnderflowOverflow(model) is None
        assert not any(module._forward_hooks for module in model.modules())
    finally:
        undo()


def test_the_class_is_ours_where_transformers_is_imported_later(run_python: Callable[..., Any]) -> None:
    done = run_python(
        "import sys\n"
        "from mldebug.numerics.frameworks._transformers import patch_transformers\n"
        "undo = patch_transformers()\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers.debug_utils import DebugUnderflowOverflow\n"
        "import torch\n"
        "print(type(DebugUnderflowOverflow(torch.nn.Linear(2, 2))).__module__)\n"
        "undo()\n"
        "from transformers import debug_utils\n"
        "print(debug_utils.DebugUnderflowOverflow.__module__)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mldebug.numerics._recorder", "transformers.debug_utils"]
