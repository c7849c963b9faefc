"""The engine for Python 3.12 and later: sys.monitoring. Code that is not traced costs nothing after its first call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tracing._code import Lines
from mldebug.tracing._recorder import Recorder

_monitoring: Any = getattr(sys, "monitoring", None)  # type checkers look at 3.10

Gate = Callable[[CodeType, dict[str, Any]], bool]


class MonitoringEngine:
    """Traces every thread, those that ran before as well. Needs one of the tool ids of sys.monitoring."""

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self._recorder = recorder
        self._gate: Gate | None = None
        self._tool = -1

    def start(self, gate: Gate | None = None) -> None:
        if self.running:
            return
        self._tool, self._gate, self.running = _take_tool(), gate, True
        try:
            self._register()
            # What an earlier user of this id has switched off, place by place, is on again.
            _monitoring.restart_events()
            if gate is None:
                self._open()
            else:
                _monitoring.set_events(self._tool, _monitoring.events.PY_START)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if not self.running:
            return
        self.running = False
        monitoring, tool = _monitoring, self._tool
        monitoring.set_events(tool, 0)
        for lines in list(self._recorder.codes.values()):
            code = lines.code()
            if code is not None:
                monitoring.set_local_events(tool, code, 0)
        for event in _events():
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)

    @property
    def waiting(self) -> bool:
        return self.running and self._gate is not None

    def check(self) -> None:
        """Nobody can take the events away."""

    def after_fork(self) -> None:
        """The pen's functions are new."""
        if self.running:
            self._register()

    def _open(self) -> None:
        """Trace from now on: what will be called, and what is running."""
        monitoring, events = _monitoring, _monitoring.events
        self._gate = None
        wanted = events.PY_START | events.PY_RESUME | events.PY_THROW | events.PY_UNWIND
        if self._recorder.options.exceptions:
            wanted |= events.RAISE
        for lines in list(self._recorder.codes.values()):  # from before a pause
            code = lines.code()
            if code is not None:
                monitoring.set_local_events(self._tool, code, self._local())
        monitoring.set_events(self._tool, wanted)
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                self._find(frame.f_code, frame)
                frame = frame.f_back

    def _local(self) -> int:
        events = _monitoring.events
        lines = self._recorder.options.lines
        return int((events.LINE if lines else 0) | events.PY_RETURN | events.PY_YIELD)

    def _find(self, code: CodeType, frame: FrameType) -> Lines | None:
        """The Lines of a code object that is traced; one that is new is decided on now."""
        lines = self._recorder.codes.get(id(code))
        if lines is None:
            lines = self._recorder.admit(frame)
            if lines is not None:
                _monitoring.set_local_events(self._tool, code, self._local())
        return lines

    def _line(self) -> Callable[[CodeType, int], Any]:
        write, recorder = self._recorder.line, self._recorder
        if recorder.options.depth is None:
            return write

        def line(code: CodeType, number: int) -> None:
            if recorder.within(sys._getframe(1)):
                write(code, number)

        return line

    def _register(self) -> None:
        events, disable = _monitoring.events, _monitoring.DISABLE
        recorder, find, frame_at = self._recorder, self._find, sys._getframe
        codes, failed, left, calls = recorder.codes, recorder.failed, recorder.left, recorder.calls

        def start(code: CodeType, offset: int) -> Any:
            try:
                if self._gate is not None:
                    if not self._gate(code, frame_at(1).f_globals):
                        return disable
                    _monitoring.restart_events()
                    self._open()
                lines = codes.get(id(code))
                if lines is None:
                    lines = find(code, frame_at(1))
                    if lines is None:
                        return disable
                if calls:
                    recorder.call(lines, frame_at(1))
                else:
                    left()
            except Exception as exc:
                failed(exc)

        def resume(code: CodeType, offset: int) -> Any:
            try:
                if id(code) not in codes:
                    find(code, frame_at(1))
            except Exception as exc:
                failed(exc)
            return disable  # the place: what goes on there is known now

        def throw(code: CodeType, offset: int, exception: BaseException) -> None:
            resume(code, offset)
            if id(code) in codes:
                left()

        def leave(code: CodeType, offset: int, value: object) -> None:
            try:
                lines = codes.get(id(code))
                if lines is not None:
                    recorder.leave(lines, frame_at(1), value)
            except Exception as exc:
                failed(exc)

        def unwind(code: CodeType, offset: int, exception: BaseException) -> None:
            if id(code) in codes:
                left()

        def raised(code: CodeType, offset: int, exception: BaseException) -> None:
            try:
                lines = codes.get(id(code))
                if lines is not None:
                    recorder.exception(lines, frame_at(1), exception)
            except Exception as exc:
                failed(exc)

        functions = {
            events.PY_START: start,
            events.PY_RESUME: resume,
            events.PY_THROW: throw,
            events.PY_RETURN: leave if recorder.options.returns else left,
            events.PY_YIELD: leave if recorder.options.returns else left,
            events.PY_UNWIND: unwind,
            events.RAISE: raised,
            events.LINE: self._line(),
        }
        for event, function in functions.items():
            _monitoring.register_callback(self._tool, event, function)


def _events() -> list[int]:
    events = _monitoring.events
    return [
        events.PY_START, events.PY_RESUME, events.PY_THROW, events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND,
        events.RAISE, events.LINE,
    ]  # fmt: skip


def _take_tool() -> int:
    """An id that nobody uses: first those that are nobody's by convention, never a debugger's or coverage's."""
    for tool in (4, 3, 5, 2):
        try:
            _monitoring.use_tool_id(tool, "mldebug trace")
        except ValueError:
            continue
        return tool
    users = ", ".join(f"{tool}: {_monitoring.get_tool(tool)}" for tool in range(6))
    raise MldebugError(
        f"cannot trace: all tool ids of sys.monitoring are taken ({users})", "end one of these tools first"
    )
