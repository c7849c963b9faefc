"""The operation behind a bad loss: of some the graph keeps all operands for the backward, so they can run again; of
others what is enough to know, a divisor or the result."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics._event import Operation
from mldebug.numerics.ops._causes import cause_of
from mldebug.numerics.ops._kept import KeptCall, keep_call
from mldebug.numerics.ops._op_names import base_name, results_for_backward, short_name
from mldebug.numerics.ops._operands import Operand, describe, facts_of, named, tensors_in
from mldebug.numerics.ops._origins import FINE, INF, NAN, same_memory, state_of
from mldebug.numerics.ops._source import line_of_variable

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
    "AcoshBackward0": _aten.acosh.default,
    "ErfinvBackward0": _aten.erfinv.default,
    "LogitBackward0": _aten.logit.default,
    "XlogyBackward0": _aten.xlogy.Tensor,
    "DigammaBackward0": _aten.digamma.default,
    "SinhBackward0": _aten.sinh.default,
    "CoshBackward0": _aten.cosh.default,
    "ProdBackward0": _aten.prod.default,
    "CumprodBackward0": _aten.cumprod.default,
    "LogsumexpBackward0": _aten.logsumexp.default,
    "LinalgVectorNormBackward0": _aten.linalg_vector_norm.default,
    "LinalgSlogdetBackward0": _aten._linalg_slogdet.default,
    "LinalgDetBackward0": _aten._linalg_det.default,
    "SmoothL1LossBackward0": _aten.smooth_l1_loss.default,
    "HuberLossBackward0": _aten.huber_loss.default,
    "BinaryCrossEntropyWithLogitsBackward0": _aten.binary_cross_entropy_with_logits.default,
    "CtcLossBackward0": _aten._ctc_loss.default,
    "CtcLossBackward1": _aten._ctc_loss.Tensor,
    "MmBackward0": _aten.mm.default,
    "BmmBackward0": _aten.bmm.default,
    "MvBackward0": _aten.mv.default,
    "DotBackward0": _aten.dot.default,
}
# Nodes that keep their result alone, and what an inf in it says of the operand. An inf that comes in gives 0 in the
# first two, so theirs is their own; in the others it would pass, so these count in wide dtypes only.
_RESULTS = {
    "ReciprocalBackward0": (_aten.reciprocal.default, "a zero divisor"),
    "RsqrtBackward0": (_aten.rsqrt.default, "a zero divisor"),
    "ExpBackward0": (_aten.exp.default, "finite operands"),
    "Expm1Backward0": (_aten.expm1.default, "finite operands"),
}
# Nodes that keep the result of a softmax: NaN in all of a row and in no other is its own.
_SOFTMAX = {"LogSoftmaxBackward0": _aten._log_softmax.default, "SoftmaxBackward0": _aten._softmax.default}
_MASKS = {"MaskedFillBackward0": ("_saved_mask", False), "WhereBackward0": ("_saved_condition", True)}
_WIDE = (torch.float32, torch.float64)
_FROM_DATA = {"target", "weight"}
_NO_GRAPH = "no graph"  # a fact: a bad operand was made without gradients, or before
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
    nodes = sorted(seen, key=lambda node: node._sequence_nr())
    given: LossOperation | None = None  # the first that took something bad which nobody in the graph made
    with torch.no_grad():
        for node in nodes:
            try:
                found = _again(node, keep) or _divided_by_zero(node, loss) or _by_its_result(node) or _softmax(node)
                given = given or (_from_outside(node) if found is None else None)
            except RuntimeError:  # freed, or of a kind that is not read here
                continue
            if found is not None:
                return given or found
    return given


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
    results = list(tensors_in(made))
    result = max(results[:1] if results_for_backward(base_name(str(func))) else results, key=state_of)
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


def _softmax(node: Any) -> LossOperation | None:
    """A softmax of a row in which all is -inf, as a mask makes it; its operand is not kept, a mask before it is."""
    func = _SOFTMAX.get(node.name())
    if func is None:
        return None
    result, dim = node._saved_result, _signed(node._saved_dim)
    rows = torch.isnan(result).all(dim=dim)
    if not result.numel() or not bool(rows.any()):
        return None
    facts = facts_of(str(func), [], [result], "nan") - {"finite operands"}
    if _is_masked(node, rows, dim):
        facts |= {"a row of -inf"}
    return _without_operands(func, describe([("result", result)]), facts, "nan", result.dtype)


def _is_masked(node: Any, rows: Tensor, dim: int) -> bool:
    """Whether a mask that was filled in shortly before leaves none of one of these rows open."""
    for _ in range(8):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return False
        if node.name() in _MASKS:
            saved, keeps = _MASKS[node.name()]
            mask = getattr(node, saved)
            closed = (mask.logical_not() if keeps else mask).all(dim=dim) if mask.dim() else mask
            try:
                return bool((closed & rows).any())
            except RuntimeError:  # of another shape: something was moved in between
                return bool(closed.any())
    return False


def _from_outside(node: Any) -> LossOperation | None:
    """An operation that took a bad operand without a graph: rewards, weights, what was made under no_grad."""
    for name in dir(node):
        value = getattr(node, name) if name.startswith("_saved_") else None
        if not isinstance(value, Tensor) or value.requires_grad or name.startswith("_saved_result"):
            continue
        if (state := state_of(value)) not in (NAN, INF):
            continue
        kind = "nan" if state == NAN else "inf"
        pairs = [(name.removeprefix("_saved_"), value)]
        one = {"one element"} if value.numel() == 1 else set()
        facts = frozenset({kind, _NO_GRAPH, *one})
        line = line_of_variable(functools.partial(_is_of, value))
        func = _AGAIN.get(node.name())
        kind_of = node.name().rstrip("0123456789").removesuffix("Backward").lower()
        operation = Operation(
            op=f"aten.{kind_of}" if func is None else short_name(func), operands=describe(pairs),
            facts=tuple(sorted(facts)), victim=True, cause="bad before the graph",
        )  # fmt: skip
        if line is not None:
            operation = replace(operation, file=line.file, line=line.number, function=line.function, code=line.code)
        return LossOperation(operation, kind, value.dtype, "it took what was bad before")
    return None


def _is_of(tensor: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and same_memory(tensor, value)


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
