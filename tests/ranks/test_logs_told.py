"""What the first line of `mldebug logs` says: which rank, what, why; in logs as launchers really leave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldebug.ranks import LogsReport, logs
from mldebug.ranks._logs_ends import Ends
from mldebug.ranks._logs_prefix import Who
from mldebug.ranks._logs_source import Sources

TRACEBACK = """\
Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
    main()
{exception}"""
OOM = TRACEBACK.format(exception="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has")
CLOSED = TRACEBACK.format(exception="RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4000")
WATCHDOG = "[E1128 10:00:00.123 ProcessGroupNCCL.cpp:629] [Rank {}] Watchdog caught collective operation timeout: "
WATCHDOG += "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds\n"
SUMMARY = """\
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_09:55:38
  host      : n1
  rank      : 5 (local_rank: 5)
  exitcode  : -9 (pid: 20692)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 20692
============================================================
"""


def read(tmp_path: Path, text: str) -> LogsReport:
    (tmp_path / "job.log").write_text(text)
    return logs(tmp_path / "job.log")


def head(report: LogsReport) -> str:
    """The first words, up to what was read."""
    return " ".join(report.text().split()).partition(" lines, ")[0].rpartition(",")[0]


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def steps(prefix: str, ranks: int) -> str:
    return "".join(f"{prefix.format(rank)}step {step} loss 2.5\n" for step in range(9) for rank in range(ranks))


def test_out_of_memory_on_one_rank_and_the_watchdog_on_the_others(tmp_path: Path) -> None:
    """torch writes `[rank3]: ` before its tracebacks, and `[rank0]:[E1128` before the lines of C++."""
    watchdogs = "".join(f"[rank{rank}]:" + WATCHDOG.format(rank) for rank in (0, 1, 2, 4))
    report = read(tmp_path, "step 1\n" + prefixed("[rank3]: ", OOM) + watchdogs)
    assert [(one.ranks, one.text, one.whole) for one in report.tracebacks] == [((3,), OOM, True)]
    assert report.ranks == (0, 1, 2, 3, 4)
    assert report.timeouts[0]["missing"] == (3,)
    assert "[3]: torch.OutOfMemoryError: CUDA out of memory" in head(report)


def test_tracebacks_of_torch_under_srun(tmp_path: Path) -> None:
    """One process a task: `9: ` and `[rank9]:` say the same."""
    text = steps("{:>2}: ", 12)
    for rank in (*range(9), 10, 11):
        text += prefixed(f"{rank:>2}: [rank{rank}]: ", CLOSED)
    text += "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\n"
    text += "srun: error: node0: tasks 0-7: Terminated\nsrun: error: node1: task 9: Out Of Memory\n"
    report = read(tmp_path, text)
    assert report.ranks == tuple(range(12))
    assert report.folded[0].ranks == tuple(range(12))
    assert "look at [9], which left no traceback (Out Of Memory, says srun)" in head(report)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (steps("[default{}]:", 8) + SUMMARY,
         "no traceback; torchrun saw first: rank 5 on n1, exit code -9 (SIGKILL: the OOM killer, or kill -9)"),
        (steps("{}: ", 4) + "2: no such file: /data\nsrun: error: n1: tasks 0-1,3: Terminated\n"
         "srun: error: n1: task 2: Exited with exit code 1\n",
         "no traceback; srun saw first: rank 2 on n1, Exited with exit code 1"),
        (steps("{}: ", 4) + "srun: error: n1: task 2: Segmentation fault (core dumped)\n",
         "no traceback; srun saw first: rank 2 on n1, Segmentation fault (core dumped)"),
        ("step 1\nsrun: error: n1: task 2: Segmentation fault\n", "no traceback; srun: n1: task 2: Segmentation fault"),
        (steps("{}: ", 4) + "3: Fatal Python error: Bus error\n", "no traceback; Fatal Python error: Bus error: [3]"),
        ("step 1\nslurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-28T10:00:00 DUE TO TIME LIMIT ***\n",
         "no traceback; SLURM cancelled the job DUE TO TIME LIMIT"),
        ("step 1\nKilled\n", "no traceback; killed (SIGKILL: the OOM killer, or kill -9)"),
        ("a\n/job/slurm_script: line 12: 4711 Killed                  python train.py\n",
         "no traceback; killed (SIGKILL: the OOM killer, or kill -9)"),
        ("[2026-11-28 10:00:10,001] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py', '--local_rank=3'] "
         "exits with return code = -9\n",
         "no traceback; DeepSpeed: local rank 3 exits with return code -9 (SIGKILL: the OOM killer, or kill -9)"),
        ("".join(f"[rank{rank}]:" + WATCHDOG.format(rank) for rank in (0, 1, 3)) + "[rank2]: saving\n",
         "no traceback; NCCL's watchdog: ALLREDUCE number 1580 timed out on [0-1,3]; not on [2]"),
    ],
    ids=["torchrun", "srun", "srun-segv", "srun-no-ranks", "fatal", "slurm", "killed", "bash", "deepspeed", "nccl"],
)  # fmt: skip
def test_an_end_without_a_traceback(tmp_path: Path, text: str, said: str) -> None:
    report = read(tmp_path, text)
    assert head(report).startswith(said)
    assert not report.ok


def test_the_rank_that_srun_names_has_its_last_line_shown(tmp_path: Path) -> None:
    text = steps("{}: ", 4) + "2: no such file: /data\nsrun: error: n1: task 2: Exited with exit code 1\n"
    said = " ".join(read(tmp_path, text).text().split())
    assert "no traceback: [2], Exited with exit code 1; last line: no such file: /data" in said


def test_with_torchrun_under_srun_a_task_is_a_node(tmp_path: Path) -> None:
    text = "".join(f"{rank // 4}: [default{rank % 4}]:step {step}\n" for step in range(9) for rank in range(8))
    report = read(tmp_path, text + "srun: error: n1: task 1: Exited with exit code 1\n")
    assert head(report).startswith("no traceback; srun: n1: task 1: Exited with exit code 1")


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{number}: item {number * 7}\n" for number in range(200)),
        "".join(f"[{number}] loading shard-{number}.bin\n" for number in range(200)),
        "".join(f"{number}: train 2.5\n{number}: valid 2.7\n" for number in range(50)),
    ],
    ids=["0:", "[0]", "twice"],
)
def test_lines_with_a_number_are_no_ranks(tmp_path: Path, text: str) -> None:
    report = read(tmp_path, text)
    assert (report.ranks, report.prefixes) == ((), ())


def test_a_sorted_log_of_ranks_has_ranks(tmp_path: Path) -> None:
    text = "".join(f"{rank}: step {step}\n" for rank in range(4) for step in range(20))
    assert read(tmp_path, text).ranks == (0, 1, 2, 3)


def test_a_ruler_is_not_interleaved(tmp_path: Path) -> None:
    assert read(tmp_path, f"a\n{'-' * 80}\n{'=-' * 40}\nb\n").broken == 0


def test_workers_of_ray_are_told_apart(tmp_path: Path) -> None:
    """They all have one name."""
    workers = [f"(RayTrainWorker pid={4711 + number}, ip=10.0.0.{number}) " for number in range(8)]
    text = "".join(f"{worker}step {step}\n" for step in range(9) for worker in workers)
    report = read(tmp_path, text + prefixed(workers[2], OOM))
    assert "RayTrainWorker pid=4713, ip=10.0.0.2: torch.OutOfMemoryError" in head(report)
    assert report.folded[0].who == (
        "RayTrainWorker pid=4711, ip=10.0.0.0 RayTrainWorker pid=4712, ip=10.0.0.1 "
        "RayTrainWorker pid=4713, ip=10.0.0.2 and 5 more"
    )


def test_pods_that_say_the_same_are_told_by_their_numbers(tmp_path: Path) -> None:
    text = "".join(f"[pod/job-worker-{n}/main] step {step}\n" for step in range(9) for n in range(64) if n != 7)
    assert read(tmp_path, text).folded[0].who == "job-worker-[0-6,8-63]"


RICH = """\
╭──────────── Traceback (most recent call last) ────────────╮
│ /app/train.py:13 in <module>                              │
│                                                           │
│ ❱ 13 main()                                               │
│ /app/train.py:8 in main                                   │
│ ❱  8 raise ValueError("bad shard 7")                      │
╰───────────────────────────────────────────────────────────╯
{}: bad shard 7
"""


@pytest.mark.parametrize("prefix", ["[default{}]:", "{}: ", "[rank{}]: "])
def test_tracebacks_that_rich_has_drawn(tmp_path: Path, prefix: str) -> None:
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    text = RICH.format("IndexError") + chain + RICH.format("ValueError")
    text = "".join(prefixed(prefix.format(rank), text) for rank in (1, 2))
    report = read(tmp_path, steps(prefix, 4) + text + steps(prefix, 4))
    assert [(one.ranks, one.exception, one.whole) for one in report.tracebacks] == [
        ((1, 2), "ValueError: bad shard 7", True)
    ]
    assert report.tracebacks[0].text.count("╰") == 2
    assert report.broken == 0


def test_a_traceback_of_rich_without_a_prefix(tmp_path: Path) -> None:
    report = read(tmp_path, "step 1\n" + RICH.format("ValueError") + "step 2\n" + RICH.format("KeyError"))
    assert [one.exception for one in report.tracebacks] == ["ValueError: bad shard 7", "KeyError: bad shard 7"]


def test_a_process_of_spawn_is_named(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn shows the traceback of its child below its own."""
    own = TRACEBACK.format(exception="torch.multiprocessing.spawn.ProcessRaisedException: ")
    below = "\n\n-- Process 1 terminated with the following error:\n"
    report = read(tmp_path, "step 1\n" + own + below + OOM + "\n\n")
    assert [(one.ranks, one.text) for one in report.tracebacks] == [((1,), OOM)]
    assert "[1]: torch.OutOfMemoryError" in head(report)


