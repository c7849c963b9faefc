"""Tests under two torchrun ranks, and what a pytest says that runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mldebug.testing._processes import clean_environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFTEST = """
import pytest
pytest_plugins = ["mldebug.testing"]
def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=0)
"""
# Torchrun forks the ranks, each of which would spend two seconds of a core on the import of torch.
FORKED = f"""
import subprocess, types
from mldebug.testing import _ranks
def popen(words, **how):
    return subprocess.Popen([words[0], {str(ROOT / "tests" / "forked.py")!r}, *words[1:]], **how)
_ranks.subprocess = types.SimpleNamespace(**{{**vars(subprocess), "Popen": popen}})
"""
TESTS = (HERE / "programs" / "under_ranks.py").read_text()


def project(folder: Path, conftest: str = CONFTEST) -> list[str]:
    """A project with those tests, and the command that runs them."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:logging --strict-markers\ntimeout = 300\n")
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--test-seed", "7", "--size", "3", "-rA", "--color=no"]
    return [sys.executable, *words, f"--basetemp={folder / 'tmp'}"]


def environment(folder: Path) -> dict[str, str]:
    return clean_environment(PYTHONPATH=str(ROOT), COUNTER=str(folder))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of all of them."""
    folder = tmp_path_factory.mktemp("project")
    command = project(folder, CONFTEST + FORKED)
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert of_project(folder) == []
    return done.stdout


def of_project(folder: Path) -> list[str]:
    """The processes that work for it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"COUNTER={folder}".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


def part(told: str, name: str) -> str:
    """What is told of a test that failed."""
    found = re.search(rf"^_+ (?:\S+\.)?{re.escape(name)} _+\n(.*?)(?=^_{{3,}} |^={{3,}} )", told, re.M | re.S)
    assert found, told
    return found[1]


def test_the_outcome_of_each(told: str) -> None:
    found = re.findall(r"^(PASSED|FAILED) test_it\.py::([^\n]*?)(?: - .*)?$", told, re.M)
    outcomes = {name: how for how, name in found}
    assert outcomes == {
        "test_fine": "PASSED",
        "test_one_fails[a[b]::c]": "FAILED",
        "TestClass::test_both_fail": "FAILED",
        "test_dies": "FAILED",
        "test_hangs": "FAILED",
        "test_a_function": "PASSED",
        "test_a_function_that_fails": "FAILED",
        "test_a_function_that_no_rank_can_find": "FAILED",
    }
    assert re.search(r"^SKIPPED \[1\] .*: seen enough$", told, re.M)


def test_what_the_ranks_print_has_their_number(told: str) -> None:
    drawn = re.findall(r"^\[rank (\d)\] rank \1 drew (\S+)$", told, re.M)
    assert [rank for rank, _ in drawn] == ["0", "1"] and drawn[0][1] == drawn[1][1], "the seed is that of the command"
    assert "[rank 1] about to fail\n" in part(told, "test_one_fails[a[b]::c]")


def test_a_failure_is_that_of_its_rank(told: str) -> None:
    text = part(told, "test_one_fails[a[b]::c]")
    assert text.startswith("1 of 2 ranks failed\n") and re.search(r"^-+ rank 1 -+$", text, re.M)
    assert re.findall(r"^E +AssertionError: (.*)$", text, re.M) == ["assert 'a[b]::c' == 'd'"]
    assert "rank 0: ended by torchrun after that" in text
    kept = re.search(r"^kept: (\S+) \(job, .*tmp-1\)$", text, re.M)
    assert kept and "seed 7: --test-seed 7" in text
    assert len(list(Path(kept[1]).glob("tmp-1/*0/checkpoint.pt"))) == 1


def test_the_same_failure_is_shown_once(told: str) -> None:
    text = part(told, "test_both_fail")
    assert text.startswith("2 of 2 ranks failed\n") and re.search(r"^-+ ranks 0, 1 -+$", text, re.M)
    assert len(re.findall(r"^E +KeyError: 'missing'$", text, re.M)) == 1


def test_a_rank_that_dies_shows_where(told: str) -> None:
    text = part(told, "test_dies")
    assert text.startswith("1 of 2 ranks failed\n") and re.search(r"^-+ rank 1: died of SIGSEGV -+$", text, re.M)
    assert re.search(r'File "\S+test_it.py", line \d+ in test_dies$', text, re.M) and "_pytest" not in text


def test_the_deadline_shows_all_stacks(told: str) -> None:
    text = part(told, "test_hangs")
    assert text.startswith("2 ranks did not end in 12 s; rank 0 had ended\n")
    assert re.search(r"stuck_here|\bsleep\b", text) and re.search(r"test_it\.py:\d+", text), text


def test_a_function_fails_with_its_traceback(told: str) -> None:
    text = part(told, "test_a_function_that_fails")
    assert "LookupError: of rank 1" in text and "in spoilt" in text and "_rank.py" not in text
    assert "it called sys.exit(0) and returned nothing" in text
    assert "define it with def at the top of the test file" in part(told, "test_a_function_that_no_rank_can_find")


def test_nothing_is_left_of_a_pytest_that_is_killed(tmp_path: Path) -> None:
    command = [*project(tmp_path), "test_more.py"]
    lines = ("import pytest, time", "@pytest.mark.ranks(2)", "def test_it():", "    time.sleep(200)", "")
    (tmp_path / "test_more.py").write_text("\n".join(lines))
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(tmp_path.glob("tmp/ranks0/job/began-0")):
            time.sleep(0.1)
        assert of_project(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and of_project(tmp_path):
        time.sleep(0.1)
    assert of_project(tmp_path) == []
