"""What a recorder does as one rank among others: stops with them, and runs a sharded forward again with them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics.distributed import _together

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics._respond import Responder
    from mldebug.numerics.replay._judge import Judge


class Ranks:
    """The part of one recorder that knows of a distributed job."""

    def __init__(self, recorder: DebugUnderflowOverflow, judge: Judge, respond: Responder) -> None:
        self._recorder, self._judge, self._respond = recorder, judge, respond
        self.together: _together.Together | None = None  # None outside a distributed job

    @property
    def stop(self) -> bool:
        """Whether an event on any rank ends the run on this one."""
        return self._respond.raises

    @property
    def drops(self) -> bool:
        """Whether a bad batch is left out on this one."""
        return self._respond.drops

    def heed(self, stepping: bool = False) -> None:
        """Stop where another rank asks for it: before a forward, or with `stepping` before an optimizer steps."""
        self.together = together = _together.of_job(self._recorder)
        if together is not None:
            together.thread = threading.get_ident()
            cuda: Any = torch.cuda
            together.device = cuda.current_device() if cuda.is_initialized() else None
            if together.wants_stop(self._recorder.step, stepping):
                self._respond.stop_with(together)

    def listen(self) -> None:
        """Gradients of this step are bad for no reason of this rank. They were averaged: another rank may know why."""
        if self.together is not None and self.stop and self._judge.has_unshown(self._recorder.step):
            self.together.listen(self._recorder.step)
            self.heed(stepping=True)

    def replay_with_all(self) -> None:
        """If a rank wants a forward of this step to run again, which takes all ranks: now, with the weights as then."""
        recorder, together = self._recorder, self.together
        batch = None if together is None or not recorder.forwards.sharded else together.wish(recorder.step)
        if together is None or batch is None:
            return
        kept = recorder.forwards.backwards.of_batch(batch)
        why_not = "its inputs were not kept" if kept is None else kept.snapshot.why_not()
        refused = together.ready(f"replay/{batch}", why_not)
        found, restore = recorder.pending or (None, [])
        if kept is not None and not refused:
            with together.replaying():
                found = self._judge.with_all(kept, found)
        elif found is not None:
            found = replace(found, reason=refused)
        if found is not None:
            recorder.pending = found, restore
            self._respond.announce(found)
        if not refused:
            together.ready(f"told/{batch}", "")  # what each found is in the log: all reports say the same

    def write_last_report(self) -> None:
        """From another thread, before the process ends: what can be said without the device."""
        pending, self._recorder.pending = self._recorder.pending, None
        self._respond.write_last(None if pending is None else pending[0])