def test_a_script_that_cannot_be_parsed(tmp_path: Path) -> None:
    text = '  File "/app/train.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    report = read(tmp_path, prefixed("[rank0]: ", text) + prefixed("[rank1]: ", text))
    assert head(report).startswith("no traceback; SyntaxError: invalid syntax: [0-1]")


def test_the_first_is_the_one_that_began_first(tmp_path: Path) -> None:
    """A message that may go on is over only when something else comes."""
    first = TRACEBACK.format(exception="ValueError: a")
    report = read(tmp_path, first + "\n" + TRACEBACK.format(exception="KeyError: b").replace("9", "7") + "\nend\n" * 3)
    assert [one.exception for one in report.tracebacks] == ["ValueError: a", "KeyError: b"]


def test_a_traceback_that_its_ranks_survived_comes_after_the_one_they_died_of(tmp_path: Path) -> None:
    caught = "".join(prefixed(f"[rank{rank}]: ", TRACEBACK.format(exception="OSError: upload")) for rank in (0, 1))
    went_on = "".join(f"[rank{rank}]: step {step}\n" for step in range(60) for rank in (0, 1))
    report = read(tmp_path, steps("[rank{}]: ", 2) + caught + went_on + prefixed("[rank1]: ", OOM))
    assert [(one.exception[:9], one.survived) for one in report.tracebacks] == [
        ("torch.Out", False),
        ("OSError: ", True),
    ]
    assert "[1]: torch.OutOfMemoryError" in head(report)
    assert "2. [0-1], which went on after it" in report.text()


