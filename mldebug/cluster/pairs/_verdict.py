"""PairsVerdict: which GPU, node or path of a cluster is bad, and what says so."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("none", "gpu", "node", "inter-rail", "path", "several")


@dataclass(frozen=True)
class Finding:
    """One thing that is bad.

    `kind` is gpu, node, inter-rail or path; `name` is `host:gpu`, `host`, `rail 3`, `a:0 -> b:1` (one direction) or
    `a:0 <-> b:1`, and "" for a fabric without routes between its rails. `ratio` is the bandwidth that is left of what
    siblings reach (0.0 where pairs fail), `z` how many robust standard deviations that is off, `pairs` on how many
    measured pairs it rests.
    """

    kind: str
    name: str
    reading: str
    ratio: float
    z: float
    pairs: int


@dataclass(frozen=True)
class PairsVerdict:
    """What `judge_pairs()` says of a pair matrix.

        verdict = judge_pairs(matrix); verdict.kind, verdict.culprits

    - `kind`: "none", "gpu", "node", "inter-rail", "path" or "several"
    - `culprits`: the names to act on: `host:gpu`, `host`, `rail 3`, or paths such as `a:0 <-> b:1`
    - `confidence`: "low", "medium" or "high"
    - `reading`: what was seen, in a sentence; `hint`: what to do about it
    - `findings`: an entry for each thing that is bad, worst first, with the share of 1 of its bandwidth that is left
      (`ratio`) and the number of pairs that it rests on
    """

    kind: str
    culprits: tuple[str, ...] = ()
    confidence: str = "high"
    reading: str = ""
    hint: str = ""
    findings: tuple[Finding, ...] = ()
