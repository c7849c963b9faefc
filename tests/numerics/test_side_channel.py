"""What the ranks agree on over the store, and when a rank counts as being inside a collective; in one process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mldebug.numerics._event import Event
from mldebug.numerics.distributed import _deadline
from mldebug.numerics.distributed._together import Together


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Together, Together]]:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both = Together(dist.PrefixStore("job", store), 0, 2, 1), Together(dist.PrefixStore("job", store), 1, 2, 1)
    yield both
    for one in both:
        one.channel.close()
        assert not one.channel._thread.is_alive(), "no thread is left"


def event(step: int, phase: Any = "forward") -> Event:
    return Event(step, 0, 0, phase, "fc", "Linear", "output", "nan", "output", "float32", 3.4e38, rank=1)


def test_the_first_is_who_has_the_smallest_step_and_all_agree(pair: tuple[Together, Together]) -> None:
    a, b = pair
    a.announce(event(7), 7, stop=False, waits=False)
    assert a.channel.news(10)
    b.announce(event(6, "backward"), 6, stop=False, waits=False)
    b.announce(event(6), 6, stop=False, waits=False)
    assert b.channel.news(10) and a.channel.news(10)
    for one in pair:
        first = one.first()
        assert first is not None and (first.rank, first.event.step) == (1, 6)
        assert [peer.event.step for peer in one.events()] == [7, 6]


def test_a_rank_goes_on_to_its_step_for_the_sake_of_the_first(pair: tuple[Together, Together]) -> None:
    a, b = pair
    a.announce(event(3), 3, stop=True, waits=True)
    assert a.channel.news(10) and b.channel.news(10)
    assert not b.wants_stop(3, stepping=False) and b.wants_stop(3, stepping=True) and b.wants_stop(4, stepping=False)
    assert not b.wants_stop(2, stepping=True) and not a.wants_stop(3, stepping=True)
    a.channel.post({"kind": "raised", "rank": 0, "round": 0})
    assert a.channel.news(10) and b.channel.news(10)
    assert b.wants_stop(2, stepping=False)


@pytest.mark.parametrize("bad", [(False, False), (True, False), (False, True), (True, True)])
def test_one_bad_rank_drops_the_batch_on_both(pair: tuple[Together, Together], bad: tuple[bool, bool]) -> None:
    answers: dict[int, Any] = {}

    def vote(i: int) -> None:
        recorder: Any = pair[i]
        pair[i].users.append(recorder)
        answers[i] = [pair[i].agree(recorder, bad[i]) for _ in range(2)]

    threads = [threading.Thread(target=vote, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {0: [any(bad)] * 2, 1: [any(bad)] * 2}


def test_a_rank_that_is_not_ready_stops_a_replay_on_both(pair: tuple[Together, Together]) -> None:
    said: dict[int, str] = {}
    reasons = ["", "its inputs were not kept"]
    threads = [
        threading.Thread(target=lambda i=i: said.update({i: pair[i].ready("replay/0", reasons[i])})) for i in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == dict.fromkeys((0, 1), "on one rank its inputs were not kept")


def test_a_rank_that_never_comes_is_not_waited_for(pair: tuple[Together, Together], monkeypatch: Any) -> None:
    monkeypatch.setattr("mldebug.numerics.distributed._together._READY", 0.5)
    assert pair[0].ready("replay/1", "") == "not all ranks were ready for it"
    assert pair[1].ready("replay/1", "") == "not all ranks were ready for it", "who comes later hears the same"


def test_a_store_that_is_gone_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def clone(self) -> Any:
            time.sleep(30)

    one = Together(Never(), 0, 2, 1)
    assert one.channel.ask(lambda store: 1, 0.2) is None
    began = time.monotonic()
    one.announce(event(1), 1, stop=True, waits=False)
    one.settle()
    assert one.agree(one, True) is None  # type: ignore[arg-type]
    assert time.monotonic() - began < 30


@contextlib.contextmanager
def wait_on_a_queue() -> Iterator[Callable[[], Any]]:
    things: queue.Queue[int] = queue.Queue()
    try:
        yield things.get
    finally:
        things.put(1)


@contextlib.contextmanager
def sleep() -> Iterator[Callable[[], Any]]:
    over = threading.Event()

    def sleeps() -> None:
        while not over.is_set():
            time.sleep(0.1)

    try:
        yield sleeps
    finally:
        over.set()


@contextlib.contextmanager
def read_a_pipe() -> Iterator[Callable[[], Any]]:
    end, other_end = os.pipe()

    def reads() -> None:
        os.read(end, 1)
        os.close(end)

    try:
        yield reads
    finally:
        os.close(other_end)


@contextlib.contextmanager
def wait_in_the_store() -> Iterator[Callable[[], Any]]:
    """A barrier of two, until the second one comes to it, over a client of its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier, within = dist.distributed_c10d._store_based_barrier, timedelta(seconds=300)
    try:
        yield lambda: barrier(0, store, "group", 2, within)
    finally:
        barrier(1, dist.TCPStore("127.0.0.1", store.port, is_master=False), "group", 2, within)