def test_a_traceback_is_not_survived_where_the_other_ranks_went_on(tmp_path: Path) -> None:
    died = prefixed("[rank0]: ", TRACEBACK.format(exception="OSError: disk"))
    went_on = "".join(f"[rank1]: step {step}\n" for step in range(60))
    report = read(tmp_path, steps("[rank{}]: ", 2) + died + went_on + prefixed("[rank1]: ", OOM))
    assert [(one.exception[:9], one.survived) for one in report.tracebacks] == [
        ("OSError: ", False),
        ("torch.Out", False),
    ]


STOOD = """\
Traceback (most recent call last):
  File "/app/train.py", line 40, in <module>
    main()
  File "/app/train.py", line {}, in {}
    call()
  File "/usr/lib/python3.11/site-packages/torch/utils.py", line 7, in wait
    sleep()
KeyboardInterrupt
"""
SIGNALLED = """\
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/usr/lib/python3.11/site-packages/torch/distributed/run.py", line 900, in main
    run(args)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: {}
"""


def test_a_job_that_was_interrupted_tells_where_its_ranks_stood(tmp_path: Path) -> None:
    ranks = [prefixed(f"[rank{r}]: ", STOOD.format(*((15, "load") if r == 2 else (28, "main")))) for r in range(4)]
    report = read(tmp_path, steps("[rank{}]: ", 4) + "".join(ranks) + SIGNALLED.format(2))
    places = "where the ranks stood then: [2] train.py:15 load, [0-1,3] train.py:28 main"
    assert head(report).startswith(f"interrupted from outside (KeyboardInterrupt); {places} ")
    said = report.text()
    assert '[2] stood at train.py:15 load:\n      File "/app/train.py", line 40, in <module>' in said
    assert "... 1 frame of libraries, the last at utils.py:7 wait" in said
    assert "consequence" not in said
    assert not report.ok


