"""The operands of an operation in short, and the facts about them that tell one cause from another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import parts
from mldebug.numerics.ops._op_names import ATTENTION, FUSED, RUNNING, base_name, words
from mldebug.numerics.ring._stats import LIMIT

_SHOWN = 8  # operands of one operation that are kept


@dataclass(frozen=True)
class Operand:
    """One operand or result of an operation.

    `low` and `high` are the extremes of its finite elements (None if there is none), `bad` how many are NaN or inf.
    A number, a list or a flag has its text in `value` and no shape.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    low: float | None = None
    high: float | None = None
    bad: int = 0
    value: str = ""

    def text(self) -> str:
        """One line: `self  2x4 float16  -1.0e+00 .. 6.5e+04, 3 bad`."""
        if self.shape is None:
            return f"{self.name} = {self.value}"
        size = "x".join(map(str, self.shape)) or "scalar"
        if self.low is None:
            seen = "empty" if 0 in self.shape else f"all {self.bad} bad" if self.bad else ""
        elif self.low == self.high:
            seen = f"{'all' if math.prod(self.shape) > 1 else 'is'} {self.low:.4g}"
        else:
            seen = f"{self.low:.4g} .. {self.high:.4g}"
        if self.bad and self.low is not None:
            seen += f", {self.bad} of {math.prod(self.shape)} nan or inf"
        return f"{self.name}  {size} {self.dtype}  {seen}".rstrip()


Named = Sequence[tuple[str, Any]]


