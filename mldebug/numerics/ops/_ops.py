"""A look at every operation, live: which one first made a bad value out of good ones, and whose code it was in."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mldebug.numerics import _hub
from mldebug.numerics._tensors import leaves, tracing_now
from mldebug.numerics.ops._formulas import Formulas
from mldebug.numerics.ops._kept import replaced
from mldebug.numerics.ops._nodes import Made, Nodes, Parameters
from mldebug.numerics.ops._op_names import OVERWRITES, base_name, results_for_backward, short_name
from mldebug.numerics.ops._operands import changed_by, tensors_in
from mldebug.numerics.ops._origin_maker import Before, OriginMaker, Ran
from mldebug.numerics.ops._origins import (
    FINE,
    INF,
    MINUS_INF,
    NAN,
    Fed,
    Ledger,
    Origin,
    Sort,
    Taken,
    is_new,
    is_worse,
    same_memory,
    state_of,
    state_of_number,
    sums_minus_infinity,
    swallows,
    without_bad_operands,
)  # fmt: skip
from mldebug.numerics.ops._places import ModuleStack
from mldebug.numerics.ops._positions import lost_positions
from mldebug.numerics.ops._scale import judge_scale
from mldebug.numerics.ops._source import ours_is_running, recomputed, users_line
from mldebug.numerics.replay._replay import first_bad_row

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_MAX_FOUND = 64  # events of one step that are kept


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """While active, traces every bad value to the operation that made it.

    Slow: each result is read. An origin that a computation made is *found* once it is of consequence: it reaches what
    a module returns, the loss or a gradient, or an operation swallows it (rsqrt of inf is 0). What a selection such as
    torch.where leaves out is of none.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: DebugUnderflowOverflow, replay: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._recorder = recorder
        self._replay = replay  # what it looks at is a replay; else replays are none of its business
        self.found: list[Origin] = []  # of this step
        self.precision: Origin | None = None  # the first operation after which positions are no longer distinct
        self.victim: Origin | None = None  # the first operation that took a bad value which nobody saw made
        self.fed: dict[str, Origin] = {}  # by the path of an input of the root: what made it bad before the forward
        self.wrote: Origin | None = None  # what made the buffer bad that a replay asks for
        self.step = 0
        self._ledger = Ledger()
        self._nodes = Nodes()
        self._formulas = Formulas(self._find, self._guarded)  # of the backward under way
        self._modules = ModuleStack()
        self._task = -1  # the backward under way
        self._bad_loss = False  # it began with NaN or inf
        self._again = False  # a forward that runs again, in backward or as a replay
        self._hooks = ExitStack()
        self._parameters = Parameters(recorder.weights)
        self._maker = OriginMaker(recorder, self._modules, self._nodes, self._parameters)

    def __enter__(self) -> OpWatch:
        self._hooks.callback(register_module_forward_pre_hook(self._enter_module).remove)
        after = register_module_forward_hook(self._leave_module)
        self._hooks.callback(after.remove)
        recorder = self._recorder
        by_itself = recorder.check == "each" or recorder.trace_batch_nums  # then its forwards run as they are written
        if not self._replay and not by_itself:  # dynamo refuses to compile a function whole under a mode like this
            self._hooks.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call,unused-ignore]
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)  # type: ignore[no-untyped-call,unused-ignore]
        finally:
            self._hooks.close()
        self._end_of_backward()

    def begin_step(self, step: int) -> None:
        """A new step: nothing found in it yet."""
        self.step = step
        self.found, self.precision, self.victim, self.fed = [], None, None, {}
        self._formulas.clear()
        self._maker.begin_step(step)
        self._nodes.begin_step()
        self._modules.clear()

    def returned(self, value: Any) -> None:
        """What the user's step returned: a bad loss is of consequence."""
        for name, leaf in leaves(value, "loss"):
            if isinstance(leaf, Tensor):
                part = name.partition(".")[2]
                self._shown(leaf, loss=not part or "loss" in part)

    def end_of_forward(self, buffer: str, output: Any) -> None:
        """The forward of a replay is over: what wrote a buffer, which is put back afterwards."""
        tensor = self._recorder.weights.find(buffer)
        self.wrote = None if tensor is None else self.made(tensor)

    def made(self, tensor: Tensor) -> Origin | None:
        """What made a tensor bad, if that is known."""
        origin = self._ledger.of(tensor)
        return origin if origin is not None and origin.computed else None

    def verdict(self, scaler: Any = None, over: bool = False) -> Origin | None:
        """The event of this step so far, before an optimizer steps or when the step is `over`.

        A GradScaler that is about to skip the step makes an overflow benign if its scale alone is the cause.
        """
        self._end_of_backward()
        origin = min(self.found, key=lambda o: o.number, default=None)
        if origin is not None and scaler is not None and scaler.is_enabled():
            self._guarded(judge_scale, origin, scaler)
        if origin is None and over:
            return self.precision
        return origin

    # Modules.

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        stack = self._modules.now
        if self._ledger and not self._is_away() and not tracing_now():
            if not stack:
                self._guarded(self._fed, module, args, _hub.kwargs_of_caller())
            for _, leaf in leaves(args, "input") if stack else ():
                if isinstance(leaf, Tensor):
                    self._given(leaf)
        stack.append(module)

    def _fed(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a root is given: its inputs that were made bad by operations before the forward."""
        watched, forwards = _hub.find(self._recorder, root), self._recorder.forwards
        given = [pair for i, value in enumerate(args) for pair in leaves(value, f"input[{i}]")]
        given += [pair for key, value in kwargs.items() for pair in leaves(value, f"input.{key}")]
        for path, leaf in given:
            origin = self.made(leaf) if isinstance(leaf, Tensor) else None
            if watched is None or origin is None:
                continue
            if origin.owner is None and origin.phase == "forward" and origin.fed is None:
                self.fed[path] = origin
                origin.fed = Fed(watched, path, first_bad_row(leaf))
                origin.batch = forwards.batches if forwards.call is None else forwards.call.batch

    def _given(self, tensor: Tensor) -> None:
        """A tensor that a module is given: one that was bad by a constant stands before what the module makes of it."""
        origin = self._ledger.of(tensor)
        if self.victim is None and origin is not None and not origin.computed:
            with torch.no_grad():
                self.victim = origin if state_of(tensor) >= INF else None

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.leave(module)
        if self._ledger and not self._is_away() and not self._again and not tracing_now():
            for _, leaf in leaves(output, "output"):
                if isinstance(leaf, Tensor):
                    self._shown(leaf)

    def _shown(self, tensor: Tensor, loss: bool = False) -> None:
        """A tensor that a module or the step returned. Of a loss -inf is bad, of others it may be meant."""
        origin = self._ledger.of(tensor)
        if origin is None or origin.found:
            return
        with torch.no_grad():
            state = state_of(tensor)
        if state >= INF or (state == MINUS_INF and (loss or origin.sort == "made")):
            if origin.computed:
                self._find(origin)
            elif self.victim is None:
                self.victim = origin

    # Operations.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_away() or ours_is_running():
            return func(*args, **kwargs)
        nr = torch._C._autograd._get_sequence_nr() - 1
        before = self._guarded(self._maker.before, func, args, kwargs) or Before()
        output = func(*args, **kwargs)
        self._guarded(self._after, func, args, kwargs, before, output, nr)
        return output

    def _is_away(self) -> bool:
        return _hub.replaying is not None and not self._replay

    def _guarded(self, function: Any, *args: Any) -> Any:
        try:
            with torch.no_grad(), _without_transforms():
                return function(*args)
        except Exception as error:  # our failure is never the end of the run
            self._recorder.fail(error)
            return None

    def _after(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Before, output: Any, nr: int
    ) -> None:
        task = torch._C._current_graph_task_id()
        backward, self._again = task != -1, False
        if backward and recomputed():
            backward, self._again = False, True
        if not backward and not self._again and self._task != -1:
            self._end_of_backward()
        base = base_name(str(func))
        changed = [t for t in changed_by(func, args, kwargs) if t.is_floating_point()]
        results = list(tensors_in(output))
        results = results[:1] if results_for_backward(base) else results
        results += [t for t in changed if not any(t is other for other in results)]
        states = [state_of(t) for t in results]
        worst = max(states, default=FINE)
        node = torch._C._current_autograd_node() if backward else None
        made: Made | None = None
        if not backward:
            if self._nodes.is_new(nr):
                made = Made(short_name(func), self._modules.owner(self._recorder), users_line())
                self._nodes.enter(nr, made)
        elif task != self._task:
            self._begin_backward(task, node)
        ran = Ran(func, args, kwargs, before, node)
        operands = [t for v in (*args, *kwargs.values()) for t in tensors_in(v)]
        if base in OVERWRITES:
            operands = [t for t in operands if not any(t is other for other in changed)]
        if worst == FINE:
            if self._ledger:
                self._consumed(base, operands, before, results, node)
                for tensor in changed:
                    if before.states.get(id(tensor)) and tensor._is_view() is False:
                        self._ledger.forget(tensor)
            if self.precision is None and not backward and (numbers := lost_positions(base, operands, results)):
                self.precision = self._origin("made", ran, numbers, NAN)
                self.precision.facts = frozenset({"positions"})
            return
        scalar = max((state_of_number(v) for v in (*args, *kwargs.values())), default=FINE)
        taken = [
            Taken(t, state, self._ledger.of(t))
            for t in operands
            if (state := before.states.get(id(t), -1)) > FINE or (state < 0 and (state := state_of(t)) > FINE)
        ]
        bad = [t for t, state in zip(results, states, strict=True) if state == worst]
        if not taken:
            namespace = getattr(func, "namespace", "")
            sort = without_bad_operands(base, namespace, worst, scalar, [*replaced(operands, before.values), bad[0]])
            origin = self._origin(sort, ran, bad, worst)
        elif is_new(base, backward, taken, worst, self._hidden(node)):
            origin = self._origin("made", ran, bad, worst)
        elif not backward and sums_minus_infinity(base, taken, worst):
            origin = self._origin("log", ran, bad, worst)
        else:
            known = [one.origin for one in taken if one.origin is not None]
            first = min(known, key=lambda o: (not o.computed, o.number), default=None)
            if first is None and not changed and all(any(same_memory(t, one.tensor) for one in taken) for t in bad):
                return  # a view of what was given: whoever computes with it is told
            if first is None or (not backward and is_worse(base, first, worst)):
                first = self._origin("given", ran, bad, max(worst, *(one.worst for one in taken)))
            origin = first
            if backward:
                self._formulas.spread(origin, base, _id(node), worst, bad)
        for tensor, state in zip(results, states, strict=True):
            if state:
                self._ledger.enter(tensor, origin)
        if made is not None and worst >= INF:
            made.origin = origin
        if not backward and changed and origin.computed:
            self._write(origin, changed)

    def _hidden(self, node: Any) -> bool:
        made = None if node is None or self._bad_loss else self._nodes.of(node)
        return made is not None and made.origin is not None

    def _write(self, origin: Origin, changed: list[Tensor]) -> None:
        """A bad value that is written into a parameter is of consequence: by an optimizer, or by code like one."""
        found = next((mine for tensor in changed if state_of(tensor) and (mine := self._parameters.of(tensor))), None)
        if found is None:
            return
        if origin.owner is None and origin.phase in ("forward", "optimizer"):
            origin.by_hand = origin.phase == "forward"
            origin.phase = "optimizer"
            origin.owner, origin.param = found
        self._find(origin)

    def _consumed(self, base: str, operands: list[Tensor], before: Before, results: list[Tensor], node: Any) -> None:
        """Clean results of operands that may be bad."""
        for tensor in operands:
            origin = self._ledger.of(tensor)
            if origin is None or origin.found or not origin.computed:
                continue
            state = before.states.get(id(tensor), -1)
            state = state_of(tensor) if state < 0 else state
            if state == FINE:
                continue
            if origin.node:
                self._formulas.taken(origin, base, _id(node), results)
            elif node is None and swallows(base, origin, state, results):
                self._find(origin)

    # Origins.

    def _origin(self, sort: Sort, ran: Ran, bad: list[Tensor], worst: int) -> Origin:
        origin = self._maker.make(sort, ran, bad, worst)
        if ran.node is not None and origin.sort == "made":
            self._formulas.add(origin, ran.node)
        return origin

    def _find(self, origin: Origin) -> None:
        muted = origin.owner is not None and origin.owner.muted
        if not origin.found and not muted and not self._again and len(self.found) < _MAX_FOUND:
            origin.found = True
            self.found.append(origin)

    def _begin_backward(self, task: int, node: Any) -> None:
        """The first node of a backward is that of the loss: if the forward made it bad, that is of consequence."""
        if self._task == -1:
            made = None if node is None else self._nodes.of(node)
            self._bad_loss = made is not None and made.origin is not None
            if made is not None and made.origin is not None and made.origin.computed:
                self._find(made.origin)
        self._task = task

    def _end_of_backward(self) -> None:
        self._task = -1
        self._formulas.end()


def _without_transforms() -> AbstractContextManager[Any]:
    """Inside vmap and the other transforms of torch.func values cannot be read as long as they are in force."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    clear: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return clear


def _id(node: Any) -> int:
    return -1 if node is None else int(node._sequence_nr())
