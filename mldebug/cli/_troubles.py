"""What `mldebug troubleshoot` knows: what people see, what it is more exactly, and the command for it.

A command is a template: {ranks} and {node} become a launcher where there are several ranks, {many} the option that
reaches other machines. `at` says which of the ways below it is started.
"""

from __future__ import annotations

from dataclasses import dataclass

WHERE = {
    "one": "one process",
    "node": "several ranks on one machine",
    "slurm": "several machines, under SLURM",
    "ssh": "several machines that ssh reaches",
    "pods": "pods of Kubernetes",
}

# How a script is run under a command, by where; `{}` is the command with its options.
_TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node01:29500"
SCRIPT = {
    "one": "mldebug {}",
    "node": "torchrun --nproc-per-node 8 -m mldebug {}",
    "slurm": "srun --ntasks-per-node 8 mldebug {}",
    "ssh": f"{_TORCHRUN} -m mldebug {{}}",
    "pods": f"{_TORCHRUN} -m mldebug {{}}",
}
# How something is asked that looks from outside.
LOOK = {
    "one": "mldebug {}",
    "node": "mldebug {}",
    "slurm": "mldebug {} --slurm JOB",
    "ssh": "mldebug {} --hosts node[01-16]",
    "pods": "mldebug {} --pods app=train",
}
LOOK_IN_PODS = {**LOOK, "pods": "kubectl exec POD -- mldebug {}"}
# How something is started that has ranks of its own.
RANKS = {
    "one": "mldebug {}",
    "node": "mldebug {}",
    "slurm": "srun --ntasks-per-node 8 mldebug {}",
    "ssh": "mldebug {} --hosts node[01-16]",
    "pods": f"{_TORCHRUN} -m mldebug {{}}",
}
# How a whole job is run under a command, on each of its nodes.
JOB = {
    "one": "mldebug {} -- python train.py",
    "node": "mldebug {} -- torchrun --nproc-per-node 8 train.py",
    "slurm": f"srun --ntasks-per-node 1 mldebug {{}} -- {_TORCHRUN} train.py",
    "ssh": f"mldebug {{}} -- {_TORCHRUN} train.py",
    "pods": f"mldebug {{}} -- {_TORCHRUN} train.py",
}
# Here, wherever the job runs.
HERE = dict.fromkeys(WHERE, "mldebug {}")

# What a reader has to replace in a command.
YOURS = (
    "train.py", "job.log", "JOB", "POD", "MODEL", "DATA", "app=train", "node[01-16]", "node01:29500", "81920",
    "llama2-7b", "--nnodes 2", "--gpus 8", "--nproc-per-node 8", "--ntasks-per-node 8",
)  # fmt: skip


@dataclass(frozen=True)
class Sign:
    """One thing that people see: their words, the command, why it is the one, and what to do when it finds nothing."""

    words: str
    how: dict[str, str]
    command: str
    reason: str
    otherwise: str
    page: str

    def line(self, where: str) -> str:
        return self.how[where].format(self.command)


@dataclass(frozen=True)
class Trouble:
    """What people say first, and what it can be."""

    words: str
    signs: dict[str, Sign]