def named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of an operation with their names in its schema."""
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    pairs = [(names[i] if i < len(names) else f"[{i}]", value) for i, value in enumerate(args)]
    return pairs + list(kwargs.items())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result: itself, or those of a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def changed_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is not None and base_name(str(func)) in RUNNING:  # in training, and its schema does not say so
        given = dict(named(func, args, kwargs))
        running = [given.get("running_mean"), given.get("running_var")]
        return [t for t in running if isinstance(t, Tensor)] if given.get("training") else []
    if schema is None or not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def describe(pairs: Named) -> tuple[Operand, ...]:
    """The operands in short. Reads the device."""
    found: list[Operand] = []
    for name, value in pairs:
        if isinstance(value, Tensor):
            found.append(_of_tensor(name, value))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found += [_of_tensor(f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor)]
        elif value is not None and not isinstance(value, (torch.dtype, torch.layout, torch.device)):
            found.append(Operand(name, value=f"{value}"[:60]))
    return tuple(found[:_SHOWN])


def _of_tensor(name: str, tensor: Tensor) -> Operand:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        low, high, bad = _ranges(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass or device without these reductions
        low = high = None
        bad = 0
    return Operand(name, tuple(tensor.shape), dtype, low, high, bad)


def _ranges(tensor: Tensor) -> tuple[float | None, float | None, int]:
    pieces = parts(tensor)
    if not pieces and tensor.numel() and not tensor.is_meta and not tensor.is_complex():
        pieces = [tensor.detach().to(torch.int64)]
    low, high, bad = math.inf, -math.inf, 0
    for piece in pieces:
        finite = piece[torch.isfinite(piece)]
        bad += piece.numel() - finite.numel()
        if finite.numel():
            one, other = torch.aminmax(finite)
            low, high = min(low, float(one)), max(high, float(other))
    return (low, high, bad) if low <= high else (None, None, bad)


# Facts. Each function looks at the live operands of the operations it is listed for.


def facts_of(op: str, pairs: Named, results: Sequence[Tensor], kind: str) -> frozenset[str]:
    """What is known of the operands that made a bad value, as words that the table of causes uses."""
    base = base_name(op)
    given = dict(pairs)
    found = {kind}
    floats = [t for _, v in pairs for t in tensors_in(v) if t.is_floating_point()]
    result = next((t for t in results if t.is_floating_point()), None)
    if result is not None:
        found.add(str(result.dtype).removeprefix("torch."))
        if result.dtype in (torch.float16, torch.bfloat16):
            found.add("half")
        if "float8" in str(result.dtype):
            found.add("float8")
    pieces = [part for tensor in floats for part in parts(tensor)]
    if all(bool(torch.isfinite(part).all()) for part in pieces):
        found.add("finite operands")
    if any(bool(torch.isinf(part).any()) for part in pieces):
        found.add("an inf operand")
        if any(bool((part == 0).any()) for part in pieces) or any(v == 0 for v in given.values() if _is_number(v)):
            found.add("zero and inf")
    if any(_is_number(v) and math.isinf(v) for v in given.values()):
        found.add("an inf scalar")
    if any(_is_number(v) and not math.isfinite(v) for v in given.values()):
        found.add("a bad scalar")
    if floats and any(t.numel() == 0 for t in floats):
        found.add("no element")
    if pieces and not any(bool((part == 0).any()) for part in pieces):
        found.add("no zero")
    if any(bool((part == torch.finfo(part.dtype).min).any()) for part in pieces):
        found |= {"two lowest"} if base in ("add", "sub") else set()
    two = [value for _, value in pairs if isinstance(value, Tensor)]
    if given.get("exponent") == 2 or (base == "mul" and len(two) == 2 and two[0] is two[1]):
        found.add("a square")
    for bases, look in _LOOKS:
        if base in bases:
            found |= look(base, given, floats, result)
    return frozenset(found)


Look = Callable[[str, dict[str, Any], list[Tensor], Tensor | None], set[str]]


def _quotient(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    above, below = given.get("self"), given.get("other")
    if base in ("reciprocal", "rsqrt"):
        above, below = 1.0, above
    elif base in ("addcdiv",):
        above, below = given.get("tensor1"), given.get("tensor2")
    elif below is None:
        below = given.get("scalar", given.get("scalars"))
    listed = isinstance(above, (list, tuple)) or isinstance(below, (list, tuple))
    pairs = list(zip(_listed(above), _listed(below), strict=False)) if listed else [(above, below)]
    found: set[str] = set()
    for top, bottom in pairs:
        if isinstance(top, (Tensor, int, float)) and isinstance(bottom, (Tensor, int, float)):
            zeros = torch.as_tensor(bottom).eq(0)
            if bool(zeros.any()):
                found.add("a zero divisor")
                if bool((zeros & torch.as_tensor(top, device=zeros.device).eq(0)).any()):
                    found.add("zero over zero")
    return found


def _fused(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """A step of an optimizer in one kernel: an average of squares is 0, and so is eps in its dtype."""
    squares = [t for name in ("exp_avg_sqs", "state_sums") for t in tensors_in(given.get(name))]
    eps = given.get("eps", 0.0)
    lost = any(not float(torch.tensor(eps, dtype=t.dtype)) and bool((t == 0).any()) for t in squares)
    return {"a zero divisor"} if lost else set()


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * 10_000


_DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1, 1)),
    "logit": (0, 1),
    "acosh": (1, math.inf),
}


def _domain(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    value = given.get("other") if base == "xlogy" else floats[0] if floats else given.get("self")
    if not isinstance(value, Tensor):
        return set()
    if value.is_complex():  # its domain has one hole
        return {"a zero operand"} if bool((value == 0).any()) else set()
    low, high = _DOMAINS.get(base, (-math.inf, math.inf))
    found = {"beyond the domain"} if bool(((value < low) | (value > high)).any()) else set()
    if bool(((value == low) | (value == high)).any()):
        found.add("at the edge")
    value = value + 1 if base == "log1p" else value
    if bool((value == 0).any()) or (base == "logit" and bool((value == 1).any())):
        found.add("a zero operand")
    if bool((value < 0).any()):
        found.add("a negative operand")
    power = given.get("exponent")
    if isinstance(power, Tensor) and power.numel():
        power = float(power.min())
    if isinstance(power, (int, float)):
        found.add("a negative power" if power < 0 else "a positive power")
        found |= {"a fractional power"} if power != int(power) else set()
    return found


def _poles(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """lgamma and its derivatives: an operand is 0, -1, -2 ..."""
    return {"a pole"} if any(bool(((x <= 0) & (x == x.floor())).any()) for x in floats) else set()


def _variance(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """BatchNorm in evaluation: the root that it takes is of a negative number."""
    kept = given.get("running_var")
    if not isinstance(kept, Tensor) or given.get("training"):
        return set()
    return {"a negative variance"} if bool((kept.double() + given.get("eps", 0.0) < 0).any()) else set()


def _rows(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """Rows of a softmax: fully masked, or with +inf."""
    scores, dim = (floats[0] if floats else None), given.get("dim", -1)
    if scores is None or not scores.numel():
        return set()
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    found = {"a row of -inf"} if bool(torch.isneginf(scores).all(dim=dims[0]).any()) else set()
    return found | ({"a row with +inf"} if bool(torch.isposinf(scores).any()) else set())


def _partly(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """Whether some, and not all, of what is summed up is -inf."""
    masked = [torch.isneginf(tensor) for tensor in floats if tensor.numel()]
    return {"a partly masked row"} if any(bool(m.any()) and not bool(m.all()) for m in masked) else set()


def _attention(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    for name in ("attn_mask", "attn_bias", "mask"):
        bias = given.get(name)
        if isinstance(bias, Tensor) and bias.numel() and bias.dim():
            keeps = bias.eq(0) if name != "mask" else bias.ne(0)  # a `mask` of booleans is True where a key is left out
            closed = torch.isneginf(bias) if bias.is_floating_point() else keeps
            return {"a row of -inf"} if bool(closed.all(dim=-1).any()) else set()
    return set()


def _labels(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    labels, ignored = given.get("target"), given.get("ignore_index", -100)
    if not isinstance(labels, Tensor):
        return set()
    found = {"no label"} if labels.numel() == 0 or bool(labels.eq(ignored).all()) else set()
    weight = given.get("weight")
    if isinstance(weight, Tensor):
        kept = labels[labels.ne(ignored)]
        found |= {"no label"} if kept.numel() and not bool(weight[kept].sum()) else set()
    return found


def _spread(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """std and var: how many samples there are."""
    if not floats or result is None:
        return set()
    count = floats[0].numel() / max(result.numel(), 1)
    correction = given.get("correction", 1)
    found = {"one sample"} if count <= (1 if correction is None or correction is True else correction or 0) else set()
    return found | ({"no element"} if floats[0].numel() == 0 else set())


def _large(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    """exp and its kin: the operand is above the logarithm of the largest value."""
    if not floats or result is None or not floats[0].numel():
        return set()
    limit = math.log(LIMIT.get(result.dtype, math.inf)) if result.dtype in LIMIT else math.inf
    return {"beyond exp"} if float(floats[0].max()) > min(limit, 700.0) - 1 else set()


def _empty_mean(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    return {"no element"} if floats and floats[0].numel() == 0 else set()


def _ctc(base: str, given: dict[str, Any], floats: list[Tensor], result: Tensor | None) -> set[str]:
    inputs, targets = given.get("input_lengths"), given.get("target_lengths")
    if inputs is None or targets is None:
        return set()
    short = torch.as_tensor(inputs).le(2 * torch.as_tensor(targets))  # with repeats up to 2n - 1 frames are needed
    return {"a target too long"} if bool(short.any()) else set()


_LOOKS: tuple[tuple[frozenset[str], Look], ...] = (
    (words("div reciprocal rsqrt addcdiv true_divide remainder fmod"), _quotient),
    (words(FUSED), _fused),
    (words("log log2 log10 log1p sqrt rsqrt pow acos asin acosh atanh erfinv xlogy logit"), _domain),
    (frozenset({"lgamma", "digamma", "polygamma"}), _poles),
    (frozenset({"native_batch_norm"}), _variance),
    (frozenset({"softmax", "log_softmax", "safe_softmax", "logsumexp"}), _rows),
    (words("sum mean"), _partly),
    (words(ATTENTION), _attention),
    (frozenset({"nll_loss_forward", "nll_loss2d_forward"}), _labels),
    (frozenset({"std", "var", "std_mean", "var_mean"}), _spread),
    (frozenset({"exp", "exp2", "expm1", "sinh", "cosh"}), _large),
    (frozenset({"mean"}), _empty_mean),
    (frozenset({"ctc_loss", "cudnn_ctc_loss"}), _ctc),
)  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
