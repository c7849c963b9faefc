"""trace_tail(): which rank stopped first, where ranks parted, their last lines; on made-up traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mldebug.core.errors import UsageError
from mldebug.tracing._ring import SMALLEST, Ring
from mldebug.tracing._tail import trace_tail
from mldebug.tracing._tail_find import find_traces
from mldebug.tracing._tail_index import index
from mldebug.tracing._tail_read import Place
from tests.tracing.jobs import CALL, line, loop, write_trace
from tests.tracing.test_ring import Writer


def _step(step: int) -> list[str]:
    return [line(4, "loss = model(batch)"), line(5, "if loss.isnan():"), line(8, "optimizer.step()")]


def _other_way_at_7(step: int) -> list[str]:
    return [*_step(step)[:2], line(6, "skipped += 1"), line(7, "continue")] if step == 7 else _step(step)


def test_equal_ranks_did_not_part(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(tmp_path, rank, loop(50, _step), ended=True)
    report = trace_tail(tmp_path)
    assert report.ok and not report.partings and report.missing == ()
    assert (
        "4 of 4 ranks\nno rank went another way than the others\nall ranks wrote their last line within"
        in report.text()
    )
    assert "\n0-3   0:00:10  train.py:     4: loss = model(batch)" in report.text()


def test_another_branch_is_named_with_its_line_and_iteration(tmp_path: Path) -> None:
    for rank in range(8):
        write_trace(tmp_path, rank, loop(50, _other_way_at_7 if rank == 3 else _step), world=8)
    report = trace_tail(tmp_path)
    (parting,) = report.partings
    assert (parting.place, parting.iteration, parting.line) == ("train.py:5", 7, "if loss.isnan():")
    assert parting.call == "train:1 main" and parting.meets and not parting.expected and parting.times == 1
    assert [(way.ranks, way.line) for way in parting.ways] == [
        ((3,), "train.py:     6: skipped += 1"),
        ((0, 1, 2, 4, 5, 6, 7), "train.py:     8: optimizer.step()"),
    ]
    assert not report.ok
    assert "ranks part at train.py:5 in iteration 7 (train:1 main):" in report.text()
    assert "  rank 0-2,4-7 -> train.py:     8: optimizer.step()" in report.text()


def test_a_rank_that_left_the_loop_never_meets_the_others(tmp_path: Path) -> None:
    left = [*loop(20, _step), line(9, "barrier()")]
    for rank in range(4):
        write_trace(tmp_path, rank, left if rank == 2 else loop(60, _step), seconds=30 if rank == 2 else 90)
    report = trace_tail(tmp_path)
    (parting,) = report.partings
    assert not parting.meets and parting.place == "train.py:8" and parting.iteration == 19
    assert [way.ranks for way in parting.ways] == [(2,), (0, 1, 3)]
    assert report.stopped_first is not None and report.stopped_first.ranks == (2,)
    assert report.stopped_first.before_next == pytest.approx(60, abs=0.1)
    assert "rank 2 stopped first, 60.0 s before the next" in report.text()


def test_a_rank_that_is_behind_did_not_part(tmp_path: Path) -> None:
    whole = loop(60, _step)
    for rank in range(4):
        write_trace(tmp_path, rank, whole[: 4 * 33 + 4] if rank == 1 else whole, seconds=5 if rank == 1 else 9)
    report = trace_tail(tmp_path)
    assert report.partings == ()
    assert report.stopped_first is not None and report.stopped_first.ranks == (1,)
    (behind,) = report.behind
    assert (behind.rank, behind.place, behind.iteration) == (1, "train.py:4", 33)


def test_lines_that_ask_for_the_rank_are_no_trouble(tmp_path: Path) -> None:
    def logs(step: int) -> list[str]:
        return [*_step(step), line(9, "if rank == 0:"), line(10, "print(loss)")]

    def plain(step: int) -> list[str]:
        return [*_step(step), line(9, "if rank == 0:")]

    for rank in range(4):
        write_trace(tmp_path, rank, loop(30, plain if rank else logs), ended=True)
    report = trace_tail(tmp_path)
    (parting,) = report.partings
    assert parting.expected and report.ok
    assert "no rank went another way than the others, but for lines that ask for the rank:" in report.text()
    assert "train.py:9: if rank == 0:   0 | 1-3 (30 times)" in report.text()


def test_a_rank_that_ends_on_its_own_way_did_not_leave(tmp_path: Path) -> None:
    """Rank 0 was killed while it logged: from there it came back each time before."""
    for rank in range(3):
        lines = loop(30, lambda step: [*_step(step), line(9, "if first:")])
        if rank == 0:
            lines = loop(20, lambda step: [*_step(step), line(9, "if first:"), line(10, "print(loss)")])
        write_trace(tmp_path, rank, lines, world=3)
    (parting,) = trace_tail(tmp_path).partings
    assert parting.times == 20 and parting.meets and parting.iteration == 0


def test_what_is_in_the_folder_besides_the_ranks(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        write_trace(tmp_path, rank, loop(9, _step), pid=500 + rank, later=-1000)  # an earlier attempt
    for rank in (0, 1):
        write_trace(tmp_path, rank, loop(9, _step), world=6)
        for worker in range(3):
            write_trace(tmp_path, rank, [CALL], pid=9000 + 10 * rank + worker, parent=1000 + rank, world=6)
    (tmp_path / "notes.txt").write_text("not a trace")
    (tmp_path / "trace-node1-5-77.txt").write_text("")
    report = trace_tail(tmp_path)
    assert [rank.pid for rank in report.ranks] == [1000, 1001]
    assert report.missing == (2, 3, 4, 5) and not report.ok
    assert report.children == 6 and report.earlier == 3
    text = report.text()
    assert "2 of 6 ranks; no trace of rank 2-5" in text
    assert "3 traces of earlier attempts" in text and "6 traces of processes that ranks forked" in text
    assert "cannot be read, or empty: trace-node1-5-77.txt" in text


@pytest.mark.parametrize("compressed", [False, True])
def test_pieces_are_read_as_one_text(tmp_path: Path, compressed: bool) -> None:
    for rank in range(4):
        body = _other_way_at_7 if rank == 3 else _step
        write_trace(tmp_path, rank, loop(500, body), pieces=rank + 1, compressed=compressed)
    (parting,) = trace_tail(tmp_path).partings
    assert parting.place == "train.py:5" and parting.iteration == 7
    assert [way.ranks for way in parting.ways] == [(3,), (0, 1, 2)]


def test_dropped_pieces_are_compared_from_a_moment_that_all_have(tmp_path: Path) -> None:
    def outer(step: int) -> list[str]:
        return [*_step(step), *([line(11, "save()")] if step % 25 == 0 else [])]

    def odd(step: int) -> list[str]:
        return [*outer(step)[:2], line(6, "skipped += 1"), *outer(step)[2:]] if step == 900 else outer(step)

    for rank in range(4):
        write_trace(tmp_path, rank, loop(1000, odd if rank == 1 else outer), pieces=5, drop=rank % 3, seconds=100)
    report = trace_tail(tmp_path)
    (parting,) = report.partings
    assert parting.place == "train.py:5" and parting.iteration is None
    assert [way.ranks for way in parting.ways] == [(1,), (0, 2, 3)]
    assert "the beginning of the files is gone" in report.text()


def test_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        ring = Ring(tmp_path, SMALLEST)
        writer, thread, refs = Writer(ring), ring.thread("MainThread"), {}
        call = ring.define(CALL.encode(), timed=False)
        for text in loop(300, _other_way_at_7 if rank == 1 else _step):
            if text not in refs:
                refs[text] = ring.define(text.encode(), call) if text != CALL else call
            writer.line(thread, refs[text])
    report = trace_tail(tmp_path, pattern="model")
    (parting,) = report.partings
    assert (parting.place, parting.iteration) == ("train.py:5", 7)
    assert [way.ranks for way in parting.ways] == [(1,), (0, 2)]
    assert [rank.matches for rank in report.ranks] == [301] * 3
    assert report.ranks[0].lines[-1] == line(8, "optimizer.step()")


def test_a_ring_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    """Its oldest lines go: the text behind them is found where it was, and what is gone is not taken for another."""
    ring = Ring(tmp_path, SMALLEST)
    writer, thread = Writer(ring), ring.thread("MainThread")
    refs = [ring.define(line(number, "x = f(x)").encode()) for number in range(997)]
    for number in range(100_000):
        writer.line(thread, refs[number % 997])
    found = index(find_traces(tmp_path).ranks[0], Place(0, 0, 0), None, lambda count: None)
    text = b"".join(found.text())
    assert len(text.splitlines()) == ring.mask + 1
    for number in range(30_000):
        writer.line(thread, refs[number % 7])
    half = len(text) // 2
    assert b"".join(found.text(half)) == text[half:]
    assert b"".join(found.text()) == b""


def test_ranks_without_a_common_time_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(tmp_path, rank, loop(400, _step), pieces=4, drop=2, later=1000 if rank == 3 else 0)
    report = trace_tail(tmp_path)
    assert report.partings == ()
    assert "rank 3 not compared: no time is in those files and in most of the others" in report.text().replace(
        "\n    ", " "
    )


def test_counts_of_a_pattern_show_the_odd_rank_first(tmp_path: Path) -> None:
    for rank in range(6):
        write_trace(tmp_path, rank, loop(100 if rank != 4 else 40, _step), world=6)
    report = trace_tail(tmp_path, pattern=r"optimizer\.step")
    assert [rank.matches for rank in report.ranks] == [100, 100, 100, 100, 40, 100]
    assert "          40  rank 4\n         100  rank 0-3,5" in report.text()


def test_threads_pids_and_values_do_not_part_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        lines = loop(40, _step)
        lines = [f"[MainThread] {text}" for text in lines]
        lines.insert(7, f"[MainThread]         train:20 f(rank={rank}, x=tensor[{rank}])")
        for number in range(0, len(lines), 5 + rank):
            lines.insert(number, f"[loader {rank}] {line(77, 'queue.get()')}")
        write_trace(tmp_path, rank, lines, world=3, note="args=1")
    assert trace_tail(tmp_path).partings == ()


def test_the_last_line_may_be_cut_off(tmp_path: Path) -> None:
    for rank in range(3):
        path = write_trace(tmp_path, rank, loop(40, _step), world=3)
        if rank == 1:
            path.write_bytes(path.read_bytes()[:-9])
    report = trace_tail(tmp_path)
    assert report.partings == () and report.ranks[1].lines[-1].startswith("train.py:     8: opti")


def test_a_thousand_ranks_fit_on_a_page(tmp_path: Path) -> None:
    for rank in range(1000):
        write_trace(tmp_path, rank, loop(8 + rank % 40, _step), world=1024, seconds=3 + rank % 40)
    lines = trace_tail(tmp_path).text().splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 80
    assert lines[0] == "1000 of 1024 ranks; no trace of rank 1000-1023"


def test_no_trace_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace in"):
        trace_tail(tmp_path)
    with pytest.raises(UsageError, match="there is no file or folder"):
        trace_tail(tmp_path / "nothing")
    with pytest.raises(UsageError, match="does not have the name of a trace"):
        trace_tail(os.path.abspath(__file__))
    write_trace(tmp_path, 0, [CALL])
    with pytest.raises(UsageError, match="no regular expression"):
        trace_tail(tmp_path, pattern="(")


def test_a_rank_that_goes_on_where_the_others_ended_went_another_way(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(
            tmp_path,
            rank,
            [*loop(31 if rank == 2 else 30, _step), line(3, "for step in range(steps):")],
            ended=rank != 2,
        )
    report = trace_tail(tmp_path)
    (parting,) = report.partings
    assert not report.ok and not parting.meets
    assert [(way.ranks, way.line) for way in parting.ways][1] == ((0, 1, 3), "(the end)")


def test_a_rank_that_was_killed_where_the_others_went_on_is_only_behind(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(tmp_path, rank, loop(20 if rank == 2 else 30, _step), ended=rank != 2)
    assert trace_tail(tmp_path).partings == ()


def test_a_rank_that_is_missing_in_the_third_attempt(tmp_path: Path) -> None:
    for attempt in range(3):
        for rank in range(4):
            if (attempt, rank) != (2, 2):
                write_trace(tmp_path, rank, loop(20, _step), pid=100 * attempt + rank, later=60.0 * attempt)
    report = trace_tail(tmp_path)
    assert (report.missing, report.earlier) == ((2,), 8)


def test_a_rank_that_died_before_another_began_is_of_the_same_attempt(tmp_path: Path) -> None:
    for attempt in range(2):
        for rank in range(4):
            later = 60.0 * attempt + 20 * (rank == 3)
            write_trace(tmp_path, rank, loop(20, _step), pid=100 * attempt + rank, later=later)
    report = trace_tail(tmp_path)
    assert (report.missing, report.earlier) == ((), 4)


def test_a_file_system_whose_clock_is_behind(tmp_path: Path) -> None:
    for rank in range(2):
        write_trace(tmp_path, rank, loop(20, _step), world=2, pieces=4, drop=2, seconds=0.5)
        for each in tmp_path.iterdir():
            each.write_text(each.read_text().replace("0:00:00 ", ""))  # without times
            os.utime(each, (1.0, 1.0))
    assert trace_tail(tmp_path).partings == ()