@pytest.mark.parametrize(
    ("waiting", "found"), [(wait_on_a_queue, ""), (sleep, ""), (read_a_pipe, ""), (wait_in_the_store, "test_side_")]
)
def test_what_counts_as_inside_a_collective(waiting: Any, found: str) -> None:
    with waiting() as function:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        until, where = time.monotonic() + (60 if found else 0.5), ""
        while time.monotonic() < until and not (found and found in where):
            time.sleep(0.05)
            frame = sys._current_frames()[thread.ident or 0]
            where = _deadline._collective(frame, thread.ident or 0, idle=True, device=None)
            assert found or not where, where
        assert found in where, where
    thread.join(60)
    assert not thread.is_alive(), "what it raises later would be another test's"


OTHER_RANK = """
import sys, time
import torch.distributed as dist
from mldebug.numerics.distributed._together import Together
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
rank = Together(dist.PrefixStore("job", store), 1, 2, 1)
while not rank.channel.neighbours._entered:
    time.sleep(0.01)
rank.channel.ask(lambda store: store.add("there", 1), 30)
time.sleep(600)
"""


@pytest.fixture
def with_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Together, subprocess.Popen[bytes]]]:
    """This rank, and the process of another one that takes part."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Together(dist.PrefixStore("job", store), 0, 2, 1)
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, str(store.port)])
    try:
        while not one.channel.ask(lambda store: one.channel.neighbours._entered and store.add("there", 0), 30):
            assert other.poll() is None
            time.sleep(0.05)
        yield one, other
    finally:
        other.kill()
        other.wait()
        one.channel.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_known_to_be_gone_is_not_waited_for(
    with_other: tuple[Together, subprocess.Popen[bytes]], how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = with_other
    monkeypatch.setattr("mldebug.numerics.distributed._together.GIVE_UP", 300.0)
    other.send_signal(how)
    began = time.monotonic()
    one.wait_for_others()
    assert time.monotonic() - began < 150, "it gave up, and did not know"


def test_nobody_votes_with_a_rank_that_has_died(
    with_other: tuple[Together, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = with_other
    monkeypatch.setattr("mldebug.numerics.distributed._together._WAIT", 300.0)
    other.kill()
    recorder: Any = one
    one.users.append(recorder)
    began = time.monotonic()
    assert one.agree(recorder, False) is None and one.agree(recorder, False) is None
    assert time.monotonic() - began < 150


def test_a_rank_that_says_that_it_goes_is_counted_once(pair: tuple[Together, Together]) -> None:
    a, b = pair
    for one in pair:
        while not one.channel.neighbours._entered:
            time.sleep(0.02)
    b.channel.close()
    assert a.channel.ask(lambda store: store.add("gone", 0), 30) == 1
    a.channel.neighbours._known[99] = "1 0"  # a process that has never been
    for _ in range(3):
        a.channel.neighbours._next = 0.0
        a.channel.ask(a.channel.neighbours.look, 30)
    assert a.channel.ask(lambda store: store.add("gone", 0), 30) == 2


def test_a_rank_that_drops_nothing_keeps_nobody_waiting(
    pair: tuple[Together, Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_WAIT", "_FIRST_WAIT"):
        monkeypatch.setattr(f"mldebug.numerics.distributed._together.{name}", 300.0)
    recorder: Any = pair[0]
    pair[0].users.append(recorder)
    pair[1].abstain()
    began = time.monotonic()
    assert pair[0].agree(recorder, False) is None and pair[0].agree(recorder, True) is None
    assert time.monotonic() - began < 150
