"""memory_report: the line, the deltas, who is on the card, and the limits around the process."""

from __future__ import annotations

import io
import mmap
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mldebug.core.report import Report
from mldebug.perf.memory import _card
from mldebug.perf.memory._card import Card, look_at_card
from mldebug.perf.memory._host import Host, cgroup, look_at_host, reset_peak
from mldebug.perf.memory._memory_report import memory_report
from mldebug.perf.memory._reading import Reading, line_of, size

MIB = 1 << 20


def test_one_line_that_greps_and_a_report() -> None:
    out = io.StringIO()
    report = memory_report("before the model", file=out)
    (line,) = out.getvalue().splitlines()
    assert re.fullmatch(
        r'mldebug memory: rank=0/1 host=\S+ at="before the model" device=\S+ .*rss=[\d.]+[MG]iB rss_peak=\S+.*', line
    )
    assert isinstance(report, Report) and report.text() == line and report.ok
    document = report.to_dict()
    assert document["schema"] == 1 and document["before"] is None
    assert document["now"]["host"]["rss"] == pytest.approx(look_at_host().rss, rel=0.2)


def mapped(mib: int) -> torch.Tensor:
    """Ones in pages of their own: what malloc gives may have been in use before, and the process does not grow."""
    return torch.frombuffer(mmap.mmap(-1, mib * MIB), dtype=torch.float32).fill_(1)


def test_a_scope_says_what_it_took_and_the_peak_within() -> None:
    out = io.StringIO()
    with memory_report("outer", file=out) as outer:
        kept = mapped(8)
        passing = mapped(64)
        del passing
        with memory_report("inner", file=out) as inner:
            also_kept = mapped(4)
    assert kept is not None and also_kept is not None
    assert outer.before is not None and outer.now.use is not None and outer.before.use is not None
    assert outer.now.use - outer.before.use >= 11 * MIB
    # What came before the inner scope is the peak of the outer one alone.
    if torch.cuda.is_available() or reset_peak():
        assert (outer.now.peak or 0) - outer.before.use > 65 * MIB
        assert inner.before is not None
        assert (inner.now.peak or 0) - (inner.before.use or 0) < 40 * MIB
    first, _, inner_line, outer_line = out.getvalue().splitlines()
    assert "(+" not in first and "at=inner" in inner_line and "at=outer" in outer_line and "(+" in outer_line


def test_decorators_say_each_call_and_exceptions_pass() -> None:
    out = io.StringIO()

    @memory_report("step", file=out)
    def step(fails: bool) -> int:
        if fails:
            raise KeyError("x")
        return 3

    assert step(False) == 3
    with pytest.raises(KeyError):
        step(True)
    assert [("left_by=KeyError" in line) for line in out.getvalue().splitlines()] == [False, False, True]


def test_bare_decorator_prints_at_calls_alone(capsys: pytest.CaptureFixture[str]) -> None:
    @memory_report
    def forward() -> str:
        return "done"

    assert capsys.readouterr().err == ""
    assert forward() == "done"
    assert "at=test_bare_decorator_prints_at_calls_alone.<locals>.forward " in capsys.readouterr().err.replace('"', "")


def test_only_some_ranks_print_and_a_stream_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    out = io.StringIO()
    assert memory_report("a", file=out, ranks=0).now.rank == 3
    memory_report("b", file=out, ranks=[3])
    assert out.getvalue().count("\n") == 1 and "rank=3/8" in out.getvalue()
    closed = io.StringIO()
    closed.close()
    memory_report("c", file=closed)


