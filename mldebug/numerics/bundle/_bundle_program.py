"""The program of a bundle: one operation, spelled out, on operands from a file beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.core.errors import MldebugError
from mldebug.numerics.ops._kept import KeptCall, extent
from mldebug.numerics.ops._op_names import RUNNING, base_name, results_for_backward
from mldebug.numerics.ops._operands import changed_by, named, tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping

_MANY = 16  # numbers or tensors in a list that are spelled out
_SAVED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)  # what safetensors has

_PROGRAM = '''"""{verdict}"""
import pathlib, sys
import torch
from safetensors.torch import load_file

device = {device}
t = load_file(pathlib.Path(__file__).with_name("operands.safetensors"), device=device){more}
for name, x in t.items():
    x = (torch.view_as_real(x) if x.is_complex() else x).double()
    span = f"{{x[x.isfinite()].min():.4g}} .. {{x[x.isfinite()].max():.4g}}" if x.isfinite().any() else "nothing finite"
    print(f"{{name}}: {{tuple(t[name].shape)}} {{t[name].dtype}} {{span}}, {{(~x.isfinite()).sum()}} nan or inf")
{call}
results = [(torch.view_as_real(x) if x.is_complex() else x).double() for x in results]
bad = [(*at, x[tuple(at)].item()) for x in results for at in ({test}).nonzero().tolist()]
print(f"{name} on {{device}}{was}: {{len(bad)}} of {{sum(x.numel() for x in results)}} {what}, at (index, value) {{bad[:3]}}")
sys.exit(bool(bad))
'''  # noqa: E501  # lines of the program, not of this module


def program(call: KeptCall, verdict: str, precision: bool = False) -> tuple[str, dict[str, Tensor]]:
    """The text of repro.py and its tensors by name. MldebugError where an operand cannot be written down.

    What it counts are NaN and inf; with `precision` neighbours along the longest dimension that are one number.
    """
    writer = _Writer()
    pairs = named(call.func, call.args, call.kwargs)
    code = [writer.code(name, value) for name, value in pairs]
    words = [*code[: len(call.args)]]
    words += [f"{name}={text}" for (name, _), text in zip(pairs[len(call.args) :], code[len(call.args) :], strict=True)]
    name = f"{call.func.namespace}.{call.func._schema.name.split('::')[1]}.{call.func._overloadname or 'default'}"
    device = next((str(x.device) for _, value in pairs for x in tensors_in(value) if x.device.type != "cpu"), "cpu")
    kind = device.partition(":")[0]
    more = []
    if writer.shapes:
        more.append(f"t |= {{{', '.join(f'{json}: {text}' for json, text in writer.shapes.items())}}}")
    for key, state in call.rng.items():
        writer.tensors[f"rng.{key}"] = state
        place = "" if key == "torch.cpu" else ".cuda" if kind == "cuda" else ""
        more.append(f'torch{place}.set_rng_state(t.pop("rng.{key}").cpu())')
    shown = call.rows and f" ({call.rows})"
    text = _PROGRAM.format(
        verdict=(verdict + shown).replace("\\", "/").replace('"', "'"),
        device='"cpu"' if device == "cpu" else f'"{kind}" if torch.{kind}.is_available() else "cpu"',
        was="" if device == "cpu" else f" (it was {device})",
        more="".join(f"\n{line}" for line in more),
        call=_results(call, f"torch.ops.{name}({', '.join(words)})", writer.names),
        name=name,
        test="x.diff(dim=max(range(x.dim()), key=x.size)) == 0" if precision else "~x.isfinite()",
        what="are the same as their neighbour" if precision else "nan or inf",
    )
    return text, writer.tensors


def _results(call: KeptCall, code: str, names: Mapping[int, str]) -> str:
    """The line that runs the operation and makes a list of its results."""
    types = [str(returned.type) for returned in call.func._schema.returns]
    changed = ", ".join(f"t[{names[id(tensor)]!r}]" for tensor in changed_by(call.func, call.args, call.kwargs))
    if not types:
        return f"{code}\nresults = [{changed}]"
    if types == ["Tensor"]:
        return f"results = [{code}]"
    if types == ["Tensor[]"]:
        return f"results = {code}"
    base = base_name(str(call.func))
    first = "[:1]" if results_for_backward(base) else ""
    more = f" + [{changed}]" if base in RUNNING and changed else ""
    return f"results = [x for x in {code}{first} if isinstance(x, torch.Tensor)]{more}"


class _Writer:
    """Arguments as Python; tensors go aside under a name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # id of a tensor -> its name
        self.shapes: dict[str, str] = {}  # name, quoted -> how to make the operand of what was saved

    def code(self, name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if isinstance(value, (list, tuple)):
            return self._list(name, list(value))
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, complex):
            return f'complex("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return "None"  # a generator: the state of the default one is set

    def _list(self, name: str, values: list[Any]) -> str:
        parts = [self.code(f"{name}.{i}", value) for i, value in enumerate(values)]
        if len(values) > _MANY and parts == [f"t['{name}.{i}']" for i in range(len(values))]:
            return f"[t[f'{name}.{{i}}'] for i in range({len(values)})]"
        if len(values) > _MANY and len(set(parts)) == 1 and not isinstance(values[0], Tensor):
            return f"[{parts[0]}] * {len(values)}"
        if len(values) > _MANY and all(isinstance(value, float) for value in values):
            self.tensors[name] = torch.tensor(values, dtype=torch.float64)
            return f"t[{name!r}].tolist()"
        return f"[{', '.join(parts)}]"

    def _tensor(self, name: str, tensor: Tensor) -> str:
        if id(tensor) in self.names:
            return f"t[{self.names[id(tensor)]!r}]"
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
            raise MldebugError(f"its operand {name} is no plain tensor ({kind})")
        self.names[id(tensor)] = name
        plain, code = tensor, f"t[{name!r}]"
        if not tensor.is_contiguous():
            plain = extent(tensor)
        if plain.is_complex():
            plain, code = torch.view_as_real(plain), f"torch.view_as_complex({code})"
        elif plain.dtype not in _SAVED:
            code += f".view({plain.dtype})"
            plain = plain.reshape(-1) if plain.dim() == 0 else plain
            code += ".reshape(())" if tensor.dim() == 0 else ""
            plain = plain.view(torch.uint8)
        if not tensor.is_contiguous():
            code += f".as_strided({tuple(tensor.size())}, {tuple(tensor.stride())})"
        if code != f"t[{name!r}]":
            self.shapes[repr(name)] = code
        self.tensors[name] = plain
        return f"t[{name!r}]"
