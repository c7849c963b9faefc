from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.cli import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OVERFLOW = "import sys; sys.modules['mldebug.numerics'].overflow()"


def test_the_options_reach_the_recorder(room, script, tmp_path: Path) -> None:
    path, frames = script(""), str(tmp_path / "frames.jsonl")
    words = "--include enc.* --include dec.* --exclude *.dropout --max-frames 5 --trace-batch-nums 1,3"
    words += f" --abort-after-batch-num 0 --check each --on-event skip -o {frames} -- {path} --json -o x"
    assert main(["overflow", *words.split()]) == 0
    [(argv, module, options)] = room.calls
    assert callable(options.pop("last_word"))
    assert (argv, module) == ([path, "--json", "-o", "x"], False)
    assert options == {
        "include": ["enc.*", "dec.*"],
        "exclude": ["*.dropout"],
        "max_frames_to_save": 5,
        "trace_batch_nums": (1, 3),
        "abort_after_batch_num": 0,
        "check": "each",
        "on_event": "skip",
        "output": frames,
        "backward": False,
        "dump_dir": None,
    }


def test_the_defaults_are_the_recorders(room, script) -> None:
    main(["overflow", "--", script("")])
    [(_argv, _module, options)] = room.calls
    assert callable(options.pop("last_word"))
    assert options == {
        "include": [],
        "exclude": [],
        "max_frames_to_save": 21,
        "trace_batch_nums": (),
        "abort_after_batch_num": None,
        "check": "step",
        "on_event": "raise",
        "output": None,
        "backward": False,
        "dump_dir": None,
    }


def test_ways_to_name_the_script(room, script, tmp_path, monkeypatch) -> None:
    path = script("")
    monkeypatch.chdir(tmp_path)
    for words in (["--", path, "a", "--", "b"], [path, "a", "--", "b"], ["--", "-m", "train", "a", "--", "b"]):
        assert main(["overflow", *words]) == 0
    assert [(argv[1:], module) for argv, module, _options in room.calls] == [
        (["a", "--", "b"], False),
        (["a", "--", "b"], False),
        (["a", "--", "b"], True),
    ]


