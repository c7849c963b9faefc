"""The plugin without ranks: what it does to tests, what it says of them, and that it is off until asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mldebug.testing._processes import clean_environment

HERE = Path(__file__).parent
OTHERS = ("xdist.plugin", "pytest_rerunfailures", "pytest_timeout")
TESTS = (HERE / "programs" / "in_one_process.py").read_text()


def run_pytest(folder: Path, *words: str, conftest: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\ntmp_path_retention_policy = failed\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", *words]
    command += [word for name in OTHERS if f"no:{name}" not in words for word in ("-p", name)]
    env |= {"PYTHONPATH": str(HERE.parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=clean_environment(**env), capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_it.py").write_text(TESTS)
    words = ("-p", "mldebug.testing", "-n", "0", "--test-seed", "3", f"--basetemp={folder / 'tmp'}")
    done = run_pytest(folder, *words, OF_THE_TESTS=str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    if sys.platform == "linux":
        environments = [
            path for path in Path("/proc").glob("[0-9]*/environ") if path.stat().st_uid == folder.stat().st_uid
        ]
        left = []
        for path in environments:
            try:
                left += [path] if f"OF_THE_TESTS={folder}".encode() in path.read_bytes() else []
            except OSError:
                continue
        assert left == []
    return done.stdout


def test_the_outcome_of_each(told: str) -> None:
    assert re.findall(r"^FAILED test_it\.py::(\w+)", told, re.M) == ["test_fails", "test_a_program_that_hangs"]
    skipped = re.findall(r"^SKIPPED \[1\] \S+ (.*)$", told, re.M)
    assert skipped == ["it is slow: --run-slow runs it", "it needs 64 GPUs, and none can be seen"]
    assert "2 failed, 6 passed, 2 skipped, 2 rerun" in told


def test_a_failure_says_the_seed_and_what_is_kept(told: str) -> None:
    seed, kept = re.findall(r"^-+ mldebug\.testing -+\nseed 3: (.*)\nkept: (\S+) \(left\.txt\)$", told, re.M)[0]
    assert seed == "--test-seed 3 gives the same numbers" and (Path(kept) / "left.txt").exists()
    assert [path.name for path in (Path(kept).parent).iterdir() if "spoils" in path.name] == []


def test_a_flaky_test_says_why_it_ran_again(told: str) -> None:
    assert "flaky: test_it.py::test_flaky passed at attempt 3, before that: AssertionError: attempt 2\n" in told


def test_a_program_that_hangs_shows_its_stacks(told: str) -> None:
    text = told[told.index("_ test_a_program_that_hangs _") :]
    assert "During handling of" not in told
    assert "did not end in 2 s\n--- stacks\nprocess " in text and "    <string>:4 <module>\n" in text
    assert "--- stdout\nhere\n" in text


def test_it_is_off_until_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(request):\n    assert not request.config.getoption('test_seed', 0)\n"
    )
    assert "1 passed" in run_pytest(tmp_path, "-n", "0").stdout
    assert run_pytest(tmp_path, "--run-slow").returncode == 4


def test_the_other_way_to_ask_and_what_is_slow(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(seed): import torch; assert torch.initial_seed() == seed\n"
    )
    how = {"conftest": "pytest_plugins = ['mldebug.testing']\n"}
    done = run_pytest(tmp_path, "-n", "1", "--run-slow", **how)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "1 passed" in run_pytest(tmp_path, "--test-seed", "none", RUN_SLOW="yes", **how).stdout.replace("== 0", "")


def test_a_flaky_mark_that_nothing_serves_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.flaky(reruns=2)\ndef test_it(): pass\n")
    words = ("-p", "mldebug.testing", "-p", "no:pytest_rerunfailures")
    done = run_pytest(tmp_path, *words)
    assert done.returncode == 4 and "pip install pytest-rerunfailures" in done.stderr


def test_a_mark_that_cannot_be(tmp_path: Path) -> None:
    marks = ("ranks(0)", "ranks('two')", "ranks(2, timout=3)", "ranks(2, 30)", "require_gpus(n='x')")
    tests = (f"@pytest.mark.{mark}\ndef test_{number}(): pass\n" for number, mark in enumerate(marks))
    (tmp_path / "test_it.py").write_text("import pytest\n" + "".join(tests))
    done = run_pytest(tmp_path, "-p", "mldebug.testing")
    assert done.returncode == 1 and "4 failed, 1 error" in done.stdout
    for words in (
        "ranks(0): give a number of 1 or more", "ranks('two'): give a number of 1 or more",
        "ranks does not take timout=: it takes a number, timeout=, backend=", "ranks does not take 30:",
        "require_gpus('x'): give a number of 1 or more",
    ):  # fmt: skip
        assert words in done.stdout
    assert "_plugin.py" not in done.stdout  # no traceback of ours


def test_mldebug_itself_loads_no_pytest() -> None:
    code = "import mldebug, sys; dir(mldebug); assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], check=True, timeout=60)
