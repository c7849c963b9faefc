"""`mldebug printflock`: a script whose lines come out whole, with the rank in front."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]
HOST = socket.gethostname()

SCRIPT = """
import logging, sys
logging.basicConfig(format="%(message)s")
print("print", *sys.argv[1:])
sys.stdout.write("write\\n")
logging.warning("log")
print("end", end="")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_every_line_has_the_rank(run_python: Run, script: Path) -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    done = run_python("-m", "mldebug", "printflock", "--", script, "--lr", "1", env=environment)
    me = f"[{HOST}:3]"
    assert (done.returncode, done.stdout) == (0, f"{me} print --lr 1\n{me} write\n{me} end")
    assert done.stderr == f"{me} log\n"


@pytest.mark.parametrize(
    ("options", "stdout", "stderr"),
    [
        (["--no-prefix"], "print\nwrite\nend", "log\n"),
        (["--prefix", "{rank}/{world_size}|"], "0/1| print\n0/1| write\n0/1| end", "0/1| log\n"),
        (["--streams", "none", "--prefix", "p"], "p print\nwrite\np end", "p log\n"),
        (["--streams", "none", "--prefix", "p", "--no-logging"], "p print\nwrite\np end", "log\n"),
        (["--streams", "stderr", "--prefix", "p"], "p print\nwrite\np end", "p log\n"),
        (["--ranks", "1,2", "--no-prefix"], "", "log\n"),
        (["--ranks", "0,2", "--no_prefix", "--ordered", "--timeout", "3"], "print\nwrite\nend", "log\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(run_python: Run, script: Path, options: list[str], stdout: str, stderr: str) -> None:
    done = run_python("-m", "mldebug", "printflock", *options, "--", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, stderr)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('words')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
        ("os._exit(9)", 9),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_exit_status_passes_through(run_python: Run, tmp_path: Path, body: str, status: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"import os, sys\nprint('a', flush=True)\n{body}\n")
    done = run_python("-m", "mldebug", "printflock", "--prefix", "p", "--", program)
    assert (done.returncode, done.stdout) == (status, "p a\n")
    if body == "1 / 0":
        lines = done.stderr.splitlines()
        assert lines[0] == "p Traceback (most recent call last):"
        assert lines[1] == f'p   File "{program}", line 3, in <module>'
        assert lines[-1] == "p ZeroDivisionError: division by zero"
    if body == "raise KeyboardInterrupt":  # where it hung is what one wants to know
        assert done.stderr.splitlines()[1:] == [
            f'p   File "{program}", line 3, in <module>',
            "p     raise KeyboardInterrupt",
            "p KeyboardInterrupt",
        ]


def test_what_goes_on_after_the_script(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("""
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("main")
""")
    done = run_python("-m", "mldebug", "printflock", "--prefix", "p", "--", program)
    assert (done.stdout, done.stderr, done.returncode) == ("p main\np thread\nat exit\n", "", 0)


def test_output_file_and_json(run_python: Run, script: Path, tmp_path: Path) -> None:
    file = tmp_path / "log"
    for options in ([], ["--json"]):
        done = run_python("-m", "mldebug", "printflock", "--no-prefix", "-o", file, *options, "--", script)
        assert done.returncode == 0
        assert done.stderr == "log\n"
    assert json.loads(done.stdout) == {"schema": 1, "ok": True, "status": 0}
    assert file.read_text() == "print\nwrite\nend" * 2
    done = run_python("-m", "mldebug", "printflock", "--json", "--no-prefix", "--", script)
    assert json.loads(done.stdout)["ok"] is True
    assert sorted(done.stderr.split()) == ["end", "log", "print", "write"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no script to run"),
        (["--", "-m"], "no module after -m"),
        (["--streams", "stdin", "--", "a.py"], "'stdin' is not one of stdout, stderr and none"),
        (["--ranks", "x", "--", "a.py"], "not a whole number"),
        (["--prefix", "{step}", "--", "a.py"], "is no format"),
        (["--", "no_such.py"], "cannot run no_such.py"),
    ],
    ids=str,
)
def test_wrong_usage(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    assert cli.main(["printflock", *options]) == 2
    assert message in capsys.readouterr().err


def test_in_this_process_everything_comes_back(script: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    streams = (sys.stdout, sys.stderr)
    assert cli.main(["printflock", "--no-prefix", "--no-logging", "-o", str(tmp_path / "log"), "--", str(script)]) == 0
    assert (sys.stdout, sys.stderr) == streams
    print("here")
    assert capfd.readouterr().out == "here\n"
