"""Is the figure of `mldebug mamf` one that can be relied on? Prints, for one GPU:

- runs:       N runs in processes of their own with other seeds: seconds each, figure, how far they are apart
- remeasure:  the first winner again in plain torch: 150 iterations after 30 s of load, against the reported figure
- classic:    the classic finder at PATH for so many seconds (ended by SIGINT), and what it says is best
- duel:       both winners side by side, in turn, sustained and by the classic's own way

    python tests/benchmarks/mamf_repeat.py --parts runs,remeasure
    python tests/benchmarks/mamf_repeat.py --parts classic,duel --classic PATH --classic-seconds 600

Where no call may last that long, the parts (classic several times, each with ranges of its own) go into calls of their
own, and find what came before in --state. The last part, report, prints all that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# What each call of the classic part looks at: where it is known to find its best shapes comes first.
CLASSIC_RANGES = (
    "--m 2048 1024 4096 3072 --n_range 1024 16384 1024 --k_range 1024 16384 1024",
    "--m 8192 6144 10240 12288 16384 --n_range 2048 18432 2048 --k_range 1024 16384 1024",
    "--m_range 256 4096 256 --n_range 1024 12288 1024 --k_range 4096 16384 1024",
)


def main() -> None:
    args = _arguments()
    state_file = Path(args.state)
    state: dict[str, Any] = json.loads(state_file.read_text()) if state_file.exists() else {}
    state.setdefault("dtype", args.dtype)
    for other in args.classic_from:
        state.setdefault("classic", []).extend(json.loads(Path(other).read_text())["classic"])
    for part in args.parts.split(","):
        globals()[f"part_{part}"](state, args)
        state_file.write_text(json.dumps(state))


def part_runs(state: dict[str, Any], args: argparse.Namespace) -> None:
    runs = state.setdefault("runs", [])
    for number in range(args.runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            words = ["--dtype", args.dtype, "--json", "-o", str(Path(folder) / "blocks.jsonl")]
            if args.seconds:
                words += ["--seconds", str(args.seconds)]
            done = subprocess.run(
                [sys.executable, "-m", "mldebug", "mamf", *words], check=False, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
            )  # fmt: skip
            wall = time.monotonic() - began
            blocks = [json.loads(line) for line in (Path(folder) / "blocks.jsonl").read_text().splitlines()]
        report = json.loads(done.stdout)
        if "error" in report:
            sys.exit(f"run {number + 1} failed: {report['error']}")
        phases: dict[str, list[float]] = {}
        for one in blocks:
            if one["kind"] == "block" and one["shape"] == report["reference_shape"] and "tflops" in one:
                phases.setdefault(one["phase"], []).append(one["tflops"])
        keep = (
            "sustained", "spread", "burst", "flushed", "flushed_known", "shape", "others", "steady", "load", "seconds",
            "tried", "seed", "device", "torch", "flat", "reference_share", "share_of_peak", "failed",
        )  # fmt: skip
        runs.append({"wall": wall, **{name: report[name] for name in keep}})
        print(
            f"run {number + 1}: {report['sustained']:.1f} TFLOPS at {report['shape']} in {wall:.1f} s wall"
            f" (spread {100 * report['spread']:.2f}%, burst {report['burst'] or 0:.1f},"
            f" flushed {report['flushed'] or 0:.1f} and known {report['flushed_known']}, flat {report['flat']},"
            f" {report['tried']} shapes, seed {report['seed']}, inside {report['seconds']:.1f} s)"
        )
        print("   others: " + ", ".join(f"{o['shape']} {o['tflops']:.1f}" for o in report["others"][:6]))
        print(
            "   reference shape by phase: "
            + ", ".join(f"{name} {statistics.fmean(rates):.1f}" for name, rates in phases.items())
        )
        print(f"   steady: {report['steady']}", flush=True)


def part_remeasure(state: dict[str, Any], args: argparse.Namespace) -> None:
    run = state["runs"][0]
    import torch

    with torch.inference_mode():
        make = _plain(run["shape"], state["dtype"])
        _load(make, args.load)
        rate = _timed(make, run["shape"], 150)
    state["remeasured"] = {"shape": run["shape"], "tflops": rate, "reported": run["sustained"], "load": args.load}
    print(
        f"150 iterations after {args.load:.0f} s of load: {rate:.1f} TFLOPS, reported {run['sustained']:.1f}",
        flush=True,
    )


def part_classic(state: dict[str, Any], args: argparse.Namespace) -> None:
    calls = state.setdefault("classic", [])
    ranges = args.classic_args or CLASSIC_RANGES[(args.ranges or len(calls)) % len(CLASSIC_RANGES)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "mm.out"
        words = [*ranges.split(), "--dtype", state["dtype"], "--output_file", str(output), "--no-verbose"]
        process = subprocess.Popen([sys.executable, args.classic, *words], stdout=subprocess.DEVNULL)
        began = time.monotonic()
        try:
            process.wait(args.classic_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(30)
        text = output.read_text()
    found = re.search(r"Tried (\d+) shapes.*?mean: +([\d.]+) TFLOPS @ (\d+)x(\d+)x(\d+)", text, re.DOTALL)
    if found is None:
        sys.exit(f"the classic finder found nothing:\n{text[-800:]}")
    one = {
        "ranges": ranges, "seconds": time.monotonic() - began, "tried": int(found[1]), "tflops": float(found[2]),
        "shape": [int(found[number]) for number in (3, 4, 5)],
    }  # fmt: skip
    calls.append(one)
    print(
        f"classic: {one['tflops']} at {one['shape']}, {one['tried']} shapes in {one['seconds']:.0f} s ({ranges})",
        flush=True,
    )


def part_duel(state: dict[str, Any], args: argparse.Namespace) -> None:
    """Blocks in turn and in random order, so that drift of clock and temperature meets both alike."""
    import torch

    median = sorted(state["runs"], key=lambda run: run["sustained"])[len(state["runs"]) // 2]
    ours = tuple(median["shape"])
    theirs = tuple(max(state["classic"], key=lambda one: one["tflops"])["shape"])
    rng = random.Random(5)
    with torch.inference_mode():
        makes = {shape: _plain(shape, state["dtype"]) for shape in {ours, theirs}}
        _load(makes[ours], args.load / 2)
        sustained = _in_turn(makes, ours, theirs, args.duel_seconds * 0.7, rng, _block)
        flushed = _in_turn(makes, ours, theirs, args.duel_seconds * 0.3, rng, _flushed)
    state["duel"] = {"ours": ours, "theirs": theirs, "sustained": sustained, "flushed": flushed}
    for name, one in (("sustained", sustained), ("with flushes", flushed)):
        print(f"{name}: ours {ours} {one['ours']:.1f}, classic's {theirs} {one['theirs']:.1f}")
        print(f"   classic's is {100 * (one['ratio'] - 1):+.2f}% ± {100 * one['error']:.2f}% in {one['turns']} turns")
    sys.stdout.flush()


def part_report(state: dict[str, Any], args: argparse.Namespace) -> None:
    if runs := state.get("runs"):
        rates = [one["sustained"] for one in runs]
        print(f"{len(runs)} runs on {runs[0]['device']}, torch {runs[0]['torch']}, Python {sys.version.split()[0]}")
        told, walls = (", ".join(f"{one[name]:.1f}" for one in runs) for name in ("sustained", "wall"))
        print(f"  sustained {told}: {100 * (max(rates) / min(rates) - 1):.2f}% apart; wall {walls} s")
    if again := state.get("remeasured"):
        off = 100 * (again["reported"] / again["tflops"] - 1)
        print(f"measured again {again['tflops']:.1f} against {again['reported']:.1f}: {off:+.2f}%")
    for one in state.get("classic", []):
        print(f"classic {one['tflops']} at {one['shape']}, {one['tried']} shapes in {one['seconds']:.0f} s")
    if duel := state.get("duel"):
        for name in ("sustained", "flushed"):
            print(f"side by side, {name}: classic's winner {100 * (duel[name]['ratio'] - 1):+.2f}% of ours")


def _in_turn(makes: Any, ours: Any, theirs: Any, seconds: float, rng: random.Random, measure: Any) -> dict[str, Any]:
    rates: dict[Any, list[float]] = {ours: [], theirs: []}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(rates[ours]) < 3:
        for shape in rng.sample([ours, theirs], 2) if ours != theirs else [ours]:
            rates[shape].append(measure(makes[shape], shape))
    pairs = [b / a for a, b in zip(rates[ours], rates[theirs], strict=True)]
    return {
        "ours": statistics.fmean(rates[ours]), "theirs": statistics.fmean(rates[theirs]),
        "ratio": statistics.fmean(pairs), "turns": len(pairs),
        "error": statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0,
    }  # fmt: skip


def _plain(shape: Any, dtype: str) -> Any:
    """A function that makes the i-th product: of four pairs of matrices in turn, so that they are cold in the cache."""
    import torch

    m, n, k = shape
    kind = getattr(torch, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sets = [
        (
            torch.randn(m, k, device=device).to(kind),
            torch.randn(n, k, device=device).to(kind).t(),
            torch.empty(m, n, dtype=kind, device=device),
        )
        for _ in range(4)
    ]

    def make(turn: int) -> None:
        a, b, c = sets[turn % 4]
        torch.mm(a, b, out=c)

    return make


def _clock() -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    import torch

    if isinstance(first, float):
        return last - first
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def _timed(make: Any, shape: Any, iterations: int) -> float:
    first = _clock()
    for turn in range(iterations):
        make(turn)
    return 2 * shape[0] * shape[1] * shape[2] * iterations / _between(first, _clock()) / 1e12


def _load(make: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        first = _clock()
        for turn in range(50):
            make(turn)
        _between(first, _clock())


def _block(make: Any, shape: Any) -> float:
    """0.3 s for the clock to settle and 0.4 s that count."""
    rate = _timed(make, shape, 10) * 1e12 / (2 * shape[0] * shape[1] * shape[2])
    for turn in range(int(0.3 * rate)):
        make(turn)
    return _timed(make, shape, max(3, int(0.4 * rate)))


def _flushed(make: Any, shape: Any) -> float:
    """The mean of calls for 0.4 s after 0.3 s, with 256 MiB written before each."""
    import torch

    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    each = 2e-4 + 2 * shape[0] * shape[1] * shape[2] / _timed(make, shape, 5) / 1e12
    marks = []
    for turn in range(max(8, int(0.7 / each))):
        flush.zero_()
        first = _clock()
        make(turn)
        marks.append((first, _clock()))
    seconds = [_between(*pair) for pair in marks[len(marks) * 3 // 7 :]]
    return 2 * shape[0] * shape[1] * shape[2] / statistics.fmean(seconds) / 1e12


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="runs,remeasure,report", help="of runs, remeasure, classic, duel, report")
    parser.add_argument("--state", default="mamf_repeat.json", help="what the parts tell each other")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, help="of each run, in place of the default")
    parser.add_argument("--load", type=float, default=30.0, help="seconds of load before measuring again")
    parser.add_argument("--classic", metavar="PATH", help="the classic mamf-finder.py")
    parser.add_argument("--classic-seconds", type=float, default=600.0)
    parser.add_argument("--classic-args", default="", help="its ranges, in place of those known to be good")
    parser.add_argument("--ranges", type=int, default=0, help="which of the ranges known to be good (0, 1 or 2)")
    parser.add_argument("--classic-from", nargs="+", default=[], metavar="STATE", help="take what these found")
    parser.add_argument("--duel-seconds", type=float, default=30.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
