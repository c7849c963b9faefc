"""Ctrl-C where it must not cut in two what is being done."""

from __future__ import annotations

import signal
import threading
from typing import Any

from mldebug.core.interrupt import is_ours


class Stop:
    """Inside `with`, Ctrl-C is noted and does not end the work: whoever looks at `asked` does. A second one ends all.

    Only where Ctrl-C would raise KeyboardInterrupt in this thread.
    """

    asked = False

    def __enter__(self) -> Stop:
        main = threading.current_thread() is threading.main_thread()
        self._before: Any = signal.getsignal(signal.SIGINT)
        self._replaces = main and (self._before is signal.default_int_handler or is_ours(self._before))
        if self._replaces:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        if self._replaces:
            signal.signal(signal.SIGINT, self._before)
