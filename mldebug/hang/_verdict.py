"""Verdict: who holds a job up, how, where, and what says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "rank-guarded-collective", "skipped-collective", "extra-collective", "fewer-iterations", "more-iterations",
    "iteration-skew", "rank-local-decision", "dead-main-thread", "missing-rank", "cross-group-order",
    "missing-group-constructor", "p2p-cycle", "two-threads-one-group", "collective-in-destructor",
    "dataloader-worker", "fork-with-lock-held", "fork-after-threads", "pipe-deadlock", "lock-barrier-cycle",
    "gil-held", "process-stopped", "poll-loop", "network", "straggler", "unknown",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What `judge()` says of a job.

        verdict = spy().verdict
        verdict.hung and print(verdict.text, verdict.hint)

    - `hung`: False for a job that goes on, is only slow, or of which too little can be seen
    - `kind`: why, docs/hang.md has all: "rank-guarded-collective", "straggler", "network"
    - `culprits`: global ranks that the others wait for; empty where no single rank is to blame
    - `text`: who waits where for whom, in a sentence or two; `hint`: what to do about it, "" where that is all
    - `sure`: "low", "medium" or "high"; `rests_on`: the evidence, strongest first
    - `where`: an entry for each set of ranks that stand at the same place
    """

    hung: bool
    kind: str
    culprits: tuple[int, ...] = ()
    text: str = ""
    sure: str = "low"  # low, medium, high
    rests_on: tuple[str, ...] = ()
    where: tuple[dict[str, Any], ...] = field(default=())

    @property
    def hint(self) -> str:
        """What to do about it, in a line; "" where the text is all there is to say."""
        return _HINTS.get(self.kind, "") if self.hung else ""


_HINTS = {
    "rank-guarded-collective": "let all ranks make the call, and keep only the writing under the condition",
    "skipped-collective": "decide together whether to skip (all_reduce the flag), or make the call with zeros",
    "extra-collective": "move the call to where all ranks pass",
    "fewer-iterations": "give all ranks equally many batches (drop_last, equal shards), or use join()",
    "more-iterations": "give all ranks equally many batches (drop_last, equal shards), or use join()",
    "iteration-skew": "look for a `continue`, or for a start that differs after a resume",
    "rank-local-decision": "let one rank decide, and broadcast its decision",
    "dead-main-thread": "read the traceback on that rank's stderr; make the thread a daemon",
    "missing-rank": "look at that rank's log, its node, and the kernel's out-of-memory messages",
    "cross-group-order": "use the groups in one order on all ranks",
    "missing-group-constructor": "let all ranks make all groups, members or not, in one order",
    "p2p-cycle": "let even ranks send first, or use batch_isend_irecv",
    "two-threads-one-group": "give each thread a group of its own",
    "collective-in-destructor": "call it in a close() that all ranks reach",
    "dataloader-worker": "see what the worker does at that line; DataLoader(timeout=...) turns it into an error",
    "fork-with-lock-held": "start workers by spawn or forkserver, or before the threads",
    "fork-after-threads": "start workers by spawn, or before the threads; TOKENIZERS_PARALLELISM=false",
    "pipe-deadlock": "read the pipe while it is written (communicate()); empty a queue before join()",
    "lock-barrier-cycle": "leave the lock before the barrier",
    "gil-held": "release the GIL there, bound the regex, or do it in another process",
    "process-stopped": "kill -CONT PID, once nobody debugs it",
    "poll-loop": "see who should set what it asks for",
    "network": "test the links between the nodes: the interface that is used, a firewall, the switch",
}
