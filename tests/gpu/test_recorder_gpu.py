"""The recorder on a real GPU: same bits, no host synchronisation, its memory, its verdicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INF, NAN = float("inf"), float("nan")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.bad = nn.Dropout(0.1), False

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y * INF if self.bad else y


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("scale", torch.ones(1))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def make(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Net(**options).cuda()


def train(
    model: nn.Module, steps: int, opt: Any = None, dtype: torch.dtype | None = None, plan: Any = ()
) -> list[bytes]:
    opt = opt or torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1)
    losses = []
    for i in range(steps):
        for k, block in enumerate(model.blocks):
            block.bad = (i, k) in plan
        opt.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(torch.randn(8, 32, 16, device="cuda")).float().pow(2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [loss.cpu().numpy().tobytes() for loss in losses]


def bits(model: nn.Module) -> list[bytes]:
    return [
        v.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in model.state_dict().values()
    ]


@pytest.mark.parametrize("check", ["step", "async"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
def test_fifty_steps_have_the_same_bits(dtype: Any, check: str) -> None:
    plain, watched = make(), make()
    want = train(plain, 50, dtype=dtype)
    state = torch.cuda.get_rng_state()
    with DebugUnderflowOverflow(watched, check=check) as recorder:
        have = train(watched, 50, dtype=dtype)
        assert recorder.step == 50
    assert recorder.report.event is None
    assert have == want
    assert bits(plain) == bits(watched)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("check", ["step", "async"])
def test_no_synchronisation(check: str) -> None:
    """None over forward and backward; with check="async" none at the optimizer either."""
    model = make()
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(8, 32, 16, device="cuda")
    with DebugUnderflowOverflow(model, check=check) as recorder:
        for i in range(5):
            opt.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if i > 1 else "default")  # first steps compile and allocate
            try:
                model(x).pow(2).mean().backward()
                if check == "step":
                    torch.cuda.set_sync_debug_mode("default")
                opt.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert recorder.report.event is None


@pytest.mark.parametrize("check", ["step", "async", "each"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_planted_inf_is_named(block: int, dtype: Any, check: str) -> None:
    model = make()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model, check=check):
        train(model, 6, dtype=dtype, plan={(3, block)})
    event = caught.value.report.event
    assert (event.step, event.module, event.role, event.phase) == (3, f"blocks.{block}", "output", "forward")
    assert any(f" blocks.{block} Block" in frame for frame in caught.value.report.frames)
    if check == "step":
        assert all(torch.isfinite(p).all() for p in model.parameters()), "the weights are not poisoned"


@pytest.mark.parametrize("value, kind", [(NAN, "nan"), (INF, "inf")])
@pytest.mark.parametrize("name", ["blocks.1.up.weight", "head.bias", "blocks.3.norm.weight"])
def test_a_bad_parameter_is_named(name: str, value: float, kind: str) -> None:
    model = make()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        train(model, 2)
    event = caught.value.report.event
    assert (event.phase, event.role, event.param, event.kind) == ("init", "parameter", name, kind)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler(fused: bool) -> None:
    model = make()
    opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    finished: list[int] = []

    def run(steps: int, bad: int) -> None:
        for i in range(steps):
            model.blocks[1].bad = i == bad
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(8, 32, 16, device="cuda")).float().pow(2).mean() * 100
            scaler.scale(loss).backward()
            scaler.step(opt)
            finished.append(i)
            scaler.update()

    with DebugUnderflowOverflow(model) as recorder:
        run(20, bad=-1)  # calibrates: skipped steps are no trouble
        assert recorder.step == 20
    assert scaler.get_scale() < 2.0**24
    assert recorder.report.event is None or recorder.report.event.benign
    finished.clear()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        run(4, bad=2)
    assert caught.value.report.event.module == "blocks.1"
    assert finished == [0, 1]


def test_small_values_and_every_float_type() -> None:
    class Gives(nn.Module):
        def __init__(self, dtype: torch.dtype, size: int, at: int | None) -> None:
            super().__init__()
            self.value = torch.zeros(size, device="cuda")
            if at is not None:
                self.value[at] = NAN
            self.value = self.value.to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.value

    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in dtypes:
        for size in (1, 7, 8192, 8193, 100_003):
            for at in (None, 0, size - 1):
                model = nn.Sequential(nn.Identity(), Gives(dtype, size, at))
                recorder = DebugUnderflowOverflow(model)
                try:
                    with recorder:
                        model(torch.ones(2, device="cuda"))
                except NumericsError:
                    pass
                assert (recorder.report.event is None) == (at is None), (dtype, size, at)
                assert at is None or recorder.report.event.module == "1"


def test_memory() -> None:
    def peak(watched: bool) -> int:
        model = make(width=256, depth=8)
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        train(model, 2, opt)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        recorder = DebugUnderflowOverflow(model) if watched else None
        train(model, 5, opt)
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - base
        if recorder is not None:
            recorder.remove()
        return used

    peak(False)
    assert peak(True) - peak(False) <= 32 * 2**20


def test_modules_in_place_are_told_apart() -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(INF)

    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), Spoils(), nn.ReLU()).cuda()
    nn.init.constant_(model[0].bias, 5.0)
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        model(torch.ones(2, 4, device="cuda")).mean().backward()
    assert caught.value.report.event.module == "2"


def test_a_model_over_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")

    class Split(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = block(x.to(block.up.weight.device))
            return self.head(x.to(self.head.weight.device)) * self.scale

    for bad in (0, 3):
        torch.manual_seed(0)
        model = Split().cuda()
        for block in model.blocks[2:]:
            block.to("cuda:1")
        with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
            train(model, 3, plan={(1, bad)})
        assert (caught.value.report.event.module, caught.value.report.event.step) == (f"blocks.{bad}", 1)


def test_a_side_stream() -> None:
    model, stream = make(), torch.cuda.Stream()
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            train(model, 3, plan={(1, 2)})
    assert (caught.value.report.event.module, caught.value.report.event.step) == ("blocks.2", 1)


@pytest.mark.parametrize("way", ["torch.compile", "regional"])
def test_compiled(way: str) -> None:
    from torch._dynamo.utils import counters

    def go(watched: bool, spoil: bool) -> tuple[list[float], Any]:
        torch._dynamo.reset()
        counters.clear()
        model = make()
        recorder = DebugUnderflowOverflow(model) if watched else None
        call: Any = model
        if way == "regional":
            for block in model.blocks:
                block.compile(fullgraph=True)
        else:
            call = torch.compile(model, fullgraph=True)
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        model.eval()  # no dropout: the compiled random numbers need not be those of another graph
        losses: list[float] = []
        try:
            for i in range(5):
                if spoil and i == 3:
                    with torch.no_grad():
                        model.blocks[2].down.weight.fill_(3.4e38)
                opt.zero_grad()
                loss = call(torch.full((4, 8, 16), 0.1 * i, device="cuda")).pow(2).mean()
                loss.backward()
                opt.step()
                losses.append(loss.item())
        except NumericsError as error:
            return losses, error.report
        finally:
            if recorder is not None:
                recorder.remove()
        return losses, None if recorder is None else recorder.report

    plain, _ = go(False, False)
    watched, report = go(True, False)
    assert report.event is None
    assert watched == pytest.approx(plain, rel=1e-4)
    assert not counters["graph_break"]
    losses, report = go(True, True)
    assert len(losses) == 3
    assert (report.event.step, report.event.module, report.event.kind) == (3, "blocks.2.down", "inf")
    torch._dynamo.reset()