def test_the_report_goes_to_stderr_and_stdout_is_the_scripts(run_python: Run, command: str, script) -> None:
    done = run_python(command, "overflow", "--", script("print('loss 1.0')"))
    assert (done.returncode, done.stdout) == (0, "loss 1.0\n")
    assert done.stderr == "ok     true\nevent  null\n"
    done = run_python(command, "overflow", "-q", "--", script("print('loss 1.0')"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "loss 1.0\n", "")


def test_a_stop_by_the_recorder_is_status_1_without_traceback(run_python: Run, command: str, script) -> None:
    done = run_python(command, "overflow", "-q", "--", script(OVERFLOW))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ok     false\nevent  inf in layer.3\n"


@pytest.mark.parametrize("status", [0, 5])
def test_the_scripts_own_status_passes_through(run_python: Run, command: str, script, status: int) -> None:
    path = script(f"import sys; sys.exit({status})")
    assert run_python(command, "overflow", "--", path).returncode == status
    # Where something was seen, and the script did not stop for it, it is never 0.
    done = run_python(command, "overflow", "--", path, "--event")
    assert done.returncode == (status or 1)
    assert "event  seen" in done.stderr


def test_a_stop_after_a_batch_is_status_1_and_says_so(run_python: Run, command: str, script) -> None:
    path = script("import sys; sys.modules['mldebug.numerics'].abort()")
    done = run_python(command, "overflow", "--abort-after-batch-num", "1", "--", path)
    assert done.returncode == 1
    assert done.stderr == (
        "mldebug: stopped after batch 1, as --abort-after-batch-num asks\nok     true\nevent  null\n"
    )


def test_paths_are_those_of_the_folder_where_it_was_started(run_python: Run, command: str, script, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "elsewhere").mkdir()
    path = script("import os; os.chdir('elsewhere')")
    done = run_python(command, "overflow", "--plot", "a.png", "--", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


OVERFLOWS = """
import sys, torch
model = torch.nn.Linear(1, 1).half()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(600)
model(torch.full((1, 1), 600.0, dtype=torch.float16))
print("script")
if "exit" in sys.argv:
    sys.exit(0)
"""


@pytest.mark.parametrize("words", [[], ["exit"]])
def test_the_real_report_is_given_once(run_torch: Run, script, words: list[str]) -> None:
    pytest.importorskip("torch")
    path = script(OVERFLOWS)
    done = run_torch("-m", "mldebug", "overflow", "--", path, *words)
    assert (done.returncode, done.stdout) == (1, "script\n"), done.stderr
    assert done.stderr.count("Detected inf/nan") == 1
    assert done.stderr.count("Traceback") == 0
    done = run_torch("-m", "mldebug", "overflow", "--json", "--", path, *words)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["event"]["kind"] == "inf"
    assert done.stdout.count("\n") == 1
    assert "Detected" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_programs_can_be_interrupted_where_the_tests_run_in_the_background(run_python: Run) -> None:
    """`nohup make test &` ignores Ctrl-C; the programs that tests start must not inherit that."""
    conftest = Path(__file__).parents[1] / "conftest.py"
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    program = f"""
import runpy, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
runpy.run_path({str(conftest)!r})
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    assert run_python(program).stdout == "True\n"


FAILS = "def train():\n    raise ValueError('my own')\ntrain()\n"


def test_a_script_that_fails_by_itself_shows_its_own_traceback(run_python: Run, command: str, script) -> None:
    path = script(FAILS)
    bare = run_python(Path(path))
    done = run_python(command, "overflow", "--", path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", bare.stderr)
    done = run_python(command, "overflow", "--", path, "--event")
    assert done.stderr == bare.stderr + "ok     false\nevent  seen\n"


def test_a_syntax_error_reads_as_always(run_python: Run, command: str, script) -> None:
    path = script("x = = 1\n")
    done = run_python(command, "overflow", "--", path)
    assert (done.returncode, done.stderr) == (1, run_python(Path(path)).stderr)


def test_the_scripts_excepthook_is_used(run_python: Run, command: str, script) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, exc, tb: print('hook saw', exc, file=sys.stderr)\n"
    done = run_python(command, "overflow", "--", script(hook + FAILS))
    assert (done.returncode, done.stderr) == (1, "hook saw my own\n")


def test_an_error_of_ours_that_the_script_raises_keeps_its_traceback(run_python: Run, command: str, script) -> None:
    path = script("from mldebug import MldebugError\nraise MldebugError('what', 'do this')\n")
    done = run_python(command, "overflow", "--", path)
    assert done.returncode == 1
    assert done.stderr == run_python(Path(path)).stderr
    assert done.stderr.startswith("Traceback")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_script_that_is_not_there_is_status_2(run_python: Run, command: str, tmp_path, as_json: bool) -> None:
    done = run_python(command, "overflow", *["--json"] * as_json, "--", "missing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mldebug: cannot run missing.py: no such file or directory\nhint: ")
    assert len(done.stderr.splitlines()) == 2
    if as_json:
        assert json.loads(done.stdout)["error"]["message"] == "cannot run missing.py: no such file or directory"


LOUD = """
import atexit, os, subprocess, sys
print("from print")
os.write(1, b"from the descriptor\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
print("from __stdout__", file=sys.__stdout__)
atexit.register(print, "from atexit")
"""


@pytest.mark.parametrize(
    ("end", "status", "event"),
    [
        ("", 0, None),
        ("sys.exit(4)", 4, None),
        ("raise ValueError('own')", 1, None),
        (OVERFLOW, 1, "inf in layer.3"),
        ("os.kill(os.getpid(), 2)", 130, None),
    ],
)
def test_json_is_all_that_stdout_has(run_python: Run, command: str, script, end, status, event) -> None:
    done = run_python(command, "overflow", "--json", "--", script(LOUD + end))
    assert done.returncode == status, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == {"schema": 1, "ok": event is None, "event": event}
    for line in ("from print", "from the descriptor", "from a child", "from __stdout__", "from atexit"):
        assert line in done.stderr


def test_json_inside_a_process_leaves_stdout_as_it_was(room, script, capfd: pytest.CaptureFixture[str]) -> None:
    import sys

    before = sys.stdout
    assert main(["overflow", "--json", "--", script("import os; os.write(1, b'script\\n')")]) == 0
    assert sys.stdout is before
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(['{"schema": 1, "ok": true, "event": null}', "after"])
    assert "script\n" in err


def test_ctrl_c_ends_with_the_report(command: str, script) -> None:
    import sys

    path = script("import time; print('begun', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", command, "overflow", "--", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "mldebug: interrupted\nok     true\nevent  null\n"


def test_plot(room, script, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert main(["overflow", "--plot", str(tmp_path / "a.png"), "--", script("")]) == 0
    assert (tmp_path / "a.png").read_text() == "png"
    # A plot that fails costs neither the report nor its clarity.
    assert main(["overflow", "--plot", str(tmp_path / "refuse.png"), "--", script("")]) == 1
    err = capsys.readouterr().err
    assert "ok     true" in err
    assert "mldebug: cannot draw" in err and "not in the mood\nhint: try later" in err


def test_plot_without_matplotlib_is_told_before_the_run(room, script, monkeypatch, capsys) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["overflow", "--plot", "a.png", "--", script("")]) == 2
    assert room.calls == []
    assert "[plot]'" in capsys.readouterr().err
