"""The command line: a table of commands, each in a small module that is loaded when it is called."""

from __future__ import annotations

import sys

from mldebug.core.interrupt import Interrupts
from mldebug.core.lazy import lazy_names

TYPE_CHECKING = False  # type checkers take it for true: see core/lazy.py
if TYPE_CHECKING:
    from collections.abc import Sequence

    from mldebug.cli._dispatch import parser_of as parser_of

# Command -> (module, the trouble it is for, what it does), by kinds of trouble. The module has PARSER, EPILOG,
# add_arguments(parser) and run(args) -> int.
COMMANDS = {
    "overflow": (
        "mldebug.cli.overflow",
        "the loss or a weight turned to NaN or inf",
        "run a training script and stop where the first NaN or inf appears",
    ),
    "compare": (
        "mldebug.cli._compare",
        "the same weights give other logits elsewhere",
        "name the first module where two recorded runs part",
    ),
    "spy": (
        "mldebug.cli._spy",
        "it hangs now: which rank, where, and why?",
        "name the rank, the line and the reason when a job hangs",
    ),
    "watch": (
        "mldebug.cli._watch",
        "it hangs now and then, at night",
        "run a job, and say which rank holds it up as soon as it hangs",
    ),
    "trace": (
        "mldebug.cli._trace",
        "it dies without a word: killed, a segfault, an exit code",
        "run a script and keep its last lines on disk, whatever ends it",
    ),
    "trace-tail": (
        "mldebug.cli._trace_tail",
        "which rank stopped first, and where did they part?",
        "read the traces of all ranks of a job together",
    ),
    "memory": (
        "mldebug.cli._memory",
        "it runs out of memory, or takes more with each step",
        "run a script: what takes memory in each phase, and what leaks",
    ),
    "dataloader": (
        "mldebug.cli._dataloader",
        "the GPUs wait for data",
        "find num_workers, prefetch and pinning for a script's own DataLoader",
    ),
    "mfu": (
        "mldebug.cli._mfu",
        "half the speed that others report: how far from the ceiling?",
        "turn tokens per second into MFU and the share of the measured ceiling",
    ),
    "mamf": (
        "mldebug.cli._mamf",
        "how fast can this card really go?",
        "find how many TFLOPS matrix products reach, sustained and in a burst",
    ),
    "comms": (
        "mldebug.cli._comms",
        "are the links as fast as they should be?",
        "measure the collectives of nccl-tests in torch, and check what arrives",
    ),
    "allreduce": (
        "mldebug.cli._allreduce",
        "how fast is all_reduce here?",
        "busbw of all_reduce over all GPUs, in a line",
    ),
    "dist-test": (
        "mldebug.cli._dist_test",
        "a rank, a GPU or a host is bad, and the job only hangs",
        "test all ranks and name who is missing, stopped, cut off or wrong",
    ),
    "pairs": (
        "mldebug.cli._pairs",
        "node 17? one GPU, node or link is slow, and nobody knows which",
        "name the GPU, node or path that is bad, from the bandwidths of all pairs",
    ),
    "doctor": (
        "mldebug.cli._doctor",
        "is this machine fit to train on?",
        "look at GPUs, links, limits and settings, and name what is bad",
    ),
    "numa": (
        "mldebug.cli._numa",
        "ranks run far from their GPUs",
        "bind ranks to the CPUs near their GPUs, or print masks for srun",
    ),
    "logs": (
        "mldebug.cli._logs",
        "64 ranks wrote into one log",
        "sort it out: which tracebacks, on which ranks, which came first",
    ),
    "printflock": (
        "mldebug.cli._printflock",
        "64 ranks print at once, and nothing can be read",
        "run a script whose lines come out whole, with a prefix that names the rank",
    ),
    "tiny-model": (
        "mldebug.cli._tiny_model",
        "the real model is too big to try things on",
        "make a tiny model with the same architecture, and check it",
    ),
    "tiny-tokenizer": (
        "mldebug.cli._tiny_tokenizer",
        "its vocabulary is most of a tiny model",
        "make the same tokenizer with fewer tokens, and check it",
    ),
    "tiny-dataset": (
        "mldebug.cli._tiny_dataset",
        "the real data is too big to try things on, or too clean",
        "take a few rows of any dataset, odd ones too; `pack` and `unpack` records",
    ),
    "emulate": (
        "mldebug.cli._emulate",
        "it only fails on several nodes, and here is one machine",
        "run a command once for each of several emulated nodes",
    ),
    "troubleshoot": (
        "mldebug.cli._troubleshoot",
        "which of these is for me?",
        "ask three questions and propose the command",
    ),
    "demo": (
        "mldebug.cli.demo",
        "what does this look like?",
        "train a tiny T5 that overflows in fp16, and find the layer",
    ),
    "completion": (
        "mldebug.cli._completion",
        "too long to type",
        "print the script that completes commands and options in a shell",
    ),
}


__getattr__, __dir__ = lazy_names(__name__, {"parser_of": "mldebug.cli._dispatch"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 trouble found or a failed run, 2 wrong usage.

    Without `argv` this is the command of the process, and `sys.argv` is read.
    """
    if argv is not None:
        from mldebug.cli._dispatch import run_command

        return run_command(list(argv), own_process=False)
    with Interrupts("mldebug"):  # before anything else is loaded
        from mldebug.cli._dispatch import run_command

        return run_command(sys.argv[1:], own_process=True)
