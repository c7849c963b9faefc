from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.core.errors import UsageError
from mldebug.core.script import exit_status, run_script, script_traceback

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# How these tests start a script in a fresh process, as a command would.
RUN = "import sys; from mldebug.core.script import run_script; run_script(sys.argv[1:])"
RUN_MODULE = "import sys; from mldebug.core.script import run_script; run_script(sys.argv[1:], module=True)"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


SHOW = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "same": main.__dict__ is globals(),
    "builtins": type(__builtins__).__name__, "doc": __doc__, "rest": [p for p in sys.path[1:] if p == os.getcwd()],
}))
"""


def test_a_script_sees_what_python_shows_it(run_python: Run, script, tmp_path: Path) -> None:
    path = script('"""The doc."""' + SHOW)
    bare = run_python(path, "--lr", "1", "--", "x", cwd=tmp_path.parent)
    ours = run_python(RUN, path, "--lr", "1", "--", "x", cwd=tmp_path.parent)
    assert ours.stdout == bare.stdout, ours.stderr
    assert '"argv": ["' + str(path) + '", "--lr", "1", "--", "x"]' in ours.stdout


def test_a_relative_script_through_a_link_too(run_python: Run, script, tmp_path: Path) -> None:
    script(SHOW, "real/train.py")
    (tmp_path / "link.py").symlink_to("real/train.py")
    bare = run_python(Path("link.py"), cwd=tmp_path)
    ours = run_python(RUN, "link.py", cwd=tmp_path)
    assert ours.stdout == bare.stdout, ours.stderr


def test_a_module_sees_what_python_shows_it(run_python: Run, script, tmp_path: Path) -> None:
    script("", "project/__init__.py")
    script(SHOW, "project/train.py")
    script(SHOW, "project/__main__.py")
    for name in ("project.train", "project"):
        bare = run_python("-m", name, "--lr", "1", cwd=tmp_path)
        ours = run_python(RUN_MODULE, name, "--lr", "1", cwd=tmp_path)
        assert ours.stdout == bare.stdout, ours.stderr
        assert '"same": true' in ours.stdout


def test_relative_imports_of_a_module_work(run_python: Run, script, tmp_path: Path) -> None:
    script("", "project/__init__.py")
    script("VALUE = 7", "project/config.py")
    script("from .config import VALUE; print(VALUE)", "project/train.py")
    assert run_python(RUN_MODULE, "project.train", cwd=tmp_path).stdout == "7\n"


def test_a_folder_and_a_zip_with_a_main(run_python: Run, script, tmp_path: Path) -> None:
    script(SHOW, "app/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    for name in ("app", "app.zip"):
        bare, ours = run_python(Path(name), cwd=tmp_path), run_python(RUN, name, cwd=tmp_path)
        assert ours.stdout == bare.stdout.replace('"app/', f'"{tmp_path}/app/').replace(
            f'"{name}/', f'"{tmp_path}/{name}/'
        ).replace(f'"path0": "{name}"', f'"path0": "{tmp_path / name}"'), ours.stderr
        assert '"same": true' in ours.stdout


def test_classes_of_the_script_can_be_pickled(run_python: Run, script) -> None:
    path = script("""
        import copy, pickle
        class Config:
            x = 1
        def function(): pass
        assert Config.__module__ == "__main__"
        assert type(pickle.loads(pickle.dumps(Config()))) is Config
        assert pickle.loads(pickle.dumps(function)) is function
        print("pickled")
    """)
    assert run_python(RUN, path).stdout == "pickled\n"


SPAWN = """
import multiprocessing, os, sys
class Item:
    pass
def work(item, queue):
    queue.put((type(item).__name__, type(item).__module__, __name__, sys.argv[1:]))
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=work, args=(Item(), queue))
    child.start()
    print(*queue.get(timeout=50))
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("module", [False, True])
def test_the_script_can_start_processes(run_python: Run, script, tmp_path: Path, method: str, module: bool) -> None:
    path = script(SPAWN)
    what = (RUN_MODULE, "train") if module else (RUN, path)
    done = run_python(*what, method, cwd=tmp_path)
    assert done.stdout == f"Item __mp_main__ __mp_main__ ['{method}']\n0\n", done.stderr


