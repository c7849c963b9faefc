"""main_process_first and its kin: order, failure, and nobody left waiting."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.ranks import _alive, _files, _first, main_process_by_path_first, main_process_first
from mldebug.ranks._board import StoreBoard
from mldebug.ranks._files import FolderBoard
from mldebug.ranks._first import spans
from mldebug.ranks._world import Who
from tests.at_once import AtOnce

from .rank_kit import FORKED, PROGRAMS, clean, finish, free_port, start, torchrun

FIRST = PROGRAMS / "first.py"


def numbered(size: int, per_node: int | None = None, **more: str) -> list[dict[str, str]]:
    each = per_node or size
    return [
        {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(each),
            "RANK": str(one),
            "LOCAL_RANK": str(one % each),
            **more,
        }
        for one in range(size)
    ]


def times(text: str) -> dict[tuple[int, str], float]:
    """(rank, what) -> when."""
    found = re.findall(r"^(\d+) (\S+) (\d+\.\d+)$", text, re.M)
    return {(int(rank), what): float(when) for rank, what, when in found}


def run(case: str, size: int = 3, **more: str) -> tuple[list[int], str, list[str]]:
    """Statuses, all that was printed, and each rank's stderr; by files, as there is neither store nor MASTER_ADDR."""
    ended = finish(start([FIRST, *case.split()], numbered(size, **more)), 60)
    return [one[0] for one in ended], "".join(one[1] for one in ended), [one[2] for one in ended]


def assert_main_first(seen: dict[tuple[int, str], float], what: str, main: int, others: list[int]) -> None:
    for other in others:
        assert seen[other, f"{what}-begins"] >= seen[main, f"{what}-ends"] - 0.001, (other, seen)


class TestByFiles:
    """No torch, no store."""

    def test_order_again_and_again(self) -> None:
        status, out, _ = run("plain notorch", 4)
        assert status == [0, 0, 0, 0]
        for number in range(3):
            assert_main_first(times(out), f"block{number}", 0, [1, 2, 3])

    def test_nested(self) -> None:
        status, out, _ = run("nested")
        assert status == [0, 0, 0]
        for what in ("outer", "inner", "deep"):
            assert_main_first(times(out), what, 0, [1, 2])

    def test_decorated_functions_and_generators(self) -> None:
        status, out, _ = run("decorated", 2)
        assert status == [0, 0]
        assert "0 got-10-20-3 " in out and "1 got-11-21-3 " in out
        calls = re.findall(r"^(\d) call-(begins|ends)", out, re.M)
        assert calls.count(("1", "begins")) == 2

    def test_nothing_is_left_behind(self) -> None:
        before = folders()
        ranks = start([FIRST, "plain"], numbered(3))
        seen = set()
        while any(one.poll() is None for one in ranks):
            seen |= folders()
            time.sleep(0.05)
        assert [one[0] for one in finish(ranks)] == [0, 0, 0]
        assert seen and folders() <= before  # there was one while they ran

    @pytest.mark.parametrize(
        ("case", "status", "words"),
        [
            ("error", 1, r"rank 0 \(host \S+, pid \d+\) failed in .*first\.py <module>:\d+\): ValueError: shard 7 is"),
            ("exit", 3, "SystemExit: 3"),
            ("interrupt", -2, "KeyboardInterrupt"),
            ("kill", -9, r"rank 0 \(host \S+, pid \d+\) has ended \(killed"),
            ("os._exit", 4, r"has ended \(killed, or by os._exit\) in the block that goes first"),
        ],
    )  # fmt: skip
    def test_the_others_are_released_when_the_main_process_fails(self, case: str, status: int, words: str) -> None:
        begin = time.monotonic()
        found, _, errors = run(case)
        assert found == [status, 1, 1]
        for error in errors[1:]:
            assert re.search(r"MldebugError: .*" + words, error), error
        assert time.monotonic() - begin < 30

    def test_a_failure_that_is_caught_is_over(self) -> None:
        status, out, _ = run("caught")
        assert status == [0, 0, 0]
        seen = times(out)
        assert (1, "block0-begins") not in seen
        assert_main_first(seen, "block1", 0, [1, 2])

    def test_the_failure_of_another_rank_is_its_own(self) -> None:
        status, out, errors = run("follower")
        assert status == [0, 1, 0]
        assert (2, "block-ends") in times(out) and "mine alone" in errors[1] and errors[2] == ""

    def test_the_timeout_says_where_the_main_process_is(self) -> None:
        status, out, errors = run("slow")
        assert status == [0, 1, 1] and (0, "done") in times(out)
        for error in errors[1:]:
            assert re.search(r"has waited \d+ s for rank 0 \(host \S+, pid \d+\), which is still in the block", error)
            assert "mldebug spy" in error and "timeout=" in error

    def test_the_timeout_says_who_never_came(self) -> None:
        status, out, errors = run("some", 4)
        assert status == [0, 1, 1, 0] and "never 1" not in out
        for error in errors[1:3]:
            assert re.search(r"for rank 0, which never came there; these ranks never came: 0, 3$", error, re.M), error

    def test_functions_are_counted_apart(self) -> None:
        status, out, _ = run("skew", 3)
        assert status == [0, 0, 0]
        assert_main_first(times(out), "two", 0, [1])
        assert_main_first(times(out), "all", 0, [1, 2])

    def test_two_places_in_one_function_are_taken_together_and_told(self) -> None:
        status, out, errors = run("lines", 2)
        assert status == [0, 0]
        assert_main_first(times(out), "block", 0, [1])
        assert "if these two do not belong together" in errors[1]

    def test_two_main_processes(self) -> None:
        same = numbered(2)
        same[1]["RANK"] = same[1]["LOCAL_RANK"] = "0"
        ended = finish(start([FIRST, "plain"], same), 30)
        assert sorted(one[0] for one in ended) == [0, 1]
        assert "two main processes: rank 0" in "".join(one[2] for one in ended)

    def test_no_way_to_the_others(self) -> None:
        ended = finish(start([FIRST, "plain"], numbered(2, per_node=1)), 30)
        assert [one[0] for one in ended] == [1, 1]
        assert "MASTER_ADDR and MASTER_PORT are not set" in ended[0][2]