def test_one_plain_process_that_was_interrupted(tmp_path: Path) -> None:
    report = read(tmp_path, "step 1\n" + STOOD.format(15, "load"))
    assert head(report).startswith(
        "interrupted from outside (KeyboardInterrupt); where it stood then: train.py:15 load no ranks"
    )


def test_a_launcher_that_was_told_to_end(tmp_path: Path) -> None:
    report = read(tmp_path, steps("[default{}]:", 4) + SIGNALLED.format(15))
    assert head(report).startswith("interrupted from outside (SIGTERM) 4 ranks")
    assert "no traceback: [0-3]; last line: step 8 loss 2.5" in report.text()


def test_an_interrupt_beside_an_error_is_a_consequence(tmp_path: Path) -> None:
    report = read(tmp_path, prefixed("[rank0]: ", STOOD.format(15, "load")) + prefixed("[rank1]: ", OOM))
    assert "[1]: torch.OutOfMemoryError" in head(report)
    assert "consequence: [0] was interrupted: KeyboardInterrupt" in report.text()
    assert report.outside is None


def test_where_one_lost_a_connection_and_one_is_silent_the_silent_one_is_looked_at(tmp_path: Path) -> None:
    text = prefixed("[rank0]: ", STOOD.format(15, "load")) + prefixed("[rank1]: ", CLOSED)
    report = read(tmp_path, steps("[rank{}]: ", 3) + text)
    assert "look at [2], which left no traceback" in head(report)