TROUBLES = {
    "numbers": Trouble(
        "the numbers are wrong: NaN, inf, other results than before",
        {
            "nan": Sign(
                "the loss or a weight is NaN or inf",
                SCRIPT,
                "overflow -- train.py",
                "It watches every module, stops at the first NaN or inf, and names the layer, the operation and the "
                "cause. It costs a few percent and needs no edit.",
                "A loss that is computed outside of any module is seen only if you hand it over: `loss = "
                "mldebug.check(loss, 'loss')`. Else record a good run and a bad one with `mldebug compare --record`.",
                "nan",
            ),
            "scale": Sign(
                "fp16: the scaler skips steps, the loss scale falls",
                SCRIPT,
                "overflow -- train.py",
                "A scale that was too high costs one step and is no trouble; a layer that overflows at any scale is. "
                "The recorder sees which of the two it is.",
                "Then the skipped steps were harmless. If the scale goes on falling, gradients are too small, not too "
                "large: look at `abs max` in the report, and try bfloat16.",
                "nan",
            ),
            "differ": Sign(
                "another card, version, dtype or compile gives other numbers",
                SCRIPT,
                "compare --record before -- train.py",
                "Record a run here and one there (`--record after`); then `mldebug compare before after` names the "
                "first module whose inputs agree and whose outputs do not.",
                "The forwards agree within the rounding of their dtypes: compare the data, the seeds and the optimizer "
                "state. `--ops` looks at every operation.",
                "devices-disagree",
            ),
        },
    ),
    "stuck": Trouble(
        "nothing happens: it hangs, or never starts",
        {
            "now": Sign(
                "it hangs now",
                LOOK,
                "spy",
                "It finds the ranks by itself, reads their stacks without stopping them, and names the rank that the "
                "others wait for, its line and the reason.",
                "A job that only is slow is called slow. Look again in a minute: `mldebug spy -o now.json`, then "
                "`mldebug spy --diff now.json` says who moved.",
                "stuck",
            ),
            "sometimes": Sign(
                "it hangs now and then, when nobody looks",
                JOB,
                "watch --timeout 300 --on-hang spy,kill",
                "It looks at the job from time to time, says why as soon as nothing moves for 300 s, and ends it, so "
                "that the scheduler can start it again.",
                "If it was killed although it only was slow, give it a longer --timeout; if it ends without a word, "
                "`mldebug trace --ring 64MB` keeps its last lines.",
                "stuck",
            ),
            "start": Sign(
                "it does not get beyond the start",
                RANKS,
                "dist-test",
                "It tests all ranks over plain sockets and names who is missing, stopped, cut off or wrong, where "
                "NCCL would only hang.",
                "Ranks and links work: look at the job itself with `mldebug spy` while it hangs.",
                "stuck",
            ),
        },
    ),
    "died": Trouble(
        "it ended by itself",
        {
            "silent": Sign(
                "without a word: killed, a segfault, an exit code and nothing else",
                SCRIPT,
                "trace --ring 64MB -o traces -- train.py",
                "Each line of your code is on disk before it runs, so the last one survives any death. Then "
                "`mldebug trace-tail traces` reads all ranks together.",
                "If the last line calls a library, add `--include PACKAGE`. `Killed` and exit code -9 or 137 mean the "
                "kernel or the scheduler: `dmesg | grep -i oom`, then `mldebug memory -- train.py`.",
                "died",
            ),
            "tracebacks": Sign(
                "with tracebacks of many ranks",
                HERE,
                "logs job.log",
                "It sorts a log of many ranks: which tracebacks there are, which came first, and which are only "
                "consequences.",
                "No traceback in the log: the one that counts went to another file (`mldebug logs FOLDER` reads them "
                "together), or the rank died without a word: `mldebug trace`.",
                "mixed-logs",
            ),
            "memory": Sign(
                "out of memory",
                SCRIPT,
                "memory -- train.py",
                "It says what was alive when memory ran out, in which phase, and which line made it.",
                "If it was the host's memory and not the GPU's, look at the DataLoader: each worker has a copy of what "
                "it touches.",
                "out-of-memory",
            ),
        },
    ),
    "slow": Trouble(
        "it is slow",
        {
            "all": Sign(
                "half the speed that others report",
                HERE,
                "mfu --tokens-per-second 81920 --model llama2-7b --gpus 8",
                "It turns your tokens per second into a share of what the GPUs can do: below 0.3 something is wrong, "
                "above 0.5 you are done.",
                "Then ask the parts one by one: `mldebug mamf` (the card), `mldebug dataloader -- train.py` (the data),"
                " `mldebug allreduce` (the links).",
                "half-speed",
            ),
            "data": Sign(
                "the GPUs wait for data",
                SCRIPT,
                "dataloader -- train.py",
                "It measures your own DataLoader with other settings in a minute and says what to write.",
                "The loader keeps up: the time goes elsewhere. `mldebug mfu` says how much there is to win.",
                "slow-loader",
            ),
            "links": Sign(
                "one GPU alone is fast, many are not",
                RANKS,
                "allreduce",
                "It measures what the links carry, and checks what arrives.",
                "The links are as fast as they should be: ranks far from their GPUs (`mldebug numa -- train.py`) or "
                "one slow rank (`mldebug pairs`).",
                "half-speed",
            ),
            "one": Sign(
                "one node or GPU is slow, and nobody knows which",
                RANKS,
                "pairs",
                "It measures all pairs of GPUs at once and names the GPU, the node or the path that is to blame.",
                "All pairs are alike: ask the machines themselves with `mldebug doctor --load`.",
                "node-17",
            ),
        },
    ),
    "memory": Trouble(
        "it takes too much memory",
        {
            "grows": Sign(
                "more with every step",
                SCRIPT,
                "memory -- train.py",
                "It names the line that makes tensors which nobody gives back.",
                "No tensors of torch grow: look for lists of Python, and at the DataLoader's workers.",
                "out-of-memory",
            ),
            "full": Sign(
                "it does not fit, or only just",
                SCRIPT,
                "memory -- train.py",
                "It says what takes memory in each phase: parameters, gradients, optimizer, activations.",
                "Activations are the rest: `mldebug.activation_memory(model, inputs)` says which layer keeps most.",
                "out-of-memory",
            ),
        },
    ),
    "output": Trouble(
        "nobody can read what the ranks print",
        {
            "log": Sign(
                "there is a log already",
                HERE,
                "logs job.log",
                "It finds out who said what, folds what all ranks say into one line, and shows tracebacks first.",
                "It found no ranks: say how lines begin, for example `--prefix 'worker-{rank} | '`.",
                "mixed-logs",
            ),
            "again": Sign(
                "I can run it again",
                SCRIPT,
                "printflock -- train.py",
                "Each line comes out whole, with the host and the rank before it, and needs no edit.",
                "Lines of a C library do not go through Python: `mldebug logs` sorts what is left.",
                "mixed-logs",
            ),
        },
    ),
    "before": Trouble(
        "nothing yet: I want to know before I start",
        {
            "machine": Sign(
                "is the machine in order?",
                LOOK_IN_PODS,
                "doctor",
                "It reads NVML, /sys and /proc in a second or two, and names what is bad or unlike the other nodes.",
                "What cannot be seen without load is seen with `--load`; then test the ranks: `mldebug dist-test`.",
                "before-training",
            ),
            "ranks": Sign(
                "can all ranks work together?",
                RANKS,
                "dist-test",
                "It runs each kind of collective and checks what arrives.",
                "Then how fast: `mldebug allreduce`, and all pairs: `mldebug pairs`.",
                "before-training",
            ),
            "speed": Sign(
                "how fast can a card go?",
                HERE,
                "mamf",
                "It finds what matrix products reach here, sustained, in a minute.",
                "If that is less than other cards of the kind reach: `mldebug doctor --load`.",
                "half-speed",
            ),
        },
    ),
    "small": Trouble(
        "trying things out takes too long",
        {
            "model": Sign(
                "the model is too big",
                HERE,
                "tiny-model MODEL -o tiny",
                "A miniature of the same architecture, checked, in a second; its tokenizer is shrunk with it.",
                "The error does not come with the miniature: it may need the size. Raise `--layers` and `--hidden`.",
                "slow-loop",
            ),
            "data": Sign(
                "the data is too big",
                HERE,
                "tiny-dataset DATA -n 100 --rows cover -o tiny-data",
                "A few rows, the odd ones too: empty, shortest, longest, each label.",
                "The odd row is not among them: more of them (`-n 1000`), or `--rows random`.",
                "slow-loop",
            ),
            "nodes": Sign(
                "it only fails on several nodes",
                HERE,
                "emulate --nodes 2 --gpus-per-node 4 -- torchrun --nproc-per-node 4 train.py",
                "Each emulated node has its own host name, network and processes, on this machine.",
                "It may need the real network: `mldebug dist-test` there.",
                "slow-loop",
            ),
        },
    ),
}
