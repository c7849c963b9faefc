"""What the recorder costs: step time without it, with it, with `backward=True`, and with the class of transformers.

    python tests/benchmarks/overflow_overhead.py [--device cpu|cuda] [--models gpt2 llama] [--batches 8 2]
        [--rounds N] [--compile] [--no-old] [--no-backward]

One interleaved run: every round times a block of steps of each variant, in an order that turns from round to round; a
variant's ratio is the median over rounds of its time over the time without. Each variant has its own model and
optimizer, equal in every bit at the start. The recorder is attached around its own block only (its hooks are global),
untimed; each block starts with an untimed step. Compiled variants run in a process each, since hooks that come and go
would compile the model again; once started, only one process works at a time. Afterwards the recorder that was timed
must name a random layer in which one inf is planted. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import random
import statistics
import time
from typing import Any

BARS = {("cuda", 8, False): 1.05, ("cuda", 2, False): 1.15, ("cuda", 8, True): 1.10, ("cpu", 4, False): 1.08}
BACKWARD_BARS = {("cuda", 8): 1.10, ("cpu", 4): 1.15}  # by device and batch, as it is written
MEMORY_BAR_MB = 32.0
BLOCK = {"cuda": 5, "cpu": 1}
ROUNDS = {"cuda": 20, "cpu": 15}


def build_model(name: str, device: str) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if device == "cuda":
        model = {"gpt2": lambda: GPT2LMHeadModel(GPT2Config())}[name]()
    elif name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, n_positions=128, n_embd=256, n_layer=6, n_head=8))
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
                max_position_embeddings=128,
            )
        )  # fmt: skip
    return model.to(device).train()


class Variant:
    """One model with its optimizer, and what watches it: "none", "ours", "backward" or "old"."""

    def __init__(self, watcher: str, model: str, batch: int, device: str, compiled: bool) -> None:
        import torch

        self.watcher, self.device, self.compiled = watcher, device, compiled
        if device == "cpu":
            torch.set_num_threads(1)
        length = 1024 if device == "cuda" else 128
        self.model = build_model(model, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, self.model.config.vocab_size, (batch, length), generator=generator).to(device)
        self.recorder: Any = None
        self.call = self.model if not compiled else None
        self.memory: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        """First steps (allocations, compilation), then the peak of memory with the watcher."""
        if not self.compiled:
            self.steps(2)
        base = self._memory()
        if self.watcher in ("ours", "backward"):
            from mldebug import DebugUnderflowOverflow

            self.recorder = DebugUnderflowOverflow(self.model, backward=self.watcher == "backward")
        elif self.watcher == "old":
            from transformers.debug_utils import DebugUnderflowOverflow as Classic

            Classic(self.model)
        if self.compiled:
            import torch

            self.call = torch.compile(self.model)
            self.steps(3)
        else:
            self.steps(2)
        self.memory = {"base": base, "peak": self._memory(peak=True)}
        self.leave()

    def _memory(self, peak: bool = False) -> float:
        import torch

        if self.device != "cuda":
            return 0.0
        torch.cuda.synchronize()
        if peak:
            return torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20

    def enter(self) -> None:
        if self.recorder is not None and not self.compiled:
            self.recorder.__enter__()

    def leave(self) -> None:
        if self.recorder is not None and not self.compiled:
            self.recorder.__exit__(None, None, None)

    def steps(self, count: int) -> None:
        import torch

        for _ in range(count):
            self.optimizer.zero_grad()
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.call(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            self.optimizer.step()

    def block(self, count: int) -> float:
        """Seconds per step over `count` steps, after one that is not timed."""
        import torch

        wait = torch.cuda.synchronize if self.device == "cuda" else (lambda: None)
        self.enter()
        self.steps(1)
        gc.collect()
        gc.disable()
        wait()
        start = time.perf_counter()
        self.steps(count)
        wait()
        seconds = time.perf_counter() - start
        gc.enable()
        self.leave()
        return seconds / count

    def catch(self, seed: int) -> tuple[str, str | None]:
        """(layer in which one inf was planted, layer that the recorder named)."""
        import torch

        from mldebug import NumericsError

        layers = [name for name, m in self.model.named_modules() if getattr(m, "weight", None) is not None]
        name = random.Random(seed).choice([layer for layer in layers if ".h." in layer or ".layers." in layer])
        layer = self.model.get_submodule(name)
        if self.compiled:  # another forward would be compiled again: the inf goes into the weight
            with torch.no_grad():
                layer.weight.view(-1)[-1] = float("inf")
        else:
            forward = layer.forward

            def planted(x: Any) -> Any:
                out = forward(x).clone()
                out.view(-1)[out.numel() // 2] = float("inf")
                return out

            layer.forward = planted
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                self.enter()
                self.steps(1)
                self.recorder.poll()
                self.leave()
        except NumericsError as error:
            return name, error.report.event.module
        finally:
            self.recorder.remove()
        event = self.recorder.report.event
        return name, None if event is None else event.module


def serve(pipe: Any, args: tuple[Any, ...]) -> None:
    """A variant in its own process: answers calls of its methods until told to end."""
    variant = Variant(*args)
    pipe.send(variant.memory)
    while (order := pipe.recv()) is not None:
        name, arguments = order
        pipe.send(getattr(variant, name)(*arguments))


class Remote:
    """A Variant that lives in a process of its own."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, args), daemon=True)
        self.process.start()
        other.close()

    def wait(self) -> None:
        """For the end of its start: those of several variants run side by side."""
        self.memory = self.pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, arguments))
        return self.pipe.recv()

    def block(self, count: int) -> float:
        return self.ask("block", count)

    def catch(self, seed: int) -> Any:
        return self.ask("catch", seed)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(30)


