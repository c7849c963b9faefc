"""What tracing costs: `python tests/benchmarks/trace_cost.py [--rounds 7] [--classic NicerTrace.py] [--kills 100]`.

Needs no package, so that every Python can run it: `PYTHONPATH=. python3.12 tests/benchmarks/trace_cost.py`. All figures
are of one process, in turns; CPU time is counted, and the fastest round of each.

    user code   a program in which the standard library does most of the work, its own lines traced; over untraced
    tight loop  200,000 lines, all traced: microseconds a line, the program's own time included

`--classic` compares with the script that has always had this name; hunter and viztracer are run where they are
installed. `--kills N` starts N processes of three threads, each of which ends by SIGKILL, os._exit or a segfault, and
counts those whose last lines are on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import mmap
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

USER = """
import difflib, fractions, json, statistics, textwrap

TEXT = "the quick brown fox jumps over the lazy dog " * 12

def step(number):
    text = textwrap.fill(TEXT, 40 + number % 9)
    encoded = json.dumps([text, {"n": number}] * 8, indent=1)  # in Python, as it is indented
    total = statistics.pvariance(map(fractions.Fraction, range(1, 24)))
    near = difflib.SequenceMatcher(None, text[:90], text[40:130]).ratio()
    return len(encoded) + float(total) + near

def work():
    result = 0.0
    for number in range(60):
        result += step(number)
    return result
"""
LOOP = """
def loop():
    total = 0
    for number in range(100_000):
        total += number
    return total
"""
LINES = 200_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--classic", metavar="PATH", help="the classic NicerTrace.py")
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    args = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        if args.kills:
            kills(Path(folder), args.kills)
            return
        work, loop = load(Path(folder), "user", USER).work, load(Path(folder), "tight", LOOP).loop
        classic = None if args.classic is None else load_classic(args.classic)
        times = rounds(work, user_ways(folder, classic), args.rounds)
        bare = min(times["untraced"])
        print("user code, over untraced")
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["untraced"], strict=True))
            print(f"  {name:<24}{min(seconds) / bare:8.3f}x  (median of rounds {ratio:.3f}x)")
        print("tight loop, microseconds a line")
        for name, seconds in rounds(loop, loop_ways(folder, classic), args.rounds).items():
            print(f"  {name:<24}{min(seconds) / LINES * 1e6:8.3f}")


Way = Callable[[], "contextlib.AbstractContextManager[Any]"]


def user_ways(folder: str, classic: Any) -> dict[str, Way]:
    from mldebug.tracing import NicerTrace

    ways: dict[str, Way] = {
        "untraced": contextlib.nullcontext,
        "NicerTrace": lambda: NicerTrace(count=0, output=folder),
        "NicerTrace, ring": lambda: NicerTrace(count=0, output=folder, ring=16 << 20),
    }
    if sys.version_info < (3, 12):
        ways["no-op settrace"] = no_op
    if classic is not None:
        ways["classic"] = lambda: run_classic(classic, folder, [sysconfig.get_paths()["stdlib"], "/nonexistent"])
    if importlib.util.find_spec("hunter"):
        ways["hunter"] = lambda: run_hunter(folder)
    if importlib.util.find_spec("viztracer"):
        ways["viztracer"] = lambda: run_viztracer(folder)
    return ways


def loop_ways(folder: str, classic: Any) -> dict[str, Way]:
    from mldebug.tracing import NicerTrace

    ways: dict[str, Way] = {
        "untraced": contextlib.nullcontext,
        "ring": lambda: NicerTrace(count=0, include=["all"], output=folder, ring=64 << 20),
        "a write per line": lambda: NicerTrace(count=0, include=["all"], output=folder),
    }
    if classic is not None:
        ways["classic"] = lambda: run_classic(classic, folder, None)
    return ways


def rounds(work: Callable[[], Any], ways: dict[str, Way], count: int) -> dict[str, list[float]]:
    """CPU seconds of each way, in turns. What is done once is outside of the time: files, and a look at each code."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            with way():
                work()
                began = time.process_time()
                work()
                times[name].append(time.process_time() - began)
    return times


@contextlib.contextmanager
def no_op() -> Iterator[None]:
    sys.settrace(lambda frame, event, arg: None)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def run_classic(cls: Any, folder: str, ignoredirs: Any) -> Iterator[None]:
    tracer = cls(trace=1, count=0, timing=True, ignoredirs=ignoredirs)
    with open(os.path.join(folder, "classic.txt"), "w") as file, contextlib.redirect_stdout(file):
        sys.settrace(tracer.globaltrace)
        try:
            yield
        finally:
            sys.settrace(None)


