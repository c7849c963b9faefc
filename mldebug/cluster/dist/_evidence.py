"""What a dist-test has seen, as plain JSON: it is judged alike whether it is fresh, partial, recorded or simulated.

schema, world, backend, timeout, ended (why the collector stopped), seconds
collector  {host, pid, address}
ranks      {"0": {rank, local_rank, host, boot, pid, parent, phase, step, age, state, parent_state, silent, lost,
                  code, error, facts, reach, large, done, stack, checks, local_world, apart, skew, waits, no_stack,
                  terminated}}
                                         a rank that never came is not in it
clashes    [{rank, host, pid, why}]      who was not let in
plan       {"0": host}                   where the launcher puts ranks, if it says so
hosts      {host: why}                   hosts that could not be reached to start ranks
wrong      [{rank, check, source, count, index, got, want}]   contents that were not what they had to be
left_out   [[check, why]]                what this backend lacks
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mldebug.cluster.dist._shape import fitting
from mldebug.core.errors import UsageError

Evidence = dict[str, Any]

SCHEMA = 1
_MOST = 1 << 20  # ranks


def empty(world: int, backend: str, timeout: float) -> Evidence:
    return {
        "schema": SCHEMA, "world": world, "backend": backend, "timeout": timeout, "ended": "", "seconds": 0.0,
        "collector": {}, "ranks": {}, "clashes": [], "hosts": {}, "wrong": [], "left_out": [],
    }  # fmt: skip


def new_rank(rank: int, local_rank: int, host: str, boot: str, pid: int, parent: int) -> dict[str, Any]:
    return {
        "rank": rank, "local_rank": local_rank, "host": host, "boot": boot, "pid": pid, "parent": parent,
        "phase": "start", "step": 0, "age": 0.0, "state": "", "parent_state": "", "silent": 0.0, "lost": "",
        "code": None, "error": None, "facts": {}, "reach": [], "large": [], "done": False, "stack": "", "checks": {},
        "local_world": 0, "apart": [], "skew": None, "waits": False, "no_stack": "", "terminated": 0.0,
    }  # fmt: skip


def load_evidence(path: str | os.PathLike[str]) -> Evidence:
    """The evidence in a file that `mldebug dist-test -o FILE` or `--json` wrote. Raises UsageError for another file.

    verdict = judge_dist_test(load_evidence("run.json"))
    """
    name, hint = os.fspath(path), "give what `mldebug dist-test -o FILE` wrote"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"cannot read {name}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{name} is no JSON document", hint) from exc
    evidence = document.get("evidence", document) if isinstance(document, dict) else None
    if not isinstance(evidence, dict) or not isinstance(evidence.get("ranks"), dict) or "world" not in evidence:
        raise UsageError(f"{name} has no evidence of a dist-test", hint)
    layout = evidence.get("schema", SCHEMA)
    if not isinstance(layout, int) or layout > SCHEMA:
        raise UsageError(f"{name} has layout {layout!r}, and this mldebug knows {SCHEMA}", "use a newer mldebug")
    fit = fitting(evidence)
    if not 0 < fit.get("world", 0) <= _MOST:
        raise UsageError(f"{name} is of {str(evidence['world'])[:40]} ranks: it is damaged", hint)
    ranks = {
        str(int(rank)): {**new_rank(int(rank), 0, "?", "", 0, 0), **one, "rank": int(rank)}
        for rank, one in fit["ranks"].items()
        if re.fullmatch(r"[0-9]{1,7}", rank) and int(rank) < fit["world"]
    }
    return {**empty(fit["world"], "", 0.0), **fit, "ranks": ranks}
