"""LockedOutput: what it replaces, what it leaves alone, and that everything comes back."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.ranks import LockedOutput, printflock
from mldebug.ranks._lines_out import LineStream

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("test_output")
    logging.root.manager.loggerDict["test_output"] = logger
    yield logger
    for handler in logger.handlers:
        handler.close()
    del logging.root.manager.loggerDict["test_output"]


def test_print_is_replaced_and_comes_back(capsys: Capture) -> None:
    before = builtins.print
    with LockedOutput(prefix="{rank}:"):
        assert builtins.print is not before
        assert builtins.print.__name__ == "print"
        print("a", "b", sep="-")
        print("to stderr", file=sys.stderr)
    assert builtins.print is before
    print("after")
    assert capsys.readouterr() == ("0: a-b\nafter\n", "0: to stderr\n")


def test_a_decorator(capsys: Capture) -> None:
    @LockedOutput(prefix="{rank}:")
    def work() -> None:
        print("inside")

    work()
    assert capsys.readouterr().out == "0: inside\n"


def test_what_is_printed_elsewhere_is_as_ever(tmp_path: Path, capsys: Capture) -> None:
    text = io.StringIO()
    with LockedOutput(prefix=True, print_ranks=[5], stdout=True), open(tmp_path / "f", "w") as file:
        print("to a file", file=file)
        print("to text", file=text)
        with contextlib.redirect_stdout(text):
            print("redirected")
    assert (tmp_path / "f").read_text() == "to a file\n"
    assert text.getvalue() == "to text\nredirected\n"
    assert capsys.readouterr().out == ""


def test_wrong_arguments_are_those_of_print() -> None:
    with LockedOutput(), pytest.raises(TypeError, match="sep must be None or a string"):
        print("a", sep=3)
    with pytest.raises(UsageError, match="timeout is 0"):
        LockedOutput(timeout=0)
    with pytest.raises(UsageError, match="is no format"):
        LockedOutput(prefix="{nobody}")


def test_lines_are_put_together(capsys: Capture) -> None:
    with LockedOutput(stdout=True, prefix="{rank}:"):
        sys.stdout.write("a")
        sys.stdout.write("b\nc")
        assert sys.stdout.write("d\n\ne") == 4
        print("f")
        sys.stdout.writelines(["g\n", "h"])
    assert capsys.readouterr().out == "0: ab\n0: cd\n0: \n0: ef\n0: g\n0: h"


def test_a_flush_shows_the_part_of_a_line(capsys: Capture) -> None:
    with LockedOutput(stdout=True, prefix="{rank}:"):
        sys.stdout.write("loading ...")
        assert capsys.readouterr().out == ""
        sys.stdout.flush()
        assert capsys.readouterr().out == "0: loading ..."
        sys.stdout.write(" done\nnext\n")
        assert capsys.readouterr().out == " done\n0: next\n"
        print("no newline", end="")
        assert capsys.readouterr().out == "0: no newline"
        print()


def test_threads_do_not_mix_their_parts(capsys: Capture) -> None:
    with LockedOutput(stdout=True):
        sys.stdout.write("main ")
        thread = threading.Thread(target=lambda: sys.stdout.write("thread\n"))
        thread.start()
        thread.join()
        sys.stdout.write("goes on\n")
        thread = threading.Thread(target=lambda: sys.stdout.write("left by a thread"))
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "thread\nmain goes on\nleft by a thread"


def test_a_line_that_never_ends_is_not_kept_for_ever(capsys: Capture) -> None:
    with LockedOutput(stdout=True):
        for _part in range(5):
            sys.stdout.write("x" * 300_000)
        assert len(capsys.readouterr().out) == 1_200_000


def test_progress_bars(capsys: Capture) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    plain, locked = [], []
    for texts, scope in ((plain, contextlib.nullcontext()), (locked, LockedOutput(stdout=True, stderr=True))):
        with scope:
            for _step in tqdm(range(3), bar_format="{n}/{total}", mininterval=0):
                pass
        texts.append(capsys.readouterr().err)
    assert plain == locked
    assert plain[0].count("\r") > 2


def test_the_stream_is_still_itself(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="latin-1", errors="replace") as file:
        before, sys.stdout = sys.stdout, file
        try:
            with LockedOutput(stdout=True):
                stream: Any = sys.stdout
                assert stream is not file
                assert (stream.isatty(), stream.fileno()) == (False, file.fileno())
                assert (stream.encoding, stream.errors, stream.name) == ("latin-1", "replace", file.name)
                assert stream.writable() and not stream.closed
                stream.write("text ")
                stream.buffer.write(b"bytes\n")
                stream.flush()
                stream.reconfigure(line_buffering=True)
                assert file.line_buffering
                subprocess.run([sys.executable, "-c", "print('child')"], stdout=stream, check=True)
                with pytest.raises(TypeError):
                    stream.write(b"bytes")
        finally:
            sys.stdout = before
    assert (tmp_path / "out").read_text() == "text bytes\nchild\n"


def test_logging(logger: logging.Logger, capsys: Capture, tmp_path: Path) -> None:
    init = logging.StreamHandler.__init__
    terminal, file = logging.StreamHandler(sys.stderr), logging.FileHandler(tmp_path / "log")
    text = logging.StreamHandler(io.StringIO())
    streams = [handler.stream for handler in (terminal, file, text)]
    for handler in (terminal, file, text):
        logger.addHandler(handler)
    with LockedOutput(logging=True, prefix="{rank}:"):
        assert [type(handler.stream) for handler in (terminal, file, text)] == [LineStream, LineStream, io.StringIO]
        logger.warning("two\nlines")
        later = logging.StreamHandler(sys.stderr)
        assert type(later.stream) is LineStream
    assert later.stream is sys.stderr
    assert logging.StreamHandler.__init__ is init
    assert [handler.stream for handler in (terminal, file, text)] == streams
    assert capsys.readouterr().err == "0: two\n0: lines\n"
    assert (tmp_path / "log").read_text() == text.stream.getvalue() == "two\nlines\n"


def test_print_ranks_cut_stdout_and_no_traceback(capsys: Capture) -> None:
    with LockedOutput(stdout=True, stderr=True, print_ranks=[1]):
        print("no")
        sys.stdout.write("no\n")
        print("yes", file=sys.stderr)
    assert capsys.readouterr() == ("", "yes\n")


def test_nested_scopes(capsys: Capture) -> None:
    before = (builtins.print, sys.stdout)
    with LockedOutput(stdout=True, prefix="outer"):
        sys.stdout.write("part ")
        sys.stdout.flush()
        with LockedOutput(stdout=True, prefix="inner"):
            print("a")
            sys.stdout.write("b\n")
        with LockedOutput(prefix="print"):
            print("c")
            sys.stdout.write("d\n")
    assert (builtins.print, sys.stdout) == before
    assert capsys.readouterr().out == "outer part a\ninner b\nprint c\nouter d\n"


def test_nested_scopes_of_logging(logger: logging.Logger, capsys: Capture) -> None:
    init, handler = logging.StreamHandler.__init__, logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    first, second = LockedOutput(logging=True, prefix="1"), LockedOutput(logging=True, prefix="2")
    first.__enter__()
    second.__enter__()
    logger.warning("a")
    first.__exit__(None, None, None)
    logger.warning("b")
    second.__exit__(None, None, None)
    assert (logging.StreamHandler.__init__, handler.stream) == (init, sys.stderr)
    assert capsys.readouterr().err == "2 a\n2 b\n"


def test_scopes_that_end_in_the_wrong_order(capsys: Capture) -> None:
    before = (builtins.print, sys.stdout)
    first, second = LockedOutput(stdout=True), LockedOutput(stdout=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    print("still")
    second.__exit__(None, None, None)
    assert (builtins.print, sys.stdout) == before
    assert capsys.readouterr().out == "still\n"


def test_what_somebody_else_has_put_over_it_stays(capsys: Capture) -> None:
    scope = LockedOutput(stdout=True, prefix="{rank}:")
    print_before, before = builtins.print, sys.stdout

    class Tee:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, text: str) -> int:
            return int(self.stream.write(text.upper()))

        def flush(self) -> None:
            self.stream.flush()

    scope.__enter__()
    ours = builtins.print
    tee: Any = Tee(sys.stdout)
    sys.stdout = tee
    builtins.print = lambda *args: ours("their", *args)  # type: ignore[assignment]
    scope.__exit__(None, None, None)
    try:
        assert sys.stdout is tee
        print("print")  # goes through what is left of ours
    finally:
        builtins.print, sys.stdout = print_before, before
    assert capsys.readouterr().out == "THEIR PRINT\n"


def test_printflock_inside(capsys: Capture) -> None:
    with LockedOutput(stdout=True, prefix="{rank}:"):
        sys.stdout.write("part ")
        printflock("whole")
    assert capsys.readouterr().out == "0: part whole\n"


def test_python_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with LockedOutput(stdout=True, stderr=True, logging=True):
        print("nowhere")
    assert sys.stdout is None


# The short lines of other code are on their way by buffered writes; the long ones are printed.
MIXED = """
import sys
from mldebug.ranks import LockedOutput
me = sys.argv[1]
with LockedOutput(stdout=True):
    for n in range(60):
        sys.stdout.write(f"{me} {n} 30 "); sys.stdout.write(me * 30 + "\\n")
        print(me, 1000 + n, 20000, me * 20000)
