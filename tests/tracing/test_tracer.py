"""NicerTrace with every interpreter that is here: what is traced, how it looks, and what the program notices of it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals, fork and descriptors of Linux")
Traced = Callable[..., Any]

FIB = """
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def main():
    fib(2)
    return 1
"""


def places(lines: list[str]) -> list[str]:
    """`function` of calls and the number of lines: short enough to write down."""
    short = []
    for line in lines:
        if call := re.match(r" {8}.*:\d+ (\S+)$", line):
            short.append(call[1])
        elif at := re.match(r"\S+: *(\d+): ", line):
            short.append(at[1])
        else:
            short.append(line)
    return short


@pytest.mark.parametrize("options", ["", "ring=1 << 20"])
def test_lines_and_calls_look_as_they_did_and_calls_are_shown_again(traced: Traced, options: str, tmp_path) -> None:
    done = traced(FIB, options)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")
    main, fib = f"        {tmp_path}/prog.py:4 main", f"        {tmp_path}/prog.py:2 fib"
    body = "prog.py:     3:     return n if n < 2 else fib(n - 1) + fib(n - 2)"
    assert done.lines == [
        main, "prog.py:     5:     fib(2)", fib, body, fib, body, fib, body,
        main, "prog.py:     6:     return 1",
    ]  # fmt: skip
    text = b"".join(path.read_bytes() for path in done.files)
    assert options or re.search(rb"\n0:00:0\d prog\.py:     5: ", text)


def test_the_caller_is_shown_again_after_recursion(traced: Traced) -> None:
    done = traced(
        """
        def f(n):
            if n:
                f(n - 1)
            return n
        def g(n):
            try:
                if n == 0: raise KeyError
                g(n - 1)
            except KeyError:
                return n
        def h(n):
            if n == 0: raise KeyError
            try:
                h(n - 1)
            except KeyError:
                pass
        def main():
            f(1)
            h(1)
        """
    )
    assert places(done.lines) == [
        "main", "19", "f", "3", "4", "f", "3", "5", "f", "5",
        "main", "20", "h", "13", "14", "15", "h", "13", "h", "16", "17",
    ]  # fmt: skip


def test_generators_coroutines_and_throw(traced: Traced) -> None:
    done = traced(
        """
        import asyncio
        def gen():
            try:
                yield 1
                yield 2
            except ValueError:
                yield 3
        async def agen():
            yield 5
        async def co():
            async for x in agen():
                await asyncio.sleep(0)
        def main():
            g = gen()
            next(g)
            g.throw(ValueError)
            g.close()
            asyncio.run(co())
        """
    )
    seen = places(done.lines)
    assert seen[:14] == ["main", "15", "16", "gen", "4", "5", "main", "17", "gen", "5", "7", "8", "main", "18"] or seen[
        :13
    ] == ["main", "15", "16", "gen", "4", "5", "main", "17", "gen", "7", "8", "main", "18"]
    assert seen.count("co") >= 2 and "agen" in seen and "10" in seen and "13" in seen


def test_threads_have_their_names(traced: Traced) -> None:
    program = """
        import threading
        def work():
            x = 1
        def main():
            t = threading.Thread(target=work, name="loader")
            t.start()
            t.join()
        """
    lines = traced(program).lines
    assert "[loader] prog.py:     4:     x = 1" in lines
    assert not any(line.startswith("[MainThread]") for line in lines)
    lines = traced(program, "threads=True, ring=1 << 20").lines
    assert lines[1].startswith("[MainThread] prog.py:     6:")


def test_threads_that_ran_before(traced: Traced, python: str) -> None:
    done = traced(
        """
        import sys, threading, time
        stop = False
        def spin():
            while not stop:
                time.sleep(0.001)
        threading.Thread(target=spin, name="early").start()
        def main():
            global stop
            time.sleep(0.1)
            stop = True
        print(sys.version_info >= (3, 12))
        """
    )
    assert any(line.startswith("[early] prog.py:     6:") for line in done.lines) == (done.stdout == "True\n")


def test_returns_exceptions_and_arguments_run_no_code_of_the_program(traced: Traced) -> None:
    done = traced(
        """
        class Odd:
            def __init__(self, x):
                self.x = x
            def __repr__(self):
                raise SystemExit("called")
            __str__ = __len__ = __getattr__ = __repr__
        class Bad(Exception):
            def __str__(self): raise SystemExit("called")
        def f(a, *rest, b=None, **more):
            raise Bad("text")
        def main():
            try:
                f(Odd(1), 2, b="x" * 100, c=[1, 2, 3, 4])
            except Bad:
                return Odd
        """,
        "args=True, returns=True, exceptions=True",
    )
    assert (done.status, done.stderr) == (0, "")
    text = "\n".join(done.lines)
    assert f" f(a=<Odd>, b='{'x' * 40}'...(100), rest=(2,), more={{'c': [1, 2, 3, ...(4)]}})" in text
    assert "prog.py:    11: f !! Bad: text" in text
    assert "prog.py:    16: main <- <class>" in text
    assert re.search(r"prog.py: +\d+: .*__init__ <- None", text)


def test_calls_only_and_depth(traced: Traced) -> None:
    program = """
        def c(): pass
        def b(): c()
        def a():
            b()
            b()
        def main():
            a()
        """
    # The module's own frame is below, and counts where it runs traced code.
    assert places(traced(program, "calls_only=True").lines) == ["main", "a", "b", "c", "b", "c"]
    seen = set(places(traced(program, "depth=3").lines))
    assert {"main", "a"} <= seen and "c" not in seen


def test_what_is_selected(traced: Traced) -> None:
    program = """
        import json, textwrap
        def mine(): json.dumps({"a": 1}, indent=1)
        def other(): pass
        def main():
            mine(); other()
        """
    names = {line.split()[-1] for line in traced(program, "calls_only=True").lines}
    assert names == {"main", "mine", "other"}
    text = "\n".join(traced(program, "include=['json'], calls_only=True").lines)
    assert "        json.encoder:" in text and "prog.py" not in text
    text = "\n".join(traced(program, "include=['user', 'json.encoder'], exclude=['*:other'], calls_only=True").lines)
    assert "json.encoder:" in text and "json.__init__" not in text and " mine" in text and " other" not in text
    text = "\n".join(traced(program, "include=['prog.py'], exclude=[':m*'], calls_only=True").lines)
    assert text.endswith(" other") and text.count("\n") == 0


def test_code_without_a_file_belongs_to_who_runs_it(traced: Traced) -> None:
    done = traced(
        """
        import dataclasses
        def main():
            exec("x = 1\\ny = 2")
            dataclasses.make_dataclass("Point", ["x"])
        """
    )
    lines = done.lines
    assert "<string>:     2: (no source)" in lines
    assert sum("<string>" in line for line in lines) == 3  # a call and two lines; what dataclasses runs is not ours


def test_code_that_dies_is_forgotten_and_its_id_may_be_used_again(traced: Traced) -> None:
    done = traced(
        """
        import gc, sys, weakref
        def main():
            for number in range(300):
                text = "def made():\\n    return %d\\nmade()" % number
                code = compile(text, "made.py", "exec")
                exec(code, {})
                died = weakref.ref(code)
                del code
                assert died() is None
        """,
        "ring=1 << 20",
    )
    assert (done.status, done.stderr) == (0, "")
    assert sum(line.startswith("made.py:     2:") for line in done.lines) == 300


def test_frames_and_values_are_not_kept(traced: Traced) -> None:
    done = traced(
        """
        import sys, weakref
        class Tensor: pass
        def make(value):
            local = value
            return weakref.ref(local)
        def main():
            ref = make(Tensor())
            assert ref() is None, sys.getrefcount(ref())
            value = Tensor()
            ref = weakref.ref(value)
            value = None
            assert ref() is None
        """,
        "args=True, returns=True, exceptions=True",
    )
    assert (done.status, done.stderr) == (0, "")


def test_forked_children_have_files_of_their_own(traced: Traced) -> None:
    program = """
        import os
        def child():
            return 7
        def main():
            pid = os.fork()
            if pid == 0:
                child()
                os._exit(0)
            os.waitpid(pid, 0)
        """
    for options in ("", "ring=1 << 20"):
        done = traced(program, options)
        assert len(done.files) == 2 and done.stderr == ""
        texts = ["\n".join(done.of(path)) for path in done.files]
        [child] = [text for text in texts if "return 7" in text]
        [parent] = [text for text in texts if "waitpid" in text]
        assert "os._exit(0)" in child and "os._exit(0)" not in parent


def test_multiprocessing_by_fork(traced: Traced) -> None:
    done = traced(
        """
        import multiprocessing
        both = multiprocessing.get_context("fork").Barrier(2)
        def work(x):
            both.wait()  # else one of them may have done it all before the other one begins
            return x + 1
        def main():
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(work, range(4), 1) == [1, 2, 3, 4]
        """
    )
    assert (done.status, done.stderr) == (0, "")
    text = "\n".join(line for path in done.files for line in done.of(path))
    assert len(done.files) == 3 and text.count("return x + 1") == 4


def test_zip_files_frozen_modules_and_odd_sources(traced: Traced, tmp_path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped.py", "def f():\n    return 'in a zip'\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\ndef f():\n    return '\xe4'\n")
    (tmp_path / "long.py").write_text(f"def f():\n    return '{'x' * 1_000_000}'\n")
    done = traced(
        """
        import sys
        sys.path.insert(0, "lib.zip")
        def main():
            import zipped, latin, long, os
            zipped.f(); latin.f(); long.f()
            del sys.modules["latin"]
            os.path.join("a", "b")
        """,
        "include=['all']",
    )
    assert (done.status, done.stderr) == (0, "")
    text = "\n".join(done.lines)
    assert "zipped.py:     2:     return 'in a zip'" in text
    assert "latin.py:     3:     return '\udce4'" in text
    assert any(line.startswith("long.py:     2:") and len(line) < 2100 and line.endswith("...") for line in done.lines)
    assert re.search(r"importlib\._bootstrap:\d+ ", text)
    assert "posixpath.py:" in text and "os.fspath" in text


def test_our_own_failure_is_a_warning_and_the_program_goes_on(traced: Traced) -> None:
    done = traced(
        """
        import mldebug.tracing._code as ours
        def broken(*_):
            raise ZeroDivisionError("odd")
        ours.line_text = broken
        broken.__code__ = broken.__code__.replace(co_filename=ours.__file__)
        def main():
            for number in range(3):
                print(number)
        """
    )
    assert (done.status, done.stdout) == (0, "0\n1\n2\n")
    assert done.stderr == "mldebug: the trace stops, the job goes on: ZeroDivisionError: odd\n"


def test_exceptions_of_signal_handlers_reach_the_program(traced: Traced) -> None:
    done = traced(
        """
        import signal, time
        class Late(Exception): pass
        def handler(*_): raise Late
        def main():
            signal.signal(signal.SIGALRM, handler)
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                try:
                    while True:
                        x = 1
                except Late:
                    pass
            print("done")
        """,
        "include=['user'], ring=1 << 20",
    )
    assert (done.status, done.stdout) == (0, "done\n")
    # On 3.10 and 3.11 what is raised inside a trace function takes that away, and this is said.
    assert done.stderr == "" or "the trace ended early" in done.stderr


@pytest.mark.parametrize("options", ["", "args=True, ring=32 << 20"])
def test_a_signal_handler_may_wait_for_a_traced_thread(traced: Traced, options: str) -> None:
    done = traced(
        """
        import signal, threading, time
        def note(number):
            if number:
                x = number
        def work():
            for number in range(1, 301):
                note(number)
        def handler(*_):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            handled.append(1)
            if len(handled) < 20:
                signal.setitimer(signal.ITIMER_REAL, 0.01)
        handled = []
        def main():
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while len(handled) < 20:
                exec("y = 1")
                note(0)
        """,
        options,
    )
    assert (done.status, done.stderr) == (0, "")
    written = [line for line in done.lines if line.endswith("x = number")]
    assert len(written) == 6000
    assert all("[Thread-" in line for line in written)
    assert not any("[Thread-" in line for line in done.lines if line.endswith(("note(0)", 'exec("y = 1")')))


def test_recursion_to_its_limit(traced: Traced) -> None:
    done = traced(
        """
        def deep(n): return deep(n + 1)
        def main():
            try:
                deep(0)
            except RecursionError:
                print("caught")
            x = 1
        """
    )
    assert (done.status, done.stdout) == (0, "caught\n")
    if done.lines[-1] != "prog.py:     8:     x = 1":  # sys.settrace takes a trace function that fails away
        assert "deep(n + 1)" in done.lines[-1] and "a RecursionError does that" in done.stderr
    else:
        assert done.stderr == ""


def test_a_second_tracer_inside_the_first(traced: Traced) -> None:
    done = traced(
        """
        def f():
            return 1
        def main():
            from mldebug.tracing import NicerTrace
            import os
            with NicerTrace(output=os.environ["OUT"]):
                f()
            f()
            x = 2
        """
    )
    first, second = sorted((done.of(path) for path in done.files), key=len, reverse=True)
    assert (done.status, done.stderr) == (0, "")
    assert "prog.py:    10:     x = 2" in first and "prog.py:    10:     x = 2" not in second
    assert any("return 1" in line for line in first) and any("return 1" in line for line in second)


def test_what_was_there_comes_back(traced: Traced) -> None:
    done = traced(
        """
        import os, sys, threading
        from mldebug.tracing import NicerTrace
        def debugger(frame, event, arg): return None
        sys.settrace(debugger); threading.settrace(debugger)
        with NicerTrace(output=os.environ["OUT"]):
            x = 1
        print(sys.gettrace() is debugger, threading.gettrace() is debugger)
        """,
        bare=True,
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_no_tool_id_is_left(traced: Traced) -> None:
    done = traced(
        """
        import os, sys
        from mldebug.tracing import NicerTrace
        if sys.version_info >= (3, 12):
            for tool in range(6):
                sys.monitoring.use_tool_id(tool, f"tool{tool}")
            try:
                NicerTrace(output=os.environ["OUT"]).start()
            except Exception as exc:
                print(type(exc).__name__, "4: tool4" in str(exc))
        else:
            print("MldebugError True")
        """,
        bare=True,
    )
    assert (done.stdout, done.stderr) == ("MldebugError True\n", "")


def test_start_at_a_function_after_a_time_and_at_a_signal(traced: Traced) -> None:
    program = """
        import os, signal, time
        def before(): pass
        def begin():
            after()
        def after(): pass
        def main():
            before()
            begin()
            time.sleep(0.3)
            late()
            os.kill(os.getpid(), signal.SIGUSR2)
            y = 2
            os.kill(os.getpid(), signal.SIGUSR2)
            z = 3
        def late():
            x = 1
        """
    seen = places(traced(program, "start_at='__main__:begin', signal='USR2'").lines)
    assert "before" not in seen and seen[:4] == ["begin", "5", "after", "6"] and "13" not in seen and "15" in seen
    for path in traced(program, "after=0.15, signal='USR2'").files:
        text = path.read_text()
        assert "before()" not in text and "x = 1" in text and "y = 2" not in text and "z = 3" in text


def test_a_signal_that_is_taken_is_left_alone(traced: Traced) -> None:
    done = traced(
        """
        import os, signal
        signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
        def main():
            os.kill(os.getpid(), signal.SIGUSR2)
        """,
        "signal='USR2'",
    )
    assert done.stdout == "mine\n"
    assert done.stderr.startswith("mldebug: SIGUSR2 does not toggle the trace: it has a handler already")


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"])
@pytest.mark.parametrize("options", ["", "ring=1 << 20"])
def test_the_last_line_is_on_disk(traced: Traced, ending: str, options: str) -> None:
    done = traced(
        f"""
        import ctypes, os, threading
        ready = threading.Event()
        def worker():
            ready.set(); threading.Event().wait()
        def main():
            threading.Thread(target=worker, daemon=True, name="worker").start()
            ready.wait()
            {ending}
        """,
        options,
    )
    assert done.status in (3, -signal.SIGKILL, -signal.SIGSEGV)
    assert done.lines[-1] == f"prog.py:     9:     {ending}"
    assert [line for line in done.lines if line.startswith("[worker] p")][-1].endswith("threading.Event().wait()")


def test_time_goes_on_after_a_day(traced: Traced) -> None:
    done = traced(
        """
        import mldebug.tracing._pen as pen
        real, later = pen.monotonic, [0.0]
        pen.monotonic = lambda: real() + later[0]
        def main():
            x = 1
            later[0] = 100_000.0
            y = 2
        """
    )
    assert "\n27:46:40 prog.py:     8:     y = 2\n" in done.files[0].read_text()


def test_multi_line_statements(traced: Traced) -> None:
    done = traced(
        """
        def f(a, b): pass
        def main():
            f(
                1,
                2,
            )
        """
    )
    assert "prog.py:     4:     f(" in done.lines


def test_importing_loads_nothing_of_others(run_python: Any) -> None:
    done = run_python(
        "import sys, mldebug.tracing; mldebug.tracing.NicerTrace; "
        "print([n for n in ('torch', 'numpy', 'rich', 'mldebug.numerics') if n in sys.modules])"
    )
    assert done.stdout == "[]\n"


def test_tensors_are_shown_by_type_and_live_as_long_as_without(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from mldebug.tracing._safe_repr import safe_repr

    class Shy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: object, **kwargs: object) -> object:
            raise RuntimeError("called")

    assert safe_repr(torch.ones(2, 3)) == "Tensor(float32, [2, 3], cpu)"
    assert safe_repr(torch.ones(2).as_subclass(Shy)) == "Shy(float32, [2], cpu)"
    assert safe_repr(torch.nn.Linear(1, 1)) == "<Linear>"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, "depth is 0"),
        ({"include": "torch"}, "a string"),
        ({"packages_to_include": "torch"}, "packages_to_include is 'torch'"),
        ({"packages_to_include": ["x"], "ignoredirs": ["/a", "/b"]}, "both given"),
        ({"ring": 1 << 20, "rotate": 5}, "a ring has one size"),
        ({"start_at": "train"}, "names no function"),
        ({"signal": "SIGNONE"}, "signal is"),
        ({"countfuncs": 1}, "countfuncs"),
        ({"after": float("nan")}, "after is nan"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    from mldebug.core.errors import UsageError
    from mldebug.tracing import NicerTrace

    with pytest.raises(UsageError, match=re.escape(words)):
        NicerTrace(**options)


def test_a_folder_that_cannot_be_written(tmp_path) -> None:
    from mldebug.core.errors import UsageError
    from mldebug.tracing import NicerTrace

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write traces"):
        NicerTrace(output=tmp_path / "file" / "folder").start()
    assert sys.gettrace() is None or "mldebug" not in repr(sys.gettrace()), os.getpid()
