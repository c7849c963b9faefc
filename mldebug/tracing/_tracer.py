"""NicerTrace: every line that runs is on disk before the next one runs."""

from __future__ import annotations

import os
import sys
import time
import trace
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.scope import Scope
from mldebug.tracing._begin import Gate, Timer, Toggle, at_function, signal_number
from mldebug.tracing._files import TraceFile, warn
from mldebug.tracing._pen import Pen, Stream, TextPen
from mldebug.tracing._recorder import Options, Recorder
from mldebug.tracing._select import Selection


class NicerTrace(Scope):
    """Writes each line that runs inside of it to `trace-{host}-{rank}-{pid}.txt`, before the next one runs.

    So the last lines are there after SIGKILL, os._exit and a segfault. `output` is the folder for these files, or "-"
    for the program's stdout. With `ring`, a number of bytes, lines go to a mapped file of that size instead, which
    keeps the newest and costs less. `rotate` (bytes), `keep` and `compress` are for long texts.

    `include` and `exclude` take modules, packages, paths, `module:function`, globs of these, and the words user,
    installed, stdlib, all; the default is user code. `packages_to_include=["PIL"]` traces installed packages besides;
    `ignoredirs` traces all but these folders, `ignoremods` leaves modules out.
    `trace` writes lines, `count` counts them for `results()`; `calls_only` leaves lines out; `returns`,
    `exceptions` and `args` show values in a few safe words; `depth` limits how deep traced calls are shown; `threads`
    names the thread in each line, `log_pids` the process. `timing=False` leaves the time out.
    `start_at="module:function"` and `after` (seconds) begin later; `signal` pauses and goes on.
    Forked children have files of their own. UsageError for a wrong option or a folder that cannot be written,
    MldebugError if Python has no place left for a tracer.

        with NicerTrace(packages_to_include=["torch"]):
            train()
    """

    def __init__(
        self,
        count: bool | int = 1,
        trace: bool | int = 1,
        countfuncs: bool | int = 0,
        countcallers: bool | int = 0,
        ignoremods: Sequence[str] = (),
        ignoredirs: str | Sequence[str] | None = (),
        infile: str | None = None,
        outfile: str | None = None,
        timing: bool = True,
        *,
        packages_to_include: str | Sequence[str] | None = None,
        log_pids: bool = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        depth: int | None = None,
        calls_only: bool = False,
        returns: bool = False,
        exceptions: bool = False,
        args: bool = False,
        threads: bool = False,
        start_at: str | None = None,
        after: float | None = None,
        signal: str | int | None = None,
        ring: int | None = None,
        rotate: int | None = None,
        keep: int = 10,
        compress: bool = False,
        output: str | os.PathLike[str] = ".",
    ) -> None:
        if countfuncs or countcallers:
            raise UsageError("countfuncs and countcallers are not there", "python -m trace --listfuncs has them")
        if depth is not None and depth < 1:
            raise UsageError(f"depth is {depth}", "1 shows the outermost traced functions")
        if ring is not None and (rotate is not None or compress or os.fspath(output) == "-"):
            raise UsageError(
                "a ring has one size: it does not rotate, is not compressed and is no stdout", "leave ring out"
            )
        self._selection = _selection(packages_to_include, ignoredirs, ignoremods, include, exclude)
        self._options = Options(
            lines=not calls_only, returns=returns, exceptions=exceptions, args=args, depth=depth, count=bool(count)
        )
        self._write, self._timing, self._log_pids, self._threads = bool(trace), timing, log_pids, threads
        self._start_at = start_at
        self._gate: Gate | None = None if start_at is None else at_function(start_at)
        if after is not None and not after >= 0:
            raise UsageError(f"after is {after}", "it is a number of seconds, as 1800")
        self._after = after
        self._signal = None if signal is None else signal_number(signal)
        self._ring, self._rotate, self._keep, self._compress = ring, rotate, keep, compress
        self._output = output if os.fspath(output) == "-" else os.path.abspath(output)
        self._infile, self._outfile = infile, outfile
        self._counts: dict[tuple[str, int], int] = {}
        self._pen: Pen | None = None
        self._recorder: Recorder | None = None
        self._timer: Timer | None = None
        self._toggle: Toggle | None = None
        self.path = ""  # of the file of the last run; empty if there is none

    def start(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise MldebugError("cannot trace: this Python runs without its global lock", "start it with PYTHON_GIL=1")
        recorder = self._recorder = Recorder(self._selection, self._options)
        if self._write:
            self._pen = self._new_pen(recorder.failed)
            self.path = self._pen.path
        recorder.write_with(self._pen)
        engine = recorder.engine = _engine(recorder)
        _active.add(self)
        try:
            if self._after is not None and sys.version_info < (3, 12):  # settrace reaches no other thread
                engine.start(_later(time.monotonic() + self._after, self._gate))
            elif self._after is not None:
                self._timer = Timer(self._after, lambda: engine.start(self._gate))
            else:
                engine.start(self._gate)
            if self._signal is not None:
                self._toggle = Toggle(self._signal, self._switch)
        except BaseException:
            self.stop(None)
            raise

    def stop(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._recorder is not None and self._recorder.engine is not None:
            if self._timer is not None or self._recorder.engine.running:
                self._say_if_empty(self._recorder)
            self._recorder.engine.stop()
            for key, hits in self._recorder.total().items():
                self._counts[key] = self._counts.get(key, 0) + hits
        if self._toggle is not None:
            self._toggle.close()
        if self._pen is not None:
            self._pen.close()
        _active.discard(self)
        self._timer = self._toggle = self._recorder = self._pen = None

    def end_of_program(self, interrupted: bool = False) -> None:
        """For a tracer that is never stopped: say in its file that the program ended in order. It traces on.

        Ctrl-C takes the trace function away where it comes while that runs, which is no news where it `interrupted`."""
        if self._recorder is not None and self._recorder.engine is not None:
            if not interrupted:
                self._recorder.engine.check()
            self._say_if_empty(self._recorder)
            if self._recorder.found and self._selection.unused and self._pen is not None:
                warn(f"nothing that ran matches --include {', '.join(sorted(self._selection.unused))}")
        if self._pen is not None:
            self._pen.end()

    def _say_if_empty(self, recorder: Recorder) -> None:
        """A misspelt name is not to be found out by reading an empty file."""
        if self._pen is None or recorder.found:
            return
        if self._start_at is not None and recorder.engine is not None and recorder.engine.waiting:
            why = f"{self._start_at} was not called" + (" after that time" if self._after is not None else "")
        elif self._after is not None:
            why = "the program ended before that time"
        else:
            unused = ", ".join(sorted(self._selection.unused))
            why = f"nothing that ran matches {unused}" if unused else "all that ran is excluded"
        warn(f"the trace is empty: {why}")

    def run(self, cmd: str) -> None:
        """Execute a statement in the namespace of `__main__`: `tracer.run("main()")`."""
        names = sys.modules["__main__"].__dict__
        self.runctx(cmd, names, names)

    def runctx(self, cmd: str, globals: dict[str, Any] | None = None, locals: Mapping[str, Any] | None = None) -> None:
        """Execute a statement in these namespaces."""
        with self:
            exec(cmd, {} if globals is None else globals, {} if locals is None else locals)

    def runfunc(self, func: Callable[..., Any], /, *args: Any, **kw: Any) -> Any:
        """Call a function and return what it returns."""
        with self:
            return func(*args, **kw)

    def results(self) -> trace.CoverageResults:
        """The counts of the runs so far: `results().counts` is from (file, line) to how often it ran."""
        counts = dict(self._counts)
        if self._recorder is not None:
            for key, hits in self._recorder.total().items():
                counts[key] = counts.get(key, 0) + hits
        return trace.CoverageResults(counts, infile=self._infile, outfile=self._outfile)

    def _new_pen(self, failed: Callable[[Exception], None]) -> Pen:
        if self._output == "-":
            stream = Stream(lambda: sys.stdout)
            return TextPen(stream, failed, timing=self._timing, log_pids=self._log_pids, threads=self._threads)
        words = {
            "timing": self._timing,
            "threads": self._threads,
            "calls": not self._options.lines,
            "args": self._options.args or self._options.returns,
        }
        note = " ".join(f"{name}=1" for name, on in words.items() if on)
        if self._ring is not None:
            from mldebug.tracing._ring import Ring
            from mldebug.tracing._ring_pen import RingPen

            try:
                ring = Ring(
                    self._output,
                    self._ring,
                    timing=self._timing,
                    log_pid=self._log_pids,
                    threads=self._threads,
                    note=f"mode=ring {note}",
                )
            except OSError:  # it has warned
                return TextPen(Stream(lambda: _Nowhere), failed, timing=False, log_pids=False, threads=False)
            return RingPen(ring, failed)
        file = TraceFile(
            self._output,
            rotate=self._rotate,
            keep=self._keep,
            compress=self._compress,
            note=f"mode=lines {note}".strip(),
        )
        return TextPen(file, failed, timing=self._timing, log_pids=self._log_pids, threads=self._threads)

    def _switch(self) -> None:
        """At the signal."""
        engine = None if self._recorder is None else self._recorder.engine
        if engine is None:
            return
        going_on = not engine.running or engine.waiting
        engine.stop()
        if going_on:
            engine.start()

    def _after_fork(self) -> None:
        if self._pen is not None and self._recorder is not None and self._recorder.engine is not None:
            self._pen.after_fork()
            self.path = self._pen.path
            self._recorder.engine.after_fork()


def _selection(
    packages: str | Sequence[str] | None,
    ignoredirs: str | Sequence[str] | None,
    ignoremods: Sequence[str],
    include: Sequence[str] | None,
    exclude: Sequence[str],
) -> Selection:
    """The classic options and the newer ones in the words of the latter."""
    folders = [ignoredirs] if isinstance(ignoredirs, str) else list(ignoredirs or ())
    if packages is not None and (folders or include is not None):
        other = "ignoredirs" if folders else "include"
        raise UsageError(f"packages_to_include and {other} are both given", "one of them says what is traced")
    if isinstance(packages, str) and packages != "uninstalled":
        raise UsageError(f"packages_to_include is {packages!r}", f'it takes "uninstalled" or a list: [{packages!r}]')
    if include is None:
        include = ["all"] if folders else ["user", *(() if isinstance(packages, str) else packages or ())]
    return Selection(include, exclude, ignoredirs=folders, ignoremods=ignoremods)


def _engine(recorder: Recorder) -> Any:
    if sys.version_info >= (3, 12):
        from mldebug.tracing._monitor import MonitoringEngine

        return MonitoringEngine(recorder)
    from mldebug.tracing._settrace import SettraceEngine

    return SettraceEngine(recorder)


def _later(moment: float, gate: Gate | None) -> Gate:
    return lambda code, names: time.monotonic() >= moment and (gate is None or gate(code, names))


class _Nowhere:
    """For a trace that cannot be written: the job goes on."""

    @staticmethod
    def write(text: str) -> None:
        """Forget it."""


# A child of a fork has what its parent had, and goes on in files of its own.
_active: weakref.WeakSet[NicerTrace] = weakref.WeakSet()


def _forked() -> None:
    for tracer in list(_active):
        tracer._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
