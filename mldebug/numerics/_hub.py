"""The one set of process-wide hooks that all recorders share, there only while a recorder is attached.

Global module hooks, filtered by the id of the module: hooks on the modules themselves would be pickled by torch.save
and copied by deepcopy. They also trace under torch.compile (see `_compiled`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mldebug.numerics import _cuda_graphs, _losses
from mldebug.numerics.compiled import _compiled
from mldebug.numerics.distributed import _together
from mldebug.numerics.ring._records import Watched

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

TABLE: dict[int, Watched] = {}  # id(module) -> how it is watched; an entry goes when its module dies
RECORDERS: list[DebugUnderflowOverflow] = []
_IGNORED: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}  # strangers; whether met inside a watched forward
# The recorder and thread of a replay under way: nobody else takes its module calls for a real forward.
replaying: tuple[DebugUnderflowOverflow, int] | None = None
_undo: list[Callable[[], None]] = []
_is_compiling = torch.compiler.is_compiling


def attach(recorder: DebugUnderflowOverflow) -> None:
    """Start sending events to a recorder; the first one installs the hooks."""
    RECORDERS.append(recorder)
    _IGNORED.clear()
    if not _undo:
        _install()


def detach(recorder: DebugUnderflowOverflow) -> None:
    """Stop; the last recorder takes the hooks away. Safe to call twice."""
    if recorder in RECORDERS:
        RECORDERS.remove(recorder)
    for key, watched in list(TABLE.items()):
        kept = _without(watched, recorder)
        if kept is None:
            TABLE.pop(key, None)
        else:
            TABLE[key] = kept
    if not RECORDERS:
        _uninstall()


def watch(recorder: DebugUnderflowOverflow, module: nn.Module, name: str, root: nn.Module) -> Watched:
    """Enter a module into the table for one recorder (once)."""
    key = id(module)
    watched = TABLE.get(key)
    while watched is not None:
        if watched.recorder is recorder:
            return watched
        watched = watched.next
    entry = Watched(recorder, module, name, root)
    entry.next = TABLE.get(key)
    recorder.when_dead(module, TABLE.pop, key, None)
    TABLE[key] = entry
    _IGNORED.pop(key, None)
    return entry


def find(recorder: DebugUnderflowOverflow, module: nn.Module) -> Watched | None:
    """The entry of a module under this recorder."""
    watched = TABLE.get(id(module))
    while watched is not None and watched.recorder is not recorder:
        watched = watched.next
    return watched


def _without(watched: Watched | None, recorder: DebugUnderflowOverflow) -> Watched | None:
    if watched is None:
        return None
    rest = _without(watched.next, recorder)
    if watched.recorder is recorder:
        return rest
    watched.next = rest
    return watched


def _install() -> None:
    _undo.append(register_module_forward_pre_hook(_before_forward).remove)
    _undo.append(functools.partial(_remove_after, register_module_forward_hook(_after_forward, with_kwargs=True)))
    _undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    _undo.append(register_optimizer_step_post_hook(_after_step).remove)
    _install_shortcut()
    _install_scaler_step()
    _losses.install(RECORDERS, _undo)
    _cuda_graphs.install(RECORDERS, _undo)
    # torch warns that global hooks fire once more for an OptimizedModule; ours are made for that.
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
    if warnings.filters[0] not in before:  # the user may have the same
        _undo.append(functools.partial(_drop_filter, warnings.filters[0]))
    atexit.register(_at_exit)
    _undo.append(lambda: atexit.unregister(_at_exit))
    _undo.append(_compiled.forget_graphs)
    _compiled.forget_graphs()


def _remove_after(handle: Any) -> None:
    handle.remove()
    # torch forgets to take a removed hook off this list.
    nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def _drop_filter(entry: Any) -> None:
    filters: Any = warnings.filters
    if entry in filters:
        filters.remove(entry)


def _uninstall() -> None:
    while _undo:
        with contextlib.suppress(Exception):
            _undo.pop()()
    TABLE.clear()
    _IGNORED.clear()


def _at_exit() -> None:
    for recorder in list(RECORDERS):
        recorder.finish(at_exit=True)
    _together.close()


# The hot path. Both hooks run for every module call of the process.


def _before_forward(module: nn.Module, args: Any) -> None:
    if _is_compiling():
        _compiled.trace_enter(module, args)
        return
    compiler = _set_compiler(None)
    try:
        watched = TABLE.get(id(module))
        if watched is None:
            ignored = _IGNORED.get(id(module))
            if ignored is not None and (ignored[1] or not _inside()):
                return
            watched = meet(module)
        while watched is not None:
            forwards = watched.forwards
            call = forwards.call
            if (call is None or forwards.live is not None or watched is call.watched) and _may(watched):
                forwards.enter(watched, module, args, kwargs_of_caller)
            watched = watched.next
    finally:
        _set_compiler(compiler)


def _after_forward(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if _is_compiling():
        _compiled.trace_leave(module, kwargs, output)
        return
    compiler = _set_compiler(None)
    try:
        watched = TABLE.get(id(module))
        while watched is not None:
            if replaying is None or _may(watched):
                watched.forwards.leave(watched, module, args, kwargs, output)
            watched = watched.next
    finally:
        _set_compiler(compiler)


# A root that is compiled is called by dynamo with its frame evaluation on: it is off while our own code runs, or that
# would be compiled too. The argument is what to set, the result what was set.
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def _install_shortcut() -> None:
    """Let calls of watched modules without hooks of their own pass by torch's hook machinery.

    With any global hook, torch runs every module call through it: half of what the recorder would cost in Python. The
    hooks above stay, and do the work wherever the shortcut is not taken: roots, replays, modules that have hooks, and
    everywhere if somebody else has replaced `Module.__call__`: each call must pass by theirs.
    """
    _undo.append(_remove_shortcut)
    if nn.Module.__call__ is _module_call:
        nn.Module.__call__ = _call  # type: ignore[method-assign]


def _remove_shortcut() -> None:
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _module_call  # type: ignore[method-assign]
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.unpatched_nn_module_call is _call:
        dynamo.unpatched_nn_module_call = _module_call  # it was imported meanwhile, and took ours for torch's own


# Torch's own, whatever stands in its place now: others may put theirs around ours, and take it off after we have left.
_module_call: Callable[..., Any] = nn.Module._wrapped_call_impl
_call_impl: Callable[..., Any] = nn.Module._call_impl


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """nn.Module.__call__ while a recorder is attached."""
    if _is_compiling():
        return _compiled.traced_call(self, args, kwargs, _module_call)
    compiler = _set_compiler(None)
    watched = TABLE.get(id(self))
    if (
        watched is None
        or watched.next is not None
        or replaying is not None
        or (root := watched.forwards.call) is None
        or watched is root.watched
        or watched.forwards.live is not None
        or self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or self._compiled_call_impl is not None
        or type(self)._call_impl is not _call_impl
        or _compiled.has_foreign_hooks()
        or torch._C._get_tracing_state() is not None
    ):
        if self._compiled_call_impl is not None:
            _compiled.prepare()
            if watched is not None and watched.forwards.wants_frames():
                _set_compiler(compiler)
                as_written: Callable[..., Any] = self._call_impl
                return as_written(*args, **kwargs)
        _set_compiler(compiler)
        return _module_call(self, *args, **kwargs)
    _set_compiler(compiler)
    output = self.forward(*args, **kwargs)
    _set_compiler(None)
    try:
        watched.forwards.leave(watched, self, args, kwargs, output)
    finally:
        _set_compiler(compiler)
    return output


def _may(watched: Watched) -> bool:
    """Not while another recorder, or another thread, has a replay under way."""
    return replaying is None or (replaying[0] is watched.recorder and replaying[1] == threading.get_ident())


def _inside() -> bool:
    """Whether a watched forward is under way."""
    return any(recorder.forwards.call is not None for recorder in RECORDERS)


def kwargs_of_caller() -> dict[str, Any]:
    """The keyword inputs of the module call under way: torch gives a global pre-hook only the positional ones."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE and code.co_name in ("inner", "_call_impl"):
            found = frame.f_locals.get("kwargs")
            return dict(found) if found else {}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


