"""Values and modules that the recorder must take as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow

from .kit import INF, NAN, Net, agrees, watch


class Gives(nn.Module):
    """A module whose output is whatever the function makes of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        return self.make(x)


class Around(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.fc, self.gives = nn.Linear(4, 4), Gives(make)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.fc(x)
        return y, self.gives(y)


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8)


GOOD = {
    "empty": lambda x: x[:0],
    "empty in one dimension": lambda x: x.new_zeros(3, 0, 2),
    "scalar": lambda x: x.sum(),
    "bool": lambda x: x > 0,
    "uint8": lambda x: x.abs().to(torch.uint8),
    "uint16": lambda x: torch.zeros(3, dtype=torch.uint16),
    "int64 extremes": lambda x: torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max]),
    "complex64": lambda x: torch.complex(x, x),
    "complex128": lambda x: torch.complex(x.double(), x.double()),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8_e4m3fn": lambda x: x.detach().to(torch.float8_e4m3fn),
    "float8_e5m2": lambda x: x.detach().to(torch.float8_e5m2),
    "sparse coo": lambda x: torch.eye(4).to_sparse(),
    "sparse coo, uncoalesced": lambda x: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "sparse csr": lambda x: torch.eye(4).to_sparse_csr(),
    "empty sparse": lambda x: torch.zeros(4, 4).to_sparse(),
    "quantised": quantised,
    "meta": lambda x: torch.empty(3, device="meta"),
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 1000),
    "expanded scalar": lambda x: x.sum().expand(7, 7),
    "channels last": lambda x: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate view": lambda x: torch.complex(x, x).conj(),
    "negative view": lambda x: torch.complex(x, x).conj().imag,
    "jagged": lambda x: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "strided nested": lambda x: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "none": lambda x: None,
    "text": lambda x: "text",
    "numbers": lambda x: (1, 2.5, None, {"a": 3}),
    "a class": lambda x: nn.Linear,
    "a generator": lambda x: (i for i in range(3)),
    "itself": lambda x: _loop(),
}


def _loop() -> list[Any]:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    return loop


@pytest.mark.parametrize("check", ["step", "each"])
@pytest.mark.parametrize("what", GOOD)
def test_outputs_of_any_sort(what: str, check: str) -> None:
    model = Around(GOOD[what])
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    with DebugUnderflowOverflow(model, check=check, trace_batch_nums=[2]) as recorder:
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(3, 4))[0].mean().backward()
            opt.step()
    assert recorder.report.event is None


BAD = {
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float64": lambda x: x.double(),
    "float8_e5m2": lambda x: x.detach().to(torch.float8_e5m2),
    "complex64": lambda x: torch.complex(x, torch.zeros_like(x)),
    "sparse coo": lambda x: x.detach().to_sparse(),
    "sparse csr": lambda x: x.detach().to_sparse_csr(),
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 1000),
    "jagged": lambda x: torch.nested.nested_tensor([x.detach(), torch.ones(1, 4)], layout=torch.jagged),
    "subclass": lambda x: x.as_subclass(Plain),
}


class Plain(Tensor):
    pass


@pytest.mark.parametrize("check", ["step", "each"])
@pytest.mark.parametrize("what", BAD)
def test_a_nan_in_values_of_any_sort(what: str, check: str) -> None:
    def make(x: Tensor) -> Any:
        return BAD[what](torch.where(torch.arange(4) == 0, torch.full_like(x, NAN), x))

    model = Around(make)
    agrees(watch(model, lambda: model(torch.ones(3, 4)), check=check).event, module="gives", kind="nan", role="output")


def test_the_frames_of_odd_values_are_printed(capsys: Any) -> None:
    for what, make in GOOD.items():
        model = Around(make)
        with DebugUnderflowOverflow(model, trace_batch_nums=[0]):
            model(torch.ones(3, 4))
        assert "gives Gives" in capsys.readouterr().out, what


def test_float8_without_infinity_overflows_to_nan() -> None:
    model = Around(lambda x: (x.detach() * 0 + 1e6).to(torch.float8_e4m3fn))
    report = watch(model, lambda: model(torch.ones(3, 4)))
    assert report.event is None or report.event.module == "gives"


def test_a_whole_model_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    with DebugUnderflowOverflow(model) as recorder:
        assert model(torch.empty(2, 4, device="meta")).shape == (2, 1)
    assert recorder.report.event is None


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Net()
        with DebugUnderflowOverflow(model) as recorder:
            assert model(torch.empty(2, 4)).shape == (2, 1)
    assert recorder.report.event is None


class Wrapped(Tensor):
    """A wrapper subclass: the numbers are in `inner` and every operation goes through __torch_dispatch__."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch.utils._pytree as pytree

        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


class Refuses(Tensor):
    """A subclass that allows nothing: measuring it must not end the training."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__repr__", "size", "dim"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TypeError(f"{func} is not allowed")


@pytest.mark.parametrize("cls", [Wrapped, Refuses])
def test_tensor_subclasses(cls: Any) -> None:
    value = Wrapped(torch.ones(3)) if cls is Wrapped else torch.ones(3).as_subclass(Refuses)
    model = Around(lambda x: value)
    with DebugUnderflowOverflow(model) as recorder:
        model(torch.ones(3, 4))[0].mean().backward()
    assert recorder.report.event is None


def test_dtensor(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        model = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), mesh)
        opt = torch.optim.SGD(model.parameters(), 1e-2)
        with DebugUnderflowOverflow(model) as recorder:
            for _ in range(2):
                opt.zero_grad()
                model(distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])).mean().backward()
                opt.step()
        assert recorder.report.event is None
        bad = distribute_tensor(torch.full((2, 4), NAN), mesh, [Replicate()])
        agrees(watch(model, lambda: model(bad)).event, role="input", module="", kind="nan")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("check", ["step", "each"])
def test_modules_in_place(check: str) -> None:
    class Spoils(nn.Module):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(INF) if self.bad else x.mul_(2.0)

    model = nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Dropout(0.1, inplace=True), nn.ReLU(inplace=True))
    nn.init.ones_(model[0].weight)
    with DebugUnderflowOverflow(model) as recorder:
        model(torch.ones(2, 4)).mean().backward()
    assert recorder.report.event is None
    model[1].bad = True
    agrees(watch(model, lambda: model(torch.ones(2, 4)), check=check).event, module="1", role="output")
