"""`mldebug trace`, and the classic script: their options, output and exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

PROGRAM = """
    import atexit, sys
    def f(x):
        return x + 1
    class Last:
        def __del__(self):
            gone = 1
    keep = Last()
    @atexit.register
    def leaving():
        at_exit = 2
    print(f(1), sys.argv[1:], __name__)
    print("to stderr", file=sys.stderr)
    sys.exit(7)
"""


def trace(run_python: Run, tmp_path: Path, *words: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "mldebug", "trace", "-o", str(tmp_path / "out"), *words, **kwargs)


def texts(tmp_path: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((tmp_path / "out").glob("trace-*.txt")))


def test_output_and_status_are_the_scripts_own(run_python: Run, script: Script, tmp_path: Path) -> None:
    path = script(PROGRAM)
    plain = run_python(Path(path), "--lr", "1")
    done = trace(run_python, tmp_path, "-q", "--", path, "--lr", "1")
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    text = texts(tmp_path)
    assert "train.py:     4:     return x + 1" in text
    assert "at_exit = 2" in text and "gone = 1" in text and "# mldebug trace end" in text


def test_the_file_that_pip_makes_is_no_frame_of_the_program(run_python: Run, script: Script, tmp_path: Path) -> None:
    path = script("""
        def f(x):
            return x + 1
        f(1)
    """)
    command = tmp_path / "mldebug"
    command.write_text("import sys\nfrom mldebug.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    words = ["trace", "-q", "-o", tmp_path / "out", "--depth", "1", "--returns", "--exceptions", "--", path]
    assert run_python(command, *words).returncode == 0
    text = texts(tmp_path)
    assert "train.py:     4: f(1)" in text and "return x + 1" not in text and f"{command}:" not in text


def test_one_line_on_stderr_says_where(run_python: Run, script: Script, tmp_path: Path) -> None:
    done = trace(run_python, tmp_path, "--", script("x = 1"))
    [path] = (tmp_path / "out").glob("trace-*.txt")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"mldebug: the trace is in {path}\n")


def test_json_is_one_document(run_python: Run, script: Script, tmp_path: Path) -> None:
    done = trace(run_python, tmp_path, "--json", "-q", "--", script("print('mine'); raise SystemExit(3)"))
    document = json.loads(done.stdout)
    assert (done.returncode, document["status"], document["ok"], document["schema"]) == (3, 3, False, 1)
    assert Path(document["path"]).exists() and done.stderr == "mine\n"


def test_a_traceback_is_as_without(run_python: Run, script: Script, tmp_path: Path) -> None:
    path = script("def f():\n    raise ValueError('bad')\nf()")
    plain, done = run_python(Path(path)), trace(run_python, tmp_path, "-q", "--", path)
    assert (done.returncode, done.stderr) == (1, plain.stderr)


def test_a_module_and_options(run_python: Run, script: Script, tmp_path: Path) -> None:
    script("import json\ndef f(x):\n    return x\nf([1])\njson.dumps({}, indent=1)", "thing.py")
    words = [
        "--args",
        "--returns",
        "--calls_only",
        "--include",
        "thing.py",
        "--include",
        "json",
        "-q",
        "--",
        "-m",
        "thing",
    ]
    done = trace(run_python, tmp_path, *words, cwd=tmp_path)
    text = texts(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "thing.py:2 f(x=[1])" in text and "thing.py:     3: f <- [1]" in text and "json.encoder:" in text


def test_a_ring_is_read_by_trace_tail(run_python: Run, script: Script, tmp_path: Path) -> None:
    done = trace(run_python, tmp_path, "--ring", "1MB", "-q", "--", script("import os\nx = 1\nos._exit(4)"))
    assert done.returncode == 4 and len(list((tmp_path / "out").glob("trace-*.ring"))) == 1
    tail = run_python("-m", "mldebug", "trace-tail", str(tmp_path / "out"))
    assert "os._exit(4)" in tail.stdout


def test_two_ranks_under_torchrun(run_python: Run, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = script("import os\nrank = os.environ['RANK']\nprint('rank', rank)")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mldebug", "trace", "-q", "-o"]
    done = run_python(*launch, str(tmp_path / "out"), "--", path, env={"OMP_NUM_THREADS": "1"}, timeout=110)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert (
        len(list((tmp_path / "out").glob("trace-*-0-*.txt")))
        == len(list((tmp_path / "out").glob("trace-*-1-*.txt")))
        == 1
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start-at", "train:fo"], "the trace is empty: train:fo was not called"),
        (["--include", "tran.py"], "the trace is empty: nothing that ran matches tran.py"),
        (["--include", "user", "--include", "jsn"], "nothing that ran matches --include jsn"),
        (["--exclude", "user"], "the trace is empty: all that ran is excluded"),
        (["--after", "1h"], "the trace is empty: the program ended before that time"),
    ],
)
def test_what_matches_nothing_is_said(
    run_python: Run, script: Script, tmp_path: Path, words: list[str], message: str
) -> None:
    done = trace(run_python, tmp_path, *words, "-q", "--", script("def foo(): pass\nfoo()"))
    assert (done.returncode, done.stderr) == (0, f"mldebug: {message}\n")


@pytest.mark.parametrize("pattern", ["train:foo", "train.py:foo", ":foo", "user:foo", "__main__:foo"])
def test_the_script_has_its_own_name_too(run_python: Run, script: Script, tmp_path: Path, pattern: str) -> None:
    path = script("def bar(): pass\ndef foo(): pass\nbar()\nfoo()")
    for words in (["--start-at", pattern], ["--include", pattern]):
        done = trace(run_python, tmp_path, *words, "--calls-only", "-q", "--", path)
        assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"train.py:\d+ (\S+)", texts(tmp_path)) == ["foo", "foo"]


def test_torch_compile_compiles_the_same_and_not_the_tracer(run_python: Run, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = script(
        """
        import torch, torch._dynamo.testing
        def f(x, y):
            z = x + y
            torch._dynamo.graph_break()
            return z.relu()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        counter = torch._dynamo.testing.CompileCounter()
        for function, values in ((f, (torch.ones(4), torch.ones(4))), (model, (torch.ones(2, 4),))):
            compiled = torch.compile(function, backend=counter)
            for _ in range(3):
                print(compiled(*values).shape, counter.frame_count, counter.op_count)
        print(dict(torch._dynamo.utils.counters["frames"]), torch._dynamo.explain(f)(*[torch.ones(4)] * 2).graph_count)
        """
    )
    plain = run_python(Path(path))
    done = trace(run_python, tmp_path, "-q", "--args", "--returns", "--", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, plain.stderr)
    assert plain.stdout and " f(x=Tensor(float32, [4], cpu)" in texts(tmp_path)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals here")
def test_the_signal_by_default(run_python: Run, script: Script, tmp_path: Path) -> None:
    path = script("import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 7)\nhidden = 1")
    assert trace(run_python, tmp_path, "-q", "--", path).returncode == 0
    assert "hidden = 1" not in texts(tmp_path)
    done = trace(run_python, tmp_path, "-q", "--signal", "none", "--", path)
    assert done.returncode == -(signal.SIGRTMIN + 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ring", "much", "--", "x.py"], "is not a size such as 64MB"),
        (["--after", "soon", "--", "x.py"], "is not a time such as 30m"),
        (["--signal", "SIGNONE", "--", "x.py"], "signal is 'SIGNONE'"),
        (["--start-at", "main", "--", "x.py"], "names no function"),
        (["--depth", "0", "--", "x.py"], "--depth"),
        ([], "no script to run"),
        (["--", "trian.py"], "cannot run trian.py"),
    ],
)
def test_wrong_usage(run_python: Run, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "x.py").touch()
    done = trace(run_python, tmp_path, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


# The options that the classic script documents, under its name.

CLASSIC = """
import sys
sys.path.insert(0, {tools!r})
from NicerTrace import NicerTrace, Tee
import json
def f(x):
    return json.dumps(x, indent=1)
