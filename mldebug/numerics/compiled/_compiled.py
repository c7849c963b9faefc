"""The recorder under torch.compile: its hooks are traced into the graph as one custom op per tensor.

The ops call back into the same recorder that eager mode uses, each time the graph runs; the call site is a constant
of the graph, so nothing recompiles and no graph breaks. Everything a trace asks the recorder is answered by functions
whose results dynamo takes as constants.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mldebug.numerics._tell import warn
from mldebug.numerics.ring._records import RowsOf, Site

if TYPE_CHECKING:
    from mldebug.numerics._event import Role
    from mldebug.numerics.ring._records import Watched

# Call sites of traced tensors: their index is what a graph carries.
_SITES: list[tuple[Watched, str, Role]] = []
# Optimizers whose steps were traced, likewise.
_OPTIMIZERS: list[weakref.ref[torch.optim.Optimizer]] = []
# Bodies of higher-order ops that may change a tensor outside. Those of cond, scan or while_loop may not.
_OPEN_BODIES = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "autograd_function_apply")
# The ops say that they change this tensor, which keeps them in order and keeps the compiler from dropping them.
_ORDER = torch.zeros(1)
_MAX_DEPTH = 6
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _constant(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result without importing dynamo (two seconds) for those who do not compile."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_library: Any = torch.library.Library("mldebug", "FRAGMENT")  # type: ignore[no-untyped-call,unused-ignore]
_library.define("record(Tensor(a!) order, Tensor value, int site) -> ()")
_library.define("record_output(Tensor(a!) order, Tensor value, int site) -> ()")
_library.define("record_rows(Tensor(a!) order, Tensor[] rows, int[] sites, Tensor[] values, int[] places) -> ()")
_library.define("mark(Tensor(a!) order, int site, bool enter) -> ()")
_library.define("step(Tensor(a!) order, int optimizer, bool before) -> ()")


def _record(order: Tensor, value: Tensor, site: int) -> None:
    watched, path, role = _SITES[site]
    if watched.recorder.attached:
        watched.recorder.guard(watched.forwards.record_compiled, watched, path, role, value)


def _record_output(order: Tensor, value: Tensor, site: int) -> None:
    """The same for what a root returns, whole: it is in memory anyway, and is often known from a module inside."""
    watched, path, role = _SITES[site]
    if watched.recorder.attached:
        watched.recorder.guard(watched.forwards.record_output, watched, path, role, value)


def _record_rows(order: Tensor, rows: list[Tensor], sites: list[int], values: list[Tensor], places: list[int]) -> None:
    """The same for many tensors: `rows` holds the largest magnitudes of the rows of each.

    `values` are those of the tensors that the graph returns, at these `places` among the rest.
    """
    returned = dict(zip(places, values, strict=True))
    by_recorder: dict[Any, list[RowsOf]] = {}
    for i, (magnitudes, site) in enumerate(zip(rows, sites, strict=True)):
        watched, path, role = _SITES[site]
        rows_of = RowsOf(watched, path, role, magnitudes, returned.get(i))
        by_recorder.setdefault(watched.recorder, []).append(rows_of)
    for recorder, tensors in by_recorder.items():
        if recorder.attached:
            recorder.guard(recorder.forwards.record_rows, tensors)


def _mark(order: Tensor, site: int, enter: bool) -> None:
    watched, _, _ = _SITES[site]
    if watched.recorder.attached:
        watched.forwards.mark_compiled(watched, enter)


def _step(order: Tensor, optimizer: int, before: bool) -> None:
    found = _OPTIMIZERS[optimizer]()
    for recorder in list(_hub_of().RECORDERS):
        if found is not None:
            (recorder.before_step if before else recorder.steps.over)(found)


_library.impl("record", _record, "CompositeExplicitAutograd")
_library.impl("record_output", _record_output, "CompositeExplicitAutograd")
_library.impl("record_rows", _record_rows, "CompositeExplicitAutograd")
_library.impl("mark", _mark, "CompositeExplicitAutograd")
_library.impl("step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("mldebug::record", lambda order, value, site: None, lib=_library)
torch.library.register_fake("mldebug::record_output", lambda order, value, site: None, lib=_library)
torch.library.register_fake("mldebug::record_rows", lambda order, rows, sites, values, places: None, lib=_library)
torch.library.register_fake("mldebug::mark", lambda order, site, enter: None, lib=_library)
torch.library.register_fake("mldebug::step", lambda order, optimizer, before: None, lib=_library)


def traced_call(module: nn.Module, args: Any, kwargs: dict[str, Any], original: Callable[..., Any]) -> Any:
    """A module call while dynamo traces it.

    A watched module without hooks passes by torch's hook machinery: to trace that takes longer than the model itself,
    and each of its many guards is checked in each step.
    """
    if not _passes(id(module)):
        return original(module, *args, **kwargs)
    trace_enter(module, args)
    output = module.forward(*args, **kwargs)
    trace_leave(module, kwargs, output)
    return output


def trace_enter(module: nn.Module, args: Any) -> None:
    """The pre-hook, while dynamo traces it."""
    root = _root_site(id(module))
    if root < 0:
        return
    torch.ops.mldebug.mark(_ORDER, root, True)
    for i, value in enumerate(args):
        _walk(id(module), value, f"input[{i}]", "input", 0)


def trace_leave(module: nn.Module, kwargs: dict[str, Any], output: Any) -> None:
    """The hook after forward, while dynamo traces it."""
    if not _is_watched(id(module)):
        return
    root = _root_site(id(module))
    if root < 0:
        _walk(id(module), output, "output", "output", 0)
        return
    _walk(id(module), output, "output", "output", 0, whole=True)
    for key, value in kwargs.items():
        _walk(id(module), value, f"input.{key}", "input", 0)
    torch.ops.mldebug.mark(_ORDER, root, False)


def trace_step(optimizer: torch.optim.Optimizer, before: bool) -> None:
    """The hooks around an optimizer's step, while dynamo traces them."""
    torch.ops.mldebug.step(_ORDER, _optimizer_index(id(optimizer)), before)


