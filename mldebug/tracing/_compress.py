"""Finished pieces of a trace become gzip files in the background."""

from __future__ import annotations

import _thread
import contextlib
import gzip
import os
import shutil
import threading
import time

_BLOCK = 1 << 20
_PATIENCE = 10.0  # seconds that close() waits


class Compressor:
    """Makes `x.txt.gz` of each `x.txt` that is added, by a thread of low priority that lives while there is work.

    The text goes only after the gzip file is complete under its own name: killed in between, the text is still there.
    The thread is not one of `threading`: a program that counts its threads does not see it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[str] = []
        self._running = False
        self._leave = False

    def add(self, path: str) -> None:
        with self._lock:
            self._work.append(path)
            if self._running:
                return
            self._running = True
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads, or Python is ending: the text stays
            self._running = False

    def close(self) -> None:
        """Wait for the work that there is, some seconds long; what is left then stays as text."""
        end = time.monotonic() + _PATIENCE
        while self._running and time.monotonic() < end:
            time.sleep(0.01)
        self._leave = True
        while self._running and time.monotonic() < end + 2:
            time.sleep(0.01)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._lock:
                if not self._work or self._leave:
                    self._running = False
                    return
                path = self._work.pop(0)
            try:
                self._compress(path)
            except Exception:  # a full disk, a file that is gone: the text, if any, is as good
                remove(path + ".gz.part")

    def _compress(self, path: str) -> None:
        part = path + ".gz.part"
        with open(path, "rb") as source, gzip.open(part, "wb", compresslevel=4) as target:
            while not self._leave:
                block = source.read(_BLOCK)
                if not block:
                    break
                target.write(block)
        if self._leave or not os.path.exists(path):  # the text may have been the oldest, and dropped
            remove(part)
            return
        shutil.copystat(path, part)
        os.replace(part, path + ".gz")
        remove(path)


def remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
