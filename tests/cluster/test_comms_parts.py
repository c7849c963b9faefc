"""The parts of comms() that need no ranks: sizes, patterns, what NCCL says, judging, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mldebug.cluster.collectives import _launch
from mldebug.cluster.collectives._data import Moved, Reduced, count_wrong, fill, timed_period
from mldebug.cluster.collectives._judge import slow_ranks
from mldebug.cluster.collectives._launch import read_report
from mldebug.cluster.collectives._nccl_log import NcclLog, chosen, routes
from mldebug.cluster.collectives._options import Options, check_options
from mldebug.cluster.collectives._report import judged
from mldebug.cluster.collectives._run import figures, new_evidence
from mldebug.cluster.collectives._save import Saver, csv_of, load
from mldebug.cluster.collectives._table import ALL_DTYPES, COLLECTIVES, dtype_name, sizes_of
from mldebug.cluster.dist._where import Where
from mldebug.core.errors import MldebugError, UsageError


@pytest.mark.parametrize("name, factor", [("all_reduce", 1.75), ("all_gather", 0.875), ("broadcast", 1.0)])
def test_busbw_is_that_of_nccl_tests(name: str, factor: float) -> None:
    cell = figures(COLLECTIVES[name], 10**9, [0.01] * 8)
    assert cell["algbw"] == pytest.approx(100)
    assert cell["busbw"] == pytest.approx(100 * factor)


def test_parts_are_multiples_of_16_bytes() -> None:
    assert COLLECTIVES["all_gather"].counts(1000, 4, 3) == (80, 240)
    assert COLLECTIVES["reduce_scatter"].counts(1000, 2, 3) == (480, 160)
    assert COLLECTIVES["all_reduce"].counts(1001, 4, 3) == (250, 250)


def test_sizes() -> None:
    assert sizes_of(32, 256, 2.0, 0) == [32, 64, 128, 256]
    assert sizes_of(100, 350, 2.0, 100) == [100, 200, 300]
    assert sizes_of(8, 8, 2.0, 0) == [8]


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", [*ALL_DTYPES, "float8_e4m3fn", "float8_e5m2"])
def test_reductions_are_exact_at_any_world_size(dtype: str, op: str) -> None:
    kind = getattr(torch, dtype)
    reduce = {"sum": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op]
    for world in (2, 7):
        made = Reduced(3, world, op, kind, "cpu")
        wanted, share = made.result()
        parts = torch.stack([made.of(rank) for rank in range(world)])
        assert share == 0
        assert torch.equal(reduce(parts.double(), 0), wanted.double())
        assert float(wanted.double().max()) == 5


def test_large_worlds_stay_small() -> None:
    made = Reduced(0, 4096, "sum", torch.bfloat16, "cpu")
    assert sum(float(made.of(rank).float().max()) for rank in (0, 1, 4095)) <= 15


@pytest.mark.parametrize("world", [2, 3, 8])
def test_what_is_timed_never_overflows(world: int) -> None:
    total = sum(timed_period(rank, world, torch.float32, "cpu") for rank in range(world))
    assert float(total.abs().max()) == 0  # type: ignore[union-attr]
    assert float(timed_period(0, world, torch.float16, "cpu").abs().max()) <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_senders_and_places_are_told_apart(dtype: str) -> None:
    made = Moved(1, getattr(torch, dtype), "cpu")
    buffer = torch.empty(700_001, dtype=getattr(torch, dtype))
    fill(buffer, made.of(3), start=11)
    assert count_wrong(buffer, made.of(3), start=11) == 0
    assert count_wrong(buffer, made.of(4), start=11) > 600_000
    assert count_wrong(buffer, made.of(3), start=12) > 600_000
    moved = torch.cat([buffer[1 << 18 :], buffer[: 1 << 18]])  # a piece of a power of two at another place
    assert count_wrong(moved, made.of(3), start=11) > 300_000
    buffer[5] = buffer[6]
    assert count_wrong(buffer, made.of(3), start=11) == 1


def test_what_nccl_chose_is_read() -> None:
    log = (
        "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "n:1:1 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 9[1] [send] via NET/IB/3/GDRDMA\n"
        "n:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct\n"
        "n:1:1 [0] NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}\n"
        "n:1:1 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..23}\n"
    )
    assert chosen(log) == {"algo": "RING", "proto": "LL128", "channels": 24}
    assert chosen("NCCL INFO 1048576 Bytes -> Algo 1 proto 2 time 12.3") == {"algo": "RING", "proto": "SIMPLE"}
    assert chosen(log, "all_gather") == {} and chosen(log, "sendrecv") == {}
    assert chosen("AllReduce [Symmetric]: 64 Bytes -> Kernel LL_AG nchannels 4") == {"kernel": "LL_AG"}
    assert chosen("nothing of it") == {}
    assert routes(log, 0) == {"P2P/CUMEM": ["1"], "NET/IB": ["9"]}


def test_the_log_is_in_memory_and_the_users_own_is_left_alone(tmp_path: Path) -> None:
    env: dict[str, str] = {}
    log = NcclLog(env)
    Path(env["NCCL_DEBUG_FILE"]).write_text("one\n")
    assert log.new_text() == "one\n" and log.new_text() == ""
    own = {"NCCL_DEBUG": "WARN"}
    assert NcclLog(own).new_text() == "" and own == {"NCCL_DEBUG": "WARN"}


def ranks(**values: list[float]) -> list[dict[str, Any]]:
    count = len(next(iter(values.values())))
    return [
        {"rank": rank, "host": "n1", **{name: those[rank] for name, those in values.items()}} for rank in range(count)
    ]


@pytest.mark.parametrize(
    "values, found",
    [
        ({"launch_us": [20, 22, 21, 19, 400, 20, 23, 21]}, [4]),
        ({"copy_gbps": [2300, 2310, 1500, 2290]}, [2]),
        ({"launch_us": [20, 24, 21, 19], "copy_gbps": [2300, 2310, 2200, 2290]}, []),
        ({"launch_us": [20, 31]}, []),
        ({"launch_us": [20, 500]}, [1]),
        ({"copy_gbps": [2300, 0.0]}, [1]),
    ],
    ids=["launch", "memory", "healthy", "two healthy", "two", "no memory at all"],
)
def test_a_slow_rank_is_named(values: dict[str, list[float]], found: list[int]) -> None:
    assert [bad["rank"] for bad in slow_ranks(ranks(**values))] == found


def evidence(busbw: float = 300.0, wrong: int = 0, **more: Any) -> dict[str, Any]:
    cell = {
        "us": 10.0, "algbw": busbw, "busbw": busbw, "min_us": 9.0, "max_us": 11.0, "by_rank": [9.0, 11.0],
        "mode": "queued", "calls": "torch", "iters": 20, "launches": 1, "wrong": wrong,
    }  # fmt: skip
    row = {
        "collective": "all_reduce", "dtype": "float32", "op": "sum", "root": -1, "bytes": 17179869184, "count": 1,
        "chosen": {"algo": "RING", "proto": "SIMPLE"}, "in_place": cell,
    }  # fmt: skip
    told = new_evidence(Options())
    told.update(world=8, hosts=["n1"], gpu="NVIDIA H200", backend="nccl", ended="finished", rows=[row])
    return {**told, **more}


def test_the_report_says_what_matters() -> None:
    report = judged(evidence(busbw=240.0))
    text = report.text()
    assert report.ok and max(map(len, text.splitlines())) <= 80
    assert text.startswith("comms: all_reduce 240 GBps busbw at 16 GiB")
    assert "# Out of bounds values : 0 OK" in text and "RING/SIMPLE 16 GiB" in text
    assert "expected: all_reduce 482.3 GBps" in text and "here 50%" in text and "hint: `mldebug pairs`" in text
    assert "  float32     sum      -1" in report.text(width=118)


def test_gates() -> None:
    assert "FAILED" in judged(evidence(wrong=7)).text() and not judged(evidence(wrong=7)).ok
    asked = {"min_busbw": 400.0}
    assert not judged(evidence(asked=asked)).ok and judged(evidence(busbw=401.0, asked=asked)).ok
    assert not judged(evidence(ended="hang", why="rank 1 hangs")).ok
    assert not judged(evidence(rows=[])).ok


def test_a_file_is_whole_after_each_row(tmp_path: Path) -> None:
    told = evidence()
    for name in ("a.json", "a.jsonl"):
        path = tmp_path / name
        with Saver(str(path)) as saver:
            saver.row(told)
            assert load(str(path))["rows"] == told["rows"]
            saver.end(judged(told))
        assert judged(load(str(path))).ok
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().splitlines()[0] + '\n{"row": {"coll')
    assert load(str(path))["ended"] == "killed" and len(load(str(path))["rows"]) == 1
    assert (
        csv_of(told)
        .splitlines()[1]
        .startswith("all_reduce,float32,sum,-1,17179869184,1,in_place,queued,torch,20,10,300")
    )


@pytest.mark.parametrize("name", ["a.md", "a.png", "a.csv"])
def test_other_files(tmp_path: Path, name: str) -> None:
    with Saver(str(tmp_path / name)) as saver:
        saver.end(judged(evidence()))
    assert (tmp_path / name).stat().st_size > 100


def test_files_that_cannot_be_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kind of file"):
        Saver("a.xlsx")
    with pytest.raises(MldebugError, match="cannot write"), Saver(str(tmp_path / "no" / "a.jsonl")):
        pass
    with pytest.raises(MldebugError, match="no such file"), Saver(str(tmp_path / "no" / "a.png")):
        pass
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UsageError, match="not what"):
        load(str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "options",
    [
        {"collectives": ("all_reduced",)}, {"dtypes": ("float33",)}, {"op": "xor"}, {"mode": "fast"}, {"nproc": 0},
        {"first": 4}, {"first": 64, "last": 32}, {"factor": 1.0}, {"iters": -1}, {"timeout": 0.0},
    ],
    ids=lambda options: next(iter(options)) + str(len(options)),
)  # fmt: skip
def test_what_cannot_be_measured_is_wrong_usage(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check_options(Options(**options))


def test_spellings_of_dtypes() -> None:
    assert [dtype_name(name) for name in ("float", "half", "bf16", "fp8")] == [
        "float32", "float16", "bfloat16", "float8_e4m3fn",
    ]  # fmt: skip
    json.dumps(judged(evidence()).to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "path, value",
    [
        (("rows", 0, "in_place", "us"), None),
        (("rows", 0, "in_place", "mode"), -1),
        (("rows", 0, "op"), []),
        (("rows", 0, "root"), "x"),
        (("rows", 0), 7),
        (("rows", 0, "chosen"), 1e300),
        (("rows", 0, "in_place", "wrong"), {}),
        (("ranks",), [{"rank": 0, "copy_gbps": {}}, {"rank": 1, "copy_gbps": 1}]),
        (("stability",), 3.0),
        (("world",), None),
        (("asked",), []),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_damaged_file_is_said_to_be_one(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    told = json.loads(json.dumps(evidence()))
    (tmp_path / "good.json").write_text(json.dumps(told))
    assert read_report(str(tmp_path / "good.json")).best() == 300.0
    at = told
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(told))
    with pytest.raises(UsageError, match=r"is damaged|is not what"):
        read_report(str(tmp_path / "bad.json"))


def test_lines_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    row = evidence()["rows"][0]
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"row": row}) + '\n{"row": {"collective": "all_reduce", "chosen": {}')
    report = read_report(str(path))
    assert report.rows == [row] and not report.ok and "ended early (killed): the file has no end" in report.text()
    path.write_text("[]\n")
    with pytest.raises(UsageError, match="is not what"):
        read_report(str(path))


def test_cpu_ranks_that_share_one_memory_are_not_blamed_for_it() -> None:
    slow = ranks(copy_gbps=[3, 20, 21, 20], launch_us=[90, 91, 92, 93])
    assert not judged(evidence(backend="gloo", ranks=slow)).slow
    assert [bad["rank"] for bad in judged(evidence(ranks=slow)).slow] == [0]


def test_rank_0_where_mpirun_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    source = "the host of mpirun; if rank 0 is on another: -x MASTER_ADDR=HOST"
    monkeypatch.setattr(_launch, "find", lambda *_: Where(("192.0.2.7",), source, (29700,)))
    with pytest.raises(MldebugError, match="mpirun on another host") as told:
        _launch.launch(Options())
    assert "-x MASTER_ADDR=" in told.value.hint


def test_a_size_that_no_memory_holds() -> None:
    with pytest.raises(UsageError, match="above 16 TiB"):
        check_options(Options(last=1 << 45))
