"""Runs the forwards of one recorder again: for their frames, for a look at every operation, for other gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics import _hub
from mldebug.numerics._frames import Frames
from mldebug.numerics.replay._collectives import NotReplayable
from mldebug.numerics.ring._records import Call

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ops._ops import OpWatch
    from mldebug.numerics.replay._backward import Kept


class Reruns:
    """The replays of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self.with_all = False  # all ranks run the same forward again now

    def new_frames(self) -> Frames:
        """Frames of a replay."""
        return self._recorder.forwards.new_frames(live=False)

    def frames(
        self, call: Call, *, inputs: bool = False, buffers: Sequence[torch.Tensor] = ()
    ) -> tuple[Frames | None, str]:
        """Frames of a replay (with finite values for bad inputs and buffers), or why there is none."""
        if call.snapshot is None:
            return None, call.replay_reason or "its inputs were not kept"
        frames = self.new_frames()
        frames.begin_batch(call.batch)
        reason = self.run(call, frames, inputs, buffers)
        return (None, reason) if reason else (frames, "")

    def operations(
        self, call: Call, kept: Kept | None = None, scale: float = 1.0, infinite: bool = False,
        buffer: str | None = None,
    ) -> tuple[OpWatch | None, str]:  # fmt: skip
        """A look at every operation of a replay (and of its backward), or why there is none. With `infinite` -inf in
        what the root returns is of consequence; of a `buffer` it is told what wrote it."""
        from mldebug.numerics.ops._ops import OpWatch

        again = self.new_frames()
        again.done = True  # nothing to look at but operations, and no reason to stop
        watch = OpWatch(self._recorder, replay=True)
        watch.begin_step(call.step)
        then: Callable[[Any], object] | None = watch.returned if infinite else None
        if buffer is not None:
            then = functools.partial(watch.end_of_forward, buffer)
        if kept is not None:
            call = replace(call, snapshot=kept.snapshot)
            parameters = self._recorder.weights.parameters()
            then = functools.partial(kept.differentiate, parameters=parameters, scale=scale)
        with watch:
            reason = self.run(call, again, then=then)
        return (None, reason) if reason else (watch, "")

    def gradients_again(self, kept: Kept, scale: float) -> list[torch.Tensor | None]:
        """The gradients of the parameters, from a backward that runs again with the loss divided by `scale`; [] where
        it cannot."""
        made: list[torch.Tensor | None] = []
        parameters = self._recorder.weights.parameters()
        frames = self.new_frames()
        frames.done = True
        call = replace(kept.call, snapshot=kept.snapshot)
        reason = self.run(call, frames, then=lambda output: made.extend(kept.differentiate(output, parameters, scale)))
        return [] if reason else made

    def stop(self) -> None:
        raise _Stop

    def run(
        self, call: Call, frames: Frames, inputs: bool = False, buffers: Sequence[torch.Tensor] = (),
        then: Callable[[Any], object] | None = None,
    ) -> str:  # fmt: skip
        """Replay a call into frames; "" or why it could not be done."""
        forwards, snapshot = self._recorder.forwards, call.snapshot
        assert snapshot is not None
        if snapshot.needs_all and not self.with_all:
            return snapshot.needs_all
        saved = forwards.call, forwards.live
        _hub.replaying = (self._recorder, threading.get_ident())
        forwards.replaying = True
        forwards.call, forwards.live = replace(call, snapshot=None, paused=False), frames
        try:
            snapshot.run(inputs, buffers, then, self.with_all)
        except _Stop:
            pass
        except NotReplayable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            _hub.replaying = None
            forwards.replaying = False
            forwards.call, forwards.live = saved
            self._recorder.memory.forget_last()
        return ""


class _Stop(BaseException):
    """Ends a replay at its finding. Not an Exception: a model that catches those must not catch this."""
