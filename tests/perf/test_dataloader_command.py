"""`mldebug dataloader`: somebody's script, a function, datasets of libraries; Ctrl-C, kill -9, other start methods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mldebug import cli
from mldebug.core.errors import MldebugError
from mldebug.perf.loader._bench import dataloader_bench

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "programs" / "loader_data.py"
# The command by its module, as the table of commands has it.
MAIN = """
import sys
from mldebug import cli
cli.COMMANDS.setdefault("dataloader", ("mldebug.cli._dataloader", "", "measure"))
sys.exit(cli.main())
"""
TRAIN = f"""
import sys, time, torch
sys.path.insert(0, {str(DATA.parent)!r})
from loader_data import Waits
if __name__ == "__main__":
    check = torch.utils.data.DataLoader(Waits(), batch_size=2)
    train = torch.utils.data.DataLoader(Waits(), batch_size=8, shuffle=True, num_workers=1)
    print(next(iter(train)).shape, len(iter(train)))
    steps = 0
    try:
        for epoch in range(2):
            for batch in train:
                time.sleep(0.03)
                steps += 1
                for _ in zip(check, range(4)):
                    pass
    finally:
        print("steps", steps, sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


class TestScript:
    def test_it_trains_a_few_steps_and_its_loader_is_measured(self, run_torch: Run, script: Path) -> None:
        done = run_torch(
            "-c", MAIN, "dataloader", "--json", "--steps", "8", "--seconds", "5", "--", script, "--lr", "1"
        )
        report = json.loads(done.stdout)
        assert "steps 8 ['--lr', '1']" in done.stderr, done.stderr
        # 30 ms of its own, and five batches of the other loader at 8 ms
        assert 0.06 < report["step_seconds"] < 0.25
        assert report["now"]["num_workers"] == 1 and report["batch_samples"] == 8
        assert report["chosen"]["num_workers"] >= 1 and done.returncode == (0 if report["ok"] else 1)

    def test_two_ranks_give_one_report(self, run_torch: Run, script: Path, tmp_path: Path) -> None:
        program = tmp_path / "main.py"
        program.write_text(MAIN)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
        words = ["dataloader", "--json", "--steps", "2", "--num-workers", "0,1", "--seconds", "2", "--", script]
        done = run_torch(*launch, *words, timeout=100)
        assert len(done.stdout.splitlines()) == 1 and json.loads(done.stdout)["rows"], done


@pytest.fixture
def main(monkeypatch) -> Iterator[Callable[..., int]]:
    """The command in this process, in the folder of the datasets; what it loads from there goes again."""
    monkeypatch.chdir(DATA.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(cli.COMMANDS, "dataloader", ("mldebug.cli._dataloader", "", "measure"))
    yield lambda *words: cli.main(["dataloader", *map(str, words)])
    sys.modules.pop("loader_data", None)


class TestScriptHere:
    def test_the_report_goes_to_stderr_and_a_file(self, main, capfd, script: Path, tmp_path: Path) -> None:
        words = ["--steps", "0", "--num-workers", "0,1", "--seconds", "2", "-o", tmp_path / "report.json"]
        assert main(*words, "--", script) == 0
        out, err = capfd.readouterr()
        assert "use DataLoader(..., num_workers=" in err and "steps 0" not in out
        assert json.loads((tmp_path / "report.json").read_text())["step_seconds"] is None

    def test_another_loader_of_the_script(self, main, capfd, script: Path) -> None:
        main("--loader", "1", "--steps", "3", "--num-workers", "0,1", "--seconds", "2", "--json", "--", script)
        assert json.loads(capfd.readouterr().out)["batch_samples"] == 2

    def test_a_script_that_catches_its_end_gets_it_again(self, main, capfd, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            f"import sys, torch; sys.path.insert(0, {str(DATA.parent)!r})\nfrom loader_data import Free\n"
            "loader = torch.utils.data.DataLoader(Free(), batch_size=4)\n"
            "try:\n    list(loader)\nexcept BaseException as exc:\n    print('caught', type(exc).__name__)\n"
            "list(loader)\nprint('not reached')\n"
        )
        plain = torch.utils.data.DataLoader.__iter__
        assert main("--steps", "0", "--num-workers", "0,1", "--seconds", "1", "--", script) == 0
        assert capfd.readouterr().out == "caught LoaderMeasured\n"
        assert torch.utils.data.DataLoader.__iter__ is plain

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_sample_that_fails_in_the_own_steps_is_named(self, main, capfd, tmp_path: Path, workers: int) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            f"import sys, torch; sys.path.insert(0, {str(DATA.parent)!r})\nfrom loader_data import Free\n"
            "class Bad(Free):\n    def __getitem__(self, i):\n        return super().__getitem__(i // (i != 7))\n"
            f"list(torch.utils.data.DataLoader(Bad(), batch_size=4, num_workers={workers}))\n"
        )
        assert main("--json", "--seconds", "1", "--", script) == 1
        out, err = capfd.readouterr()
        assert "ZeroDivisionError at index 7" in err and "Traceback" not in err
        assert "index 7" in json.loads(out)["error"]["message"]

    def test_a_script_that_ends_before_has_its_status_and_a_document(self, main, capfd, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            f"import sys, torch; sys.path.insert(0, {str(DATA.parent)!r})\nfrom loader_data import Free\n"
            "for batch in torch.utils.data.DataLoader(Free(), batch_size=4):\n    sys.exit(3)\n"
        )
        assert main("--json", "--", script) == 3
        assert "ended with status 3" in json.loads(capfd.readouterr().out)["error"]["message"]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_training_in_a_thread_ends_without_a_traceback(self, main, capfd, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            f"import sys, threading, torch; sys.path.insert(0, {str(DATA.parent)!r})\nfrom loader_data import Free\n"
            "loader = torch.utils.data.DataLoader(Free(), batch_size=4)\n"
            "one = threading.Thread(target=list, args=(loader,)); one.start(); one.join(); print('joined')\n"
        )
        assert main("--steps", "2", "--num-workers", "0", "--seconds", "1", "--", script) in (0, 1)
        out, err = capfd.readouterr()
        assert out == "joined\n" and "use DataLoader" in err and "Traceback" not in err

    def test_a_script_without_a_loader(self, main, capfd, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("print('hello')")
        assert main("--", script) == 1
        out, err = capfd.readouterr()
        assert "iterated no DataLoader" in err and out == "hello\n"

    def test_a_script_that_fails_shows_its_own_traceback(self, main, capfd, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("import sys\nif len(sys.argv) > 1: sys.exit(4)\n1 / 0")
        assert main("--", script) == 1
        err = capfd.readouterr().err
        assert "ZeroDivisionError" in err and "mldebug" not in err
        assert main("--", script, "x") == 4


class TestFunction:
    @pytest.mark.parametrize(
        ("name", "samples"), [("loader_data:make_loader", 8), ("./loader_data.py:Free", 5)], ids=["module", "file"]
    )
    def test_a_loader_and_a_dataset(self, main, capfd, name: str, samples: int) -> None:
        words = ["--num-workers", "0,1", "--seconds", "1.5", "--json", "--batch-size", "5"]
        assert main(*words, name) == 0
        assert json.loads(capfd.readouterr().out)["batch_samples"] == samples

    @pytest.mark.parametrize(
        ("name", "status", "says"),
        [
            ("no_such_module:f", 2, "no module named no_such_module"), ("loader_data:no_such", 2, "has no no_such"),
            ("loader_data:make_nothing", 2, "int is no dataset"), ("none.py:f", 2, "cannot load none.py: no such file"),
            ("loader_data:Raises", 1, "the dataset raised ValueError at index 17: bad jpeg"),
        ],
        ids=["no-module", "no-name", "value", "no-file", "raises"],
    )  # fmt: skip
    def test_what_is_wrong_is_said(self, main, capfd, name: str, status: int, says: str) -> None:
        assert main("--batch-size", "8192", "--seconds", "5", name) == status
        assert says in capfd.readouterr().err


class TestEnds:
    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "dataloader", *words], text=True, stdout=subprocess.PIPE, cwd=DATA.parent,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    def members(self, session: int) -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def wait(self, session: int, enough: Callable[[int], bool]) -> bool:
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            if enough(len(self.members(session))):
                return True
            time.sleep(0.05)
        return False

    def test_ctrl_c_ends_with_what_was_found(self, tmp_path: Path) -> None:
        output = tmp_path / "report.json"
        process = self.start("--seconds", "60", "--num-workers", "1,2", "-o", str(output), "loader_data:make_loader")
        assert self.wait(process.pid, lambda count: count >= 2)
        time.sleep(2.5)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 130, stderr
        report = json.loads(output.read_text())
        assert report["complete"] is False and report["interrupted"] is True and report["rows"], stderr
        assert "it was interrupted before all was measured" in stdout and "time was up" not in stdout
        assert "Traceback" not in stderr and self.wait(process.pid, lambda count: count == 0)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
    def test_what_ends_it_ends_its_workers(self, number: signal.Signals) -> None:
        process = self.start("--seconds", "60", "--num-workers", "2", "loader_data:Hangs")
        assert self.wait(process.pid, lambda count: count >= 2)
        process.send_signal(number)
        process.communicate(timeout=20)
        assert self.wait(process.pid, lambda count: count == 0), self.members(process.pid)


@pytest.mark.timeout(300)
def test_other_start_methods(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "main.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(DATA.parent)!r})\nimport loader_data\n"
        "from mldebug.perf.loader._bench import dataloader_bench\n"
        "if __name__ == '__main__':\n"
        "    for seconds in (12, 60):  # on a busy machine a worker may take the first for its start\n"
        "        report = dataloader_bench(loader_data.Waits(), batch_size=4, num_workers=[0, 1], seconds=seconds,\n"
        "                                  multiprocessing_context='spawn')\n"
        "        if len({row.setting.num_workers for row in report.rows}) == 2:\n            break\n"
        "    print(sorted({row.setting.num_workers for row in report.rows}), report.rows[-1].first_batch > 0.3)\n"
        "    try:\n"
        "        dataloader_bench(loader_data.Raises(), batch_size=4, num_workers=[1], shuffle=False,\n"
        "                         multiprocessing_context='spawn')\n"
        "    except Exception as exc:\n        print(exc.message)\n"
    )
    done = run_python(program, timeout=200)
    assert done.stdout.startswith("[0, 1] True\nthe dataset raised ValueError at index 17"), done


class TestLibraries:
    def test_datasets_of_hugging_face(self) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": list(range(3000)), "y": [[1.0, 2.0]] * 3000})
        for one in (rows.with_format("torch"), rows.to_iterable_dataset(num_shards=4).with_format("torch")):
            report = dataloader_bench(one, batch_size=16, num_workers=[0, 2], seconds=3)
            assert report.batch_samples == 16 and len(report.rows) >= 2
            assert not any("same samples" in note for note in report.notes)
        broken = rows.with_transform(lambda batch: {"x": [1 // (17 - x) for x in batch["x"]]})
        with pytest.raises(MldebugError, match="the dataset raised ZeroDivisionError at index 17: "):
            dataloader_bench(broken, batch_size=32, shuffle=False, seconds=3)

    def test_webdataset(self, run_torch: Run, tmp_path: Path) -> None:
        pytest.importorskip("webdataset")
        program = tmp_path / "data.py"
        program.write_text(
            "import webdataset as wds, os\n"
            "if not os.path.exists('a-1.tar'):\n"
            "    for shard in range(2):\n"
            "        with wds.TarWriter(f'a-{shard}.tar') as sink:\n"
            "            for n in range(50): sink.write({'__key__': f'{shard}-{n}', 'x.cls': n})\n"
            "def loader():\n"
            "    data = wds.WebDataset(['a-0.tar', 'a-1.tar'], shardshuffle=False).decode().to_tuple('x.cls')\n"
            "    return wds.WebLoader(data.batched(10), batch_size=None, num_workers=2)\n"
            "if __name__ == '__main__':\n    [None for _ in loader()]\n"
        )
        words = ["--steps", "3", "--num-workers", "1,2", "--seconds", "3", "--json", "--", program]
        done = run_torch("-c", MAIN, "dataloader", *words, cwd=tmp_path)
        report = json.loads(done.stdout)
        assert report["now"]["num_workers"] == 2 and report["batch_samples"] == 10, done


def test_help_loads_nothing_heavy(run_python: Run) -> None:
    program = MAIN.replace("sys.exit(cli.main())", "cli.main(['dataloader', '--help'])\nprint('torch' in sys.modules)")
    done = run_python(program)
    assert done.stdout.endswith("False\n") and all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
