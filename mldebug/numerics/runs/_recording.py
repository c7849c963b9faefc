"""record_run: every module output (or operation) of a run, written to a folder as it comes."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mldebug.core.report import Report
from mldebug.core.scope import Scope
from mldebug.core.world import world
from mldebug.numerics._tell import warn
from mldebug.numerics._tensors import leaves, tracing_now
from mldebug.numerics.runs import _recording_compiled as compiled
from mldebug.numerics.runs._recording_env import environment, random_state
from mldebug.numerics.runs._recording_files import Writer
from mldebug.numerics.runs._recording_tensor import described

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel")
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in the names of modules inside them
_MAX_LEAVES = 200  # tensors of one module call


@dataclass(frozen=True)
class RecordingReport(Report):
    """What this rank recorded: into which folder, how many forwards, lines and bytes; `is_full`: the limit was met.

    with record_run("before", model) as run: train()
    print(run.report.text())
    """

    folder: str
    rank: int
    forwards: int
    lines: int
    nbytes: int
    is_full: bool

    def text(self, color: bool = False, width: int = 80) -> str:
        size = f"{self.nbytes / 1e6:.1f} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:.1f} kB"
        size += ", where it ended: the limit of bytes" if self.is_full else ""
        return f"mldebug compare: rank {self.rank} recorded {self.forwards} forwards to {self.folder} ({size})"


class record_run(Scope):
    """Record what every module takes and returns, to compare it with another run: see `mldebug.compare`.

    `folder` is made if need be; each rank writes files of its own into it, and an earlier recording there is replaced.
    For each tensor: shape, dtype, statistics, a checksum of its bits and 256 of its values; the whole tensor as well
    if it has at most `full_bytes` and the recording is below 9/10 of `max_bytes` (bytes a rank; at the limit
    recording ends, and the recording says so). With `model` only its modules are recorded, else those of any model
    that is called. `ops=True` also records the output of every operation (slow). `forwards` is how many forwards of
    the model to record (None: all). Numbers of the run stay what they are; of what fails in here the run hears by
    one warning. Tensors on a GPU are waited for.

        with mldebug.record_run("before", model):
            train()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        ops: bool = False,
        forwards: int | None = None,
        max_bytes: int = 1 << 30,
        full_bytes: int = 4 << 20,
    ) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self._ops = ops
        self.outside = False  # also record operations outside of modules: for functions that compare() calls
        self._forwards, self._limits = forwards, (max_bytes, full_bytes)
        self._only = None if model is None else _unwrapped(model)
        self._handles: list[Callable[[], Any]] = []
        self._recorder: Recorder | None = None

    def start(self) -> None:
        writer = Writer(self.folder, world().rank, *self._limits)
        writer.head({"world_size": world().world_size, "host": world().host, **environment()})
        recorder = self._recorder = Recorder(writer, self._only, self._ops, self._forwards)
        recorder.outside = self.outside
        if self._only is not None:
            recorder.guard(recorder.know, self._only)
        if self._ops or self.outside:
            mode: Any = _Ops(recorder)
            mode.__enter__()
            self._handles.append(lambda: mode.__exit__(None, None, None))
        pre = register_module_forward_pre_hook(recorder.entered)
        post = register_module_forward_hook(recorder.left, with_kwargs=True)
        self._handles += [pre.remove, lambda: _remove(post), *compiled.start(recorder)]

    def stop(self, exc: BaseException | None) -> None:
        for undo in reversed(self._handles):
            undo()
        self._handles.clear()
        if self._recorder is not None:
            self._recorder.guard(self._recorder.writer.close)

    @property
    def report(self) -> RecordingReport:
        """What was recorded so far."""
        if self._recorder is None:
            return RecordingReport(self.folder, world().rank, 0, 0, 0, False)
        writer, forwards = self._recorder.writer, self._recorder.forwards
        return RecordingReport(self.folder, world().rank, forwards, writer.lines, writer.nbytes, writer.is_full)

    def result(self, value: Any) -> None:
        """Record what a callable returned, and close."""
        if self._recorder is not None:
            self._recorder.guard(self._recorder.tensors, "result", "result", -1, value)


