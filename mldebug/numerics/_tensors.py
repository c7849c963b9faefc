"""Find the tensors inside whatever a module takes or returns, and make odd ones measurable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# The dtypes whose reductions need no preparation.
PLAIN_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MAX_CONTAINERS = 10_000


def leaves(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of a nested value, in order.

    Goes into tuples, lists, mappings (a ModelOutput is one) and dataclasses. Anything else is a leaf and is yielded
    as it is: tensors, None, numbers, unknown objects. Paths read like `output[0][1]` and `output.logits`. A container
    that is met again, inside itself or elsewhere, is gone into once.
    """
    if isinstance(value, Tensor) or value is None:
        yield path, value
        return
    items: Iterable[tuple[str, Any]]
    if isinstance(value, (tuple, list)):
        items = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, Mapping):
        items = ((join(path, key), item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = ((f"{path}.{name}", getattr(value, name)) for name in names)
    else:
        yield path, value
        return
    seen = set() if seen is None else seen
    if id(value) not in seen and len(seen) < _MAX_CONTAINERS:
        seen.add(id(value))
        for name, item in items:
            yield from leaves(item, name, seen)


def join(path: str, key: object) -> str:
    """The path of one entry of a mapping: `output.logits` for a name, `output[3]` for any other key."""
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def is_plain(tensor: Tensor) -> bool:
    """True for an ordinary strided float tensor, which can be measured as it is."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in PLAIN_DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
    )


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain float tensors that hold the values of any tensor; empty where nothing can be NaN or inf.

    Sparse tensors give their values, a DTensor its local shard, a nested tensor its values, other subclasses the
    tensors they say they are made of, complex tensors their real view, float8 a wider copy.
    """
    if is_plain(tensor):
        return [tensor.detach()] if tensor.numel() else []
    return [part for piece in _unwrap(tensor.detach()) for part in _widen(piece)]


def _unwrap(tensor: Tensor) -> list[Tensor]:
    if tensor.is_meta or tensor.is_quantized or _is_traced(tensor):
        return []
    if type(tensor) not in _PLAIN_TYPES:
        local = getattr(tensor, "_local_tensor", None)  # DTensor; to_local() would record a redistribution
        if isinstance(local, Tensor):
            return _unwrap(local)
        if tensor.is_nested:
            return _unwrap(tensor.values())
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return [piece for name in flatten()[0] for piece in _unwrap(getattr(tensor, name))]
        tensor = tensor.as_subclass(Tensor)
    if tensor.is_nested:
        return [piece for row in tensor.unbind() for piece in _unwrap(row)]
    if tensor.layout is torch.sparse_coo:
        return _unwrap(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return _unwrap(tensor.values())
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]  # mkldnn
    return [tensor]


def _widen(tensor: Tensor) -> list[Tensor]:
    if tensor.numel() == 0:
        return []
    if tensor.is_complex():
        return _widen(torch.view_as_real(tensor.resolve_conj()))
    if not tensor.is_floating_point():
        return []
    if tensor.dtype in PLAIN_DTYPES:
        return [tensor]
    if tensor.element_size() == 1 and "float8" in str(tensor.dtype):
        return [tensor.to(torch.float32)]
    return []  # packed sub-byte formats have no NaN and no inf


def _is_traced(tensor: Tensor) -> bool:
    """A stand-in without values: functorch's wrappers and the fake tensors of export."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    fake = torch._subclasses.fake_tensor.FakeTensor
    return isinstance(tensor, fake) or torch._is_functional_tensor(tensor)


def tracing_now() -> bool:
    """True while torch.jit.trace, torch.export or a functorch transform runs: there are no values to look at."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None where it has none of its own, as sparse tensors and wrappers."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