def folders() -> set[str]:
    """Those of jobs that this process has launched: others run beside it, and come and go."""
    base = Path(f"/dev/shm/mldebug-{os.getuid()}/ranks")
    names = os.listdir(base) if base.is_dir() else []
    return {one for one in names if one.split(".")[1:2] == [str(os.getpid())]}


Nodes = Callable[[str], "tuple[list[tuple[int, str, str]], dict[tuple[int, str], float]]"]


@pytest.fixture
def nodes(run_torch: Callable[..., Any]) -> Nodes:
    """Four ranks as on two nodes (two agents on one machine are told apart by GROUP_RANK), without torchrun."""

    def run(case: str) -> tuple[list[tuple[int, str, str]], dict[tuple[int, str], float]]:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "x"}
        ranks = numbered(4, per_node=2, **common)
        for one in ranks:
            one["GROUP_RANK"] = str(int(one["RANK"]) // 2)
        with AtOnce(4) as runs:
            for at, one in enumerate(ranks):
                runs.add(at, lambda one=one: run_torch(FIRST, *case.split(), timeout=90, env=clean(**one)))
            done = [runs[at] for at in range(4)]
        ended = [(one.returncode, one.stdout, one.stderr) for one in done]
        return ended, times("".join(one[1] for one in ended))

    return run


class TestTwoNodes:
    """By a store that rank 0 makes at MASTER_ADDR, as under srun."""

    def test_local(self, nodes: Nodes) -> None:
        ended, seen = nodes("local")
        assert [one[0] for one in ended] == [0] * 4, ended
        assert_main_first(seen, "block", 0, [1])
        assert_main_first(seen, "block", 2, [3])
        assert seen[2, "block-begins"] < seen[0, "block-ends"]  # nodes do not wait for each other

    def test_a_path_of_the_node(self, nodes: Nodes) -> None:
        ended, seen = nodes("path /proc")
        assert [one[0] for one in ended] == [0] * 4, ended
        assert_main_first(seen, "block", 0, [1])
        assert_main_first(seen, "block", 2, [3])

    def test_a_path_that_nodes_share(self, nodes: Nodes) -> None:
        ended, seen = nodes("path fake:shared,shared")
        assert [one[0] for one in ended] == [0] * 4, ended
        assert_main_first(seen, "block", 0, [1, 2, 3])

    def test_a_path_of_which_nobody_can_say(self, nodes: Nodes) -> None:
        """Right for both: rank 0 before all, and the first of each node before the others of that node."""
        ended, seen = nodes("path fake:unknown,unknown")
        assert [one[0] for one in ended] == [0] * 4, ended
        assert_main_first(seen, "block", 0, [1, 2, 3])
        assert_main_first(seen, "block", 2, [3])
        assert all("is on shinyfs at /, which may be shared by nodes or not" in one[2] for one in ended)

    def test_nodes_that_disagree(self, nodes: Nodes) -> None:
        begin = time.monotonic()
        ended, _ = nodes("path fake:local,shared")
        texts = "".join(one[2] for one in ended)
        said = re.search(r"is not the same on all nodes: (\w+) \(\w+\) for rank \d on", texts)
        assert said, ended
        # Who comes first is right. If that is the node with a disk of its own it goes on; the other waits for rank 0,
        # which fails where it comes later.
        assert [one[0] for one in ended] == ([0, 0, 1, 1] if said.group(1) == "shared" else [1] * 4), ended
        assert time.monotonic() - begin < 55

    def test_the_store_of_rank_0_serves_the_process_group_too(self, nodes: Nodes) -> None:
        ended, seen = nodes("late-store")
        assert [one[0] for one in ended] == [0] * 4, ended
        for what in ("block", "again"):
            assert_main_first(seen, what, 0, [1, 2, 3])
        assert all((one, "sum-4-of-4") in seen for one in range(4))

    def test_an_error_of_the_rank_that_has_the_store(self, nodes: Nodes) -> None:
        ended, _ = nodes("error")
        assert [one[0] for one in ended] == [1] * 4
        for one in ended[1:]:
            assert re.search(r"rank 0 \(host \S+, pid \d+\) failed in .*: ValueError: shard 7 is", one[2]), one

    def test_rank_0_stays_until_the_others_know_that_it_has_left(self, nodes: Nodes) -> None:
        ended, seen = nodes("at-the-end")
        assert [one[0] for one in ended] == [0] * 4, ended
        assert all((one, "came") in seen for one in range(4))

    def test_rank_0_that_never_comes(self, run_torch: Callable[..., Any]) -> None:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = run_torch(FIRST, "some", env=clean(**numbered(4, per_node=2, **common)[1]))
        assert done.returncode == 1
        assert re.search(r"the store at 127.0.0.1:\d+, .* cannot be reached", done.stderr), done.stderr


Torchrun = Callable[..., "tuple[dict[tuple[int, str], float], str]"]


@pytest.fixture
def under_torchrun(run_torch: Callable[..., Any]) -> Torchrun:
    """What four ranks did, that torchrun forks, and what it said."""

    def run(case: str, status: int = 0) -> tuple[dict[tuple[int, str], float], str]:
        done = run_torch(FORKED, *torchrun(FIRST, case)[1:], env=clean(), timeout=110)
        assert done.returncode == status, done.stderr
        return times(done.stdout), done.stderr

    return run


class TestTorchrun:
    def test_without_a_process_group(self) -> None:
        """They load torch themselves, for the store of torchrun."""
        command = torchrun(FIRST, "plain")
        done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        seen = times(done.stdout)
        for number in range(3):
            assert_main_first(seen, f"block{number}", 0, [1, 2, 3])

    def test_with_one_and_its_groups_and_a_store_that_is_given(self, under_torchrun: Torchrun) -> None:
        seen, _ = under_torchrun("gloo")
        for what in ("block0", "block1", "block2", "by-store"):
            assert_main_first(seen, what, 0, [1, 2, 3])
        assert_main_first(seen, "by-group", 0, [2])
        assert_main_first(seen, "by-group", 1, [3])
        assert seen[1, "by-group-begins"] < seen[0, "by-group-ends"]

    def test_an_error_reaches_all_ranks_after_a_restart_too(self, under_torchrun: Torchrun) -> None:
        begin = time.monotonic()
        seen, err = under_torchrun("error", status=1)
        assert (0, "block-ends") in seen and (1, "block-begins") not in seen
        assert "ValueError: shard 7 is" in err
        assert time.monotonic() - begin < 60


class Notes:
    """A board in memory."""

    def __init__(self) -> None:
        self.notes: dict[str, dict] = {}

    def write(self, name: str, note: dict) -> None:
        self.notes[name] = json.loads(json.dumps(note))

    def read(self, name: str) -> dict | None:
        return self.notes.get(name)

    def claim(self, name: str, note: dict) -> dict:
        return self.notes.setdefault(name, note)


class TestHeartbeat:
    """Of a main process on another node, whose pid cannot be seen."""

    def gate(self, notes: Notes, rank: int) -> _first._Gate:
        return _first._Gate(notes, "key", Who(rank, rank, 2, None, ""), rank == 0, range(2), "x.py f:1", 60.0)

    def test_silence_is_death(self, monkeypatch) -> None:
        monkeypatch.setattr(_alive, "SILENCE", 0.5)
        monkeypatch.setattr(_alive, "BEAT", 0.1)
        notes = Notes()
        notes.write("key", {"state": "in", "rank": 0, "host": "far", "pid": 1, "ticks": 1, "node": "n", "site": "x"})
        with pytest.raises(MldebugError, match=r"rank 0 \(host far, pid 1\) has not been heard of"):
            self.gate(notes, 1).enter()

    def test_a_beat_is_life(self, monkeypatch) -> None:
        monkeypatch.setattr(_alive, "SILENCE", 1.0)
        monkeypatch.setattr(_alive, "BEAT", 0.1)
        notes = Notes()
        main = self.gate(notes, 0)
        main.enter()
        notes.notes["key"]["node"] = "another"
        watched = _alive.Watched(notes, "key/beat")
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert watched.is_gone(notes.notes["key"]) == ""
            time.sleep(0.05)
        main.leave(None)
        assert notes.notes["key"]["state"] == "done"
        beats = notes.notes["key/beat"]
        time.sleep(0.3)
        assert notes.notes["key/beat"] == beats  # it stops with the block

    def test_ranks_that_torchrun_replaced(self) -> None:
        notes = Notes()
        notes.write("key", {**_alive.card(Who(0, 0, 2, 2, "")), "ticks": 1, "state": "in", "site": "x"})
        self.gate(notes, 0).enter()
        assert notes.notes["key"]["ticks"] != 1


def test_alone_it_costs_nothing(monkeypatch) -> None:
    for name in os.environ.keys() - clean().keys():
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    scope, path = main_process_first(), main_process_by_path_first("/nowhere")
    begin = time.perf_counter()
    for _ in range(1000):
        with scope, path:
            pass
    assert time.perf_counter() - begin < 1.0


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="timeout is 0"):
        main_process_first(timeout=0)


