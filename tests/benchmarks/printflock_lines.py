"""Many processes print into one pipe, one file and one terminal at once: are all lines whole, and how fast is it?

    python tests/benchmarks/printflock_lines.py                                  # 64 processes x 1,000 lines
    python tests/benchmarks/printflock_lines.py --classic PATH/printflock.py     # beside another printflock

Lines have 10 B to 100 kB, most of them are short. Every line names its process, its number and its length, and is
filled with one letter, so that a broken or lost one is seen. Ours and the other take turns in one run; the other is
called with flush=True. `--sinks pipe,file,pty` and `--rounds N` choose; the best round of each counts for the ratio.
The exit status is 1 where one of our lines is broken or lost, or, with --classic, where we are slower.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tty
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# argv: path of another printflock or "", number of this process, lines, a descriptor. On stderr: "ready", when it waits
# for the end of stdin, and when it had printed its last line. It lives on until the descriptor is at its end.
WRITER = r"""
import sys, os, random, time, importlib.util
path, me, lines = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if path:
    spec = importlib.util.spec_from_file_location("printflock", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    def show(text): module.printflock(text, flush=True)
else:
    from mldebug.ranks import printflock as show
chance = random.Random(me)
letter = chr(ord("a") + me % 26)
texts = []
for n in range(lines):
    roll = chance.random()
    size = int(10 ** chance.uniform(1, 2.3)) if roll < 0.9 else int(10 ** chance.uniform(2.3, 4)) if roll < 0.99 \
        else int(10 ** chance.uniform(4, 5))
    head = f"{me:02d} {n} "
    texts.append((head, max(1, size - len(head))))
os.write(2, b"ready\n")
sys.stdin.read()
for head, fill in texts:
    show(head + str(fill) + " " + letter * fill)
os.write(2, b"done %.6f\n" % time.monotonic())
os.read(int(sys.argv[4]), 1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classic", default="", metavar="PATH", help="another printflock.py to compare with")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sinks", default="pipe,file,pty")
    args = parser.parse_args()
    bad = False
    for sink in args.sinks.split(","):
        best: dict[str, float] = {}
        for _round in range(args.rounds):
            for path in ["", args.classic] if args.classic else [""]:
                name = "classic" if path else "mldebug"
                seconds, data = run(sink, path, args.processes, args.lines)
                broken, lost = judge(data, args.processes, args.lines)
                rate = args.processes * args.lines / seconds
                best[name] = max(best.get(name, 0.0), rate)
                print(f"{sink:5} {name:8} broken {broken:4}  lost {lost:4}  {rate:9,.0f} lines/s", flush=True)
                bad |= name == "mldebug" and bool(broken or lost)
        if args.classic:
            ratio = best["mldebug"] / best["classic"]
            bad |= ratio < 1
            print(f"{sink:5} mldebug / classic, best of {args.rounds}: {ratio:.2f}", flush=True)
    return int(bad)


def run(sink: str, path: str, processes: int, lines: int) -> tuple[float, bytes]:
    """Start all writers, let them go at once, and read what they write."""
    file = None
    if sink == "pipe":
        reading, writing = os.pipe()
    elif sink == "pty":
        reading, writing = pty.openpty()
        tty.setraw(writing)
        attributes = termios.tcgetattr(writing)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(writing, termios.TCSANOW, attributes)
    else:
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        reading, writing = -1, os.open(file.name, os.O_WRONLY | os.O_APPEND)
    go, start = os.pipe()
    stay, leave = os.pipe()
    ready, say_ready = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(me), str(lines), str(stay)],
            stdin=go,
            stdout=writing,
            stderr=say_ready,
            env=environment,
            pass_fds=[stay],
        )
        for me in range(processes)
    ]
    for fd in (go, stay, writing, say_ready):
        os.close(fd)
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(reading, chunks))
    with open(ready, encoding="utf-8") as said:
        for _child in children:
            said.readline()
        reader.start()
        started = time.monotonic()
        os.close(start)
        ends: list[float] = []
        for line in said:
            if line.startswith("done "):
                ends.append(float(line[5:]))
            else:
                sys.stderr.write(line)
            if len(ends) == processes:
                break
        os.close(leave)
    for child in children:
        child.wait()
    reader.join()
    if file is not None:
        chunks.append(Path(file.name).read_bytes())
        file.close()
    return max(ends) - started, b"".join(chunks)


def _read_all(fd: int, chunks: list[bytes]) -> None:
    try:
        while fd >= 0 and (chunk := os.read(fd, 1 << 20)):
            chunks.append(chunk)
    except OSError:  # a terminal whose last writer has gone
        pass
    if fd >= 0:
        os.close(fd)


def judge(data: bytes, processes: int, lines: int) -> tuple[int, int]:
    """How many lines are broken, and how many of those that should be there are not."""
    whole, broken = set(), 0
    for line in data.split(b"\n")[:-1]:
        parts = line.split(b" ")
        try:
            me, number, fill, rest = int(parts[0]), int(parts[1]), int(parts[2]), parts[3]
        except (ValueError, IndexError):
            broken += 1
            continue
        if len(parts) == 4 and rest == bytes([ord("a") + me % 26]) * fill:
            whole.add((me, number))
        else:
            broken += 1
    return broken, processes * lines - len(whole)


if __name__ == "__main__":
    sys.exit(main())
