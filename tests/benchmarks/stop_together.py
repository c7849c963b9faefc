"""How fast all ranks of a job stop for NaN on one: `python tests/benchmarks/stop_together.py [--runs N] [CASE ...]`.

Starts `tests/programs/stop_together.py` under torchrun with ranks on gloo. Prints, for each run, the seconds from the
event until the last rank's report was written, and until the launcher had returned (with the end of Python in every
rank and, of a rank that does not end by itself, torchrun's wait before it kills it). Exit status 0 where no run took
more than 10 s to the reports and every rank that could named the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "programs" / "stop_together.py"
CASES = {  # case -> ranks, first rank, ranks that cannot report
    "train": (4, (2,), ()),
    "train0": (4, (0,), ()),
    "reduce": (4, (2,), ()),
    "sync": (4, (2,), ()),
    "two": (4, (1, 2), ()),
    "stopped": (4, (2,), (1,)),
    "dead": (4, (2,), (1,)),
    "train of 8": (8, (2,), ()),
}
BAR = 10.0


def run(case: str, folder: Path) -> dict[str, Any]:
    """One job: when the event was, when each rank had its report, when all was over, whom each report names."""
    ranks, first, lost = CASES[case]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [str(PROGRAM), case.partition(" ")[0], str(folder)]
    if case == "dead":  # torchrun would end the others at once
        out, status = by_hand(ranks, program, env)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        out, status = wait_for(
            [subprocess.Popen([*torchrun, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)]
        )
    end = time.time()
    files = {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    event = max(one["event"] for rank, one in files.items() if "event" in one and rank in first)
    lines = {rank: _event_line(folder / f"lines.rank{rank}.jsonl") for rank in range(ranks) if rank not in lost}
    names = {rank: None if line is None else line[0]["first_rank"] for rank, line in lines.items()}
    return {
        "status": status, "reports": max((line[1] - event for line in lines.values() if line), default=float("inf")),
        "ended": end - event, "names": names, "out": out,
        "right": all(name in first for name in names.values()) and len(set(names.values())) == 1,
        "aborted": len(re.findall("ends here", out)),
    }  # fmt: skip


def by_hand(ranks: int, program: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Start the ranks as srun would: nothing but variables, and the store is in rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    jobs = [
        subprocess.Popen(
            [sys.executable, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    return wait_for(jobs)


def wait_for(jobs: list[subprocess.Popen[bytes]]) -> tuple[str, int]:
    """What all of them print, and the worst status; what does not end in four minutes is killed."""
    texts = []
    for job in jobs:
        try:
            text, _ = job.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            job.kill()
            text, _ = job.communicate()
        texts.append(text.decode(errors="replace"))
    return "".join(texts), max(abs(job.returncode) for job in jobs)


def _event_line(path: Path) -> tuple[dict[str, Any], float] | None:
    """The event in a rank's output file, and when it was written."""
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return next(((row, path.stat().st_mtime) for row in rows if row["kind"] == "event"), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("case", nargs="*", default=list(CASES))
    args = parser.parse_args()
    bad = 0
    print(f"{'case':<12}{'reports':>9}{'job over':>10}{'aborted':>9}  named by all")
    for case in args.case:
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory() as folder:
                seen = run(case, Path(folder))
            fine = seen["right"] and seen["reports"] <= BAR and seen["status"] != 0
            bad += not fine
            named = "yes" if seen["right"] else f"no: {seen['names']}"
            print(
                f"{case:<12}{seen['reports']:>7.1f} s{seen['ended']:>8.1f} s{seen['aborted']:>9}  {named}", flush=True
            )
            if not fine:
                print(seen["out"][-3000:], file=sys.stderr)
    print(f"{bad} of {len(args.case) * args.runs} runs beyond {BAR:.0f} s, or without the name of the first rank")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
