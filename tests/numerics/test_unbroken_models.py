"""What users and libraries do to a watched model: copy, save, grow, trace, export, vmap, replicate."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

from .kit import INF, NAN, Net, Plant, agrees, bits, own_hooks, tiny, tokens, train, watch


def test_the_modules_themselves_carry_no_hook() -> None:
    model = Net()
    with DebugUnderflowOverflow(model):
        assert own_hooks(model) == 0
        assert not any("mldebug" in repr(value) for module in model.modules() for value in vars(module).values())


def test_deepcopy_is_another_model() -> None:
    model = Net()
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=1)
        other = copy.deepcopy(model)
        other.plant.value = NAN
        other(torch.ones(2, 4)).mean().backward()
        recorder.poll()
        assert recorder.report.event is None and recorder.batch_number == 1
        with pytest.raises(NumericsError):
            train(model, {0: NAN}, steps=1)


def test_a_saved_model_loads_where_this_package_is_not(tmp_path: Path, run_python: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with DebugUnderflowOverflow(model):
        model(torch.randn(3, 4)).mean().backward()
        torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys; sys.modules['mldebug'] = None\n"
        "import torch; model = torch.load(sys.argv[1], weights_only=False); print(model(torch.ones(2, 4)).shape)"
    )
    done = run_python(program, tmp_path / "model.pt", timeout=110)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 4])" in done.stdout


def test_modules_added_after_attachment() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fc(x))

    model = Grows()
    recorder = DebugUnderflowOverflow(model)
    with pytest.raises(NumericsError) as caught, recorder:
        train(model, steps=1)
        model.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        train(model, steps=1)
        with torch.no_grad():
            nn.init.constant_(model.head[0].weight, 3e38)
            nn.init.constant_(model.head[0].bias, 3e38)
            nn.init.constant_(model.fc.bias, 5.0)
        train(model, steps=1)
    agrees(caught.value.report.event, module="head.0")


def test_a_module_swapped_for_another() -> None:
    model = Net()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        train(model, steps=1)
        model.fc2 = nn.Linear(8, 1)
        model.fc2.requires_grad_(False)
        nn.init.constant_(model.fc2.weight, NAN)
        train(model, steps=1)
    agrees(caught.value.report.event, module="fc2", kind="nan")


def test_load_state_dict_and_to_another_dtype_while_attached() -> None:
    model, other = Net(), Net()
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=1)
        model.load_state_dict(other.state_dict())
        model.to(torch.bfloat16)
        model(torch.ones(2, 4, dtype=torch.bfloat16))
        model.half()
        model(torch.ones(2, 4, dtype=torch.float16))
    assert recorder.report.event is None


def test_trace_holds_no_measurement() -> None:
    model, x = Net(), torch.ones(2, 4)
    plain = str(torch.jit.trace(model, x).inlined_graph)
    with DebugUnderflowOverflow(model):
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), model(x))
    assert str(traced.inlined_graph).count("aten::") == plain.count("aten::")


def test_export_holds_no_measurement() -> None:
    model, x = Net(), torch.ones(2, 4)
    with DebugUnderflowOverflow(model) as recorder:
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
        model.plant.value = NAN
        model(x)
        with pytest.raises(NumericsError):
            recorder.poll()
    assert "mldebug" not in str(program.graph)
    assert "aminmax" not in str(program.graph)


def test_functional_call_grad_and_vmap() -> None:
    model, x = Net(), torch.randn(3, 4)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (one[None],)).pow(2).mean()

    want = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    with DebugUnderflowOverflow(model) as recorder:
        have = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        torch.func.jvp(lambda one: loss(params, one), (x[0],), (torch.ones(4),))
        torch.func.jacrev(lambda one: loss(params, one))(x[0])
    assert recorder.report.event is None
    assert all(torch.equal(have[k], want[k]) for k in want)


def test_functional_call_with_a_nan_parameter() -> None:
    model = Net()
    params = {k: torch.full_like(v, NAN) for k, v in model.named_parameters()}
    event = watch(model, lambda: torch.func.functional_call(model, params, (torch.ones(2, 4),))).event
    agrees(event, module="fc1", kind="nan")


def test_replicas_of_data_parallel() -> None:
    model = nn.Linear(4, 4)
    with DebugUnderflowOverflow(model) as recorder:
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = model.weight, model.bias
        replica(torch.ones(2, 4))
        nn.DataParallel(model)(torch.ones(2, 4))
    assert recorder.report.event is None


def test_threads_that_call_the_model() -> None:
    model = Net()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    model(torch.ones(2, 4))
        except BaseException as error:
            errors.append(error)

    with DebugUnderflowOverflow(model) as recorder:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert recorder.report.event is None


def test_a_recursive_call_of_the_root() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self(self.fc(x), depth - 1) if depth else x

    model = Again()
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=2)
        assert recorder.step == 2
    assert recorder.report.event is None


def test_the_replay_leaves_the_model_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Counts(), nn.Dropout(0.5), Plant(INF))

    def run(model: nn.Module) -> None:
        torch.manual_seed(1)
        model(torch.randn(3, 4)).mean().backward()

    plain, watched = make(), make()
    run(plain)
    after = torch.get_rng_state()
    with DebugUnderflowOverflow(watched, on_event="warn") as recorder:
        run(watched)
        recorder.poll()
        assert torch.equal(torch.get_rng_state(), after)
    agrees(recorder.report.event, module="4", kind="inf")
    assert recorder.report.frames_from == "replay"
    assert bits(plain) == bits(watched)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))


def test_a_forward_that_cannot_be_replayed_gives_the_ring() -> None:
    class Once(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                raise RuntimeError("this forward runs twice and no more")
            return super().forward(x)

    model = Once()
    report = watch(model, lambda: train(model, {1: NAN}, steps=2))
    agrees(report.event, step=1, module="plant", kind="nan")
    assert report.frames_from == "ring"
    assert "ring" in report.text() or any("replay" in note for note in report.notes)
    text = "\n".join(report.frames)
    assert "plant Plant" in text and "output" in text and "fc1 Linear" in text


def test_a_transformers_model_with_past_and_dicts() -> None:
    model = tiny("gpt2", dropout=0.0).eval()
    with DebugUnderflowOverflow(model) as recorder, torch.no_grad():
        out = model(**tokens(), use_cache=True, output_hidden_states=True, output_attentions=True)
        model(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=out.past_key_values)
        model(**tokens(), return_dict=False)
    assert recorder.report.event is None


@pytest.mark.parametrize("replayable", [True, False])
def test_a_forward_longer_than_the_ring(replayable: bool) -> None:
    class Early(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * INF

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.cell = Early(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            spoiled = self.early(x)
            if not replayable:
                x.add_(0.0)
            for _ in range(70_000):
                self.cell(torch.ones(1))
            return spoiled * 0.0

    model = Long()
    report = watch(model, lambda: model(torch.ones(2, 3)))
    agrees(report.event, module="early", kind="inf", role="output")
    assert report.frames_from == ("replay" if replayable else "ring")
