"""printflock: what it prints, that it is whole, and where it is called from."""

from __future__ import annotations

import io
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.ranks import print_once, printflock, rank0_print

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        (("a", 1, None, 2.5), {}),
        (("a", "b"), {"sep": ""}),
        (("a", "b"), {"sep": None, "end": None}),
        (("a", "b"), {"sep": ", ", "end": "!"}),
        (("ü", "\u2603"), {"flush": True}),
        (("two\nlines",), {"end": ""}),
    ],
)
def test_it_prints_what_print_prints(
    args: tuple[Any, ...], options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for function in (print, printflock):
        with open(tmp_path / function.__name__, "w", encoding="utf-8") as file:
            file.write("before ")  # still in its buffer
            function(*args, **options, file=file)
            file.write("after")
        function(*args, **options)
        text = io.StringIO()
        function(*args, **options, file=text)
        (tmp_path / f"{function.__name__}-text").write_text(text.getvalue() + capsys.readouterr().out)
    assert (tmp_path / "print").read_bytes() == (tmp_path / "printflock").read_bytes()
    assert (tmp_path / "print-text").read_bytes() == (tmp_path / "printflock-text").read_bytes()


@pytest.mark.parametrize("options", [{"sep": 1}, {"end": b""}, {"sepp": ""}, {"file": 3}, {"file": object}], ids=str)
def test_it_refuses_what_print_refuses(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, AttributeError)) as expected:
        print("a", **options)
    with pytest.raises(expected.type):
        printflock("a", **options)


def test_a_closed_file(tmp_path: Path) -> None:
    file = open(tmp_path / "file", "w")  # noqa: SIM115
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        printflock("a", file=file)


def test_python_without_a_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    printflock("a")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "utf-16", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize("errors", ["strict", "replace", "backslashreplace"])
def test_the_encoding_of_the_stream(encoding: str, errors: str, tmp_path: Path) -> None:
    outcomes = []
    for function in (print, printflock):
        path = tmp_path / function.__name__
        with open(path, "w", encoding=encoding, errors=errors) as file:
            try:
                for text in ("plain", "ü", "\u2603"):
                    function(text, file=file)
            except UnicodeEncodeError as exc:
                outcomes.append(str(exc))
        outcomes.append(path.read_bytes())
    half = len(outcomes) // 2
    assert outcomes[:half] == outcomes[half:]


def test_an_object_that_prints_while_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Chatty:
        def __str__(self) -> str:
            printflock("inner")
            return "outer"

    printflock(Chatty())
    assert capsys.readouterr().out == "inner\nouter\n"


def test_prefix_and_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    printflock("a\n\nb", prefix=True)
    printflock("x", prefix="{rank:02d}/{world_size} {local_rank} {pid}|")
    printflock("y", prefix="{time} ")
    printflock("begin ", end="", prefix="{rank}:")
    printflock("end", prefix="{rank}:")
    printflock("begin ", end="", prefix="{rank}:")
    printflock("end")
    printflock("\r 50%", end="", prefix="{rank}:")
    printflock("\r100%\r\n", end="", prefix="{rank}:")
    for ranks in ([0, 7], [3], range(4), {2}):
        printflock("ranks", ranks, print_ranks=ranks)
    rank0_print("not here")
    rank0_print("here", print_ranks=(3,), prefix="{rank}")
    lines = capsys.readouterr().out.split("\n")
    assert lines[:3] == ["[node7:3] a", "[node7:3] ", "[node7:3] b"]
    assert lines[3] == f"03/8 1 {os.getpid()}| x"
    assert lines[4][2] == lines[4][5] == ":"
    assert lines[4].endswith(" y")
    assert lines[5:] == [
        "3: begin end",
        "3: begin end",
        "\r3:  50%\r3: 100%\r",
        "ranks [3]",
        "ranks range(0, 4)",
        "3 here",
        "",
    ]


def test_the_line_of_a_stream_that_is_gone_is_nobodys() -> None:
    ids = set()
    for _ in range(100):
        stream = io.StringIO()
        begun = id(stream) in ids
        printflock("begin", end="", file=stream, prefix="{rank}:")
        assert stream.getvalue() == "0: begin"
        if begun:
            return
        ids.add(id(stream))
        del stream
    pytest.fail("no two streams had one id")


