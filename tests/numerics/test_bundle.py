"""dump_dir: a folder that shows the bad result without the model."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, diagnose
from mldebug.numerics.bundle import _bundle
from mldebug.numerics.bundle._bundle_program import program
from mldebug.numerics.ops._kept import KeptCall, keep_call, random_state

from . import cases_ops_more  # noqa: F401 (it enters its cases)
from .cases_ops import OP_TROUBLES
from .kit import Net, agrees, watch

aten = torch.ops.aten


def _executed(file: Path) -> tuple[bool, list[Tensor], str]:
    """(exit status, results, what was printed) of a repro.py, run here."""
    text = file.read_text()
    assert len(text.splitlines()) < 20
    names: dict[str, Any] = {"__file__": str(file)}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        exec(compile(text, str(file), "exec"), names)
    return bool(end.value.code), names["results"], said.getvalue()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("every_key_of_a_row_is_masked_by_a_buffer", "_softmax.default on cpu: 8 of 32 nan or inf"),
        ("square_overflows_and_rsqrt_swallows_it", "8 of 8 nan or inf, at (index, value) [(0, 0, inf)"),
        ("sqrt_behind_where", "aten.div.Tensor on cpu: 1 of 4 nan or inf, at (index, value) [(0, 1, nan)]"),
        ("mask_times_minus_inf", "self: (4,) torch.float32 0 .. 1, 0 nan or inf"),
        ("a_micro_batch_without_a_label", "target: (2,) torch.int64 -100 .. -100, 0 nan or inf"),
        ("cast_to_fp16_overflows", "self: (2, 4) torch.float32 8.8e+04 .. 1.136e+05, 0 nan or inf"),
        ("adams_eps_is_zero_in_fp16", "addcdiv"),  # in place: the parameter as it was before
        ("ctc_outside_of_the_model", "_ctc_loss"),
        ("positions_cast_to_bf16", "are the same as their neighbour, at (index, value) [(256, 256.0)"),
    ],
)
def test_the_program_shows_it(name: str, shown: str, tmp_path: Path) -> None:
    case = OP_TROUBLES[name]
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps, dump_dir=tmp_path)
    folder = tmp_path / f"step{report.event.step}-rank0"
    assert {path.name for path in folder.iterdir()} == {
        "report.json", "environment.json", "operands.safetensors", "repro.py", "inputs.json", "inputs.safetensors",
        "rng.json", "rng.safetensors",
    }  # fmt: skip
    reproduced, _, said = _executed(folder / "repro.py")
    assert reproduced and shown in said, said
    assert json.loads((folder / "report.json").read_text())["event"]["op"] == report.event.op
    assert f"{folder / 'repro.py'}" in report.text()


# Any operation, on operands of any kind.

_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
_LAYOUTS = ["plain", "transposed", "expanded", "strided", "overlapping", "scalar"]


def _operand(draw: Any, dtype: torch.dtype, layout: str | None = None) -> Tensor:
    layout = layout or draw(st.sampled_from(_LAYOUTS))
    base = torch.randn(6, 8).to(dtype)
    base[draw(st.integers(0, 5)), draw(st.integers(0, 7))] = draw(st.sampled_from([float("nan"), float("inf"), 0.0]))
    return {
        "plain": base[:4, :4].clone,
        "transposed": lambda: base[:4, :4].clone().t(),
        "expanded": lambda: base[:1, :4].expand(4, 4),
        "strided": lambda: base[:4, ::2],
        "overlapping": lambda: base.view(-1).as_strided((4, 4), (1, 1), 2),
        "scalar": lambda: base[0, 0],
    }[layout]()


@st.composite
def _calls(draw: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    dtype = draw(st.sampled_from(_DTYPES))
    one, other = _operand(draw, dtype), _operand(draw, dtype)
    plain = [_operand(draw, dtype, "plain") for _ in range(draw(st.sampled_from([1, 3, 20])))]
    real = torch.float32 if dtype.is_complex else dtype
    calls = [
        (aten.add.Tensor, (one, other), {"alpha": 2}),
        (aten.mul.Tensor, (one, one), {}),  # one tensor twice
        (aten.mul_.Tensor, (plain[0], other), {}),
        (aten.cat.default, ([one.reshape(-1), other.reshape(-1)], 0), {}),
        (aten._foreach_mul_.Scalar, (plain, 2.0), {}),
        (aten._foreach_add.ScalarList, (plain, [1.5] * len(plain)), {}),
        (aten._foreach_mul.ScalarList, (plain, [0.5 * i for i in range(len(plain))]), {}),
        (aten.sum.dim_IntList, (plain[0], [0, -1], True), {}),
        (aten._to_copy.default, (_operand(draw, real),), {"dtype": torch.float16, "memory_format": None}),
        (aten._to_copy.default, (_operand(draw, torch.float32),), {"dtype": torch.float8_e5m2}),
        (aten._softmax.default, (_operand(draw, real, "strided"), -1, False), {}),
        (aten.native_layer_norm.default, (_operand(draw, real, "strided"), [4], None, None, 1e-5), {}),
        (aten.masked_fill.Scalar, (one, torch.tensor(True), float("-inf")), {}),
        (aten.where.self, (torch.tensor([True, False, True, False]), one, other), {}),
        (aten.index.Tensor, (plain[0], [None, torch.tensor([1, 2])]), {}),
        (aten.full.default, ([2, 3], float("nan")), {"dtype": dtype, "device": torch.device("cpu")}),
        (aten.native_dropout.default, (_operand(draw, real, "plain"), 0.5, True), {}),
        (aten.bernoulli.p, (_operand(draw, real), 0.5), {}),
        (aten.linalg_vector_norm.default, (_operand(draw, real), float("inf")), {}),
    ]
    return draw(st.sampled_from(calls))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=_calls())
def test_any_operation_comes_out_bit_for_bit(call: Any, tmp_path: Path) -> None:
    func, args, kwargs = call
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    rng = random_state(func, tensors)
    kept = keep_call(func, args, kwargs, (), rng)
    assert isinstance(kept, KeptCall)
    text, operands = program(kept, 'a verdict with \\ and "quotes"')
    (tmp_path / "repro.py").write_text(text)
    _bundle.save(operands, tmp_path / "operands.safetensors")
    results = func(*args, **kwargs)
    found = [results] if isinstance(results, Tensor) else [r for r in results or args[0] if isinstance(r, Tensor)]
    found = found[:1] if "norm" in str(func) and "native" in str(func) else found
    bad, again, _ = _executed(tmp_path / "repro.py")
    assert len(again) == len(found)
    for one, other in zip(found, again, strict=True):
        wide = (torch.view_as_real(one) if one.is_complex() else one).double()
        assert torch.equal(wide.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))
    assert bad == any(not bool(torch.isfinite(one).all()) for one in again)


def test_operands_that_are_too_large_are_cut_to_a_bad_row() -> None:
    left, right = torch.ones(64, 32, dtype=torch.float16), torch.full((32, 8), 100.0, dtype=torch.float16)
    left[41] = 1000.0
    kept = keep_call(aten.mm.default, (left, right), {}, [left @ right], {}, room=2000)
    assert isinstance(kept, KeptCall) and kept.args[0].shape == (1, 32) and "row 41 of 64" in kept.rows
    assert bool(torch.isinf(kept.run()[0]).all())
    both = keep_call(aten.mul.Tensor, (left, left), {}, [left * left], {}, room=2000)
    assert isinstance(both, KeptCall) and both.args[1].shape == (1, 32)
    whole = keep_call(aten.sum.default, (left * 100,), {}, [(left * 100).sum()], {}, room=2000)
    assert whole == "its operands take 0 MB, more than the 0 MB that are kept"
    expanded = torch.ones(1).expand(1 << 30)  # 4 GB in name only
    assert isinstance(keep_call(aten.sum.default, (expanded,), {}, [], {}), KeptCall)


def test_an_operand_that_was_on_another_device() -> None:
    kept = keep_call(aten.log.default, (torch.zeros(2),), {}, (), {})
    assert isinstance(kept, KeptCall)
    kept.args = (torch.zeros(2, device="meta"),)
    with pytest.raises(Exception, match="no plain tensor"):
        program(kept, "")

    class Pretends(Tensor):
        device = torch.device("cuda", 1)

    kept.args = (torch.zeros(2).as_subclass(Pretends),)
    text, _ = program(kept, "")
    assert 'device = "cuda" if torch.cuda.is_available() else "cpu"' in text and "(it was cuda:1)" in text


# The step: inputs and random states.


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: dict[str, Any]) -> Tensor:
        noise = torch.tensor(random.random() + numpy.random.rand())
        return torch.log(torch.dropout(self.fc(x).abs(), 0.5, True)) * scale["by"] * noise


def test_the_step_can_be_run_again(tmp_path: Path) -> None:
    model, x = Drops(), torch.randn(4, 6)[:, 1:5]

    def step(i: int) -> Tensor:
        return model(x, scale={"by": torch.tensor([1.0 + 2.0j]).real, "name": "s"}).sum()

    report = diagnose(model, step, steps=1, dump_dir=tmp_path)
    agrees(report.event, op="aten.log", module="")
    folder = tmp_path / "step0-rank0"
    inputs, states = load_file(folder / "inputs.safetensors"), load_file(folder / "rng.safetensors")
    about, more = json.loads((folder / "inputs.json").read_text()), json.loads((folder / "rng.json").read_text())
    assert about["arguments"]["input.scale.name"] == "s" and about["arguments"]["input[0]"]["shape"] == [4, 4]
    assert torch.equal(inputs["input[0]"], x)
    once = []
    for _ in range(2):
        torch.set_rng_state(states["torch.cpu"])
        random.setstate((more["python"], tuple(states["python"].tolist()), more["gauss_next"]))
        numpy.random.set_state((more["numpy"][0], states["numpy"].numpy().astype("uint32"), *more["numpy"][1:]))
        once.append(model(inputs["input[0]"], scale={"by": inputs["input.scale.by"]}))
    assert torch.equal(*once) and int(torch.isinf(once[0]).sum()) == report.event.operation.results[0].bad


def test_bad_data_has_its_inputs_and_no_program(tmp_path: Path) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    model = Net()
    report = watch(model, lambda: model(x).sum().backward(), dump_dir=tmp_path)
    agrees(report.event, role="input", sample=1)
    folder = tmp_path / "step0-rank0"
    assert not (folder / "repro.py").exists() and (folder / "report.json").exists()
    assert int(load_file(folder / "inputs.safetensors")["input[0]"].isnan().sum()) == 1
    assert "without a repro.py: no operation is known" in report.notes[-1]


# Where and when it is written.


def _overflow(model: nn.Module) -> None:
    model.fc2.weight.data.fill_(3e38)
    model(torch.full((2, 4), 1e4)).sum().backward()


def test_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = Net()
    folder = tmp_path / "al's runs"
    report = watch(model, lambda: _overflow(model), dump_dir=folder)
    agrees(report.event, module="fc2", op="aten.addmm")
    program = folder / "step0-rank0" / "repro.py"
    assert _executed(program)[0]
    assert any(f"python {shlex.quote(str(program))} shows it" in note for note in report.notes)


def test_each_event_has_a_folder_and_none_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3"), monkeypatch.setenv("WORLD_SIZE", "4"), monkeypatch.setenv("LOCAL_RANK", "3")
    (tmp_path / ".step0-rank3.part" / "left").mkdir(parents=True)  # by a process that was killed
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        recorder = DebugUnderflowOverflow(model, on_event="warn", dump_dir=tmp_path)
        recorder.quiet()
        with recorder:
            for i in range(3):
                model.plant.value = float("nan") if i != 1 else None
                model(torch.ones(2, 4))
                opt.step()
        assert recorder.report.events == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "step0-rank3", "step0-rank3-2", "step2-rank3", "step2-rank3-2",
    }  # fmt: skip
    assert not list(tmp_path.glob("*/left"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    model = Net()
    with pytest.warns(UserWarning, match="cannot write the step to"):
        report = watch(model, lambda: _overflow(model), dump_dir=tmp_path / "file")
    assert report.event.op == "aten.addmm" and "was not written" in report.notes[-1]

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_bundle, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        report = watch(model, lambda: _overflow(model), dump_dir=tmp_path / "dump")
    assert report.event.op == "aten.addmm" and not list((tmp_path / "dump").iterdir())


_SCRIPT = """
import sys, time, torch
from torch import nn
if len(sys.argv) > 1:
    from mldebug.numerics.bundle import _bundle
    _bundle.save = lambda *args: time.sleep(600)
model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
nn.init.ones_(model[0].weight)
model(torch.full((2, 4), 3e38)).sum().backward()
"""


def test_the_command_and_a_kill_in_the_middle(tmp_path: Path) -> None:
    script, dump = tmp_path / "train.py", tmp_path / "dump"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "mldebug", "overflow", "--dump-dir", str(dump), "-q", "--", str(script)]
    slow = subprocess.Popen([*command, "slow"], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while not (dump / ".step0-rank0.part" / "report.json").exists() and time.monotonic() < end:
        assert slow.poll() is None
        time.sleep(0.05)
    slow.send_signal(signal.SIGKILL)
    assert slow.wait(60) == -signal.SIGKILL
    assert [path.name for path in dump.iterdir()] == [".step0-rank0.part"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert [path.name for path in dump.iterdir()] == ["step0-rank0"]
    again = [sys.executable, str(dump / "step0-rank0" / "repro.py")]
    shown = subprocess.run(again, check=False, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 1 and "aten.addmm.default on cpu: " in shown.stdout, shown.stderr
