"""memory_watch: what a training script takes in each phase, what is alive, and what grows, without an edit of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
import weakref
from collections import Counter
from typing import Any, TextIO

import torch

from mldebug.core.device import Device
from mldebug.core.errors import MldebugError
from mldebug.core.report import jsonable, write
from mldebug.core.scope import Scope
from mldebug.perf.memory._advice import advice
from mldebug.perf.memory._blocks import CudaBlocks, classes_of
from mldebug.perf.memory._card import used_device
from mldebug.perf.memory._hooks import Hooks, compiler_is_in_use
from mldebug.perf.memory._live import LATER, Live, LiveTensors, kinds_of
from mldebug.perf.memory._reading import Reading, line_of, look, size
from mldebug.perf.memory._run_report import MemoryRunReport, OutOfMemory, Phase
from mldebug.perf.memory._sites import hide_own_frames
from mldebug.perf.memory._steps import FIRST, Steps

_SETTLED = 3  # steps, after which models and optimizers are expected to be there
_SOURCES = ("forward", "backward", "optimizer step")  # what counts as a step: the last of these that happens


class memory_watch(Scope):
    """Prints a line of memory for each phase of a training (init, first forward, first backward, first optimizer step,
    steady), and says at its end what was alive and whether memory grows step after step, and where.

    Phases are found by torch's own process-wide hooks. On CUDA torch's allocator keeps the stack of each block; on the
    CPU operations are noted in the first 40 steps, in 16 steps at 100, 200, 400 ..., and when the process grows.
    `.report` is a MemoryRunReport after the scope. `output` is a file that gets each line as JSON as it comes;
    `file` the stream of the lines (stderr), None-like with quiet=True. `top` places are shown of what is alive.
    Our own failure is a warning and not the end of the run. Numbers of the script are not changed.

        with memory_watch() as watch:
            train()
        print(watch.report.text())
    """

    report: MemoryRunReport

    def __init__(
        self,
        *,
        output: str | os.PathLike[str] | None = None,
        file: TextIO | None = None,
        quiet: bool = False,
        top: int = 8,
    ) -> None:
        self._output = os.fspath(output) if output is not None else None
        self._file, self._quiet, self._top = file, quiet, top

    def start(self) -> None:
        self._phase, self._source, self._doing, self._count = "init", 0, "", 0
        self._phases: list[Phase] = []
        self._notes: list[str] = []
        self._ran_out: OutOfMemory | None = None
        # Those of the first steps, and those that came later: one that comes with each step and stays is a leak.
        self._models: list[weakref.WeakSet[torch.nn.Module]] = [weakref.WeakSet(), weakref.WeakSet()]
        self._optimizers: list[weakref.WeakSet[torch.optim.Optimizer]] = [weakref.WeakSet(), weakref.WeakSet()]
        self._main_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._main_steps = self._backwards = 0  # of the main optimizer; backwards since its last
        self._is_new = False  # the optimizer that steps was not seen before
        self._other_steps: Counter[int] = Counter()  # of each since the main one's last
        self._pid = os.getpid()
        self._jsonl = open(self._output, "w", encoding="utf-8") if self._output is not None else None  # noqa: SIM115
        self._hooks = Hooks(self)
        self._live = LiveTensors(self._where)
        self._blocks = CudaBlocks(self._out_of_memory)
        self._steps = Steps(self._alive, self._kinds, self._live, self._announce)
        self._last = self._first = look("start")
        self._hooks.install()
        if torch.cuda.is_available():
            self._blocks.begin()
        elif not self._live.begin():
            self._notes.append("a dispatch mode was open at the start: what tensors are alive is not looked at")

    def stop(self, exc: BaseException | None) -> None:
        self._hooks.remove()
        try:
            ends_it = exc is not None and Device("cpu", 0).out_of_memory(exc)
            if ends_it and self._ran_out is None:
                self._note_out_of_memory(None, exc)
            elif not ends_it and self._ran_out is not None:
                self._notes.append(f"memory ran out in the {self._ran_out.phase}, and the script went on")
                self._ran_out = None
            if self._phase != "steady" or self._count > 1:
                self._end_phase(self._phase if self._phase in ("init", "steady") else f"{self._phase} (not ended)", "")
            self._steps.judge()
        except Exception as error:
            self.failed(error)
        finally:
            self._live.end()
            self._blocks.end()
            if exc is not None:
                hide_own_frames(exc)
            self.report = self._make_report()
            self._record("report", self.report.to_dict())
            self._steps.clear()
            self._live.forget()
            if self._jsonl is not None:
                with contextlib.suppress(OSError):
                    self._jsonl.close()

    # What the hooks call.

    def forward_begins(self, root: torch.nn.Module) -> None:
        self._enter(self._models, root)
        if self._phase == "init":
            self._end_phase("init", "first forward")
            if torch.cuda.is_available() and compiler_is_in_use():
                self._hooks.watch_modules(False)  # the stacks of blocks say which class; torch.compile sees no hooks
                return
        self._tick(0)

    def backward_begins(self) -> None:
        if self._phase in ("init", "first forward"):
            self._end_phase("first forward" if self._phase == "first forward" else "init", "first backward")
        self._doing = "backward"

    def backward_ended(self) -> None:
        self._doing = ""
        self._backwards += 1
        if self._phase == "first backward":
            self._end_phase("first backward", "first optimizer step")
        self._tick(1)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_new = self._enter(self._optimizers, optimizer)
        if self._phase in ("init", "first forward", "first backward"):  # gradients came by another way
            self._end_phase(self._phase, "first optimizer step")
        if self._phase == "first optimizer step":
            self._last = look()
        self._doing = "optimizer step"

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._doing = ""
        if self._phase == "first optimizer step":
            self._end_phase("first optimizer step", "steady")
        main = self._main_optimizer() if self._main_optimizer is not None else None
        if main is None:
            self._main_optimizer, self._main_steps = weakref.ref(optimizer), 0
        elif main is not optimizer:
            self._other_steps[id(optimizer)] += 1
            made_anew = self._is_new and self._main_steps == 1 and self._backwards > 0  # one for each step
            if not made_anew and self._other_steps[id(optimizer)] < 20:
                return  # of several optimizers one counts the steps
            self._main_optimizer, self._main_steps = weakref.ref(optimizer), 0  # the first one is used no more
        self._main_steps, self._backwards = self._main_steps + 1, 0
        self._other_steps.clear()
        self._tick(2)

    def failed(self, exc: Exception) -> None:
        message = f"mldebug memory: it failed and watches on: {type(exc).__name__}: {exc}"
        if message not in self._notes and len(self._notes) < 20:
            self._notes.append(message)
            with contextlib.suppress(Exception):  # a filter may make it an error
                warnings.warn(message, stacklevel=2)

    # What is noted.

    def _tick(self, source: int) -> None:
        if os.getpid() != self._pid or source < self._source:
            return
        was_noting = self._live.noting
        if source > self._source:
            self._source, self._count = source, 0
            self._steps.begin_again()
            if not torch.cuda.is_available():
                self._live.begin()  # many forwards came before: their window is over
        self._count += 1
        # What a rollout or an evaluation keeps may be let go soon: of forwards alone only the report says it.
        self._steps.ended(self._count, self._use(), telling=source > 0)
        if torch.cuda.is_available():
            if source or self._count >= FIRST:  # else forwards alone are the steps
                self._hooks.watch_modules(False)
        elif was_noting != self._live.noting:
            self._hooks.watch_modules(self._live.noting)

    def _use(self) -> int | None:
        """The bytes on an accelerator that would grow with a leak; None without one."""
        device = used_device()
        if device is not None and device.kind in ("cuda", "rocm"):
            return int(torch.cuda.memory_allocated(device.index))
        return None if device is None or device.kind == "cpu" else look().use

    def _where(self) -> str:
        return self._hooks.running() or f"({self._doing or ('init' if self._phase == 'init' else 'script')})"

    def _enter(self, known: list[weakref.WeakSet[Any]], thing: Any) -> bool:
        """Whether it is new."""
        is_new = thing not in known[0] and thing not in known[1]
        if is_new:
            known[self._count >= _SETTLED].add(thing)
        return is_new

    def _kinds(self) -> dict[int, str]:
        first, later = (
            kinds_of(list(self._models[when]), list(self._optimizers[when]), by_address=self._on_cuda())
            for when in (0, 1)
        )
        return {address: kind + LATER for address, kind in later.items()} | first

    def _on_cuda(self) -> bool:
        return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _alive(self) -> list[Live] | None:
        """What is alive; None: not looked at now."""
        if self._on_cuda():
            return self._blocks.look(
                torch.cuda.current_device(), self._kinds(), classes_of([*self._models[0], *self._models[1]])
            )
        if not self._live.noting:
            return None
        # What was made by no operation that was noted, such as weights that are mapped from a file, is left out.
        return self._live.look(self._kinds())

    def _end_phase(self, name: str, following: str) -> None:
        self._phase = following or self._phase
        if os.getpid() != self._pid:
            return
        before, now = (self._phases[-1].reading if self._phases else self._first), look(name)
        if name.startswith("first optimizer step"):
            before = self._last
        alive = self._alive()
        kinds = _by_kind(alive or [])
        highest = max((phase.reading.peak or 0 for phase in self._phases), default=0)
        phase = Phase(
            name,
            self._count if name == "steady" else 0,
            now,
            sum(kinds.values()) if alive is not None else None,
            kinds,
            tuple((alive or [])[: self._top]),
            (now.peak or 0) > highest,
        )
        self._phases.append(phase)
        more = f"tensors={size(phase.tensors)}" if phase.tensors is not None and now.card.allocated is None else ""
        if name == "steady":
            more = f"steps={self._count} {more}".strip()
        self._say(line_of(now, before, more))
        self._record("phase", jsonable(phase))

    def _out_of_memory(self, device: int, asked: int) -> None:
        """The allocator is about to raise: what is alive is what was alive."""
        try:
            self._note_out_of_memory(asked, None)
        except Exception as exc:
            self.failed(exc)

    def _note_out_of_memory(self, asked: int | None, exc: BaseException | None) -> None:
        now: Reading = look("out of memory")
        alive = self._alive() or []
        kinds = _by_kind(alive)
        phase = self._phase if not self._doing or self._phase != "steady" else f"steady steps' {self._doing}"
        error = str(exc).splitlines()[0] if exc is not None and str(exc) else f"{now.card.device} has no memory left"
        self._ran_out = OutOfMemory(
            phase, self._count, asked, error, now, kinds, tuple(alive[: self._top]), advice(now, kinds, asked)
        )
        self._say(line_of(now, None, f"phase={phase.replace(' ', '_')} step={self._count + 1}"))
        self._record("out of memory", jsonable(self._ran_out))

    def _announce(self, text: str, what: dict[str, Any]) -> None:
        self._say(f"mldebug memory: rank={self._first.rank}/{self._first.world_size} {text}")
        self._record("growth", what)

    def _say(self, line: str) -> None:
        if not self._quiet:
            with contextlib.suppress(MldebugError, OSError, ValueError):
                write(line + "\n", sys.stderr if self._file is None else self._file)

    def _record(self, kind: str, what: Any) -> None:
        if self._jsonl is not None:
            try:
                self._jsonl.write(json.dumps({"kind": kind, **what}) + "\n")
                self._jsonl.flush()
            except (OSError, ValueError) as exc:
                self._jsonl = None
                self.failed(OSError(f"{self._output} takes no more: {exc}"))

    def _make_report(self) -> MemoryRunReport:
        now = self._phases[-1].reading if self._phases else self._first
        device = now.card.device if now.card.physical is None else f"{now.card.device} (GPU {now.card.physical})"
        notes = [*self._notes, *self._steps.all_notes()]
        leak, results = self._steps.leak, None
        if leak is not None and not self._source and not (leak.holder is not None and leak.holder.graph):
            leak, results = None, leak  # a test set has an end
        if results is not None:
            first, holder = results.growths[0].where.site.where(), results.holder
            kept = f" by {holder.name}" if holder is not None and holder.name else ""
            notes.append(
                f"of what {first} makes {size(results.per_step)} are kept{kept} after each forward, without an "
                "autograd graph: the results of a test set, or a leak if this goes on for good"
            )
        if self._live.full:
            notes.append("more tensors were alive than are kept in view: the lists are not complete")
        return MemoryRunReport(
            now.rank,
            now.world_size,
            now.host_name,
            device,
            self._count if self._source else 0,
            _SOURCES[self._source],
            tuple(self._phases),
            leak,
            self._steps.judged,
            self._ran_out,
            tuple(notes),
            self._steps.process.per_step,
            self._steps.process.leak if leak is None else None,
            results.per_step if results is not None else None,
        )


def _by_kind(alive: list[Live]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for live in alive:
        sums[live.kind] += live.nbytes
    return dict(sums.most_common())
