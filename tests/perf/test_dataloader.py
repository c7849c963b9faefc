"""dataloader_bench on datasets whose cost is known, and on those that break."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mldebug.core.device import find_device
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.machine import Root
from mldebug.perf.loader import _limits, _run, _visit
from mldebug.perf.loader._bench import dataloader_bench
from mldebug.perf.loader._choose import contenders, is_settled, smallest, useful
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._run import Bench
from mldebug.perf.loader._source import samples_in, source_of
from mldebug.perf.loader._visit import How, Visit
from tests.perf.programs import loader_data as kit

A, B, C = Setting(0), Setting(2, 2), Setting(4, 2)


@pytest.fixture(autouse=True)
def ends_its_processes() -> Iterator[None]:
    before = set(_limits.descendants(os.getpid()))  # of other files of tests in this process
    yield
    time.sleep(0.05)
    left = [pid for pid in _limits.descendants(os.getpid()) if pid not in before]
    # The helper of multiprocessing that removes named semaphores stays until the end, and is none of the workers.
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()]
    assert [name for name in names if b"resource_tracker" not in name] == []


class TestRates:
    def test_workers_that_wait_scale_and_the_smallest_that_feeds_a_step_is_chosen(self) -> None:
        # 100 ms a batch, and one each 66 ms is asked for: two workers do. Long sleeps, so that what else this machine
        # does counts for little; which setting is chosen is judged below, where nothing else runs.
        slow = kit.Waits()
        slow.seconds = 0.025
        report = dataloader_bench(slow, batch_size=4, step_seconds=0.066, num_workers=[0, 1, 2, 3], seconds=12)
        rates = {row.setting.num_workers: row.samples_per_second for row in report.rows}
        assert 20 < rates[0] < 41 and 20 < rates[1] < 41
        assert rates[2] > 1.5 * rates[1]
        assert report.chosen is not None and report.chosen.num_workers >= 2
        assert report.enough_workers == report.chosen.num_workers and report.ok
        if report.waits is None:  # a machine so busy that the rounds took all the time
            assert any("2 workers was not tried: time was up" in note for note in report.notes), report.notes
        else:
            assert report.waits < 0.25
        row = next(one for one in report.rows if one.setting.num_workers == 1)
        assert row.worker_cpu is not None and row.worker_cpu < 0.5
        assert row.worker_memory is not None and row.worker_memory > 1 << 20
        assert row.first_batch > 0.09 and report.batch_samples == 4 and report.batch_bytes == 4 * 100 * 4
        assert "wait for the rest" in report.text()

    @pytest.mark.parametrize(("step", "workers"), [(0.055, 2), (0.030, 3), (0.100, 1)], ids=["two", "three", "one"])
    def test_the_smallest_that_feeds_a_step_where_nothing_else_runs(self, monkeypatch, step, workers: int) -> None:
        """Batches of 80 ms on a machine without noise: each worker brings as much as the first one."""
        batch = 0.080

        def see(source: object, setting: Setting, how: How) -> Visit:
            each = batch / max(1, setting.num_workers)
            waits = [max(0.0, each - how.step)] * 10
            return Visit(0.1, 8 / each, 10, 8.0, 3200, cpu=0.01, memory=1 << 20, waits=waits)

        for place in (_run, _visit):
            monkeypatch.setattr(place, "visit", see)
        monkeypatch.setattr(_run, "visit_alone", see)
        monkeypatch.setattr(_run, "epoch_start", lambda *_: 0.1)
        bench = Bench(source_of(kit.Free(), None, 8, False, None, None), None, step, _limits.look(), 60, 30, None)
        bench.run()
        report = bench.report()
        assert report.chosen is not None and report.chosen.num_workers == workers
        assert report.enough_workers == workers and report.ok and report.complete and report.waits == 0.0

    def test_a_step_that_nothing_feeds(self) -> None:
        report = dataloader_bench(kit.Waits(), batch_size=8, step_seconds=0.001, num_workers=[0, 1], seconds=4)
        assert report.enough_workers is None and not report.ok
        assert "the loader is the bottleneck" in " ".join(report.text().split())

    def test_free_data_need_no_workers(self) -> None:
        report = dataloader_bench(kit.Free(), batch_size=4, step_seconds=0.050, num_workers=[0, 2], seconds=4)
        assert report.chosen == Setting(0) and report.enough_workers == 0

    def test_a_loader_brings_its_own_settings(self) -> None:
        seen = []

        class Sampler:
            def __iter__(self):
                seen.append(len(seen))
                yield from ([3, 5, 7], [1])

        def collate(samples):
            assert {float(one[0]) for one in samples} in ({3.0, 5.0, 7.0}, {1.0})
            return torch.stack(samples)

        loader = torch.utils.data.DataLoader(kit.Waits(), batch_sampler=Sampler(), collate_fn=collate, num_workers=1)
        report = dataloader_bench(loader, num_workers=[1, 2], seconds=4)
        assert report.now == Setting(1, 2) and report.row(report.now) is not None
        assert report.gain is not None and len(seen) > 2
        assert 1.5 < report.batch_samples < 2.5

    def test_the_gain_counts_what_is_waited_for(self) -> None:
        loader = torch.utils.data.DataLoader(kit.Waits(), batch_size=4, num_workers=1)
        report = dataloader_bench(loader, num_workers=[1, 2], step_seconds=0.01, seconds=15)
        assert report.waits is not None and report.gain is not None and report.now is not None
        now = report.row(report.now)
        assert now is not None and report.waits > 0
        reached = report.gain * min(now.samples_per_second, 4 / 0.01)
        assert reached <= 1.001 * 4 / (0.01 * (1 + report.waits))

    def test_random_numbers_of_the_program_are_those_it_would_have_had(self) -> None:
        def draw() -> tuple[float, float]:
            return random.random(), float(torch.rand(()))

        torch.manual_seed(5), random.seed(5)
        wanted = draw()
        torch.manual_seed(5), random.seed(5)
        loader = torch.utils.data.DataLoader(kit.Free(), batch_size=4, shuffle=True)
        dataloader_bench(loader, num_workers=[0, 1], seconds=1)
        assert draw() == wanted

    def test_samples_are_read_on_and_not_again(self) -> None:
        source = source_of(kit.Free(), None, 8, False, None, None)
        _, _, sizes = source.loader(Setting(0), 0)
        first = next(iter(source.loader(Setting(0), 0)[0]))
        second = next(iter(source.loader(Setting(0), 0)[0]))
        assert first[:, 0].tolist() == list(range(8)) and second[:, 0].tolist() == list(range(8, 16)) and not sizes

    def test_copies_count_where_there_is_a_device(self, monkeypatch) -> None:
        """The CPU as a device of its own: what a GPU does beside time is the same."""
        monkeypatch.setattr(Bench, "_setting", lambda self, count: Setting(count, 2 if count else 0, False, False))
        source = source_of(kit.Waits(), None, 8, False, None, None)
        bench = Bench(source, find_device("cpu"), None, _limits.look(), 5.0, 10.0, None)
        bench.counts = [0, 1]
        bench.run()
        report = bench.report()
        assert bench.copy > 0 and report.device and "nonblock" in report.text()
        ways = {(row.setting.pin_memory, row.setting.non_blocking) for row in report.rows}
        assert (False, False) in ways and report.chosen is not None

    def test_no_longer_than_asked(self) -> None:
        began = time.monotonic()
        report = dataloader_bench(kit.Waits(), batch_size=8, seconds=1.5)
        assert time.monotonic() - began < 20  # and not the minute that is the rule
        assert report.rows and json.loads(report.json())["chosen"]["num_workers"] >= 0

    def test_a_report_reads_at_80_columns(self) -> None:
        report = dataloader_bench(kit.make_loader(), num_workers=[0, 1, 2], step_seconds=0.02, seconds=4)
        assert all(len(line) <= 80 for line in report.text().splitlines()), report.text()
        assert report.text().startswith("use DataLoader(..., num_workers=")


class TestStreams:
    def test_epochs_end_and_the_measurement_goes_on(self) -> None:
        report = dataloader_bench(kit.Stream(), batch_size=4, num_workers=[0, 1, 2], seconds=4)
        assert {row.setting.num_workers for row in report.rows} == {0, 1, 2}
        assert report.batch_samples == 4
        assert not any("same samples" in note for note in report.notes)

    def test_workers_that_all_yield_the_same_are_told(self) -> None:
        report = dataloader_bench(kit.Unsplit(), batch_size=4, num_workers=[1, 2], seconds=3)
        assert any("each worker yields the same samples" in note for note in report.notes)

    def test_the_dataset_makes_the_batches(self) -> None:
        report = dataloader_bench(kit.Stream(), batch_size=None, num_workers=[1], seconds=2)
        assert report.batch_samples == 2  # a tensor of two is taken for a batch of two


class TestFailures:
    @pytest.mark.parametrize(
        ("dataset", "says"),
        [
            (
                kit.Raises(),
                r"the dataset raised ValueError at index 17: bad jpeg \(loader_data.py:\d+, in __get",
            ),
            (kit.RaisesByName(), r"the dataset raised FileNotFoundError at index 17: .*img/17.jpg"),
            (kit.RaisesInBatch(), r"the dataset raised OSError at index 17: disk is gone"),
            (kit.BrokenStream(), r"the dataset raised KeyError at sample 17 of the stream: 'shard-0003.tar'"),
            (kit.Ragged(), r"collate_fn raised RuntimeError for the batch that ends with index 31: stack expects"),
            (kit.Dies(), r"worker 0 of 1 was ended by SIGKILL at index 17"),
            (kit.Exits(), r"worker 0 of 1 left with status 3 at index 17"),
        ],
        ids=["raises", "many-arguments", "by-batch", "stream", "collate", "killed", "exits"],
    )
    def test_the_sample_is_named(self, dataset, says: str) -> None:
        with pytest.raises(MldebugError, match=says) as caught:  # in the first batch, before anything is measured
            dataloader_bench(dataset, batch_size=32, shuffle=False, num_workers=[1], seconds=5)
        assert caught.value.hint

    @pytest.mark.parametrize("dataset", [kit.Raises(), kit.Dies()], ids=["raises", "dies"])
    def test_also_without_workers(self, dataset, monkeypatch) -> None:
        monkeypatch.setattr(Bench, "_probe", lambda self: None)
        with pytest.raises(MldebugError, match=r"at index 17"):
            dataloader_bench(dataset, batch_size=32, shuffle=False, num_workers=[0], seconds=5)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_sample_that_hangs_is_named_and_leaves_nothing(self, workers: int, monkeypatch) -> None:
        if not workers:
            monkeypatch.setattr(Bench, "_probe", lambda self: None)
        began = time.monotonic()
        with pytest.raises(MldebugError, match=r"no batch came within 1 s: .* read index 17 for [1-4] s"):
            dataloader_bench(kit.Hangs(), batch_size=4, shuffle=False, num_workers=[workers], timeout=1, seconds=30)
        assert time.monotonic() - began < 12

    def test_the_users_own_worker_init_fn_sees_its_dataset(self) -> None:
        def begin(worker: int) -> None:
            torch.utils.data.get_worker_info().dataset.seconds = 0.0  # an attribute of the dataset itself
            assert type(torch.utils.data.get_worker_info().dataset) is kit.Waits

        report = dataloader_bench(kit.Waits(), batch_size=8, num_workers=[1], worker_init_fn=begin, seconds=2)
        assert report.rows[0].samples_per_second > 500  # 8 samples of 4 ms would be 250 a second

    def test_a_worker_that_crashes_as_it_starts_is_started_again_once(self, tmp_path: Path) -> None:
        """As the fork of a process with threads may, before the dataset had any part in it."""
        flag = tmp_path / "crashed"

        def crash(worker: int) -> None:
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGSEGV)

        def always(worker: int) -> None:
            os.kill(os.getpid(), signal.SIGSEGV)

        report = dataloader_bench(kit.Free(), num_workers=[1], worker_init_fn=crash, seconds=4)
        told = "worker 0 of 1 was ended by SIGSEGV before its first sample, and was started again. hint: "
        assert report.rows and [note for note in report.notes if note.startswith(told)]
        with pytest.raises(MldebugError, match="SIGSEGV before its first sample") as caught:
            dataloader_bench(kit.Free(), num_workers=[1], worker_init_fn=always, seconds=4)
        assert "multiprocessing_context='forkserver'" in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("dataset", "options", "says"),
        [
            (kit.Empty(), {}, "has no samples"),
            (iter([1]), {}, "is no IterableDataset"),
            (7, {}, "int is no dataset"),
            (kit.Free(), {"batch_size": 0}, "batch_size is 0"),
            (kit.Free(), {"seconds": 0}, "seconds is 0"),
            (kit.Free(), {"num_workers": []}, "num_workers is"),
            (kit.Free(), {"prefetch_factors": (0,)}, "prefetch_factors is"),
        ],
        ids=["empty", "iterator", "number", "batch", "seconds", "workers", "prefetch"],
    )
    def test_wrong_arguments(self, dataset, options, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            dataloader_bench(dataset, **options)


class TestLimits:
    def root(self, folder: Path, **files: str) -> Root:
        texts = {
            "proc/self/status": "Cpus_allowed_list:\t0-15", "proc/meminfo": "MemAvailable: 1000 kB",
            "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory", "sys/fs/cgroup/job/cpu.max": "max 100000", **files,
        }  # fmt: skip
        for name, text in texts.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return Root(folder)

    def test_affinity_quota_and_ranks(self, tmp_path: Path) -> None:
        assert _limits.look(self.root(tmp_path), {}).cpus == 16
        assert _limits.look(self.root(tmp_path), {"LOCAL_WORLD_SIZE": "4"}).cpus == 4
        limited = self.root(tmp_path, **{"sys/fs/cgroup/job/cpu.max": "250000 100000"})
        found = _limits.look(limited, {})
        assert (found.cpus, found.why) == (3, "by the cgroup's quota of 2.5")

    def test_ranks_that_are_bound_keep_their_own(self, tmp_path: Path) -> None:
        root = self.root(tmp_path, **{"proc/self/status": "Cpus_allowed_list:\t0-7"})
        assert _limits.look(root, {"LOCAL_WORLD_SIZE": "8"}).cpus == 8

    def test_memory_is_what_the_cgroup_has_left(self, tmp_path: Path) -> None:
        root = self.root(
            tmp_path, **{"sys/fs/cgroup/job/memory.max": "600000", "sys/fs/cgroup/job/memory.current": "100000"}
        )
        assert _limits.free_memory(root) == 500_000

    def test_a_small_dev_shm_is_said(self, monkeypatch) -> None:
        monkeypatch.setattr(_limits, "free_shm", lambda root: 64 << 20)
        report = dataloader_bench(kit.Big(), batch_size=8, num_workers=[0, 1], seconds=20)  # 32 MiB a batch
        assert [row.setting.num_workers for row in report.rows] == [0]
        assert any("96 MiB of /dev/shm, and 64 MiB are free. hint: docker --shm-size" in one for one in report.notes)


class TestChoice:
    def test_the_smallest_within_three_percent(self) -> None:
        assert smallest({A: 50.0, B: 97.5, C: 100.0}, 8, None) == B
        assert smallest({A: 50.0, B: 96.0, C: 100.0}, 8, None) == C
        assert smallest({}, 8, None) is None

    def test_a_step_hides_what_is_faster_than_it(self) -> None:
        assert smallest({A: 100.0, B: 1000.0, C: 5000.0}, 10, 0.05) == B  # 10 samples each 50 ms: 200 a second do
        assert useful(A, 100.0, 10, 0.1) == pytest.approx(50)  # without workers step and loader take turns
        assert useful(B, 100.0, 10, 0.1) == pytest.approx(100)

    def test_rounds_go_on_while_noise_may_turn_the_answer(self) -> None:
        assert is_settled({A: [50.0], C: [100.0]}, 8, None)
        assert not is_settled({B: [96.0], C: [100.0]}, 8, None)
        assert not is_settled({B: [90.0, 97.0, 104.0], C: [99.0, 100.0, 101.0]}, 8, None)
        assert is_settled({B: [98.8, 99.0, 99.2], C: [99.8, 100.0, 100.2]}, 8, None)
        assert contenders({A: [50.0], B: [97.0], C: [100.0]}, 8, None) == [B, C]
        assert not is_settled({B: [90.0, 100.0, 110.0], C: [85.0, 98.0, 120.0]}, 8, None)  # the larger may be better
        assert contenders({B: [100.0, 99.0], C: [95.0, 94.0]}, 8, None) == [B]

    def test_samples_of_batches_that_the_dataset_made(self) -> None:
        assert samples_in({"x": torch.ones(5, 2)}) == 5
        assert samples_in([["a", "b"], torch.ones(3)]) == 3
        assert samples_in(torch.ones(())) == 1
