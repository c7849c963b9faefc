"""Runs programs that hang under `mldebug watch`, and scores what it says: `python tests/benchmarks/hang_cases.py`.

A case is a program whose doc string has a line `EXPECT hang=yes  culprit=rank 2  class=kind` and a line `RUN: command`.
Right is: the ranks, the kind, the exit status, no process left behind and no file left in shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")  # no port that two jobs could share


@dataclass(frozen=True)
class Case:
    path: Path
    hung: bool
    culprits: tuple[int, ...]
    kind: str
    command: list[str]

    @classmethod
    def read(cls, path: Path) -> Case | None:
        text = path.read_text(encoding="utf-8")
        expect = re.search(r"^EXPECT hang=(\w+)\s+culprit=(.*?)(?:\s+class=([\w-]+).*)?$", text, re.M)
        run = re.search(r"^RUN: (.*?)(?:\s{2,}.*)?$", text, re.M)
        if not expect or not run:
            return None
        numbers = re.match(r"ranks? ([\d, ]+)", expect[2])
        culprits = tuple(sorted(int(one) for one in re.findall(r"\d+", numbers[1]))) if numbers else ()
        words = shlex.split(run[1])
        heads = {"torchrun": [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS], "python": [sys.executable]}
        rest = [str(path) if word == path.name else word for word in words[1:]]
        return cls(path, expect[1] == "yes", culprits, expect[3] or "straggler", [*heads[words[0]], *rest])


@dataclass(frozen=True)
class Outcome:
    wrong: list[str]
    seconds: float
    document: dict[str, Any]


def run_case(case: Case, timeout: float, limit: float) -> Outcome:
    command = [sys.executable, "-m", "mldebug", "watch", "--timeout", str(timeout), "--on-hang", "spy,kill", "--json"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "err"), "w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, "--", *case.command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        try:
            stdout, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            stdout, _ = process.communicate()
        errors.seek(0)
        said = errors.read()[-300:]
    seconds = time.monotonic() - began
    try:
        document = json.loads(stdout)
    except ValueError:
        return Outcome([f"no JSON on stdout: {said!r}"], seconds, {})
    verdict = document["verdict"]
    wrong = []
    if verdict["hung"] != case.hung:
        wrong.append(f"hung is {verdict['hung']}")
    if sorted(verdict["culprits"]) != list(case.culprits):
        wrong.append(f"culprits {verdict['culprits']} and not {list(case.culprits)}")
    if verdict["kind"] != case.kind:
        wrong.append(f"kind {verdict['kind']} and not {case.kind}")
    if process.returncode != int(case.hung):
        wrong.append(f"exit status {process.returncode}")
    if left := processes_of(folder):
        wrong.append(f"processes left: {left}")
    if files := [name for name in os.listdir("/dev/shm") if name.startswith(f"mldebug-watch-{process.pid}-")]:
        wrong.append(f"files left: {files}")
    return Outcome(wrong, seconds, document)


def processes_of(folder: str) -> list[int]:
    """The processes that were started with this TMPDIR: others may run the same program."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if f"TMPDIR={folder}\0" in Path("/proc", entry, "environ").read_text(errors="replace"):
                    found.append(int(entry))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True, metavar="DIR", help="folder of the programs")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases whose name has WORD in it")
    parser.add_argument("--timeout", type=float, default=8.0, help="of watch (default: 8)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one case (default: 150)")
    parser.add_argument("--times", type=int, default=1, help="run each case so often (default: 1)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each verdict's text")
    args = parser.parse_args()
    paths = sorted(path for path in args.cases.glob("*.py") if args.only in path.stem)
    cases = [case for case in map(Case.read, paths) if case is not None]
    right = total = 0
    for _ in range(args.times):
        for case in cases:
            outcome = run_case(case, args.timeout, args.limit)
            total += 1
            right += not outcome.wrong
            print(f"{'ok   ' if not outcome.wrong else 'WRONG'} {case.path.stem:24} {outcome.seconds:5.1f} s", end="")
            print("".join(f"; {one}" for one in outcome.wrong), flush=True)
            if (args.verbose or outcome.wrong) and outcome.document:
                print(f"      {outcome.document['verdict']['text']}", flush=True)
    print(f"{right} of {total} right")
    return 0 if right == total and total else 1


if __name__ == "__main__":
    sys.exit(main())
