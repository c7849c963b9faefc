"""`mamf()` with real matrix products on the CPU, and what is left when something ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.perf import mamf
from mldebug.perf.matmul._gpus import judge, robust_z, run_many
from mldebug.perf.matmul._results import ResultFile, read_results
from mldebug.perf.matmul._run import Options

ROOT = Path(__file__).resolve().parents[2]
BROKEN = ROOT / "tests" / "perf" / "programs" / "mamf_broken.py"
FORKED = ROOT / "tests" / "forked.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Run = Callable[..., subprocess.CompletedProcess[str]]


def records(path: Path) -> list[dict[str, Any]]:
    """All lines of a result file; each of them must be whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_search_finds_a_shape_and_writes_every_block(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    said: list[str] = []
    began = time.monotonic()
    report = mamf("fp32", device="cpu", seconds=4, seed=3, output=path, progress=said.append)
    assert time.monotonic() - began < 12  # what is asked for, and a machine that others use
    assert report.ok and report.settled and report.ended == ""
    assert report.dtype == "float32" and report.mode == "search" and report.seed == 3
    assert report.sustained > 0 and report.burst and report.flushed
    assert report.tried >= 20
    start, *blocks, last = records(path)
    assert start["tool"] == "mamf" and start["torch"] == report.torch
    assert last["kind"] == "report" and last["sustained"] == pytest.approx(report.sustained)
    assert last["shape"] == list(report.shape)
    phases = [one["phase"] for one in blocks]
    assert [phase for number, phase in enumerate(phases) if phase not in phases[:number]] == sorted(
        set(phases), key=["warm-up", "round 1", "round 2", "round 3", "round 4", "climb", "duel", "final"].index
    )
    final = [one["tflops"] for one in blocks if one["phase"] == "final" and one["shape"] == list(report.shape)]
    assert min(final) <= report.sustained <= max(final)
    text = report.text()
    assert text.startswith("MAMF") and max(map(len, text.replace(str(path), "").splitlines())) <= 80
    assert any("duel" in one for one in said)


def test_given_shapes_are_all_that_is_measured_and_a_batch_beside_them(tmp_path: Path) -> None:
    report = mamf(
        "bf16", device="cpu", seconds=1, shapes=[(256, 256, 384), (320, 64, 128)], also=[(64, 64, 64, 4)],
        output=tmp_path / "out.jsonl",
    )  # fmt: skip
    assert report.mode == "shapes"
    assert {report.shape, *(one.shape for one in report.others)} == {(256, 256, 384), (320, 64, 128)}
    assert all(one.tflops <= report.sustained * 1.0001 for one in report.others)
    assert [one.shape for one in report.also] == [(64, 64, 64, 4)] and report.also[0].tflops > 0


def test_a_shape_without_room_is_left_out_with_the_reason(tmp_path: Path) -> None:
    huge = (1 << 20, 1 << 20, 1 << 20)
    report = mamf("fp32", device="cpu", seconds=1, shapes=[huge, (256, 256, 256)], output=tmp_path / "out.jsonl")
    assert report.failed["1048576x1048576x1048576"].startswith("out of memory: 1048576x1048576x1048576 needs 12582912")
    assert report.shape != huge and report.ok
    with pytest.raises(MldebugError, match="none of the shapes could be measured: out of memory"):
        mamf("fp32", device="cpu", seconds=1, shapes=[huge], output=tmp_path / "other.jsonl")
    assert records(tmp_path / "other.jsonl")[-1]["kind"] == "end"


@pytest.mark.parametrize(
    ("dtype", "words"),
    [("tf32", "tf32 cannot be multiplied"), ("nvfp4", "nvfp4 cannot be multiplied"), ("fp7", "fp7")],
)
def test_a_dtype_that_is_not_here_is_an_error_that_names_those_that_are(dtype: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        mamf(dtype, device="cpu", output=tmp_path / "out.jsonl")
    assert "bfloat16" in caught.value.hint or "bf16" in caught.value.hint
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp8"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    report = mamf(dtype, device="cpu", seconds=0.5, shapes=[(256, 256, 256)], output=tmp_path / "out.jsonl")
    assert report.sustained > 0
    assert ("one scale for each tensor, fast accumulation on" in " ".join(report.text().split())) == (dtype == "fp8")


def test_float32_precision_is_what_it_was(tmp_path: Path) -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    try:
        mamf("fp32", device="cpu", seconds=0.5, shapes=[(512, 512, 512)], output=tmp_path / "out.jsonl")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("kind", "phase", "status"),
    [("SIGINT", "round 1", 130), ("SIGTERM", "duel", 143), ("SIGINT", "final", 130)],
)
def test_a_signal_ends_it_with_the_best_so_far(
    kind: str, phase: str, status: int, run_torch: Run, tmp_path: Path
) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "2", "--json", "-o", "out.jsonl")
    done = run_torch(BROKEN, kind, phase, *words, env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert report["ended"] == kind and not report["ok"] and report["sustained"] > 0
    found = records(tmp_path / "out.jsonl")
    assert found[0]["kind"] == "start" and found[-1]["kind"] == "report" and found[-1]["shape"] == report["shape"]
    measured = {tuple(one["shape"]) for one in found if one["kind"] == "block"}
    assert tuple(report["shape"]) in measured


def test_a_signal_before_anything_is_known_leaves_a_file_that_says_so(run_torch: Run, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "-o", "out.jsonl")
    done = run_torch(BROKEN, "SIGINT", "warm-up", *words, env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 130 and done.stdout == ""
    *_, block, last = records(tmp_path / "out.jsonl")
    assert block["kind"] == "block" and last == {"kind": "end", "ended": "SIGINT", "phase": "warm-up"}


def test_out_of_memory_leaves_shapes_out_and_not_the_others(run_torch: Run, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "2", "--json", "-o", "out.jsonl")
    done = run_torch(BROKEN, "oom", "round 1", *words, env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sustained"] > 0 and any("out of memory" in why for why in report["failed"].values())
    found = records(tmp_path / "out.jsonl")
    assert any("out of memory" in one.get("error", "") for one in found) and found[-1]["kind"] == "report"


def test_a_device_that_fails_for_good_ends_it_with_the_best_so_far(run_torch: Run, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "2", "-o", "out.jsonl")
    done = run_torch(BROKEN, "gone", "round 1", *words, env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: CUDA error: unspecified launch failure" in " ".join(done.stdout.split())
    assert records(tmp_path / "out.jsonl")[-1]["ended"].startswith("RuntimeError: CUDA error")


def test_a_killed_run_is_resumed(run_torch: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "15", "-o", path)
    assert run_torch(BROKEN, "SIGKILL", "round 1", *words, env=ONE_THREAD).returncode == -signal.SIGKILL
    _, before = read_results(path)
    assert before
    found = next(one for one in records(path) if one["kind"] == "block" and one["phase"] == "round 1")
    only_there = (328, 344, 376)  # the best so far, and no shape that a new search begins with
    with path.open("a") as file:
        file.write(json.dumps({**found, "shape": only_there, "share": 9.0}) + "\n")
        file.write('{"kind": "blo')  # half a line, as a kill may leave
    report = mamf("fp32", device="cpu", seconds=2, resume=path)
    assert report.path == str(path)
    _, after = read_results(path)
    assert set(before) <= set(after) and sum(map(len, after.values())) > sum(map(len, before.values())) + 1
    assert len(after[only_there]) > 1, "what the killed run found best takes part again"
    with pytest.raises(MldebugError, match="has dtype 'float32', and this run 'bfloat16'"):
        mamf("bf16", device="cpu", resume=path)


def test_the_file_goes_into_the_current_folder_and_never_into_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mldebug

    monkeypatch.chdir(tmp_path)
    one = ResultFile(None, "cpu0")
    one.close()
    assert one.path.parent == tmp_path and one.path.name.startswith("mamf-")
    monkeypatch.chdir(Path(mldebug.__file__).parent / "perf")
    other = ResultFile(None, "cpu0")
    other.close()
    try:
        assert Path(mldebug.__file__).parent not in other.path.parents
    finally:
        other.path.unlink()


def test_a_full_disk_is_a_warning_and_the_run_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    report = mamf("fp32", device="cpu", seconds=0.5, shapes=[(512, 512, 512)], output="/dev/full")
    assert report.sustained > 0
    warned = capfd.readouterr().err
    assert warned.count("/dev/full is incomplete: no space left on device. The run goes on") == 1


def test_several_devices_are_measured_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = Options("fp32", "cpu", seconds=0.5, shapes=[(512, 512, 512)], output=str(tmp_path / "out"))
    report = run_many(options, [0, 0, 7], lambda text: None)
    assert [one["rank"] for one in report.devices] == [0, 1]
    assert report.missing == {"rank 2": "there is no cpu device 7"}
    assert not report.ok and "missing: rank 2: there is no cpu device 7" in report.text()
    assert {path.name for path in tmp_path.iterdir()} == {"out.0", "out.1"}


def test_sigterm_is_handed_on_to_the_devices_and_their_best_is_collected(tmp_path: Path) -> None:
    words = ["-m", "mldebug", "mamf", "--all-gpus", "--device", "cpu", "--dtype", "fp32", "--seconds", "15", "--json"]
    process = subprocess.Popen(
        [sys.executable, *words, "-o", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    deadline, path = time.monotonic() + 60, tmp_path / "out.0"
    while time.monotonic() < deadline and (not path.exists() or '"round 1"' not in path.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    report = json.loads(stdout)
    assert process.returncode == 143 and report["ended"] == "SIGTERM" and not report["ok"]
    assert report["missing"] == {} and report["devices"][0]["sustained"] > 0
    assert records(path)[-1]["kind"] == "report"


def test_a_straggler_is_told_from_cards_that_differ_a_little() -> None:
    def told(*rates: float) -> dict[int, dict[str, Any]]:
        base = {"host": "n1", "uuid": "", "device": "H100", "dtype": "bfloat16", "trouble": [], "steady": {}}
        more = {"burst": None, "shape": [1, 1, 1]}
        return {rank: {**base, **more, "index": rank, "sustained": rate} for rank, rate in enumerate(rates)}

    fine = judge(told(730, 728, 733, 725, 731, 729, 735, 727))
    assert fine.ok and fine.stragglers == ()
    one = judge(told(730, 728, 733, 660, 731, 729, 735, 727))
    assert [straggler.rank for straggler in one.stragglers] == [3] and not one.ok
    assert one.text().startswith("behind: rank 3, n1 device 3: 660 TFLOPS, 9.5% below the median")
    assert [straggler.rank for straggler in judge(told(730, 650)).stragglers] == [1]
    assert judge(told(730, 726)).stragglers == ()
    assert robust_z([730, 731, 729, 650])[3] < -10


def test_ranks_meet_by_a_store_under_torchrun(run_torch: Run, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--dtype", "fp32", "--seconds", "1", "--shape", "512x512x512", "--json", "-o", "out")
    done = run_torch(
        FORKED, "-m", "torch.distributed.run", "--nproc-per-node", "2", BROKEN, "none", "-", *words, env=ONE_THREAD,
        cwd=tmp_path,
    )  # fmt: skip
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert [one["rank"] for one in report["devices"]] == [0, 1] and report["missing"] == {}
    assert {path.name for path in tmp_path.iterdir()} == {"out.0", "out.1"}
