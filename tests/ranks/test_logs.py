"""logs(): whose line is it, which lines are equal, and which traceback is the cause."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.ranks import LogsReport, logs
from mldebug.ranks._logs_fold import rank_set

TRACEBACK = """\
Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
    main()
  File "/app/train.py", line 5, in main
    step({argument})
{exception}"""
BAD_SHAPE = TRACEBACK.format(argument="x", exception="RuntimeError: mat1 and mat2 cannot be multiplied (4x5 and 4x4)")
CLOSED = TRACEBACK.format(
    argument="y", exception="RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:{port}"
)


def read(tmp_path: Path, text: str | bytes, **options: object) -> LogsReport:
    path = tmp_path / "job.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return logs(path, **options)  # type: ignore[arg-type]


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def shown(report: LogsReport) -> list[str]:
    return [f"{line.who} {line.text}" for line in report.folded]


@pytest.mark.parametrize(
    "prefix",
    [
        "[node-a:{rank}] ",
        "[rank{rank}]: ",
        "[rank{rank}]:",
        "[default{rank}]:",
        "[trainer{rank}]:",
        "[{rank}]:",
        "[{rank}] ",
        "{rank}: ",
        "{rank:>2}: ",
        "[1,{rank}]<stdout>:",
        "[1,{rank}]<stderr>: ",
        "[prterun-host-1234@1,{rank}]<stdout>: ",
        "nid00123 {rank}: ",
        "[default{rank}]:[rank{rank}]: ",
        "2026-11-28T09:56:03.123456789Z [rank{rank}]: ",
        "[pod/job-worker-0/pytorch] [rank{rank}]: ",
        "node-a: [rank{rank}]: ",
        "0: [rank{rank}]: ",
    ],
)
def test_prefixes_that_launchers_write(tmp_path: Path, prefix: str) -> None:
    text = ""
    for step in range(6):
        text += "".join(f"{prefix.format(rank=rank)}step {step} loss 2.5\n" for rank in (0, 1, 2, 11))
    text += prefixed(prefix.format(rank=2), BAD_SHAPE)
    report = read(tmp_path, text)
    assert report.ranks == (0, 1, 2, 11)
    assert shown(report)[:6] == [f"[0-2,11] step {step} loss 2.5" for step in range(6)]
    assert [(one.ranks, one.text) for one in report.tracebacks] == [((2,), BAD_SHAPE)]


@pytest.mark.parametrize(
    ("prefix", "who"),
    [("node-{n}: ", "node-{n}"), ("[pod/job-{n}/main] ", "job-{n}"), ("(Worker pid=40{n}) ", "Worker pid=40{n}")],
)
def test_prefixes_that_name_no_rank_name_their_writer(tmp_path: Path, prefix: str, who: str) -> None:
    text = "".join(f"{prefix.format(n=number)}step {step}\n" for step in range(5) for number in (1, 2))
    report = read(tmp_path, text)
    assert report.ranks == ()
    assert {name for line in report.folded for name in line.others} == {who.format(n=number) for number in (1, 2)}


@pytest.mark.parametrize(
    "line",
    [
        "[2026-01-02 03:04:05,678] [INFO] [rank {rank}] loss 2.5",
        "[2026-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank {rank}] loss 2.5",
        "[E ProcessGroupNCCL.cpp:458] [Rank {rank}] some trouble",
        "[E321 02:07:08.4 ProcessGroupNCCL.cpp:2268] [PG ID 1 PG GUID 1 Rank {rank}] some trouble",
    ],
)
def test_lines_that_name_their_rank_inside(tmp_path: Path, line: str) -> None:
    report = read(tmp_path, "".join(line.format(rank=rank) + "\n" for rank in (0, 1, 3)))
    assert report.ranks == (0, 1, 3)
    assert [(one.ranks, "rank" in one.differs) for one in report.folded] == [((0, 1, 3), True)]


def test_nccl_lines_tell_host_and_device(tmp_path: Path) -> None:
    text = "".join(f"n1:{4000 + rank}:{5000 + rank} [{rank}] NCCL WARN Call to connect failed\n" for rank in range(4))
    report = read(tmp_path, text)
    assert [one.ranks for one in report.folded] == [(0, 1, 2, 3)]
    assert report.events == ({"said": "NCCL WARN Call to connect failed", "ranks": (0, 1, 2, 3), "others": ()},)
    text += text.replace("n1:", "n2:")
    assert set(read(tmp_path, text).events[0]["others"]) >= {"n1:0", "n2:3"}


@pytest.mark.parametrize(
    "text",
    [
        "Error: no such file\nError: again\n",
        "1 of 3\nINFO: a\nINFO: b\nINFO: c\n",
        "a\nb\n",
        "Epoch 0: 6%\nEpoch 1: 7%\n",
        "0: 384x640 1 person\n0: 384x640 2 persons\n",
    ],
)
def test_ordinary_text_is_no_prefix(tmp_path: Path, text: str) -> None:
    report = read(tmp_path, text)
    assert (report.ranks, report.prefixes) == ((), ())
    assert [one.text for one in report.folded] == list(dict.fromkeys(text.splitlines()))


def test_the_local_rank_of_torchrun_becomes_a_rank_when_a_traceback_tells_it(tmp_path: Path) -> None:
    text = (
        "[default3]:before\n" + prefixed("[default3]:[rank11]: ", BAD_SHAPE) + "[default3]:after\n[default2]:before\n"
    )
    report = read(tmp_path, text)
    assert shown(report)[0] == "[2,11] before"
    assert shown(report)[-1] == "[11] after"
    assert report.tracebacks[0].ranks == (11,)


def test_local_ranks_of_two_nodes_are_not_mixed(tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / f"node-{node}.log").write_text("[default0]:hello\n[default1]:hello\n")
    report = logs([tmp_path / "node-a.log", tmp_path / "node-b.log"])
    assert report.ranks == ()
    assert len(report.folded[0].others) == 4


@pytest.mark.parametrize(
    "name",
    ["attempt_0/{rank}/stderr.log", "log-{rank}.txt", "slurm-4711-{rank}.out", "rank{rank}.log", "out.{rank}.log"],
)
def test_one_file_for_each_rank(tmp_path: Path, name: str) -> None:
    for rank in (0, 1, 10):
        path = tmp_path / name.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("start\n" + (BAD_SHAPE + "\n" if rank == 10 else "") + "end\n")
    report = logs(tmp_path)
    assert report.ranks == (0, 1, 10)
    assert report.tracebacks[0].ranks == (10,)
    assert {"[0-1,10] start", "[0-1,10] end"} <= set(shown(report))
    assert report.silent[0].ranks == (0, 1)


def test_a_second_attempt_is_read_after_the_first(tmp_path: Path) -> None:
    for attempt, exception in enumerate(("ValueError: first", "ValueError: second")):
        path = tmp_path / f"attempt_{attempt}" / "0" / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(
            TRACEBACK.format(argument=attempt, exception=exception.replace("Value", "Key" * attempt)) + "\n"
        )
    assert [one.exception for one in logs(tmp_path).tracebacks] == ["Error: first", "KeyError: second"]


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("<{host}/{rank}> ", "<n1/{rank}> "),
        (r"worker-(\d+) \| ", "worker-{rank} | "),
        (r"R(?P<rank>\d+)\s", "R{rank} "),
    ],
)
def test_a_prefix_that_the_user_describes(tmp_path: Path, prefix: str, text: str) -> None:
    report = read(tmp_path, "".join(text.format(rank=rank) + "loss 1\n" for rank in range(3)), prefix=prefix)
    assert shown(report) == ["[0-2] loss 1"]


@pytest.mark.parametrize("prefix", ["(", "no group"])
def test_a_prefix_that_is_none(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(UsageError, match="--prefix"):
        read(tmp_path, "x\n", prefix=prefix)


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ("12:00:01 start", "12:00:02.5 start", ("time",)),
        ("2026-01-02T03:04:05Z start", "2026-01-02T03:04:06Z start", ("time",)),
        ("W1128 09:55:38.746000 20688 torch/x.py:1] hm", "W1128 09:55:39.746000 20777 torch/x.py:1] hm", ("time",)),
        ("rank 0 is ready", "rank 1 is ready", ("rank",)),
        ("local_rank=0", "local_rank=1", ("rank",)),
        ("model on cuda:0", "model on cuda:1", ("device",)),
        ("pid 4711 up", "pid 4712 up", ("pid",)),
        ("<object at 0x7f0011223344>", "<object at 0x7f0011223355>", ("address",)),
    ],
)
def test_lines_equal_but_for_what_follows_from_the_rank(
    tmp_path: Path, first: str, second: str, differs: tuple[str]
) -> None:
    report = read(tmp_path, f"[rank0]: {first}\n[rank1]: {second}\n")
    assert [(one.who, one.differs) for one in report.folded] == [("[0-1]", differs)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("loss 2.31", "loss 2.32"),
        ("shape (4, 4)", "shape (4, 5)"),
        ("rank 3 is late", "rank 4 is late"),  # said by ranks 0 and 1: about others
        ("model on cuda:0", "model on cuda:0 "),
        ("step 10", "step 11"),
        ("seq 0x10", "seq 0x20"),
        ("model on cuda:1", "model on cuda:0"),  # each has the device of the other
    ],
)
def test_a_real_difference_is_never_folded(tmp_path: Path, first: str, second: str) -> None:
    report = read(tmp_path, f"[rank0]: {first}\n[rank1]: {second}\n")
    assert [one.ranks for one in report.folded] == [(0,), (1,)]


def test_the_same_line_again_is_matched_in_order(tmp_path: Path) -> None:
    report = read(tmp_path, "[rank0]: nan\n[rank0]: nan\n[rank1]: nan\n[rank1]: nan\n[rank1]: nan\n")
    assert [one.ranks for one in report.folded] == [(0, 1), (0, 1), (1,)]


def test_cause_and_consequences(tmp_path: Path) -> None:
    text = prefixed("[rank1]: ", CLOSED.format(port=4711)) + prefixed("[rank2]: ", BAD_SHAPE)
    text += prefixed("[rank3]: ", CLOSED.format(port=4712)) + "[rank0]: fine\n"
    report = read(tmp_path, text)
    assert [(one.ranks, bool(one.victim)) for one in report.tracebacks] == [((2,), False), ((1, 3), True)]
    assert [one.ranks for one in report.silent] == [(0,)]
    lines = report.text().splitlines()
    assert lines[0].startswith("2 kinds of traceback; first by order in the log: [2]: RuntimeError: mat1")
    assert any(line.startswith("consequence: [1,3] lost the connection to another rank") for line in lines)
    assert "no traceback: [0]; last line: fine" in lines
    assert json.loads(report.json())["tracebacks"][0]["ranks"] == [2]
    assert not report.ok


def test_a_cause_and_victims_at_the_same_line_are_told_apart(tmp_path: Path) -> None:
    texts = {
        rank: TRACEBACK.format(argument="x", exception="RuntimeError: Connection closed by peer") for rank in range(4)
    }
    texts[2] = TRACEBACK.format(argument="x", exception="RuntimeError: CUDA error: an illegal memory access")
    report = read(tmp_path, "".join(prefixed(f"[rank{rank}]: ", text) for rank, text in texts.items()))
    assert [one.ranks for one in report.tracebacks] == [(2,), (0, 1, 3)]


def test_the_first_by_time_is_first(tmp_path: Path) -> None:
    for rank, (clock, error) in enumerate((("10:00:09", "ValueError: late"), ("10:00:01", "KeyError: 'early'"))):
        text = f"2026-01-01 {clock} step 1\n{TRACEBACK.format(argument=rank, exception=error)}\n"
        (tmp_path / f"rank{rank}.log").write_text(text)
    report = logs(tmp_path)
    assert report.first_by == "time"
    assert [one.ranks for one in report.tracebacks] == [(1,), (0,)]


def test_messages_of_one_traceback_that_differ(tmp_path: Path) -> None:
    text = "".join(
        prefixed(
            f"[rank{rank}]: ",
            TRACEBACK.format(argument="x", exception=f"AssertionError: rank {rank}: {3 + rank % 2} rows"),
        )
        for rank in range(6)
    )
    (one,) = read(tmp_path, text).tracebacks
    assert one.ranks == (0, 1, 2, 3, 4, 5)
    assert [(message.text, message.ranks) for message in one.messages] == [
        ("AssertionError: rank 0: 3 rows", (0, 2, 4)),
        ("AssertionError: rank 1: 4 rows", (1, 3, 5)),
    ]


def test_tracebacks_are_gathered_across_interleaving(tmp_path: Path) -> None:
    texts = {
        rank: TRACEBACK.format(argument=f"x{rank}", exception=f"ValueError: {rank}").splitlines() for rank in range(3)
    }
    mixed = "".join(f"[rank{rank}]: {texts[rank][number]}\n" for number in range(6) for rank in range(3))
    report = read(tmp_path, mixed)
    assert [one.text for one in report.tracebacks] == ["\n".join(texts[rank]) for rank in range(1)]
    assert [message.ranks for message in report.tracebacks[0].messages] == [(0,), (1,), (2,)]


def test_tracebacks_without_a_prefix_are_untangled_as_far_as_can_be(tmp_path: Path) -> None:
    lines = BAD_SHAPE.splitlines()
    mixed = [lines[0], lines[1], lines[0], lines[1], lines[2], lines[3], lines[2], *lines[4:], *lines[3:]]
    report = read(tmp_path, "\n".join(mixed) + "\n")
    assert [(one.text, one.times) for one in report.tracebacks] == [(BAD_SHAPE, 2)]
    assert report.broken == 1
    assert "1 line looks interleaved; print with printflock" in " ".join(report.text().split())


def test_chained_exceptions_and_carets_are_one_traceback(tmp_path: Path) -> None:
    first = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    {}["lr"]\n    ~~^^^^^^\nKeyError: \'lr\''
    )
    text = f"{first}\n\nThe above exception was the direct cause of the following exception:\n\n{BAD_SHAPE}"
    plain = "".join(f"[rank1]: {line}\n" if line else "\n" for line in text.splitlines())  # as torch's hook does
    for log in (plain, prefixed("[rank1]: ", text), prefixed("[default1]:", text), text + "\n"):
        (one,) = read(tmp_path, log).tracebacks
        assert one.text == text
        assert one.exception.startswith("RuntimeError: mat1")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups")
def test_exception_groups_are_one_traceback(tmp_path: Path) -> None:
    import traceback

    try:
        raise ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [TypeError("b")])])  # type: ignore[name-defined,unused-ignore]  # noqa: F821
    except BaseException as exc:
        text = "".join(traceback.format_exception(exc)).rstrip()
    for prefix in ("[rank1]: ", "[default1]:", ""):
        (one,) = read(tmp_path, prefixed(prefix, text) + f"{prefix}after\n").tracebacks
        assert one.text == text
        assert one.exception == "ExceptionGroup: two (2 sub-exceptions)"


def test_a_message_of_several_lines_stays_whole(tmp_path: Path) -> None:
    more = "\nCUDA kernel errors might be asynchronously reported\nCompile with `TORCH_USE_CUDA_DSA` to enable it.\n"
    text = TRACEBACK.format(argument="x", exception="RuntimeError: CUDA error: device-side assert") + more
    (one,) = read(tmp_path, prefixed("[default1]:", text) + "[default1]:step 4\n").tracebacks
    assert one.text == text.rstrip()


def test_the_rank_without_a_traceback_is_looked_at_when_all_others_are_victims(tmp_path: Path) -> None:
    text = "".join(prefixed(f"[rank{rank}]: ", CLOSED.format(port=4000 + rank)) for rank in (0, 1, 2, 4))
    report = read(tmp_path, "[rank3]: loading batch 7\n" + text)
    assert "look at [3], which left no traceback" in " ".join(report.text().split())
    assert report.silent[0].last == "loading batch 7"


def test_the_summary_of_torchrun(tmp_path: Path) -> None:
    report = read(tmp_path, prefixed("[rank0]: ", CLOSED.format(port=1)) + SUMMARY)
    assert [(one["rank"], one["exitcode"], one["first"]) for one in report.failures] == [(0, -15, False), (3, -9, True)]
    assert report.ranks == (0, 3)
    text = " ".join(report.text().split())
    assert "no traceback: [3], exit code -9 (SIGKILL: the OOM killer, or kill -9)" in text
    assert "torchrun saw first: rank 3 on n1, exit code -9" in text
    assert not any("ChildFailedError" in one.exception for one in report.tracebacks)
    assert not any("exitcode" in one.text for one in report.folded)


SUMMARY = """\
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-28_09:55:38
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 20690)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 20690
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_09:55:38
  host      : n1
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 20692)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 20692
============================================================
"""


def test_the_watchdog_of_nccl_tells_who_did_not_come(tmp_path: Path) -> None:
    head = "[rank{rank}]:[E321 02:07:08.4{rank} ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    what = "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600004 milliseconds"
    lines = [head.format(rank=rank) + what for rank in (0, 1, 3)]
    report = read(tmp_path, "[rank2]: saving\n" + "\n".join(lines) + "\n")
    assert report.timeouts == ({"op": "ALLREDUCE", "seq": 1580, "ranks": (0, 1, 3), "missing": (2,)},)
    assert "ALLREDUCE number 1580 timed out on [0-1,3]; not on [2]" in " ".join(report.text().split())


def test_what_nccl_had_enqueued_is_compared_within_a_group(tmp_path: Path) -> None:
    line = "[rank{0}]:[E321 02:07:08.4 x.cpp:1664] [PG ID {1} PG GUID 1 Rank {0}] last enqueued work: {2}, "
    line += "last completed work: 1\n"
    pairs = [(0, 1, 90), (1, 1, 90), (2, 1, 88), (0, 2, 7), (1, 2, 7)]
    report = read(tmp_path, "".join(line.format(*pair) for pair in pairs))
    assert report.notes == ("NCCL work of group 1: [2] had enqueued 88, others up to 90",)


def test_a_rank_that_is_named_within_a_line(tmp_path: Path) -> None:
    text = "Epoch 0: 6%[E ProcessGroupNCCL.cpp:458] [Rank {}] Watchdog caught collective operation timeout: "
    text += "WorkNCCL(SeqNum=7, OpType=ALLGATHER)\n"
    report = read(tmp_path, text.format(0) + text.format(5))
    assert [late["ranks"] for late in report.timeouts] == [(0, 5)]


def test_messages_of_interleaved_tracebacks_go_on(tmp_path: Path) -> None:
    lines = [
        *BAD_SHAPE.splitlines()[:-1],
        "RuntimeError: NCCL error",
        "ncclSystemError: System call failed",
        "Last error:",
        "refused",
    ]
    mixed = [
        lines[0],
        *(line for line in lines[1:4] for _ in range(1)),
        lines[0],
        *lines[1:4],
        lines[4],
        lines[4],
        *lines[5:],
        *lines[5:],
    ]
    report = read(tmp_path, "\n".join(mixed) + "\n")
    assert [(one.text, one.times) for one in report.tracebacks] == [("\n".join(lines), 2)]


def test_two_lines_in_one_are_told_and_parted(tmp_path: Path) -> None:
    report = read(tmp_path, "[rank0]: ok\n[rank1]: half[rank0]: whole\n[rank1]: ok\n")
    assert report.broken == 1
    assert shown(report) == ["[0-1] ok", "[1] half", "[0] whole"]
    report = read(tmp_path, "step 0 loss 64.0step 0 loss 64.0\n\n")
    assert report.broken == 1


def test_a_traceback_behind_a_progress_bar(tmp_path: Path) -> None:
    report = read(
        tmp_path, "  0%|  | 0/800 [00:00<?]Traceback (most recent call last):\n" + BAD_SHAPE.partition("\n")[2] + "\n"
    )
    assert report.tracebacks[0].text == BAD_SHAPE
    assert report.broken == 1


def test_colours_progress_bars_stray_bytes_and_nuls(tmp_path: Path) -> None:
    data = (
        b"\x1b[31m[rank0]: \x1b[0mred\x1b[K\r\n[rank1]: 10%\r[rank1]: 90%\n\0\0\0[rank0]: caf\xe9\n[rank1]: caf\xe9\n"
    )
    report = read(tmp_path, data)
    assert shown(report) == ["[0] red", "[1] 90%", "[0-1] caf\ufffd"]


def test_very_long_lines(tmp_path: Path) -> None:
    long = b"x" * 1_000_000
    report = read(tmp_path, b"[rank0]: " + long + b"\n[rank1]: " + long + b"\n[rank2]: " + long[:-1] + b"y\n")
    assert [one.ranks for one in report.folded] == [(0, 1), (2,)]
    assert all(len(one.text) < 5000 and "(1000000 bytes" in one.text for one in report.folded)
    report = read(tmp_path, b"[rank0]: " + b"y" * 9_000_000 + b"\n[rank0]: after\n")
    assert shown(report)[-1] == "[0] after"
    assert "is cut" in report.notes[0]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
def test_compressed_logs(tmp_path: Path, pack: object) -> None:
    report = read(tmp_path, pack(prefixed("[rank4]: ", BAD_SHAPE).encode()))  # type: ignore[operator]
    assert report.tracebacks[0].ranks == (4,)


def test_a_compressed_log_that_breaks_off(tmp_path: Path) -> None:
    data = gzip.compress(b"".join(b"[rank0]: line %d\n" % (number * 7919 % 100003) for number in range(200_000)))
    report = read(tmp_path, data[: len(data) // 2])
    assert report.lines > 1000
    assert "ends early" in report.notes[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MldebugError, match="no such file"):
        logs(tmp_path / "none.log")
    with pytest.raises(MldebugError, match="no logs in the folder"):
        logs(tmp_path)
    with pytest.raises(MldebugError, match="looks binary"):
        read(tmp_path, b"\x7fELF" + bytes(range(256)) * 50)
    with pytest.raises(UsageError, match="no log"):
        logs([])


def test_a_binary_file_among_others_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[rank0]: x\n")
    (tmp_path / "b.log").write_bytes(os.urandom(5000))
    report = logs([tmp_path / "a.log", tmp_path / "b.log"])
    assert shown(report) == ["[0] x"]
    assert "looks binary" in report.notes[0]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_logs(tmp_path: Path, text: str) -> None:
    report = read(tmp_path, text)
    assert report.ok
    assert report.folded == ()
    assert report.text().startswith("no traceback\n")


def test_a_growing_file_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    assert shown(read(tmp_path, "[rank0]: one\n[rank0]: tw")) == ["[0] one", "[0] tw"]


def test_ranks_grep_and_lines(tmp_path: Path) -> None:
    text = "".join(f"[rank{rank}]: step {step} loss {rank}\n" for step in range(50) for rank in range(4))
    text += prefixed("[rank1]: ", BAD_SHAPE)
    report = read(tmp_path, text, ranks=[2, 3], lines=3)
    assert report.ranks == (2, 3)
    assert report.tracebacks == ()
    assert shown(report) == ["[3] step 48 loss 3", "[2] step 49 loss 2", "[3] step 49 loss 3"]
    seen: list[str] = []
    read(tmp_path, text, grep=r"step 7 ", on_line=lambda line: seen.append(line.text))
    assert seen == [f"step 7 loss {rank}" for rank in range(4)]
    with pytest.raises(UsageError, match="--grep"):
        read(tmp_path, text, grep="(")


def test_split(tmp_path: Path) -> None:
    text = "preamble\n[default0]:a\n[default1]:b\n[default1]:[rank5]: c\n[default0]:d\n"
    folder = tmp_path / "by-rank"
    report = read(tmp_path, text, split=folder)
    assert report.split_files == len(list(folder.iterdir()))
    assert (folder / "rank-5.log").read_text() == "b\nc\n"
    assert (folder / "no-rank.log").read_text() == "preamble\n"
    with pytest.raises(UsageError, match="not empty"):
        read(tmp_path, text, split=folder)


def test_ctrl_c_gives_what_was_read_until_then(tmp_path: Path) -> None:
    def stop(size: int) -> None:
        raise KeyboardInterrupt

    text = prefixed("[rank1]: ", BAD_SHAPE) + "[rank0]: a line of a long log that goes on and on\n" * 800_000
    report = read(tmp_path, text, on_progress=stop)
    assert report.interrupted
    assert report.lines < 500_000
    assert report.tracebacks[0].ranks == (1,)


def test_many_kinds_and_messages_stay_bounded(tmp_path: Path) -> None:
    text = "".join(
        prefixed("[rank0]: ", TRACEBACK.format(argument="x", exception=f"ValueError: {number}"))
        for number in range(300)
    )
    report = read(tmp_path, text)
    assert len(report.tracebacks) == 1
    assert len(report.tracebacks[0].messages) + report.tracebacks[0].more_messages == 300
    assert len(report.text().splitlines()) < 80


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 4, 5, 6, *range(8, 64)], "0-6,8-63"), ([5, 1, 2], "1-2,5"), ([1, 3], "1,3")],
)
def test_rank_sets(numbers: list[int], text: str) -> None:
    assert rank_set(numbers) == text
