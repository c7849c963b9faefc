"""The side channel of a distributed job: what its ranks tell each other apart from its collectives.

It has a store client of its own (the job's is not touched), under keys of its own. A daemon thread does all the
talking, so nothing that the store does can block the job: who wants an answer waits for it with a deadline.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mldebug.numerics.distributed._neighbours import Neighbours

POLL = 0.25  # seconds between two looks at the log
_GOODBYE = 1.0  # seconds that the host of the store waits for the others before it takes the store away

Entry = dict[str, Any]


@dataclass
class _Question:
    ask: Callable[[Any], Any]
    done: threading.Event
    answer: Any = None


class Channel:
    """A log that every rank of a job writes to and reads, and counters.

    `heard` is called in the channel's thread with each entry of the log, our own as well. `lost` says that nobody can
    be reached (any more). `look` is called in the thread too, with the store, each time that it has read the log.
    """

    def __init__(
        self, store: Any, rank: int, name: str, heard: Callable[[Entry], None], look: Callable[[Any], None]
    ) -> None:
        self.lost = False
        self._store = store  # the job's: looked at, and cloned
        self._rank = rank
        self._name = name
        self._heard = heard
        self._look = look
        self.neighbours = Neighbours()
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._jobs: deque[_Question] = deque()
        self._next = 0  # entry of the log
        self._closing = False
        self._hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._thread = threading.Thread(target=self._run, name="mldebug-side-channel", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return not self.lost and not self._closing and self.same_process

    @property
    def same_process(self) -> bool:
        """False in a forked child, which has no such thread."""
        return os.getpid() == self._pid

    def post(self, entry: Entry) -> None:
        """Add an entry to the log. Does not wait."""
        self._enqueue(lambda store: self._write(store, entry))

    def ask(self, question: Callable[[Any], Any], seconds: float) -> Any:
        """What `question(store)` returns, called in the channel's thread; None if that takes longer than `seconds`."""
        asked = self._enqueue(question)
        return asked.answer if asked.done.wait(seconds) else None

    def tell(self, what: Callable[[Any], Any]) -> None:
        """Have something done with the store. Does not wait."""
        self._enqueue(what)

    def news(self, seconds: float) -> bool:
        """Read the log now; False if that takes longer than `seconds`. All that was posted before is out then."""
        return self.ask(self._read, seconds) is True

    def close(self) -> None:
        """End the thread. Whoever hosts the store lets the others put theirs down first."""
        if not self.same_process or not self._thread.is_alive():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _GOODBYE)

    def _enqueue(self, question: Callable[[Any], Any]) -> _Question:
        asked = _Question(question, threading.Event())
        if not self.open:  # in a forked child nobody ever lets go of the lock
            asked.done.set()
            return asked
        with self._wake:
            if self.open:
                self._jobs.append(asked)
                self._wake.notify()
            else:
                asked.done.set()
        return asked

    # In the thread.

    def _run(self) -> None:
        try:
            store = _own_client(self._store, self._name)
            if store is not None:
                store.add("hello", 1)
                self.neighbours.enter(store)
                while self._turn(store):
                    pass
        except Exception:  # the store is gone, and with it most likely the job
            pass
        finally:
            self._store = None
            with self._wake:
                self.lost = True
                for asked in self._jobs:
                    asked.done.set()
                self._jobs.clear()

    def _turn(self, store: Any) -> bool:
        with self._wake:
            if not self._jobs and not self._closing:
                self._wake.wait(POLL)
            asked = self._jobs.popleft() if self._jobs else None
            closing = self._closing and asked is None
        if asked is not None:
            try:
                asked.answer = asked.ask(store)
            finally:
                asked.done.set()
        else:
            self._read(store)
            self._look(store)
        if closing:
            self._say_goodbye(store)
        return not closing and not self.lost

    def _write(self, store: Any, entry: Entry) -> None:
        """Put an entry at the end of the log; what others have put there meanwhile is read."""
        text = json.dumps(entry)
        while True:
            there = store.compare_set(f"log/{self._next}", "", text).decode()
            self._next += 1
            self._heard(json.loads(there))
            if there == text:
                return

    def _read(self, store: Any) -> bool:
        while not self.lost and store.check([f"log/{self._next}"]):
            entry = json.loads(store.get(f"log/{self._next}").decode())
            self._next += 1
            if entry.get("kind") == "the store goes away":
                store.add("goodbye", 1)
                self.lost = True
            else:
                self._heard(entry)
        return True

    def _say_goodbye(self, store: Any) -> None:
        self.neighbours.leave(store)
        store.add("gone", 1)
        if not self._hosts or store.add("hello", 0) == store.add("gone", 0):
            return
        self._heard = lambda entry: None
        self._write(store, {"kind": "the store goes away", "rank": self._rank})
        end = time.monotonic() + _GOODBYE
        while time.monotonic() < end and store.add("goodbye", 0) + store.add("gone", 0) < store.add("hello", 0):
            time.sleep(0.02)


def _own_client(store: Any, name: str) -> Any:
    """A client of our own to the server of the job's store; None for a store that cannot have a second one."""
    dist: Any = torch.distributed
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, (dist.TCPStore, dist.FileStore)):
        return None
    if hasattr(store, "clone"):
        return dist.PrefixStore(f"mldebug/{name}", store.clone())
    if isinstance(base, dist.FileStore):
        return dist.PrefixStore(f"mldebug/{name}", dist.FileStore(base.path, -1))
    client = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=base.timeout)
    return dist.PrefixStore(f"mldebug/{name}", client)