def test_the_line_of_a_stream_without_weak_references() -> None:
    class Stream:
        __slots__ = ("texts",)

        def __init__(self) -> None:
            self.texts: list[str] = []

        def write(self, text: str) -> None:
            self.texts.append(text)

    stream = Stream()
    printflock("begin ", end="", file=stream, prefix="{rank}:")  # type: ignore[arg-type]
    printflock("end", file=stream, prefix="{rank}:")  # type: ignore[arg-type]
    printflock("next", file=stream, prefix="{rank}:")  # type: ignore[arg-type]
    assert "".join(stream.texts) == "0: begin end\n0: next\n"


@pytest.mark.parametrize("prefix", ["{step}", "{", "{0}", "{rank:q}", "{rank.x}"])
def test_a_prefix_that_is_no_format(prefix: str) -> None:
    with pytest.raises(UsageError, match="is no format"):
        printflock("a", prefix=prefix)


def test_print_once_is_for_a_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        print_once("shape", step)
        print_once("other", step)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for step in range(3):
        print_once("rank 1", step)
        print_once("rank 1 too", step, print_ranks=[1])
    assert capsys.readouterr().out == "shape 0\nother 0\nrank 1 too 0\n"


def test_the_classic_import(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "from printflock import printflock\nprintflock('a', 'b', sep='-')\n"
        "from printflock import printflock as print\nimport sys\nprint('c', end='!', file=sys.stderr, flush=True)\n"
    )
    done = run_python(program, env={"PYTHONPATH": f"{ROOT / 'tools'}{os.pathsep}{ROOT}"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "a-b\n", "c!")


def test_from_a_zip_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    archive = tmp_path / "install" / "packages.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as file:
        for path in [*(ROOT / "mldebug").glob("*.py"), *(ROOT / "mldebug/core").glob("*.py")]:
            file.write(path, path.relative_to(ROOT))
        for path in (ROOT / "mldebug/ranks").glob("*.py"):
            file.write(path, path.relative_to(ROOT))
    archive.chmod(0o444)
    archive.parent.chmod(0o555)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = "import mldebug.ranks as r; r.printflock(r.__file__.count('.zip'), *sorted(__import__('os').listdir(T)))"
    environment = {**os.environ, "PYTHONPATH": str(archive), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": ""}
    command = [sys.executable, "-c", f"T = {str(temporary)!r}; {program}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert [path.name for path in archive.parent.iterdir()] == ["packages.zip"]
    assert list(temporary.iterdir()) == []  # nothing is left behind


# argv: number of this process, lines, longest line; prints to stdout, to a file that it opens itself if named.
WRITER = """
import random, sys
from mldebug.ranks import printflock
me, lines, most = map(int, sys.argv[1:4])
file = open(sys.argv[4], sys.argv[5]) if len(sys.argv) > 4 else None
chance = random.Random(me)
for n in range(lines):
    size = chance.choice([10, 60, 300, 5000, most])
    printflock(f"{me} {n} {size} " + chr(97 + me) * size, file=file)
"""


def whole_lines(data: bytes) -> tuple[int, int]:
    """How many different lines are whole, and how many are not."""
    whole, broken = set(), 0
    for line in data.split(b"\n")[:-1]:
        parts = line.split(b" ")
        if len(parts) == 4 and parts[0].isdigit() and parts[3] == bytes([97 + int(parts[0])]) * int(parts[2]):
            whole.add((parts[0], parts[1]))
        else:
            broken += 1
    return len(whole), broken


def start_writers(count: int, lines: int, stdout: Any, *more: str) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(me), str(lines), "100000", *more], stdout=stdout, env=environment
        )
        for me in range(count)
    ]