def test_it_begins_no_use_of_cuda_and_loads_no_torch(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(
        "import sys\nfrom mldebug.perf.memory._memory_report import memory_report\n"
        "with memory_report('x'): pass\nprint('torch' in sys.modules)\n"
        "import torch; memory_report('y'); print(torch.cuda.is_initialized())"
    )
    assert done.stdout == "False\nFalse\n", done.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, (None, None), id="none"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_7/memory.max": "4000\n",
                "sys/fs/cgroup/slurm/job_7/memory.current": "1000\n",
                "sys/fs/cgroup/slurm/memory.max": "9000\n",
                "sys/fs/cgroup/slurm/memory.current": "5000\n",
            },
            (4000, 1000),
            id="v2-of-the-job",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/0123abc\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500\n",
            },
            (2000, 1500),
            id="v1-in-a-container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500\n",
            },
            (None, None),
            id="v1-no-limit",
        ),
    ],
)
def test_the_tightest_limit(tmp_path: Path, files: dict[str, str], expected: tuple[int | None, int | None]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup(tmp_path) == expected


def test_rss_and_peak_are_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert look_at_host(tmp_path) == Host(MIB, 2 * MIB, None, None)
    assert not reset_peak(tmp_path / "nowhere")


class FakeNvml(SimpleNamespace):
    """Two GPUs, as NVML tells of them; handles are indices."""

    def __init__(self, processes: dict[int, int | None]) -> None:
        self._processes = processes

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'ab'[handle]}123"

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 100, total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle: int) -> list[Any]:
        return []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real NVML answers in tests/gpu")
@pytest.mark.parametrize(
    ("visible", "local_rank", "device", "physical"),
    [
        (None, "0", "cuda:0", 0),
        (None, "1", "cuda:1", 1),
        ("1", "0", "cuda:0", 1),
        ("1", "1", "cuda:0", 1),  # each rank sees its own GPU alone
        ("1,0", "1", "cuda:1", 0),
        ("GPU-b1", "0", "cuda:0", 1),
    ],
)
def test_the_right_gpu_before_cuda_is_in_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local_rank: str, device: str, physical: int
) -> None:
    monkeypatch.setattr(_card, "load_nvml", lambda: FakeNvml({1: 30, os.getpid(): 50}))
    monkeypatch.setattr(_card, "used_device", lambda: None)
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    card = look_at_card()
    assert (card.device, card.physical, card.used, card.total) == (device, physical, (physical + 1) * 100, 1000)
    assert (card.others, card.other_processes) == (30, 1)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ({"me": 50}, (0, 0)),
        ({"me": 50, 7: 30, 8: 5}, (35, 2)),
        ({"me": 50, 7: None}, (None, 1)),
        ({7: 30}, (0, 0)),  # in a container this process has another number there
        ({7: 30, 8: 40}, (None, 1)),
        ({}, (0, 0)),
    ],
    ids=str,
)
def test_who_else_is_on_the_card(processes: dict[Any, int | None], expected: tuple[int | None, int | None]) -> None:
    nvml = FakeNvml({os.getpid() if pid == "me" else pid: used for pid, used in processes.items()})
    assert _card._others(nvml, 0, in_use=True) == expected


def test_the_line_of_a_gpu() -> None:
    card = Card("cuda:0", 3, 2048, 8192, 4096, 2000, 2048, 9000 * MIB, 81920 * MIB, 1024, 2)
    before = Reading("x", 1, 8, "node7", 0.0, Card("cuda:0", 3, 1024, 8192, 4096), Host(MIB, MIB, None, None))
    now = Reading("x", 1, 8, "node7", 0.0, card, Host(2 * MIB, 3 * MIB, 64 * MIB, 10 * MIB))
    assert line_of(now, before) == (
        "mldebug memory: rank=1/8 host=node7 at=x device=cuda:0/gpu3 allocated=2.0KiB(+1.0KiB) peak=4.0KiB "
        "reserved=8.0KiB(+0B) fragmentation=25% driver=8.79GiB/80.00GiB others=1.0KiB(2processes) "
        "rss=2.0MiB(+1.0MiB) rss_peak=3.0MiB cgroup=10.0MiB/64.0MiB"
    )


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "?"), (0, "0B"), (1023, "1023B"), (1024, "1.0KiB"), (-3 * MIB, "-3.0MiB"), (1 << 30, "1.00GiB")],
)
def test_sizes_in_words(count: int | None, words: str) -> None:
    assert size(count) == words


def test_a_label_with_quotes_stays_one_line() -> None:
    out = io.StringIO()
    memory_report('a "b"\nc', file=out)
    assert r'at="a \"b\"\nc"' in out.getvalue() and out.getvalue().count("\n") == 1
