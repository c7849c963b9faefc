"""`mldebug logs` as a command: its options, its status, its words. What it finds is tested in tests/ranks."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
BAD = "".join(
    f"[rank1]: {line}\n"
    for line in (
        "Traceback (most recent call last):",
        '  File "train.py", line 4, in <module>',
        "    step()",
        "ValueError: x",
    )
)
GOOD = "".join(f"[rank{rank}]: step {step} loss 2.5\n" for step in range(100) for rank in range(4))


def mldebug(run_python: Run, *words: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "mldebug", "logs", *words, **more)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text(GOOD + BAD)
    return path


def test_the_answer_comes_first(run_python: Run, log: Path) -> None:
    done = mldebug(run_python, log.name, cwd=log.parent)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert lines[0] == "1 kind of traceback; first by order in the log: [1]: ValueError: x"
    assert max(map(len, lines)) <= 80
    at = lines.index("last 40 of 101 folded lines:")
    assert lines[at + 1] == "[0-3] step 61 loss 2.5"
    assert lines[-1] == "[1] <traceback> ValueError: x"


def test_status_quiet_and_stdin(run_python: Run, log: Path) -> None:
    done = mldebug(run_python, "-q", "-", input=GOOD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert mldebug(run_python, "-q", log).stdout.startswith("1 kind of traceback")
    done = mldebug(run_python, "-", input="")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "no traceback")


def test_json_and_output(run_python: Run, log: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = mldebug(run_python, "--json", "-o", output, log)
    document = json.loads(done.stdout)
    assert done.stdout == output.read_text()
    assert (document["schema"], document["ok"], document["ranks"]) == (1, False, [0, 1, 2, 3])
    assert document["tracebacks"][0]["ranks"] == [1]
    assert len(document["folded"]) == 40


def test_options_choose(run_python: Run, log: Path, tmp_path: Path) -> None:
    done = mldebug(run_python, "--rank", "0,2-3", "--lines", "all", log)
    assert done.returncode == 0
    assert done.stdout.count("[0,2-3] step") == 100
    done = mldebug(run_python, "--grep", r"step 1\d ", log)
    assert done.stdout.endswith("".join(f"[0-3] step {step} loss 2.5\n" for step in range(10, 20)))
    done = mldebug(run_python, "--lines", "0", log)
    assert "folded" not in done.stdout
    mldebug(run_python, "--split", tmp_path / "by-rank", log)
    assert sorted(path.name for path in (tmp_path / "by-rank").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]
    done = mldebug(run_python, "--prefix", "<{rank}> ", "-", input="<0> a\n<1> a\n")
    assert done.stdout.endswith("[0-1] a\n")


def test_packed_files_and_a_glob(run_python: Run, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.log.gz").write_bytes(gzip.compress(b"hello\n"))
    done = mldebug(run_python, *sorted(tmp_path.iterdir()))
    assert done.stdout.endswith("[0-2] hello\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["none.log"], 2, "mldebug: cannot read none.log: no such file\nhint: "),
        (["--rank", "x", "a"], 2, "is no rank or list of ranks"),
        (["--lines", "-3", "a"], 2, "mldebug: "),
        (["--grep", "(", "a"], 2, "--grep '(' is no regular expression"),
        ([], 2, "mldebug: "),
        (["-o", "/none/x.json", "a"], 2, "there is no folder"),
    ],
)
def test_errors_are_two_lines(run_python: Run, words: list[str], status: int, said: str) -> None:
    done = mldebug(run_python, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_what_a_hint_says_to_run_can_be_pasted(run_python: Run, tmp_path: Path) -> None:
    done = mldebug(run_python, tmp_path / "none.log")
    assert f"hint: ls {tmp_path} shows" in done.stderr
    odd = tmp_path / "al's logs"
    odd.mkdir()
    done = mldebug(run_python, odd / "none.log")
    assert f"hint: ls {shlex.quote(str(odd))} shows" in done.stderr


def test_a_terminal_that_cannot_show_all_signs(run_python: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes("[rank0]: loss \u2192 nan \U0001f3d6\n".encode() + b"[rank0]: \xff\n")
    for words in ([], ["--lines", "all"]):
        done = mldebug(run_python, *words, path, env={"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert "\\u2192 nan" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_told(run_python: Run, log: Path) -> None:
    done = run_python(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'mldebug', 'logs', sys.argv[1]],"
        " stdout=open('/dev/full', 'w')))",
        log,
    )
    assert done.returncode == 1
    assert "no space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"[rank0]: line {number}\n" for number in range(200_000)))
    command = f"{sys.executable} -m mldebug logs --lines all {path} | head -3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert len(done.stdout.splitlines()) == 3
    assert "Traceback" not in done.stderr


def test_it_loads_nothing_heavy(run_python: Run, log: Path) -> None:
    done = run_python(
        "import sys; from mldebug.cli import main; main(['logs', sys.argv[1]]);"
        "print({'torch', 'numpy', 'rich'} & set(sys.modules), file=sys.stderr)",
        log,
    )
    assert done.stderr == "set()\n"