_MODULE_FILE = inspect.getsourcefile(nn.Module)


def running_now(module: nn.Module, skip: int = 1) -> bool:
    """True if this thread is inside more than `skip` calls of the module: that is, it calls itself."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and code.co_filename == _MODULE_FILE and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count > skip


def meet(module: nn.Module) -> Watched | None:
    """A module that is not in the table: a compiled wrapper, one added since, a root in command mode, or a stranger."""
    original = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
    if original is not None:
        _compiled.prepare()
        inner = TABLE.get(id(original)) or meet(original)
        if inner is not None:
            entry = watch(inner.recorder, module, inner.name, inner.root() or original)
            entry.wrapper = True
            entry.sites = inner.sites
            return entry
        return None
    for recorder in RECORDERS:
        found = recorder.roots.adopt(module)
        if found is not None:
            return found
    key = id(module)
    _IGNORED[key] = weakref.ref(module, lambda _: _IGNORED.pop(key, None)), _inside()
    return None


# Where flags are read before the weights can be changed.


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if _is_compiling():
        _compiled.trace_step(optimizer, True)
        return None
    for recorder in list(RECORDERS):
        recorder.before_step(optimizer)
    # A closure runs forward and backward inside the step: the verdict is read again when it returns.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def watched_closure() -> Any:
        loss = closure()
        for recorder in list(RECORDERS):
            recorder.before_step(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], watched_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": watched_closure}


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _is_compiling():
        _compiled.trace_step(optimizer, False)
        return
    for recorder in list(RECORDERS):
        recorder.steps.over(optimizer)


def _install_scaler_step() -> None:
    """Let GradScaler.step be seen from outside: an unfused optimizer whose step it skips is never called."""
    scaler = torch.amp.GradScaler
    original, at_work = scaler.step, True

    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not at_work or _is_compiling():  # in a trace the optimizer's own hooks are enough
            return original(self, optimizer, *args, **kwargs)
        for recorder in list(RECORDERS):
            recorder.before_step(optimizer, scaler=self)
        result = original(self, optimizer, *args, **kwargs)
        for recorder in list(RECORDERS):
            recorder.steps.over(optimizer, scaler=self)
        return result

    def undo() -> None:
        nonlocal at_work
        at_work = False
        if scaler.step is step:  # else somebody has put theirs around it
            scaler.step = original  # type: ignore[method-assign]

    _undo.append(undo)
    scaler.step = step  # type: ignore[method-assign]