"""


def test_short_lines_of_other_code_do_not_break_long_ones() -> None:
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", MIXED, str(me)], stdout=writing, env=environment) for me in range(6)
    ]
    os.close(writing)
    with open(reading, "rb") as stream:
        lines = stream.read().split(b"\n")[:-1]
    assert [writer.wait() for writer in writers] == [0] * 6
    assert len(lines) == 6 * 120
    for line in lines:
        me, _number, size, text = line.split(b" ")
        assert text == me * int(size)


def test_a_forked_child_is_inside_too(run_python: Run) -> None:
    program = """
import os, sys
from mldebug.ranks import LockedOutput
with LockedOutput(stdout=True, prefix="{rank}:"):
    print("parent")
    if os.fork() == 0:
        print("child")
        sys.stdout.write("of it"); sys.stdout.flush()
        os._exit(0)
    os.wait()
    sys.stdout.write(" end\\n")
"""
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, "0: parent\n0: child\n0: of it0:  end\n"), done.stderr


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_write_that_the_program_has_put_there(when: str, run_python: Run) -> None:
    """wandb replaces `sys.stdout.write`, to have what is printed."""
    program = f"""
import sys
from mldebug.ranks import LockedOutput, printflock
seen, scope = [], LockedOutput(stdout=True, prefix="p")
def replace():
    old = sys.stdout.write
    def write(text):
        seen.append(text)
        return old(text)
    sys.stdout.write = write
if "{when}" == "before":
    replace()
scope.__enter__()
if "{when}" == "inside":
    replace()
print("print")
sys.stdout.write("write\\n")
if "{when}" == "before":
    scope.__exit__(None, None, None)
    printflock("function")
sys.stderr.write("".join(seen))
"""
    done = run_python("-c", program)
    if when == "before":
        assert done.stdout == done.stderr == "p print\np write\nfunction\n"
    else:
        assert (done.stdout, done.stderr) == ("p print\np write\n", "print\nwrite\n")
