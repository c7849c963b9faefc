"""What watching costs a healthy job: `python tests/benchmarks/watch_cost.py [--ranks 8] [--seconds 60] [--rounds 3]`.

A DistributedDataParallel job of many steps on gloo. CPU time is counted, not time on the clock, so that other work on
the machine does not count:

    watch    of `mldebug watch --timeout 8` and the readers that it starts, over a minute, in percent of a core a rank
    agents   of their threads in the ranks, likewise
    spied    CPU time of a step with a `mldebug spy` every ten seconds, over that without, in turns: the median ratio
    verdict  seconds on the clock from the command `mldebug spy` to its verdict
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path = os.path.join(os.environ["STEPS"], str(dist.get_rank()))
stop = os.path.join(os.environ["STEPS"], "stop")
step = 0
with open(path, "w") as stream:
    print(os.getpid(), file=stream, flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.ones(32, 256)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
        if step % 10 == 0:
            ended = torch.tensor([float(os.path.exists(stop))])
            dist.all_reduce(ended)
            print(step, time.process_time(), file=stream, flush=True)
            if ended:
                break
dist.destroy_process_group()
"""


TURN = 10.0  # seconds with, and without


class Job:
    """The job, under watch or not, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, watched: bool) -> None:
        self.folder, self.ranks, self.watched = folder, ranks, watched
        program = folder / "job.py"
        program.write_text(PROGRAM, encoding="utf-8")
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(ranks)]
        words = [sys.executable, "-m", "torch.distributed.run", *where, str(program)]
        if watched:
            watch = [
                sys.executable,
                "-m",
                "mldebug",
                "watch",
                "--timeout",
                "8",
                "--json",
                "--on-hang",
                "spy,kill",
                "--",
            ]
            words = [*watch, *words]
        env = {**os.environ, "STEPS": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Job:
        while not all(len(self.lines(rank)) > 3 for rank in range(self.ranks)):
            time.sleep(0.5)
            if self.process.poll() is not None:
                sys.exit("the job ended early")
        time.sleep(3)
        return self

    def __exit__(self, *_args: object) -> None:
        self.folder.joinpath("stop").touch()
        stdout, _ = self.process.communicate(timeout=100)
        if self.watched and json.loads(stdout)["verdict"]["hung"]:
            sys.exit("a false alarm")

    def lines(self, rank: int) -> list[str]:
        path = self.folder / str(rank)
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(self.lines(rank)[0]) for rank in range(self.ranks)]

    def steps(self, rank: int) -> tuple[int, float]:
        """The last step that it wrote down, and its CPU time then."""
        step, spent = [line for line in self.lines(rank) if " " in line][-1].split()
        return int(step), float(spent)


def ticks(path: str, children: bool = False) -> float:
    """Seconds of CPU of a process or thread, with those of the children that it has waited for."""
    fields = Path(path).read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def agent_threads(pid: int) -> float:
    """Seconds of CPU of the agent's threads in a rank."""
    folder = next(
        entry.partition("=")[2]
        for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        if entry.startswith("MLDEBUG_AGENT=")
    )
    table = json.loads(Path(folder, f"{pid}.threads").read_text(encoding="utf-8"))
    names = {native: name for name, native in table.values()}
    return sum(ticks(f"/proc/{pid}/task/{native}/stat") for native, name in names.items() if name.startswith("mldebug"))


def cost_of_watch(ranks: int, seconds: float) -> tuple[float, float]:
    """Percent of a core a rank: of watch and its readers, and of the agents."""
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), ranks, True) as job:
        pids, watch = job.pids, f"/proc/{job.process.pid}/stat"
        began, before, inside = time.monotonic(), ticks(watch, True), sum(map(agent_threads, pids))
        time.sleep(seconds)
        passed = time.monotonic() - began
        spent, agents = ticks(watch, True) - before, sum(map(agent_threads, pids)) - inside
    return 100 * spent / passed / ranks, 100 * agents / passed / ranks


def cost_of_spying(ranks: int, seconds: float) -> tuple[list[float], list[float]]:
    """The ratios of CPU time a step, spied on over not, turn by turn; and the seconds that each spy took."""
    ratios, took = [], []
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), ranks, False) as job:
        spy = [
            sys.executable,
            "-m",
            "mldebug",
            "spy",
            "--json",
            *(word for pid in job.pids for word in ("--pid", str(pid))),
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            rates = []
            for spied in (False, True):
                before = [job.steps(rank) for rank in range(ranks)]
                turn = time.monotonic() + TURN
                if spied:
                    began = time.monotonic()
                    subprocess.run(spy, stdout=subprocess.DEVNULL, check=False)
                    took.append(time.monotonic() - began)
                time.sleep(max(0.0, turn - time.monotonic()))
                after = [job.steps(rank) for rank in range(ranks)]
                rates.append(
                    statistics.median(
                        (then[1] - first[1]) / (then[0] - first[0]) for first, then in zip(before, after, strict=True)
                    )
                )
            ratios.append(rates[1] / rates[0])
    return ratios, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round (default: 60)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    watches, agents, ratios, took = [], [], [], []
    for _ in range(args.rounds):
        watch, agent = cost_of_watch(args.ranks, args.seconds)
        more, longer = cost_of_spying(args.ranks, args.seconds)
        watches.append(watch)
        agents.append(agent)
        ratios += more
        took += longer
        print(f"watch {watch:.2f} %, agents {agent:.2f} % of a core a rank; ", end="")
        print(f"spied x{statistics.median(more):.4f}; verdict {statistics.median(longer):.2f} s", flush=True)
    total = statistics.median(map(sum, zip(watches, agents, strict=True)))
    print(f"watch and agents {total:.2f} % of a core a rank (at most 0.5)")
    print(f"spied x{statistics.median(ratios):.4f} of {len(ratios)} turns (at most 1.01)")
    print(f"verdict {statistics.median(took):.2f} s, worst {max(took):.2f} s of {len(took)} (at most 3)")


if __name__ == "__main__":
    main()