def main(x=1):
    return f(x)
{code}
"""


def classic(run_python: Run, tmp_path: Path, code: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(CLASSIC.format(tools=str(ROOT / "tools"), code=code))
    done = run_python(path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_runs_as_it_did(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCAL_RANK")}
    command = [sys.executable, str(ROOT / "tools" / "NicerTrace.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    [path] = tmp_path.glob("trace-*-0-*.txt")
    assert path.read_text() == done.stdout
    assert re.search(r"^        \S+NicerTrace.py:\d+ main$", done.stdout, re.M)
    assert re.search(r"^0:00:0\d NicerTrace.py: +\d+: +time.sleep\(1\)$", done.stdout, re.M)
    assert len((ROOT / "tools" / "NicerTrace.py").read_text().splitlines()) <= 60


def test_trace_timing_run_runfunc_runctx(run_python: Run, tmp_path: Path) -> None:
    text = classic(run_python, tmp_path, "NicerTrace(trace=1, count=0, timing=True).run('main()')")
    assert re.search(r"^0:00:00 mine.py: +\d+:     return f\(x\)$", text, re.M)
    text = classic(run_python, tmp_path, "print('got', NicerTrace(trace=1, count=0).runfunc(main, x=2))")
    assert re.search(r"^mine.py: +\d+:     return f\(x\)$", text, re.M) and text.endswith("got 2\n")
    text = classic(run_python, tmp_path, "NicerTrace(1, 1).runctx('g(3)', {'g': main}, {})")
    assert " main\n" in text
    assert classic(run_python, tmp_path, "NicerTrace(trace=0).run('main()')") == ""


def test_count_and_results(run_python: Run, tmp_path: Path) -> None:
    code = "t = NicerTrace(trace=0, count=1)\nt.run('main()\\nmain()')\nprint(t.results().counts[__file__, 7])"
    assert classic(run_python, tmp_path, code) == "2\n"
    code = "t = NicerTrace(trace=0, count=0)\nt.run('main()')\nprint(t.results().counts)"
    assert classic(run_python, tmp_path, code) == "{}\n"


@pytest.mark.parametrize(
    ("options", "json_too", "mine_too"),
    [
        ("", False, True),
        ("packages_to_include=None", False, True),
        ("packages_to_include='uninstalled'", False, True),
        ("packages_to_include=['json']", True, True),
        ("packages_to_include=['PIL', 'numpy']", False, True),
        ("ignoredirs=['/nonexistent']", True, True),
        ("ignoredirs=[__file__.rpartition('/')[0]]", True, False),
        ("ignoredirs=[json.__file__.rpartition('/')[0]]", False, True),
        ("ignoredirs=['/nonexistent', json.__file__.rpartition('/')[0]]", False, True),
        ("ignoredirs=['/nonexistent'], ignoremods=['json']", False, True),
        ("packages_to_include=['json'], ignoremods=['encoder']", True, True),
    ],
)
def test_what_is_included(run_python: Run, tmp_path: Path, options: str, json_too: bool, mine_too: bool) -> None:
    text = classic(run_python, tmp_path, f"NicerTrace(trace=1, count=0, {options}).run('main()')")
    assert ("        json.__init__:" in text, " main\n" in text) == (json_too, mine_too)
    assert "json.encoder" not in text or (json_too and "encoder" not in options)


def test_log_pids_and_tee(run_python: Run, tmp_path: Path) -> None:
    code = (
        "import os\nsys.stdout = Tee('copy.txt')\nprint(os.getpid())\nNicerTrace(count=0, log_pids=True).run('main()')"
    )
    text = classic(run_python, tmp_path, code)
    pid, *lines = text.splitlines()
    assert lines and all(line.startswith(f"{pid} ") for line in lines)
    assert f"{pid} mine.py:     9:     return f(x)" in lines
    assert (tmp_path / "copy.txt").read_text() == text
