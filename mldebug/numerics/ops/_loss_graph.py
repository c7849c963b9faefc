"""The operation behind a bad loss: of some the graph keeps all operands for the backward, so they can run again; of
others what is enough to know, a divisor or the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics._event import Operation
from mldebug.numerics.ops._causes import cause_of
from mldebug.numerics.ops._kept import KeptCall, keep_call
from mldebug.numerics.ops._op_names import short_name
from mldebug.numerics.ops._operands import Operand, describe, facts_of, named
from mldebug.numerics.ops._origins import FINE, INF, NAN, state_of

_NODES = 10_000  # of a graph that are looked at
_SIGN = 1 << 63  # a graph keeps negative numbers as unsigned ones
_aten: Any = torch.ops.aten
# Nodes whose operands are kept whole, and what they are the gradient of.
_AGAIN = {
    "LogBackward0": _aten.log.default,
    "Log2Backward0": _aten.log2.default,
    "Log10Backward0": _aten.log10.default,
    "Log1PBackward0": _aten.log1p.default,
    "AcosBackward0": _aten.acos.default,
    "AsinBackward0": _aten.asin.default,
    "AtanhBackward0": _aten.atanh.default,
    "LgammaBackward0": _aten.lgamma.default,
    "DivBackward0": _aten.div.Tensor,
    "MulBackward0": _aten.mul.Tensor,
    "PowBackward0": _aten.pow.Tensor_Scalar,
    "PowBackward1": _aten.pow.Tensor_Tensor,
    "StdBackward0": _aten.std.correction,
    "VarBackward0": _aten.var.correction,
    "MseLossBackward0": _aten.mse_loss.default,
    "KlDivBackward0": _aten.kl_div.default,
    "BinaryCrossEntropyBackward0": _aten.binary_cross_entropy.default,
    "NllLossBackward0": _aten.nll_loss_forward.default,
    "NllLoss2DBackward0": _aten.nll_loss2d_forward.default,
    "MeanBackward0": _aten.mean.default,
}
# Nodes that keep their result alone, and what an inf in it says of the operand. An inf that comes in gives 0 in the
# first two, so theirs is their own; in the others it would pass, so these count in wide dtypes only.
_RESULTS = {
    "ReciprocalBackward0": (_aten.reciprocal.default, "a zero divisor"),
    "RsqrtBackward0": (_aten.rsqrt.default, "a zero divisor"),
    "ExpBackward0": (_aten.exp.default, "finite operands"),
    "Expm1Backward0": (_aten.expm1.default, "finite operands"),
}
_WIDE = (torch.float32, torch.float64)
_FROM_DATA = {"target", "weight"}
_TAKES_INFINITY = ("NllLossBackward0", "NllLoss2DBackward0")  # the logit of a class that is masked is -inf


@dataclass(frozen=True)
class LossOperation:
    """The operation, whether it made "nan" or "inf", and it with its operands, where these are to be kept."""

    operation: Operation
    kind: str
    dtype: torch.dtype
    again: KeptCall | str | None = None


def operation_of_loss(loss: Tensor, after: int, keep: bool) -> LossOperation | None:
    """The first operation that made a bad value out of finite operands, or took a bad label, in the graph of a loss
    before its backward.

    Only nodes with a sequence number of `after` and more are looked at: those of the code after the model. None where
    no node that keeps enough to know did it. `keep` asks for a copy of the operands.
    """
    stack, seen = [loss.grad_fn], set[Any]()
    while stack and len(seen) < _NODES:
        node = stack.pop()
        # AccumulateGrad has the largest number there is.
        if node is None or node in seen or not after <= node._sequence_nr() < _SIGN:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    with torch.no_grad():
        for node in sorted(seen, key=lambda node: node._sequence_nr()):
            try:
                found = _again(node, keep) or _divided_by_zero(node, loss) or _by_its_result(node)
            except RuntimeError:  # freed, or of a kind that is not read here
                continue
            if found is not None:
                return found
    return None


def _again(node: Any, keep: bool) -> LossOperation | None:
    func = _AGAIN.get(node.name())
    given = None if func is None else _arguments(node, func)
    if func is None or given is None:
        return None
    args, kwargs = given
    pairs = named(func, args, kwargs)
    bad = {name: state for name, value in pairs if isinstance(value, Tensor) and (state := state_of(value)) != FINE}
    victim = bool(bad) and set(bad) <= _FROM_DATA  # a label, say, that was bad before
    if bad and not victim and (node.name() not in _TAKES_INFINITY or max(bad.values()) == NAN):
        return None
    made = func(*args, **kwargs)
    result = made[0] if isinstance(made, tuple) else made
    if (state := state_of(result)) == FINE:
        return None
    kind = "nan" if state == NAN else "inf"
    facts = facts_of(str(func), pairs, [result], kind)
    cause = None if victim else cause_of(short_name(func), "", "forward", facts)
    operation = Operation(
        op=short_name(func),
        operands=describe(pairs),
        results=describe([("result", result)]),
        facts=tuple(sorted(facts)),
        victim=victim,
        cause="" if cause is None else cause.key,
    )
    again = keep_call(func, tuple(args), kwargs, [result], {}) if keep else None
    return LossOperation(operation, kind, result.dtype, again)


def _divided_by_zero(node: Any, loss: Tensor) -> LossOperation | None:
    """A division by something that is not learned: the graph does not keep what was divided, and by zero nothing is
    finite."""
    if node.name() != "DivBackward0" or node._saved_self is not None or (other := node._saved_other) is None:
        return None
    if state_of(other) != FINE or not bool((other == 0).any()):
        return None
    kind = "nan" if state_of(loss) == NAN else "inf"
    pairs = [("other", other)]
    facts = facts_of("aten.div.Tensor", pairs, [loss], kind) - {"finite operands"} | {"a zero divisor"}
    return _without_operands(_aten.div.Tensor, describe(pairs), facts, kind, loss.dtype)


def _by_its_result(node: Any) -> LossOperation | None:
    func, fact = _RESULTS.get(node.name(), (None, ""))
    if func is None:
        return None
    result = node._saved_result
    if state_of(result) != INF or (fact == "finite operands" and result.dtype not in _WIDE):
        return None
    facts = facts_of(str(func), [], [result], "inf") | {fact}
    return _without_operands(func, describe([("result", result)]), facts, "inf", result.dtype)


def _without_operands(
    func: Any, known: tuple[Operand, ...], facts: frozenset[str], kind: str, dtype: torch.dtype
) -> LossOperation:
    cause = cause_of(short_name(func), "", "forward", facts)
    operation = Operation(
        op=short_name(func), operands=known, results=(), facts=tuple(sorted(facts)), victim=False,
        cause="" if cause is None else cause.key,
    )  # fmt: skip
    return LossOperation(operation, kind, dtype, "the graph of the loss does not keep its operands")


def _arguments(node: Any, func: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of an operation from what its node keeps; None if one that it needs is not there."""
    if func is _aten.mean.default:  # keeps the shape alone; without elements that is all there is
        empty = node._saved_self_sym_numel == 0
        return ([torch.empty(tuple(node._saved_self_sym_sizes))], {}) if empty else None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in func._schema.arguments:
        saved = f"_saved_{argument.name}"
        value = _signed(getattr(node, saved)) if hasattr(node, saved) else argument.default_value
        if value is None and isinstance(argument.type, torch.TensorType):
            return None  # it was not needed for the gradients that are asked for
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _signed(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= _SIGN:
        return value - 2 * _SIGN
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_signed(item) for item in value]
    return value
