from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

import mldebug
from mldebug.cli import COMMANDS, main
from mldebug.core.errors import MldebugError


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_troubles_and_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, (_module, trouble, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(trouble)}$", out, re.M)
        assert summary in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mldebug {mldebug.__version__}\n"
    assert main(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"]) == (1, mldebug.__version__)
    assert main(["--version", "--jsn"]) == 2


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["overflaw"], "no command named 'overflaw'", "did you mean `mldebug overflow`?"),
        (["xyzzy"], "no command named 'xyzzy'", "`mldebug --help` lists the commands"),
        (["--jsn"], "no command named '--jsn'", "`mldebug --help` lists the commands"),
        (["demo", "--nope"], "unrecognized arguments: --nope", "`mldebug demo --help` lists the options"),
        (["demo", "--js"], "unrecognized arguments: --js", "did you mean --json?"),
        (["overflow"], "no script to run", "mldebug overflow -- train.py"),
        (["overflow", "--"], "no script to run", "mldebug overflow -- train.py"),
        (["overflow", "--", "-m"], "no module after -m", "mldebug overflow -- train.py"),
        (["overflow", "--check", "never", "--", "t.py"], "argument --check: invalid choice: 'never'", "lists the"),
        (["overflow", "--max-frames", "0", "--", "t.py"], "argument --max-frames: '0' is not a whole number", "lists"),
        (["overflow", "--trace-batch-nums", "1,x", "--", "t.py"], "argument --trace-batch-nums: 'x' is not", "lists"),
        (["overflow", "-o", "no/where/f.jsonl", "--", __file__], "--output no/where/f.jsonl: there is no", "mkdir -p"),
        (["overflow", "--plot", "no/where/f.png", "--", __file__], "--plot no/where/f.png: there is no", "mkdir -p"),
        (["overflow", "-o", "/", "--", __file__], "--output /: this is a folder", "name a file in it"),
        (["demo", "-o", "no/where/r.json"], "--output no/where/r.json: there is no", "mkdir -p"),
        (["overflow", "-m", "pkg"], "unrecognized arguments: -m", "goes after `--`: mldebug overflow -- -m"),
        (["help", "overflaw"], "no command named 'overflaw'", "did you mean `mldebug overflow`?"),
    ],
)
def test_wrong_usage_is_two_lines_and_status_2(capsys, argv, message, hint) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 2
    assert lines[0].startswith(f"mldebug: {message}")
    assert lines[1].startswith("hint: ") and hint in lines[1]


def test_an_error_is_a_document_under_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overflow", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["error"]["message"] == "no script to run"
    assert "overflow -- train.py" in document["error"]["hint"]


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch):
    """A command named `fail` that raises what it is given."""

    def install(exc: BaseException) -> None:
        def run(_args: object) -> int:
            raise exc

        module = ModuleType("failing_command")
        from mldebug.cli._parser import Parser

        module.__dict__.update(PARSER=Parser, EPILOG="", add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(COMMANDS, "fail", ("failing_command", "trouble", "fails"))

    return install


def test_our_errors_have_status_1_and_others_are_not_hidden(failing_command, capsys) -> None:
    failing_command(MldebugError("cannot read it", "try as root"))
    assert main(["fail"]) == 1
    assert capsys.readouterr().err == "mldebug: cannot read it\nhint: try as root\n"
    failing_command(ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


def test_ctrl_c_is_status_130(failing_command, capsys) -> None:
    failing_command(KeyboardInterrupt())
    assert main(["fail"]) == 130
    assert capsys.readouterr().err == "mldebug: interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m mldebug --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert done.stdout in ("0\n", "1\n")


def test_command_names_and_options_take_underscores(room, script, capsys) -> None:
    path = script("")
    assert (
        main(["overflow", "--max_frames", "3", "--on_event=warn", "--no_color", "--", path, "--max_frames", "9"]) == 0
    )
    [(argv, module, options)] = room.calls
    assert argv == [path, "--max_frames", "9"]
    assert module is False
    assert (options["max_frames_to_save"], options["on_event"]) == (3, "warn")


FULL = "no space left on device"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--help >/dev/full", FULL),
        ("--version >/dev/full", FULL),
        ("overflow --help >/dev/full", FULL),
        ("overflow -- ok.py >/dev/full", FULL),  # what the script printed
        ("overflow --json -- ok.py >/dev/full", FULL),
        ("overflow --json -- missing.py >/dev/full", ""),
        ("--help >&-", "it is closed"),
        ("overflow --json -- ok.py >&-", "stdout is closed"),
    ],
)
def test_a_stdout_that_takes_nothing_is_told_without_traceback(command, script, tmp_path, words, reason) -> None:
    script("print('ok')", "ok.py")
    script(command, "command.py")
    root = os.path.dirname(os.path.dirname(mldebug.__file__))
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": ""}  # else the script's print fails by itself
    done = subprocess.run(
        f"{sys.executable} command.py {words}",
        shell=True,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith(("mldebug: ", "hint: "))]
    assert len(lines) == 2
    assert lines[0].startswith(f"mldebug: cannot write the output: {reason}" if reason else "mldebug: cannot run")
    assert done.returncode == (1 if reason else 2)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


LIGHT = ("trace -o traces", "printflock --no-prefix", "numa", "watch", "emulate --plain --nodes 1 --no-prefix")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("scopes", "ending", "unbuffered", "status"),
    [
        (("overflow", "compare --record run", "memory", *LIGHT), "2>/dev/full", "", 7),
        (LIGHT, "2>/dev/full", "1", 0),
        (LIGHT, "2>&-", "", 0),
    ],
)
def test_a_stderr_that_takes_nothing_leaves_the_program_its_status(
    script, tmp_path, monkeypatch, scopes, ending, unbuffered, status
) -> None:
    """The report is lost, as there is nowhere to say it; the program runs to its end all the same."""
    monkeypatch.chdir(tmp_path)
    program = script(f"print('ran'); raise SystemExit({status})", "ends.py")
    for scope in scopes:
        runs = f"{sys.executable} {program}" if scope.startswith(("watch", "emulate")) else program
        done = shell(f"{scope} -- {runs} {ending}", unbuffered)
        assert (scope, done.returncode, done.stdout) == (scope, status, "ran\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_stdout_to_which_nothing_is_written_is_no_trouble() -> None:
    done = shell("watch -- true >/dev/full", unbuffered="1")
    assert (done.returncode, done.stderr) == (0, "")


def shell(words: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    root = os.path.dirname(os.path.dirname(mldebug.__file__))
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": unbuffered}
    command = f"{sys.executable} -m mldebug {words}"
    return subprocess.run(command, check=False, shell=True, env=environment, capture_output=True, text=True)


HELPS = [[], *([*name.split(), "--help"] for name in (*COMMANDS, "tiny-dataset pack", "tiny-dataset unpack"))]


@pytest.mark.parametrize("argv", HELPS, ids=" ".join)
def test_help_fits_80_columns(argv, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_of_a_command_shows_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "overflow"]) == 0
    out = capsys.readouterr().out
    assert main(["overflow", "--help"]) == 0
    assert capsys.readouterr().out == out
    assert main(["overflow", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mldebug overflow [options] -- train.py [its arguments]\n")
    assert "--max-frames" in out
    assert "--max_frames" not in out