RULE = "-" * 74
BAD = "=" * 83 + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
DETECTED = (
    "{} detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. "
)
DETECTED += "The first process to do so was:\n\n  Process name: {}\n  Exit code:    1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mpirun noticed that process rank 2 with PID 4711 on node n1 exited on signal 9 (Killed).\n",
         "mpirun saw first: rank 2 on n1, signal 9 (Killed)"),
        ("prterun noticed that process rank 2 with PID 4711 on node n1 exited on\nsignal 9 (Killed).\n",
         "prterun saw first: rank 2 on n1, signal 9 (Killed)"),
        (DETECTED.format("mpirun", "[[27391,1],1]"), "mpirun saw first: rank 1, exit code 1"),
        (DETECTED.format("prterun", "[prterun-n1-4711@1,1]"), "prterun saw first: rank 1, exit code 1"),
        (BAD + "=   RANK 2 PID 4711 RUNNING AT n1\n=   KILLED BY SIGNAL: 9 (Killed)\n",
         "MPICH saw first: rank 2 on n1, signal 9 (Killed)"),
        (BAD + "=   PID 4711 RUNNING AT n1\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n",
         "MPICH: a process (PID 4711) on n1, exit code 9"),
    ],
    ids=["mpirun", "prterun", "mpirun-code", "prterun-code", "hydra-rank", "hydra"],
)  # fmt: skip
@pytest.mark.parametrize("before", ["step 1\n", steps("[1,{}]<stdout>:", 4)], ids=["bare", "ranks"])
def test_an_end_that_mpi_tells(tmp_path: Path, text: str, said: str, before: str) -> None:
    report = read(tmp_path, f"{before}{RULE}\n{text}{RULE}\n")
    assert head(report).startswith(f"no traceback; {said}")
    assert not report.ok


def test_the_ranks_that_waited_for_the_one_that_went_first_are_a_consequence(tmp_path: Path) -> None:
    waited = "mldebug.core.errors.MldebugError: rank 0 (host n1, pid 4711) failed in the block that goes first "
    waited = TRACEBACK.format(exception=waited + "(train.py:9): OSError: disk").replace("9,", "7,")
    text = prefixed("[rank1]: ", waited) + prefixed("[rank0]: ", TRACEBACK.format(exception="OSError: disk"))
    report = read(tmp_path, text)
    assert "[0]: OSError: disk" in head(report)
    assert "consequence: [1] waited for a rank that went first" in report.text()


def test_a_rank_that_has_no_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(steps("[rank{}]: ", 4) + prefixed("[rank5]: ", OOM))
    assert logs(tmp_path / "job.log", ranks=[2, 5]).notes == ()
    report = logs(tmp_path / "job.log", ranks=[2, 8, 9])
    assert report.notes == ("no line is of rank 8-9; there are lines of [0-3,5]",)
    assert "no line is of rank 8-9" in report.text()


def test_ranks_asked_of_a_log_without_any(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\nstep 2\n")
    assert logs(tmp_path / "job.log", ranks=[9]).notes == (
        "no line is of rank 9; no line names its rank (see --prefix)",
    )


def test_an_expression_that_matches_no_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(steps("[rank{}]: ", 4))
    assert logs(tmp_path / "job.log", grep="nan").notes == ("no line matches 'nan'",)
    assert logs(tmp_path / "job.log", grep="loss", lines=0).notes == ()


def test_a_local_rank_that_is_asked_for_is_there(tmp_path: Path) -> None:
    text = "".join(f"n{node}: [default{rank}]:step {step}\n" for step in range(9) for node in (0, 1) for rank in (0, 1))
    (tmp_path / "job.log").write_text(text)
    assert logs(tmp_path / "job.log", ranks=[1]).notes == ()


def test_what_mpi_tells_may_come_in_two_pieces() -> None:
    """A log is read in pieces, and those with nothing remarkable are not looked at line by line."""
    ends, source = Ends(), Sources().of(Who(), "", None)
    lines = DETECTED.format("mpirun", "[[27391,1],1]").encode().splitlines()
    awaited = [(ends.look(line, source), ends.mpi.pending > 0)[1] for line in lines if line]
    assert awaited == [True, True, True, False]
    assert ends.failures[1].words == "exit code 1"


def test_the_rest_of_what_mpi_tells_is_not_awaited_for_ever() -> None:
    ends, source = Ends(), Sources().of(Who(), "", None)
    for line in [b"mpirun detected that one or more processes exited", *[b"step 1"] * 20]:
        ends.look(line, source)
    assert not ends.mpi.pending