@pytest.mark.parametrize(
    ("text", "status", "stderr"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('bad luck')", 1, "bad luck\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_the_exit_status_is_the_scripts(run_python: Run, script, text: str, status: int, stderr: str) -> None:
    done = run_python(RUN, script(text))
    assert (done.returncode, done.stderr) == (status, stderr)


@pytest.mark.parametrize(
    ("code", "status", "text"), [(None, 0, ""), (0, 0, ""), (3, 3, ""), ("bad", 1, "bad\n"), ((1, 2), 1, "(1, 2)\n")]
)
def test_exit_status(code: object, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(SystemExit(code)) == status
    assert capsys.readouterr().err == text


def test_everything_is_put_back(script, tmp_path: Path) -> None:
    before = sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"]
    for text in ("", "raise ValueError", "import sys; sys.exit(3)", "import sys; sys.path.append('x'); sys.argv = []"):
        with contextlib.suppress(ValueError, SystemExit):
            run_script([str(script(text))])
        assert (sys.argv, list(sys.argv), sys.path, list(sys.path), sys.modules["__main__"]) == before
        assert sys.argv is before[0] and sys.path is before[2]


def test_the_traceback_begins_in_the_script(script) -> None:
    path = script("""
        def train():
            raise ValueError("from the script")
        train()
    """)
    with pytest.raises(ValueError, match="from the script") as caught:
        run_script([str(path)])
    # This test's own frame is above those of the package where it is called from a function, not from a command.
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    frames = traceback.extract_tb(script_traceback(caught.value))
    assert [(frame.filename, frame.name) for frame in frames] == [(str(path), "<module>"), (str(path), "train")]
    assert frames[1].line == 'raise ValueError("from the script")'


def test_a_syntax_error_has_no_frame(script) -> None:
    path = script("x = = 1")
    with pytest.raises(SyntaxError) as caught:
        run_script([str(path)])
    assert caught.value.filename == str(path)
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert script_traceback(caught.value) is None


def test_future_statements_of_the_package_do_not_reach_the_script(run_python: Run, script) -> None:
    path = script("def f(x: int): pass\nprint(f.__annotations__)")
    assert run_python(RUN, path).stdout == "{'x': <class 'int'>}\n"


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        ([], "no script to run", "name a script"),
        (["missing.py"], "cannot run missing.py: no such file or directory", "the current folder is"),
        (["no.py"], "cannot run no.py: no such file or directory", "the current folder is"),  # only its ending is alike
        (["trian.py"], "cannot run trian.py: no such file or directory", "did you mean train.py?"),
        (["python3", "train.py"], "cannot run python3: no such file", "leave the interpreter out"),
        (["torchrun", "train.py"], "cannot run torchrun: no such file", "torchrun ... -m mldebug COMMAND -- train.py"),
        (["."], "cannot run .: it has no __main__.py", "name the script itself"),
    ],
)
def test_a_script_that_is_not_there(script, tmp_path, monkeypatch, argv, message, hint) -> None:
    script("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        run_script(argv)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("nowhere", "no module of this name", "modules are looked for in"),
        ("nowhere.train", "no module of this name", "modules are looked for in"),
        ("train.py", "named without .py", "say -m train, or train.py alone"),
        ("project", "the package has no __main__.py", "name one of its modules"),
        ("train.sub", "no module of this name", "modules are looked for in"),
        ("math", "it has no Python code", "written in Python"),
    ],
)
def test_a_module_that_is_not_there(script, tmp_path, monkeypatch, name, message, hint) -> None:
    script("")
    script("", "project/__init__.py")
    monkeypatch.chdir(tmp_path)
    for module in ("train", "project", "nowhere"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UsageError) as caught:
        run_script([name], module=True)
    sys.modules.pop("train", None)
    sys.modules.pop("project", None)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_import_that_fails_inside_the_project_is_the_users(run_python: Run, script, tmp_path: Path) -> None:
    script("import not_installed_anywhere", "project/__init__.py")
    script("", "project/train.py")
    done = run_python(RUN_MODULE, "project.train", cwd=tmp_path)
    assert "ModuleNotFoundError: No module named 'not_installed_anywhere'" in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "stderr"),
    [("raise SystemExit(3)", 3, ""), ("pass", 0, ""), ("sys.exit('no')", 1, "no\n"), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_a_process_that_the_script_forks_ends_by_itself(run_python: Run, script, end, status, stderr) -> None:
    path = script(f"""\
        import atexit, os, sys, threading, time
        atexit.register(lambda: print("at exit", flush=True))
        print("before", end="", flush=True)
        if not (pid := os.fork()):
            threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
            print("child")
            {end}
        else:
            print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """)
    done = run_python("-c", RUN + "; print('back')", path)
    assert done.returncode == 0
    assert done.stdout == f"beforechild\nthread\nat exit\nstatus {status}\nback\nat exit\n"
    assert stderr in done.stderr and "mldebug" not in done.stderr
