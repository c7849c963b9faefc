"""ordered=True: the order of ranks, and what happens when one does not come."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mldebug.ranks import _ordered, printflock

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Store:
    """What is used of torch's stores."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.hang = threading.Event()
        self.hang.set()

    def set(self, key: str, value: str) -> None:
        self.hang.wait(20)
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.hang.wait(20)
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Rank 2 of 4, with a process group."""
    store = Store()
    dist: Any = ModuleType("torch.distributed")
    dist.is_available = dist.is_initialized = lambda: True
    dist.get_rank, dist.get_world_size = lambda: 2, lambda: 4
    dist.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    monkeypatch.setattr(_ordered, "WAIT", 0.6)
    return store


def test_without_a_process_group_it_prints_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    printflock("a", ordered=True)
    assert capsys.readouterr() == ("a\n", "")


def test_it_waits_for_the_rank_before(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ordered, "WAIT", 30.0)
    threading.Timer(0.3, store.set, ("mldebug/ordered/0/done/1", "1")).start()
    started = time.monotonic()
    printflock("a", ordered=True)
    assert 0.2 < time.monotonic() - started < 20
    assert store.values["mldebug/ordered/0/done/2"] == "1"
    assert capsys.readouterr() == ("a\n", "")


def test_a_rank_that_does_not_come_is_named_and_costs_the_bound_once(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set("mldebug/ordered/0/done/0", "9")
    started = time.monotonic()
    printflock("a", ordered=True)
    assert 0.5 < time.monotonic() - started < 2
    said = capsys.readouterr().err
    assert "rank 2 prints without waiting for rank 1: no ordered print there in 0.6 s" in said
    store.set("mldebug/ordered/0/done/1", "1")  # it comes later, and stays one behind
    started = time.monotonic()
    printflock("b", ordered=True)
    assert time.monotonic() - started < 0.5
    assert capsys.readouterr() == ("b\n", "")


def test_a_rank_that_waits_itself_is_waited_for(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.set("mldebug/ordered/0/come/1", "1")
    threading.Timer(0.9, store.set, ("mldebug/ordered/0/done/1", "1")).start()
    printflock("a", ordered=True)
    assert capsys.readouterr() == ("a\n", "")
    assert store.values["mldebug/ordered/0/done/1"] == "1"


def test_only_ranks_that_print_are_waited_for(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    printflock("a", ordered=True, print_ranks=[2, 3])
    printflock("b", ordered=True, print_ranks=[0, 3])
    assert capsys.readouterr() == ("a\n", "")


def test_a_store_that_does_not_answer(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.hang.clear()
    started = time.monotonic()
    printflock("a", ordered=True)
    printflock("b", ordered=True)
    assert time.monotonic() - started < 4
    store.hang.set()
    out, err = capsys.readouterr()
    assert out == "a\nb\n"
    assert err.count("the store of the process group does not answer") == 1


def test_a_store_that_is_gone(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_args: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(store, "set", gone)
    printflock("a", ordered=True)
    out, err = capsys.readouterr()
    assert out == "a\n"
    assert "failed (Connection reset by peer)" in err


def test_real_ranks(run_python: Run, tmp_path: Any) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text("""
import os, random, time
import torch.distributed as dist
from mldebug.ranks import printflock as print
dist.init_process_group("gloo")
for step in range(3):
    time.sleep(random.random() * 0.1)
    print(step, dist.get_rank(), ordered=True)
    dist.barrier()
dist.destroy_process_group()
""")
    done = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", program, timeout=110, env={"RANK": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{step} {rank}" for step in range(3) for rank in range(3)]
