"""What `mldebug memory` costs a step: a small step and one of GPT-2's size, each watched and unwatched in turns.

    OMP_NUM_THREADS=1 python tests/benchmarks/memory_cost.py --seconds 35

Prints, of each, the step without a watch and what the watch adds in the first 40 steps, which are looked at, and later:
the median of the differences of neighbouring steps. On the CPU times are those of this process, so that what else the
machine does is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from mldebug.perf.memory._memory_report import memory_report
from mldebug.perf.memory._watch import memory_watch

_WINDOW = 40  # steps that are looked at
_NEXT = 100  # the step from which it looks again
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_clock = time.perf_counter if _DEVICE == "cuda" else time.process_time
_Step = Callable[[int], float]  # tokens -> seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=35, help="time for most of it (default 35)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a step of GPT-2 (default 64)")
    options = parser.parse_args()
    print(f"{_DEVICE}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for name, make, tokens, share in (("small", _small, 8, 0.2), ("GPT-2", _gpt2, options.tokens, 0.7)):
        _show(name, *_measure(name, make(), tokens, options.seconds * share))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        began = time.perf_counter()
        for _ in range(200):
            memory_report("x", file=nowhere)
        print(f"one memory_report: {(time.perf_counter() - began) / 200 * 1e6:.0f} us")


def _measure(name: str, step: _Step, tokens: int, seconds: float) -> tuple[list[tuple[float, float]], ...]:
    """Pairs of (unwatched, watched) seconds: of the steps that are looked at, and of later ones."""
    for _ in range(3):
        step(tokens)
    pairs: list[list[tuple[float, float]]] = [[], []]
    end = time.monotonic() + seconds
    while not pairs[1] or time.monotonic() < end:
        with memory_watch(quiet=True) as watch:
            for _ in range(5):  # the phases
                step(tokens)
            for kind, until in enumerate((time.monotonic() + (end - time.monotonic()) / 2, end)):
                watched = 5 if kind == 0 else _WINDOW
                for taken in range(watched, _WINDOW if kind == 0 else _NEXT - 1):
                    if len(pairs[kind]) >= 5 and time.monotonic() > until:
                        break
                    pairs[kind].append(_pair(watch, step, tokens, watch_first=taken % 2 == 0))
                    _progress(f"{name}: {len(pairs[0])} + {len(pairs[1])} pairs of steps")
                _close_window(watch)
    _progress("")
    return tuple(pairs)


def _close_window(watch: memory_watch) -> None:
    """As at its end, so that the rest of the steps that are looked at need not be made."""
    watch._steps._window = None
    watch._live.end()
    watch._hooks.watch_modules(False)


def _pair(watch: memory_watch, step: _Step, tokens: int, watch_first: bool) -> tuple[float, float]:
    """A step with the watch's hooks, and one without them, in the same process and a moment apart."""
    noting = watch._live.noting
    if watch_first:
        watched = step(tokens)
    watch._hooks.remove()
    watch._live.end()
    plain = step(tokens)
    watch._hooks.install()
    watch._hooks.watch_modules(noting)
    if noting:
        watch._live.begin()
    return plain, watched if watch_first else step(tokens)


def _show(name: str, looked_at: list[tuple[float, float]], later: list[tuple[float, float]]) -> None:
    base = statistics.median(plain for plain, _ in looked_at + later)
    print(f"{name}: a step takes {base * 1e3:.2f} ms without")
    for when, pairs in (("looked at", looked_at), ("later", later)):
        more = statistics.median(watched - plain for plain, watched in pairs)
        print(f"  {when:9} {more * 1e6:+8.0f} us a step ({more / base:+.2%}), {len(pairs)} pairs", flush=True)


def _small() -> _Step:
    layers = (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return _stepping(torch.nn.Sequential(*layers), lambda tokens: torch.randn(tokens, 64))


def _gpt2() -> _Step:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    return _stepping(model, lambda tokens: torch.randint(0, 50257, (1, tokens)))


def _stepping(model: torch.nn.Module, batch: Callable[[int], torch.Tensor]) -> _Step:
    model.to(_DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: int) -> float:
        data = batch(tokens).to(_DEVICE)
        began = _clock()
        output = model(data)
        (output if isinstance(output, torch.Tensor) else output.logits).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
        return _clock() - began

    return step


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