def _walk(key: int, value: Any, path: str, role: Role, depth: int, whole: bool = False) -> None:
    if isinstance(value, Tensor):
        if value.dtype in _DTYPES and value.numel() > 0:
            # A value need not be kept in memory for us; Inductor gets this in another form (see `_partition`).
            value = value.detach()
            if whole:
                torch.ops.mldebug.record_output(_ORDER, value, _site(key, path, role))
                return
            torch.ops.mldebug.record(_ORDER, torch.stack((value.amin(), value.amax())), _site(key, path, role))
    elif depth >= _MAX_DEPTH:
        return
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _walk(key, item, f"{path}[{i}]", role, depth + 1, whole)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _walk(key, item, f"{path}.{name}", role, depth + 1, whole)


def prepare() -> None:
    """Before dynamo runs: it is to leave our own functions alone when they are called from outside a graph, and
    Inductor is to partition as if nobody watched, unless the user has a partitioner of their own."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    from torch._dynamo.eval_frame import skip_code
    from torch._inductor import config

    _hub = _hub_of()
    for function in (_hub._call, _hub._before_forward, _hub._after_forward, torch.autograd.backward):
        skip_code(function.__code__)

    if getattr(config, "custom_partitioner_fn", False) is None:
        from mldebug.numerics.compiled._partition import Partitioner

        config.custom_partitioner_fn = Partitioner()


_prepared = False


def _drop_partitioner() -> None:
    global _prepared
    _prepared = False
    config = sys.modules.get("torch._inductor.config")
    ours = getattr(config, "custom_partitioner_fn", None)
    if config is not None and type(ours).__module__ == "mldebug.numerics.compiled._partition":
        config.custom_partitioner_fn = None  # type: ignore[attr-defined]


def run_as_written() -> Callable[[], None] | None:
    """Have compiled modules run their own code, so that each module is called, until the result is called."""
    if "torch._dynamo" not in sys.modules:
        return None
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def has_foreign_hooks() -> bool:
    """Whether there are global module hooks beside the two of the recorder."""
    hooks = nn.modules.module
    ours = len(hooks._global_forward_hooks) == 1 and len(hooks._global_forward_pre_hooks) == 1
    return not ours or bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


def is_strict(site: int) -> bool:
    """Whether -inf is an alarm at a call site of a graph."""
    watched, path, role = _SITES[site]
    return Site(watched, path, torch.float32, role).strict


def forget_graphs() -> None:
    """Drop what was compiled: with graphs from before attaching nothing would be seen, with ours nothing would end."""
    dynamo = sys.modules.get("torch._dynamo")
    traced = bool(_SITES or _OPTIMIZERS)
    _SITES.clear()
    _OPTIMIZERS.clear()
    _drop_partitioner()
    if dynamo is None:
        return
    counters = dynamo.utils.counters  # with fullgraph, only the second one counts
    compiled = counters["frames"]["ok"], counters["stats"]["unique_graphs"]
    if not any(compiled) or _forgotten == [compiled]:  # a reset leaves the counters as they are
        return
    if not traced:
        warn(
            "mldebug: the model was compiled before the recorder was attached; it will be compiled again\n"
            "hint: make the recorder before the first call of the compiled model"
        )
    torch.compiler.reset()
    _forgotten[:] = [(counters["frames"]["ok"], counters["stats"]["unique_graphs"])]


_forgotten: list[tuple[int, int]] = []  # what had been compiled at the last reset of ours


@_constant
def _passes(key: int) -> bool:
    watched = _lookup(key)
    module = None if watched is None or watched.wrapper else watched.ref()
    if module is None or isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        return False
    if type(module)._call_impl is not nn.Module._call_impl:
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and module._compiled_call_impl is None and not has_foreign_hooks()


@_constant
def _is_watched(key: int) -> bool:
    watched = _lookup(key)
    if watched is None or watched.muted or watched.wrapper or _is_exporting():
        return False
    return _may_record()


@_constant
def _root_site(key: int) -> int:
    watched = _lookup(key)
    if watched is None or watched.wrapper or watched.name or _is_exporting() or not _may_record():
        return -1
    return _site_index(watched, "", "output")


@_constant
def _site(key: int, path: str, role: Role) -> int:
    watched = _lookup(key)
    assert watched is not None
    return _site_index(watched, path, "loss" if path == "output.loss" else role)


def _site_index(watched: Watched, path: str, role: Role) -> int:
    prepare()
    _SITES.append((watched, path, role))
    return len(_SITES) - 1


@_constant
def _optimizer_index(key: int) -> int:
    _OPTIMIZERS.append(weakref.ref(_object(key)))
    return len(_OPTIMIZERS) - 1


def _is_exporting() -> bool:
    """Asked for outside of the trace: inside some versions of dynamo hold torch.compiler.is_exporting() for True."""
    if hasattr(torch.compiler, "is_exporting"):  # since torch 2.7
        return torch.compiler.is_exporting()
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx()
    return tracer is None or bool(tracer.output.export)  # without one it is torch.export, below dynamo


def _may_record() -> bool:
    """Not in what runs under vmap or grad, as in eager mode, nor in a body that must change nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        if str(getattr(tracer, "source_target", "")) not in _OPEN_BODIES:  # since torch 2.7
            return False
        tracer = tracer.parent
    return True


def _lookup(key: int) -> Watched | None:
    hub = _hub_of()
    watched: Watched | None = hub.TABLE.get(key)
    if watched is None and hub.RECORDERS and not _is_exporting():
        module = _object(key)
        # The first one met is the outermost: a root in command mode. Or it was added to a root since.
        watched = None if hasattr(module, "_orig_mod") else hub.meet(module)
    return watched


def _object(key: int) -> Any:
    """What has this id. A function with a constant result gets no objects; the trace that asks holds it."""
    return ctypes.cast(key, ctypes.py_object).value


def _hub_of() -> Any:
    from mldebug.numerics import _hub

    return _hub