def test_a_store_that_fails_is_told() -> None:
    class Broken:
        def check(self, names: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nframe #0")

    with pytest.raises(MldebugError, match=r"has failed: Connection reset by peer\n"):
        StoreBoard(Broken()).read("x")


def test_a_folder_board_keeps_the_first_claim(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", f"test-{os.getpid()}")
    board = FolderBoard()
    name = f"a/b {time.monotonic_ns()}"
    assert board.read(name) is None
    assert board.claim(name, {"n": 1}) == {"n": 1}
    assert board.claim(name, {"n": 2}) == {"n": 1}
    board.write(name, {"n": 3})
    assert board.read(name) == {"n": 3}


def test_a_job_that_begins_as_soon_as_one_was_killed(monkeypatch) -> None:
    """The same launcher starts the ranks anew at once: their files are as young as these processes."""
    monkeypatch.setenv("MASTER_ADDR", f"again-{os.getpid()}")
    folder = FolderBoard(2, 0)._folder
    here = next(folder.glob("here.*"))
    here.rename(folder / "left.1.1.0")  # of the rank 0 of before; its rank 1 was killed
    (folder / "here.1.1.1").touch()
    (folder / "stale").touch()
    _files._entered.clear()
    assert FolderBoard(2, 0)._folder == folder
    assert not (folder / "stale").exists()
    (folder / "left.1.1.1").touch()
    (folder / "left.1.1.2").touch()
    _files._leave(next(folder.glob("here.*")), 2)
    assert not folder.exists()


def test_nobody_takes_the_folder_from_a_rank_that_is_there(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", f"there-{os.getpid()}")
    folder = FolderBoard(2, 0)._folder
    mine = next(folder.glob("here.*"))
    alive = folder / f"here.{os.getppid()}.{_files.ticks(os.getppid())}.1"
    for one in (alive, folder / "left.1.1.0"):
        one.touch()
    _files._leave(mine, 2)
    assert folder.exists()
    shutil.rmtree(folder)


def test_spans() -> None:
    assert spans([7, 0, 2, 3, 4]) == "0, 2-4, 7"
    assert spans([]) == ""