@contextlib.contextmanager
def run_hunter(folder: str) -> Iterator[None]:
    import hunter

    path = os.path.join(folder, "hunter.txt")
    with open(path, "w") as file, hunter.trace(module="user", action=hunter.CodePrinter(stream=file)):
        yield


@contextlib.contextmanager
def run_viztracer(folder: str) -> Iterator[None]:
    import viztracer

    with viztracer.VizTracer(include_files=[folder], output_file=os.path.join(folder, "viz.json"), verbose=0):
        yield


def load(folder: Path, name: str, source: str) -> types.ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_classic(path: str) -> Any:
    """It imports PIL for its demonstration only."""
    if importlib.util.find_spec("PIL") is None:
        sys.modules["PIL"] = types.ModuleType("PIL")
        sys.modules["PIL"].Image = None  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(io.StringIO()):
        return load_path(path).NicerTrace


def load_path(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("classic_nicer_trace", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Each thread says in memory of a file which line it has just executed.
VICTIM = """
import ctypes, mmap, os, sys, threading, time
file = open(sys.argv[1], "r+b")
said = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
ending, ends = sys.argv[2], time.monotonic() + float(sys.argv[3])
def turn(place):
    while True:
        said[place] = 8
        said[place] = 9
        said[place] = 10
        if place == 0 and time.monotonic() > ends and ending != "kill": said[place] = 11; end()
def end():
    os._exit(9) if ending == "exit" else ctypes.string_at(0)
for place in (1, 2):
    threading.Thread(target=turn, args=(place,), name=f"worker{place}", daemon=True).start()
turn(0)
"""
# After which line of the program which may stand in the trace: itself, or the next, which was about to run.
MAY_BE = {0: {6, 7, 8}, 8: {8, 9}, 9: {9, 10}, 10: {10, 11, 7, 8}, 11: {11, 12, 13}}


def kills(folder: Path, count: int) -> None:
    program = folder / "victim.py"
    program.write_text(VICTIM)
    good = {}
    for number in range(count):
        ending, mode = ("kill", "exit", "segfault")[number % 3], ("write", "ring")[number // 3 % 2]
        where = folder / str(number)
        where.mkdir()
        said = where / "said"
        said.write_bytes(bytes(4096))
        options = ["--ring", "4MB"] if mode == "ring" else []
        command = [sys.executable, "-c", "from mldebug.cli import _trace, main, COMMANDS as c\n"
                   "c.setdefault('trace', ('mldebug.cli._trace', '', 'trace'))\nimport sys; sys.exit(main())",
                   "trace", "-q", *options, "-o", str(where), "--", str(program), str(said), ending,
                   str(random.uniform(0.02, 0.2))]  # fmt: skip
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        if ending == "kill":
            while not all(said.read_bytes()[at] for at in (0, 8, 16)):  # until all three threads are in their loops
                time.sleep(0.01)
            time.sleep(random.uniform(0.02, 0.2))
            process.send_signal(signal.SIGKILL)
        process.wait()
        fine = is_kept(where, said)
        done = good.setdefault((ending, mode), [0, 0])
        done[0] += fine
        done[1] += 1
    for (ending, mode), (fine, all_) in sorted(good.items()):
        print(f"{ending:<10}{mode:<7}{fine} of {all_} have the last line of each thread")
    total = sum(fine for fine, _ in good.values())
    print(f"all       {total} of {count}")


def is_kept(where: Path, said: Path) -> bool:
    with said.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as map_:
        lines = [int.from_bytes(map_[at : at + 8], "little") for at in (0, 8, 16)]
    last = {"": 0, "[worker1] ": 0, "[worker2] ": 0}
    for path in where.glob("trace-*"):
        for line in read(path):
            _time, _, rest = line.partition(" ")
            name = rest[: rest.index("]") + 2] if rest.startswith("[") else ""
            if name in last and rest[len(name) :].startswith("victim.py:"):
                last[name] = int(rest[len(name) :].split(":")[1])
    return all(
        traced in MAY_BE.get(done, set()) or (done == 0 and traced == 0)
        for done, traced in zip(lines, last.values(), strict=True)
    )


def read(path: Path) -> list[str]:
    if path.suffix == ".ring":
        from mldebug.tracing._ring_read import RingReader

        return [line.decode("utf-8", "replace") for line in RingReader(path).lines()]
    # A kill may cut the write of a line that has not run yet.
    return path.read_text("utf-8", "replace").rpartition("\n")[0].splitlines()


if __name__ == "__main__":
    main()