def read_all(fd: int) -> bytes:
    data = b""
    while True:
        try:
            chunk = os.read(fd, 1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            os.close(fd)
            return data
        data += chunk


@pytest.mark.parametrize("sink", ["pipe", "pipe that does not wait", "pty", "file", "file without append"])
def test_many_processes_print_whole_lines(sink: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if sink.startswith("pipe"):
        reading, writing = os.pipe()
        os.set_blocking(writing, sink == "pipe")
    elif sink == "pty":
        reading, writing = pty.openpty()
        import tty

        tty.setraw(writing)
    else:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if sink == "file" else 0)
        reading, writing = -1, os.open(path, flags)
    writers = start_writers(8, 60, writing)
    os.close(writing)
    data = read_all(reading) if reading >= 0 else b""
    assert [writer.wait() for writer in writers] == [0] * 8
    assert whole_lines(data or path.read_bytes()) == (8 * 60, 0)


@pytest.mark.parametrize("mode", ["a", "r+", "w"])
def test_a_file_that_each_process_opens_itself(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    # "w" cuts the file at each start: all have to be open before the first line
    writers = start_together(path) if mode == "w" else start_writers(6, 60, None, str(path), mode)
    assert [writer.wait() for writer in writers] == [0] * 6
    whole, broken = whole_lines(path.read_bytes())
    if mode == "r+":  # a file to be read and written has a position of its own, which is the program's
        assert whole > 0
    else:
        assert (whole, broken) == (6 * 60, 0)


def start_together(path: Path) -> list[subprocess.Popen[bytes]]:
    program = WRITER.replace(
        "chance =", "import time\ntime.sleep(max(0, float(sys.argv[6]) - time.time()))\nchance =", 1
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    go = str(time.time() + 4)
    return [
        subprocess.Popen([sys.executable, "-c", program, str(me), "60", "100000", str(path), "w", go], env=environment)
        for me in range(6)
    ]


def test_a_position_that_the_program_sets_is_its_own(tmp_path: Path) -> None:
    with open(tmp_path / "status", "w") as file:
        printflock("step 1, loss 2.5", file=file)
        file.seek(0)
        printflock("step 2", file=file)
    assert (tmp_path / "status").read_text() == "step 2\n loss 2.5\n"


def test_a_reader_that_went_away(run_python: Run) -> None:
    program = "import os, sys\nfrom mldebug.ranks import printflock\nr, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\n"
    done = run_python(program + "try:\n    printflock('a')\nexcept BrokenPipeError:\n    os._exit(7)")
    assert done.returncode == 7


def test_a_file_that_may_grow_no_more(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with open(tmp_path / "file", "w") as file:
                printflock("x" * 5000, file=file)
        except OSError:
            os._exit(5)
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


# A timer's handler prints too, again and again, in the middle of whatever the program prints just now, itself included.
HANDLER = """
import itertools, signal, sys
from mldebug.ranks import printflock
numbers, count, depth = itertools.count(1), 0, 0
def handler(number, frame):
    global count, depth
    count = max(count, mine := next(numbers))
    depth += 1
    signal.setitimer(signal.ITIMER_REAL, 0.001 if depth < 4 else 0)
    printflock(f"1 {mine} 3000 " + "b" * 3000)
    depth -= 1
    signal.setitimer(signal.ITIMER_REAL, 0.001)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001)
n = 0
while count < 1000:
    n += 1
    printflock(f"0 {n} 200000 " + "a" * 200000)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
sys.stderr.write(f"{n} {next(numbers) - 1}")
"""


def test_a_signal_handler_that_prints_in_the_middle_of_a_print(tmp_path: Path) -> None:
    # A lock file of its own: outputs of other tests, which are stopped on purpose, may have the same slot.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HANDLER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    data, said = process.communicate(timeout=100)
    assert b"mldebug" not in said, said
    lines, handled = map(int, said.split())
    assert whole_lines(data) == (lines + handled, 0)
    assert data.count(b"\n") == lines + handled  # none twice
    assert handled >= 1000


def test_ctrl_c_leaves_no_half_line() -> None:
    program = """
from mldebug.ranks import printflock
try:
    for n in range(10**9):
        printflock(f"0 {n} 500000 " + "a" * 500000)
except KeyboardInterrupt:
    pass
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    fd = process.stdout.fileno()
    data = os.read(fd, 100_000)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    while chunk := os.read(fd, 1 << 16):
        data += chunk
    assert process.wait() == 0
    process.stdout.close()
    assert data.endswith(b"\n")
    assert whole_lines(data)[1] == 0


def test_threads_and_forks_at_once(run_python: Run, tmp_path: Path) -> None:
    program = f"""
import os, threading
from mldebug.ranks import printflock
file = open({str(tmp_path / "out")!r}, "a")
stop = threading.Event()
printed = 0
def work():
    global printed
    while not stop.is_set():
        printed += 1
        printflock(f"0 {{printed}} 20000 " + "a" * 20000, file=file)
thread = threading.Thread(target=work)
thread.start()
children = []
for n in range(30):
    pid = os.fork()
    if pid == 0:
        printflock(f"1 {{n}} 30000 " + "b" * 30000, file=file)
        os._exit(0)
    children.append(pid)
statuses = [os.waitpid(pid, 0)[1] for pid in children]
stop.set()
thread.join()
print(printed, sum(statuses))
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    printed, statuses = map(int, done.stdout.split())
    assert statuses == 0
    assert whole_lines((tmp_path / "out").read_bytes()) == (printed + 30, 0)


def test_a_holder_that_is_killed_or_stopped_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """It fills the pipe and waits for its reader with the lock held."""
    for number, seconds in ((signal.SIGKILL, 4.0), (signal.SIGSTOP, 9.0)):
        reading, writing = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
        big = "from mldebug.ranks import printflock; printflock('a' * 1_000_000)"
        first = subprocess.Popen([sys.executable, "-c", big], stdout=writing, env=environment)
        assert select.select([reading], [], [], 20)[0]
        time.sleep(0.3)
        first.send_signal(number)
        small = "from mldebug.ranks import printflock; printflock('small')"
        started = time.monotonic()
        second = subprocess.Popen(
            [sys.executable, "-c", small], stdout=writing, stderr=subprocess.PIPE, env=environment
        )
        os.close(writing)
        data = b""
        while not data.endswith(b"small\n"):
            data += os.read(reading, 1 << 16)
        assert time.monotonic() - started < seconds + 3
        said = second.communicate(timeout=20)[1]
        assert (b"has held the lock" in said) == (number == signal.SIGSTOP)
        first.kill()
        first.wait()
        os.close(reading)


def test_at_the_end_of_the_interpreter(run_python: Run) -> None:
    program = """
import atexit
from mldebug.ranks import printflock
class Last:
    def __del__(self):
        printflock("gone")
kept = Last()
kept.itself = kept
atexit.register(printflock, "at exit")
printflock("end")
"""
    done = run_python(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\nat exit\ngone\n", "")


def test_in_a_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream(io.TextIOBase):
        """As a kernel's: text goes to another place, and `fileno` is that of the server's log."""

        def __init__(self) -> None:
            self.texts: list[str] = []

        def write(self, text: str) -> int:
            self.texts.append(text)
            return len(text)

        def fileno(self) -> int:
            raise io.UnsupportedOperation("fileno")

    stream = OutStream()
    monkeypatch.setattr(sys, "stdout", stream)
    printflock("a", "b")
    assert stream.texts == ["a b\n"]


def test_in_asyncio(capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    async def work(n: int) -> None:
        for _turn in range(3):
            printflock(n)
            await asyncio.sleep(0)

    async def everybody() -> None:
        await asyncio.gather(*(work(n) for n in range(3)))

    asyncio.run(everybody())
    assert sorted(capsys.readouterr().out.split()) == ["0"] * 3 + ["1"] * 3 + ["2"] * 3


def test_capture_by_descriptor(capfd: pytest.CaptureFixture[str]) -> None:
    printflock("to the descriptor")
    assert capfd.readouterr().out == "to the descriptor\n"


def test_the_benchmark_runs(run_python: Run) -> None:
    benchmark = ROOT / "tests/benchmarks/printflock_lines.py"
    done = run_python(benchmark, "--processes", "8", "--lines", "100", "--rounds", "1", timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line.split()[:6] for line in done.stdout.splitlines()]
    assert results == [[sink, "mldebug", "broken", "0", "lost", "0"] for sink in ("pipe", "file", "pty")]
    assert done.stderr == ""


def test_the_prefix_follows_what_a_program_says_of_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that spawn has started learns its rank later; to read it again costs less than the print."""
    printflock("a", prefix="{rank}")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    printflock("b", prefix="{rank}")
    assert capsys.readouterr().out == "0 a\n5 b\n"
    with open(os.devnull, "w") as file:

        def seconds(**options: Any) -> float:
            begin = time.perf_counter()
            for _ in range(300):
                printflock("line", file=file, **options)
            return time.perf_counter() - begin

        turns = [(seconds(prefix=True), seconds()) for _ in range(15)]  # in turns, as the machine may be busy
        assert min(one for one, _ in turns) < 3 * min(other for _, other in turns)
