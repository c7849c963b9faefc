"""What follows an event: raise, warn, skip, a function."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, MldebugError, NumericsError

from .kit import NAN, Net, agrees, bits, train


def careful(model: nn.Module, plan: dict[int, float], steps: int = 5) -> list[int]:
    """A loop that leaves out the optimizer step of a loss that is not finite."""
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    stepped = []
    for i in range(steps):
        model.plant.value = plan.get(i)
        opt.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).mean()
        if torch.isfinite(loss):
            loss.backward()
            opt.step()
            stepped.append(i)
    return stepped


def test_warn_goes_on() -> None:
    model = Net()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with DebugUnderflowOverflow(model, on_event="warn") as recorder:
            assert careful(model, {1: NAN}) == [0, 2, 3, 4]
    agrees(recorder.report.event, batch=1, module="plant")


@pytest.mark.parametrize("last", [False, True], ids=["", "at the end"])
@pytest.mark.parametrize("kind", ["left out", "applied", "accumulated"])
def test_the_report_knows_whether_the_program_left_a_bad_batch_out(kind: str, last: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with DebugUnderflowOverflow(model, on_event=lambda event: None) as recorder:
        recorder.quiet()
        for i in range(4 if last else 6):
            if kind != "accumulated" or i != 3:
                optimizer.zero_grad()
            out = model(torch.ones(2, 4))
            (torch.log(out - out) if i == 2 else out).mean().backward()
            finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
            if (kind == "left out" and finite) or kind == "applied" or (kind == "accumulated" and i != 2):
                optimizer.step()
    notes = [note for note in recorder.report.notes if "did not reach the weights" in note]
    agrees(recorder.report.event, step=2, batch=2, role="loss")
    assert len(notes) == (kind == "left out")
    assert not notes or "batch 2, of the event in step 2" in notes[0]


def test_a_function_gets_the_event_once_per_bad_batch() -> None:
    events: list[Any] = []
    model = Net()
    with DebugUnderflowOverflow(model, on_event=events.append):
        careful(model, {1: NAN, 3: NAN}, steps=6)
    assert [event.batch for event in events] == [1, 3]
    assert all(event.module == "plant" for event in events)


@pytest.mark.parametrize("check", ["step", "each", "async"])
def test_after_a_handled_event_the_next_batch_is_good(check: str) -> None:
    events: list[Any] = []
    model = Net()
    with DebugUnderflowOverflow(model, on_event=events.append, check=check):
        careful(model, {0: NAN})
        assert len(events) == 1
        careful(model, {})
    assert len(events) == 1


def test_a_caught_error_is_no_event_twice() -> None:
    model = Net()
    with DebugUnderflowOverflow(model) as recorder:
        with pytest.raises(NumericsError):
            train(model, {0: NAN}, steps=1)
        train(model, steps=2)
        with pytest.raises(NumericsError) as caught:
            train(model, {1: NAN}, steps=3)
    agrees(caught.value.report.event, batch=4)
    assert recorder.report.event is not None


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw fused"])
def test_skip_drops_the_batch(name: str) -> None:
    from .test_flag_points import OPTIMIZERS

    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        losses = train(model, {1: NAN}, steps=4, optimizer=OPTIMIZERS[name](model.parameters()))
        assert recorder.step == 4, "a skipped step is counted"
    assert len(losses) == 4
    train(twin, steps=4, optimizer=Leave(OPTIMIZERS[name](twin.parameters()), [1]))
    assert bits(model) == bits(twin), "as if the bad batch had not been there"
    agrees(recorder.report.event, step=1, module="plant")


class Leave:
    """An optimizer without the steps named."""

    def __init__(self, optimizer: torch.optim.Optimizer, left_out: list[int]) -> None:
        self.optimizer, self.left_out, self.at = optimizer, left_out, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        if self.at not in self.left_out:
            self.optimizer.step()
        self.at += 1


def test_skip_under_a_scaler() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kept = []
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        for i in range(4):
            model.plant.value = NAN if i == 1 else None
            opt.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            scaler.step(opt)
            scaler.update()
            kept.append(bits(model))
        assert recorder.step == 4
    assert kept[0] == kept[1] != kept[2] != kept[3]
    agrees(recorder.report.event, step=1)


def test_skip_of_an_accumulated_step() -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        train(model, {2: NAN}, steps=3, micro=2)
        assert (recorder.step, recorder.batch_number) == (3, 6)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    agrees(recorder.report.event, step=1, micro_batch=0)


class RootOfZero(nn.Module):
    """Its forward is finite, its gradient is not where the input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * x[0, 0]
        return self.down(torch.where(h > 0, h.abs().sqrt(), 0.0))


