"""What the text of a program says: conditions on the rank, guards and ways out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldebug.hang import Evidence, annotate
from mldebug.hang._judge_text import asks_rank, counts_only, holds, is_main_guard, is_poll, long_sleep, parts_ranks


@pytest.mark.parametrize(
    ("guard", "passes"),
    [
        ("if rank == 0", [0]),
        ("else rank == 0", [1, 2, 3]),
        ("if not rank", [0]),
        ("if dist.get_rank() in (0, 2)", [0, 2]),
        ("if self.rank % 2 == 1", [1, 3]),
        ("if is_main_process()", [0]),
        ("if not accelerator.is_main_process", [1, 2, 3]),
        ("if rank == 1 or rank == 3", [1, 3]),
        ("if rank > 1 and step == 3", [2, 3]),  # as far as can be known
        ("if loss > 3", [0, 1, 2, 3]),
        ("if (", [0, 1, 2, 3]),
        ("for rank in ranks", [0, 1, 2, 3]),
    ],
)
def test_which_ranks_may_pass(guard: str, passes: list[int]) -> None:
    assert [rank for rank in range(4) if holds(guard, rank) is not False] == passes


def test_a_guard_parts_ranks_only_where_it_asks_for_them() -> None:
    assert parts_ranks("if rank == 2 and bad", [2], [0, 1, 3])
    assert not parts_ranks("if rank == 2", [1, 2], [0, 3])
    assert not parts_ranks("if bad", [2], [0])
    assert asks_rank("while rank < 2") and not asks_rank("if ranking")


def test_the_main_process_is_told_from_one_that_is_picked() -> None:
    assert is_main_guard("if rank == 0") and is_main_guard("if rank != 0") and is_main_guard("if is_main_process()")
    assert not is_main_guard("if rank == 1 and step == 2") and not is_main_guard("if rank < 2")


def test_polling_is_told_from_waiting_for_time_and_from_work() -> None:
    assert is_poll("while not os.path.exists(path)", "time.sleep(1)", "")
    assert is_poll("while True", "time.sleep(1)", "")
    assert not is_poll("while time.time() < end", "time.sleep(1)", "")
    assert not is_poll("while batch", "batch = model(batch)", "")
    assert not is_poll("for part in parts", "time.sleep(1)", "")


def test_sleep_for_ever() -> None:
    assert long_sleep("time.sleep(10**6)") and long_sleep("sleep(60 * 60)") and long_sleep("time.sleep(3600)")
    assert not long_sleep("time.sleep(20)") and not long_sleep("time.sleep(delay)") and not long_sleep("f()")


PROGRAM = """\
import os

def save(state):
    with lock:
        barrier()

def main(rank):
    for step in range(9):
        if step == 2:
            if rank == 0:
                save({})
        elif bad(step):
            continue
    while not done():
        try:
            poll()
        except StopIteration:
            break
    return 1
"""


def source(tmp_path: Path, line: int, text: str = PROGRAM) -> dict[str, object]:
    path = tmp_path / "train.py"
    path.write_text(text)
    thread = {"name": "MainThread", "tid": 1, "active": False, "gil": False}
    thread["frames"] = [{"name": "f", "file": str(path), "line": line}]
    sample = {"time": 0.0, "state": "S", "ticks": 0, "threads": [thread]}
    rank = {"rank": 0, "pid": 1, "samples": [sample], "children": []}
    evidence: Evidence = {"schema": 1, "time": 0, "hosts": [], "ranks": [rank], "notes": []}  # type: ignore[list-item]
    annotate(evidence)
    found = evidence["source"].get(f"{path}:{line}", {})
    return dict(found)  # type: ignore[call-overload, no-any-return]


def test_guards_of_a_line(tmp_path: Path) -> None:
    assert source(tmp_path, 5)["guards"] == ["with lock"]
    assert source(tmp_path, 11)["guards"] == ["for step in range(9)", "if step == 2", "if rank == 0"]
    assert source(tmp_path, 13)["guards"] == ["for step in range(9)", "else step == 2", "if bad(step)"]
    assert source(tmp_path, 8)["guards"] == ["for step in range(9)"]
    assert source(tmp_path, 16)["guards"] == ["while not done()", "try"]
    assert source(tmp_path, 19)["guards"] == []


def test_steps_of_a_function(tmp_path: Path) -> None:
    steps = source(tmp_path, 11)["steps"]
    jumps = [(step["line"], step["what"]) for step in steps if "call" not in step["what"]]  # type: ignore[attr-defined]
    assert [jump for jump in jumps if jump[1] != "statement"] == [(13, "continue"), (18, "break"), (19, "return")]


@pytest.mark.parametrize("text", ["def broken(:\n", "x = 1\n", ""])
def test_a_file_that_changed_or_does_not_parse_is_no_failure(tmp_path: Path, text: str) -> None:
    source(tmp_path, 40, text)


@pytest.mark.parametrize(
    ("guard", "counts"),
    [
        ("if step >= limit", True),
        ("if step >= len(loader)", True),
        ("if batch is None", True),
        ("if not data", True),
        ("if epoch % args.save_every == 0", True),
        ("if self.improved(epoch)", False),
        ("if stopper.step(val)", False),
        ("if bad_epochs >= patience", False),
        ("if time.time() > end", False),
    ],
)
def test_conditions_on_the_number_of_steps(guard: str, counts: bool) -> None:
    assert counts_only(guard) is counts
