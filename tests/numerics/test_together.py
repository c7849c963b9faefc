"""Real ranks under torchrun: they stop together at an event, drop the same batch, and run sharded forwards again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
FORKED = TESTS / "forked.py"
PROGRAM = TESTS / "programs" / "sharded_event.py"
DEADLINE = 300  # seconds for a whole job, on a slow machine


def event_line(folder: Path, rank: int) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / f"lines.rank{rank}.jsonl").read_text().splitlines()]
    return next(row for row in rows if row["kind"] == "event")


# All that is tried with two and with four ranks: the cases of one job run one after the other, the last one ends it.
JOBS = {
    2: ["ddp", "fsdp", "tp", "fsdp-gone", "fsdp-flip", "fsdp-skip", "healthy:off", "healthy:raise", "masked:skip"],
    4: ["fsdp", "tp"],
}
LAST = {2: "reduce:raise", 4: "train:raise"}


class Job:
    """What a job of some ranks came to."""

    def __init__(self, run_torch: Callable[..., Any], ranks: int, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        for case in (*JOBS[ranks], LAST[ranks]):
            if ":" in case:
                (folder / case.replace(":", "-")).mkdir()
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        done = run_torch(FORKED, *launch, PROGRAM, folder, *JOBS[ranks], LAST[ranks], timeout=DEADLINE)
        self.status, self.out = done.returncode, done.stdout + done.stderr

    def told(self, case: str) -> list[dict[str, Any]]:
        """What each rank wrote of a case, in the order of the ranks."""
        files = sorted(
            self.folder.glob(f"{case.replace(':', '-')}/rank*.json" if ":" in case else f"{case}.rank*.json")
        )
        assert len(files) == self.ranks, self.out
        return [json.loads(path.read_text()) for path in files]


@pytest.fixture(scope="module")
def two(run_torch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(run_torch, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(run_torch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(run_torch, 4, tmp_path_factory.mktemp("four"))


def test_four_ranks_stop_for_nan_on_the_third(four: Job) -> None:
    told = four.told("train:raise")
    assert four.status == 1 and [one["rank"] for one in told] == [0, 1, 2, 3], four.out
    event = told[2]["event"]
    for one in told:
        report = one["raised"]
        assert one["end"] - event < 10, f"rank {one['rank']} took {one['end'] - event:.1f} s\n{four.out}"
        assert (report["first_rank"], report["event"]["rank"], report["event"]["step"]) == (2, 2, 3)
        assert report["rank"] == one["rank"] and not report["ok"]
        assert ", rank 2" in report["verdict"] and "ank 2" in one["text"].split("\n\n")[1]
        assert [row["rank"] for row in report["ranks"]] == [2]
        assert len(one["losses"]) == 3, "they stopped before the optimizer of that step"
    assert len({one["weights"][0] for one in told}) == 1
    assert told[2]["raised"]["event"]["again"] == "shown" and "nothing bad was seen on rank 0" in told[0]["text"]


def test_a_rank_inside_a_collective_writes_its_report_and_ends(two: Job) -> None:
    folder = two.folder / "reduce-raise"
    event = json.loads((folder / "rank1.json").read_text())["event"]
    assert two.status == 1 and not (folder / "rank0.json").exists(), "it did not come out of the collective"
    report = event_line(folder, 0)
    assert (report["first_rank"], report["rank"]) == (1, 0)
    assert "rank 0 ends here: 5 s after rank 1 saw the event" in two.out
    assert "all_reduce at stop_together.py:" in two.out and "exit status 1" in two.out
    assert (folder / "lines.rank0.jsonl").stat().st_mtime - event > 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_operation_in_ddp_fsdp_and_tensor_parallel(ranks: int, request: pytest.FixtureRequest) -> None:
    job: Job = request.getfixturevalue("two" if ranks == 2 else "four")
    for kind in ("ddp", "fsdp", "tp") if ranks == 2 else ("fsdp", "tp"):
        for rank, report in enumerate(job.told(kind)):
            event = report["event"]
            assert (event["op"], event["again"], event["step"]) == ("aten.div.Tensor", "shown", 2), (kind, rank)
            assert event["operation"]["cause"] == "zero over zero" and "x / x.sum" in event["operation"]["code"]
            assert event["module"].rpartition(".")[2] == "share" and event["phase"] == "forward"
            assert (report["first_rank"] == 1 or kind == "tp") and event["rank"] == (rank if kind == "tp" else 1)
            assert report["caught"], "the same job went on with the next model"


@pytest.mark.parametrize(
    ("kind", "why"), [("fsdp-gone", "on one rank input[0] was changed in place"), ("fsdp-skip", "sharded (DTensor)")]
)
def test_what_is_not_replayable_never_becomes_did_not_reproduce(two: Job, kind: str, why: str) -> None:
    for rank, report in enumerate(two.told(kind)):
        assert (report["event"]["op"], report["event"]["again"]) == (None, "not replayable")
        assert rank == 0 or (why in report["not_replayed"] and "not replayable" in " ".join(report["text"].split()))


def test_a_bit_that_flips_once_in_a_sharded_model(two: Job) -> None:
    for report in two.told("fsdp-flip"):
        assert report["event"]["again"] == "did not reproduce" and report["event"]["op"] is None
        assert "another device" in report["hint"] and report["first_rank"] == 1


def test_all_ranks_drop_the_same_batch(two: Job) -> None:
    assert [report["dropped_steps"] for report in two.told("fsdp-skip")] == [[2], [2]]


def test_losses_are_the_same_and_nothing_is_left(two: Job) -> None:
    for off, on in zip(two.told("healthy:off"), two.told("healthy:raise"), strict=True):
        for key in ("losses", "weights", "buffers"):
            assert off[key] == on[key], key
        assert on["threads"] == off["threads"] and not any("mldebug" in name for name in on["threads"])
        assert on["report"]["first_rank"] is None and on["report"]["ok"]


def test_a_batch_that_only_one_rank_knows_to_be_bad_is_dropped_by_all(two: Job) -> None:
    told = two.told("masked:skip")
    assert [one["report"]["dropped_steps"] for one in told] == [[3]] * 2
    assert len({str(one["weights"]) for one in told}) == 1
    assert all(one["report"]["first_rank"] == 1 for one in told)