@pytest.mark.parametrize("way", ["plain", "compiled", "one of two"])
def test_skip_of_a_step_whose_gradients_are_bad_is_an_event(way: str) -> None:
    torch.manual_seed(0)
    model = RootOfZero()
    called: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    groups = [model.up.parameters(), model.down.parameters()] if way == "one of two" else [model.parameters()]
    optimizers = [torch.optim.SGD(group, 1e-2) for group in groups]
    events = []
    with DebugUnderflowOverflow(called, on_event="skip") as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            before = bits(model.up), bits(model.down)
            for optimizer in optimizers:
                optimizer.zero_grad()
            called(torch.full((6, 4), 0.0 if i == 2 else 1.0)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            if i == 2:
                assert bits(model.up) == before[0] and (bits(model.down) == before[1]) == (way != "one of two")
            events.append(recorder.report.events)
    agrees(recorder.report.event, step=2, phase="backward", kind="nan", op="SqrtBackward0", again="shown", module="")
    assert recorder.report.event.operation.cause == "gradient of sqrt at zero"
    assert events == [0, 0, 1, 1] and recorder.report.dropped_steps == [2]


def test_the_gradients_of_two_optimizers_that_step_together() -> None:
    torch.manual_seed(0)
    model, events = RootOfZero(), []
    optimizers = [torch.optim.SGD(part.parameters(), 1e-2) for part in (model.up, model.down)]
    with DebugUnderflowOverflow(model, on_event=events.append):
        for i in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.full((6, 4), 0.0 if i == 2 else 1.0)).square().mean().backward()
            if i == 3:
                break
            for optimizer in optimizers:
                optimizer.step()
    assert len(events) == 1, "what the bad gradients made of the weights follows from them"
    agrees(events[0], step=2, batch=2, phase="backward", op="SqrtBackward0", again="shown")


def test_skip_of_gradients_that_do_not_come_again_is_an_event_too() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    with DebugUnderflowOverflow(model, on_event="skip") as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(3):
            opt.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            if i == 1:
                next(model.parameters()).grad.view(-1)[0] = NAN
            opt.step()
    agrees(recorder.report.event, step=1, phase="backward", kind="nan", again="did not reproduce")
    assert recorder.report.dropped_steps == [1]


def test_the_report_says_what_was_skipped() -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        train(model, {1: NAN, 3: NAN, 4: NAN}, steps=6)
    report = recorder.report
    assert (report.dropped, report.dropped_steps) == (3, [1, 3, 4])
    assert 'note: 3 of 6 steps were dropped, as on_event is "skip": step 1, 3, 4' in report.text()
    assert (report.to_dict()["dropped"], report.to_dict()["dropped_steps"]) == (3, [1, 3, 4])


def test_only_the_first_skipped_steps_are_named() -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        train(model, dict.fromkeys(range(2, 14), NAN), steps=15)
    assert recorder.report.dropped == 12
    assert "12 of 15 steps were dropped" in recorder.report.text()
    assert "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ..." in " ".join(recorder.report.text().split())


def test_nothing_is_said_where_nothing_was_skipped() -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_event="skip") as recorder:
        train(model, steps=2)
    assert recorder.report.dropped == 0 and "dropped" not in recorder.report.text()


@pytest.mark.parametrize("first", ["generator", "critic"])
def test_what_another_recorder_has_told_of_is_not_told_again(first: str) -> None:
    torch.manual_seed(0)
    models = {"generator": nn.Sequential(nn.Linear(4, 4)), "critic": nn.Sequential(nn.Linear(4, 1))}
    order = sorted(models, key=lambda name: name != first)
    events: list[tuple[str, Any]] = []
    recorders = {
        name: DebugUnderflowOverflow(models[name], on_event=lambda event, name=name: events.append((name, event)))
        for name in order
    }
    for recorder in recorders.values():
        recorder.quiet()
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    generator, critic = models["generator"], models["critic"]
    for i in range(4):
        if i == 2:
            with torch.no_grad():
                generator[0].weight.fill_(3e38)
        made = generator(torch.ones(2, 4))
        for name, taken in (("critic", made.detach()), ("generator", made)):
            optimizers[name].zero_grad()
            critic(taken).mean().backward()
            if i < 2:
                optimizers[name].step()
        if i == 2:
            break
    for recorder in recorders.values():
        recorder.poll()
    for recorder in recorders.values():
        recorder.remove()
    assert [name for name, _ in events] == ["generator"]
    agrees(events[0][1], module="0", role="output", kind="inf", batch=2)
    report = recorders["critic"].report
    assert report.event is None and not report.ok
    assert "follows from the event of another recorder, inf in the output of 0 (Linear)" in report.verdict
    assert "of Sequential" in report.verdict


def test_bad_data_of_one_of_two_models_is_its_own_event() -> None:
    events: list[str] = []
    models = [nn.Sequential(nn.Linear(4, 1)) for _ in range(2)]
    recorders = [DebugUnderflowOverflow(m, on_event=lambda event: events.append(event.role)) for m in models]
    for i in range(3):
        for j, model in enumerate(models):
            model(torch.full((2, 4), NAN if (i, j) in ((0, 0), (2, 1)) else 1.0)).mean().backward()
    for recorder in recorders:
        recorder.poll()
        recorder.remove()
    assert events == ["input", "input"]


def test_the_arguments_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"on_event": "explode"}, {"check": "sometimes"}, {"max_frames_to_save": -1}]
    wrong += [{"on_event": lambda: None}, {"on_step": lambda step: None}]
    for options in wrong:
        with pytest.raises((MldebugError, ValueError, TypeError)):
            DebugUnderflowOverflow(Net(), **options)