class Recorder:
    """Follows the calls of modules by global hooks: hooks on the modules would be pickled and copied with them."""

    def __init__(self, writer: Writer, only: nn.Module | None, ops: bool, forwards: int | None) -> None:
        self.writer, self.ops, self.outside = writer, ops, False
        self._only, self._forwards = only, forwards
        self._names: dict[int, tuple[int, str, nn.Module]] = {}  # id -> number of its model, name; keeps it alive
        self._inner: set[int] = set()  # what wrappers wrap: the wrapper is recorded in its place
        self._models = 0
        self._open: list[tuple[int, dict[str, Any]]] = []  # calls under way: id, and what was written of them
        self._calls: dict[tuple[int, str], int] = {}  # in this forward
        self._roots: dict[int, nn.Module] = {}
        self._versions: dict[int, int] = {}  # of the weights, when they were written
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # id(tensor) -> it, version, its line
        self._forward = -1
        self._here = (os.getpid(), threading.get_ident())  # children and other threads are not recorded
        self._inside = False  # our own operations are not recorded
        self._failed = False

    @property
    def forwards(self) -> int:
        """How many forwards of a model were recorded."""
        seen = self._forward + 1
        return seen if self._forwards is None else min(seen, self._forwards)

    # The hooks.

    def entered(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            compiled.trace_entered(module)
            return
        if self._is_on():
            frame = sys._getframe(1)
            kwargs = frame.f_locals.get("kwargs", {}) if frame.f_code.co_name in ("_call_impl", "inner") else {}
            self.guard(self.enter, module, args, kwargs)

    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            compiled.trace_left(module, output)
            return
        if self._open and self._is_on() and any(entry[0] == id(module) for entry in self._open):
            self.guard(self.leave, module, output)

    # What they do.

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if type(module).__name__ in _WRAPPERS:
            self._see_wrapper(module)
        elif not self._open and self._only is None and not self._is_known(module) and not _in_backward():
            self.know(module)
        if id(module) not in self._names or id(module) in self._inner:
            return
        if self._names[id(module)][1] == "" or not self._open:
            if _in_backward():
                return  # activation checkpointing runs a part again
            self.begin()
        if self._is_past():
            return
        model, name, _ = self._names[id(module)]
        call = self._calls[model, name] = self._calls.get((model, name), -1) + 1
        about = {"kind": "call", "model": model, "forward": self._forward, "module": name, "call": call}
        about |= {"class": _class_name(module), "training": module.training, "random": random_state()}
        about["parent"] = self._open[-1][1]["id"] if self._open else None
        about["autocast"] = _autocast()
        number = about["id"] = self.writer.line(about)
        self._open.append((id(module), about))
        self.tensors("input", "input", number, (args, kwargs))

    def leave(self, module: nn.Module, output: Any) -> None:
        while self._open:
            key, about = self._open.pop()
            if key == id(module):
                break  # what was above it ended by an exception
        self.tensors("output", "output", about["id"], output)
        about = {"kind": "left", "of": about["id"], "random": random_state()}
        self.writer.line(about)

    def tensors(self, role: str, path: str, call: int, value: Any, op: str = "", made_of: Any = ()) -> None:
        """One line for each tensor inside of `value`."""
        for number, (where, leaf) in enumerate(leaves(value, path)):
            if not isinstance(leaf, Tensor):
                continue
            if number >= _MAX_LEAVES or self.writer.is_full:
                return
            known = self._seen.get(id(leaf))
            about = {"kind": "tensor", "role": role, "path": _plain_path(where), "of": call}
            if op:
                about |= {"op": op, "from": self._lines_of(made_of)}
            if known is not None and known[0]() is leaf and known[1] == leaf._version:
                self.writer.line(about | {"same": known[2]})
                continue
            facts, whole = described(leaf, self.writer.takes)
            line = self.writer.line(about | facts, whole)
            if not leaf.is_inference():  # those have no version, and may be changed
                self._seen[id(leaf)] = (weakref.ref(leaf), leaf._version, line)

    def know(self, model: nn.Module) -> None:
        """Give the modules of `model` their names, and record its weights."""
        number, self._models = self._models, self._models + 1
        for name, module in model.named_modules():
            if type(module).__name__ not in _WRAPPERS:
                self._names.setdefault(id(module), (number, plain_name(name), module))
        config = getattr(model, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        about = {"kind": "model", "model": number, "class": type(model).__name__, "attention": attention}
        self.writer.line(about)
        self._roots[number] = model
        self._weights(number, sum(w._version for w in model.parameters() if not w.is_inference()))

    def begin(self) -> None:
        """A forward of a model begins. What is still open was left by an exception."""
        self._forward += 1
        self._open.clear()
        self._calls.clear()
        self._seen.clear()
        if not self._is_past():
            for number, versions in self._versions.items():
                model = self._roots[number]
                now = sum(weight._version for weight in model.parameters() if not weight.is_inference())
                if now != versions:
                    self._weights(number, now)

    def compiled_output(self, module: nn.Module, path: str, value: Tensor) -> None:
        """The output of a module inside a compiled graph: its inputs were not seen, as they may not exist."""
        if id(module) not in self._names or self._is_past():
            return
        model, name, _ = self._names[id(module)]
        if path in ("output", "output[0]") or (model, name) not in self._calls:
            self._calls[model, name] = self._calls.get((model, name), -1) + 1
        about = {"kind": "call", "model": model, "forward": max(0, self._forward), "module": name}
        about |= {"call": self._calls[model, name], "class": _class_name(module), "training": module.training}
        about |= {"parent": self._open[-1][1]["id"] if self._open else None, "compiled": True}
        self._seen.clear()  # Inductor writes new values into the tensors it has, whose versions stay
        self.tensors("output", path, self.writer.line(about), value)
        self._seen.clear()

    def module_of(self, key: int) -> nn.Module | None:
        """The module with this id, if it is recorded."""
        return self._names[key][2] if key in self._names and key not in self._inner else None

    def is_root(self, key: int) -> bool:
        """Whether the forward of a model begins with this module."""
        return self.module_of(key) is not None and self._names[key][1] == ""

    def operation(self, name: str, output: Any, args: Any, is_view: bool) -> None:
        """Record what an operation returned. A view is known by the tensor that it looks into."""
        if is_view:
            base = self._seen.get(id(args[0])) if args else None
            if base is not None and isinstance(output, Tensor) and not output.is_inference():
                self._seen[id(output)] = (weakref.ref(output), output._version, base[2])
        elif not self._is_past():
            if not self._open:
                given = [leaf for _, leaf in leaves(args, "") if isinstance(leaf, Tensor) and not self._lines_of(leaf)]
                self.tensors("op", "input", -1, given, "input")
            self.tensors("op", "output", self._open[-1][1]["id"] if self._open else -1, output, name, args)

    def _lines_of(self, value: Any) -> list[int]:
        """The numbers of the lines in which the tensors of `value` are."""
        lines = []
        for _, leaf in leaves(value, ""):
            known = self._seen.get(id(leaf))
            if known is not None and isinstance(leaf, Tensor) and known[0]() is leaf and known[1] == leaf._version:
                lines.append(known[2])
        return lines

    def _see_wrapper(self, wrapper: nn.Module) -> None:
        """Let a wrapper (DDP, a compiled module) stand for the module in it."""
        inner = _unwrapped(wrapper)
        if id(inner) not in self._names and self._only is None and not self._open:
            self.know(inner)
        if id(inner) in self._names and id(wrapper) not in self._names:
            self._names[id(wrapper)] = (*self._names[id(inner)][:2], wrapper)
        if id(inner) in self._names:
            self._inner.add(id(inner))

    def _weights(self, number: int, versions: int) -> None:
        """Samples of the weights, before the forward that is next."""
        model, self._versions[number] = self._roots[number], versions
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if not self.writer.is_full:
                facts, _ = described(weight, lambda _: False)
                about = {"kind": "weight", "model": number, "forward": max(0, self._forward)}
                self.writer.line(about | {"module": plain_name(name), **facts})

    def _is_known(self, module: nn.Module) -> bool:
        return id(module) in self._names or id(module) in self._inner

    def _is_past(self) -> bool:
        return self._forwards is not None and self._forward >= self._forwards

    def wants_op(self) -> bool:
        return not self._inside and self._is_on() and (self.ops if self._open else self.outside)

    def _is_on(self) -> bool:
        return not self._failed and not self.writer.is_full and (os.getpid(), threading.get_ident()) == self._here

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """A failure of ours is a warning and not the end of the run."""
        if self._inside or tracing_now():
            return
        self._inside = True
        try:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                function(*args)
        except Exception as exc:
            if not self._failed:
                self._failed = True
                warn(f"mldebug.record_run stopped recording: {type(exc).__name__}: {exc}")
        finally:
            self._inside = False


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._recorder.wants_op() and func.namespace == "aten":
            name = func._schema.name.partition("::")[2]
            self._recorder.guard(self._recorder.operation, name, output, args, func.is_view)
        return output


def plain_name(name: str) -> str:
    """The name of a module without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _unwrapped(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _WRAPPERS:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def _class_name(module: nn.Module) -> str:
    name = type(_unwrapped(module)).__name__
    return name.removeprefix("FSDP") if hasattr(module, "_get_fsdp_state") else name  # FSDP2 makes a class of its own


def _plain_path(path: str) -> str:
    """`input[0]` and `input.mask`, where (args, kwargs) were gone through as one."""
    if path.startswith("input[0]"):
        return "input" + path[len("input[0]") :]
    return "input" + path[len("input[1]") :] if path.startswith("input[1]") else path


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _autocast() -> str | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def _remove(handle: Any) -> None:
    handle.remove()
    module = nn.modules.module
    module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch forgets to take a removed hook off this list