def measure(
    model: str, batch: int, device: str, compiled: bool, old: bool, backward: bool, rounds: int, seed: int
) -> dict[str, Any]:
    names = ["none", "ours"] + ["backward"] * (backward and not compiled) + ["old"] * (old and not compiled)
    kind = Remote if compiled else Variant
    with contextlib.redirect_stdout(io.StringIO()):
        variants = {name: kind(name, model, batch, device, compiled) for name in names}
        for variant in variants.values():
            if isinstance(variant, Remote):
                variant.wait()
        times: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds):
            for k in range(len(names)):
                name = names[(i + k) % len(names)]
                times[name].append(variants[name].block(BLOCK[device] * (2 if compiled else 1)))
        planted, named = variants["ours"].catch(seed)
    row: dict[str, Any] = {
        "model": model,
        "batch": batch,
        "length": 1024 if device == "cuda" else 128,
        "compiled": compiled,
    }
    for name in names:
        row[f"{name}_ms"] = round(statistics.median(times[name]) * 1e3, 3)
    for name in names[1:]:
        ratios = sorted(a / b for a, b in zip(times[name], times["none"], strict=True))
        row[f"{name}_ratio"] = round(statistics.median(ratios), 4)
        row[f"{name}_ratio_spread"] = [round(ratios[len(ratios) // 10], 4), round(ratios[-1 - len(ratios) // 10], 4)]
    row["bar"] = BARS.get((device, batch, compiled))
    if "backward" in names:
        row["backward_bar"] = BACKWARD_BARS.get((device, batch))
    if device == "cuda":
        extra = {name: v.memory["peak"] - v.memory["base"] for name, v in variants.items()}
        row["memory_mb"] = round(extra["ours"] - extra["none"], 2)
        row["memory_bar_mb"] = MEMORY_BAR_MB
    row.update(planted=planted, named=named, caught=planted == named)
    fast = row["bar"] is None or row["ours_ratio"] <= row["bar"]
    if row.get("backward_bar") is not None:
        fast = fast and row["backward_ratio"] <= row["backward_bar"]
    row["within_bars"] = bool(fast and row["caught"] and row.get("memory_mb", 0.0) <= MEMORY_BAR_MB)
    for variant in variants.values():
        if isinstance(variant, Remote):
            variant.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--models", nargs="+", choices=("gpt2", "llama"))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--compile", action="store_true", help="the compiled model instead, without the old class")
    parser.add_argument("--no-old", action="store_true", help="leave out the class of transformers")
    parser.add_argument("--no-backward", action="store_true", help="leave out the gradients of module outputs")
    parser.add_argument("--seed", type=int, default=None, help="of the layer in which the inf is planted")
    args = parser.parse_args()

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    models = args.models or (["gpt2"] if device == "cuda" else ["gpt2", "llama"])
    batches = args.batches or ([8] if device == "cuda" and args.compile else [8, 2] if device == "cuda" else [4])
    rounds = args.rounds or ROUNDS[device]
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    rows = []
    for model in models:
        for batch in batches:
            rows.append(
                measure(model, batch, device, args.compile, not args.no_old, not args.no_backward, rounds, seed)
            )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    result = {
        "benchmark": "overflow_overhead",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": rounds,
        "seed": seed,
        "rows": rows,
        "within_bars": all(row["within_bars"] for row in rows),
    }
    print(json.dumps(result))
    return 0 if result["within_bars"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
