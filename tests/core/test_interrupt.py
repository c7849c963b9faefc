"""Ctrl-C while a package is imported that loses a KeyboardInterrupt, as torch, numpy and transformers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.script import print_traceback

# What `import loses` does: it says that it runs, and goes on whatever is raised in it, until the file `go` is there.
LOSES = """
import os, time
try:
    print("importing", flush=True)
    time.sleep(3600)
except BaseException as exc:
    print("lost", type(exc).__name__, flush=True)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
print("imported", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts Python where there is a module `loses`; with its stdout and stderr as text."""
    begun = []

    def run(*words: str, package: str = "loses") -> subprocess.Popen[str]:
        (tmp_path / f"{package}.py").write_text(LOSES)
        env = {**os.environ, "GO": str(tmp_path / "go"), "PYTHONPATH": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
        )
        begun.append(process)
        return process

    yield run
    for process in begun:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)


def test_a_command_ends_at_once_and_removes_its_temporary_folder(start, tmp_path: Path) -> None:
    program = """
        import tempfile
        from mldebug.core.interrupt import Interrupts
        with Interrupts("tool"), tempfile.TemporaryDirectory(dir=".", prefix="scratch"):
            import loses
    """
    process = start("-c", textwrap.dedent(program))
    interrupt(process)
    assert process.communicate(timeout=60) == ("", "tool: interrupted\n")
    assert process.returncode == 130
    assert not list(tmp_path.glob("scratch*"))


def test_children_are_not_left_behind(start, tmp_path: Path) -> None:
    program = """
        import subprocess
        from mldebug.core.interrupt import Interrupts
        with Interrupts("tool"):
            child = subprocess.Popen(["sleep", "3600"])
            try:
                import loses
            finally:
                child.kill()
                print("ended", child.wait())
    """
    process = start("-c", textwrap.dedent(program))
    interrupt(process)
    assert process.stdout.readline() == "lost KeyboardInterrupt\n"  # it was raised
    (tmp_path / "go").touch()
    assert process.communicate(timeout=60)[0] == "imported\nended -9\n"


def test_a_script_has_what_python_alone_gives_it(start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import _signal, signal\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler is _signal.default_int_handler)\n"
    )
    process = start("-m", "mldebug", "numa", "-q", "--", "train.py")
    assert process.communicate(timeout=60)[0] == "True\n"


def test_afterwards_it_is_ours_again(start) -> None:
    program = """
        import signal
        from mldebug.core.interrupt import Interrupts, PythonsOwn
        handlers = [signal.getsignal(signal.SIGINT)]
        with Interrupts("tool"):
            handlers.append(signal.getsignal(signal.SIGINT))
            with PythonsOwn():
                handlers.append(signal.getsignal(signal.SIGINT))
            handlers.append(signal.getsignal(signal.SIGINT))
        handlers.append(signal.getsignal(signal.SIGINT))
        print([one is signal.default_int_handler for one in handlers])
    """
    process = start("-c", textwrap.dedent(program))
    assert process.communicate(timeout=60)[0] == "[True, False, True, False, True]\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio has a way of its own since 3.11")
def test_asyncio_cancels_its_task_as_under_python_alone(start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import asyncio
        async def main():
            try:
                print("importing", flush=True)
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                raise
        asyncio.run(main())
        """)
    )
    process = start("-m", "mldebug", "numa", "-q", "--", "train.py")
    interrupt(process)
    said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("cancelled\n", 130)


def test_the_traceback_of_a_script_has_no_frame_of_ours(start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    )
    process = start("-m", "mldebug", "numa", "-q", "--", "train.py")
    interrupt(process)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.startswith("Traceback") and error.rstrip().endswith("KeyboardInterrupt")
    assert "mldebug" not in error.replace(str(tmp_path), "")


def test_what_looks_at_a_line_is_no_part_of_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    ours: dict[str, Any] = {"__name__": "mldebug.looks"}
    exec("def look(future):\n    future.result()", ours)
    future: Future[None] = Future()
    future.set_exception(KeyboardInterrupt())
    try:
        ours["look"](future)  # the script's line
    except KeyboardInterrupt as exc:
        print_traceback(exc)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert len(shown) == 1 and __file__ in shown[0]


@pytest.mark.parametrize(
    "words",
    [
        ["mamf"],
        ["demo"],
        ["tiny-model", "llama", "-o", "tiny"],
        ["overflow", "--", "train.py"],
        ["compare", "--record", "record", "--", "train.py"],
    ],
)
def test_commands_end_while_torch_loads(start, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "train.py").write_text("print('begun')\n")
    process = start("-m", "mldebug", *words, package="torch")
    interrupt(process)
    assert process.communicate(timeout=60) == ("", "mldebug: interrupted\n")
    assert process.returncode == 130
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"train.py", "torch.py", "__pycache__", "record"}


def test_what_looks_after_workers_can_be_ended_while_torch_loads(start, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    program = """
        import signal
        from mldebug.cluster.pairs._node import Node
        def load():
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
            raise RuntimeError
        node = Node({"local": [], "nproc": 1, "host": "a", "job": "j", "rank": None})
        node._connect = lambda: None
        node.say = lambda message: None
        node.load, node._fork, node._look_after = load, lambda local: None, lambda: None
        node.run()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    """
    process = start("-c", textwrap.dedent(program))
    said, error = process.communicate(timeout=60)
    assert said == "True\nFalse\n", error
