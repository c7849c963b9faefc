"""What a dist-test has seen, as plain JSON: it is judged alike whether it is fresh, partial, recorded or simulated.

schema, world, backend, timeout, ended (why the collector stopped), seconds
collector  {host, pid, address}
ranks      {"0": {rank, local_rank, host, boot, pid, parent, phase, step, age, state, parent_state, silent, lost,
                  code, error, facts, reach, done, stack, checks, local_world, apart, skew, waits, no_stack}}
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
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError

Evidence = dict[str, Any]

SCHEMA = 1


def empty(world: int, backend: str, timeout: float) -> Evidence:
    return {
        "schema": SCHEMA, "world": world, "backend": backend, "timeout": timeout, "ended": "", "seconds": 0.0,
        "collector": {}, "ranks": {}, "clashes": [], "hosts": {}, "wrong": [], "left_out": [],
    }  # fmt: skip


def new_rank(rank: int, local_rank: int, host: str, boot: str, pid: int, parent: int) -> dict[str, Any]:
    return {
        "rank": rank, "local_rank": local_rank, "host": host, "boot": boot, "pid": pid, "parent": parent,
        "phase": "start", "step": 0, "age": 0.0, "state": "", "parent_state": "", "silent": 0.0, "lost": "",
        "code": None, "error": None, "facts": {}, "reach": [], "done": False, "stack": "", "checks": {},
        "local_world": 0, "apart": [], "skew": None, "waits": False, "no_stack": "",
    }  # fmt: skip


def load_evidence(path: str | os.PathLike[str]) -> Evidence:
    """The evidence in a file that `mldebug dist-test -o FILE` or `--json` wrote. Raises UsageError for another file.

    verdict = judge_dist_test(load_evidence("run.json"))
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        why = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot read {os.fspath(path)}: {why}", "check the path") from exc
    except ValueError as exc:
        raise UsageError(
            f"{os.fspath(path)} is no JSON document", "give what `mldebug dist-test -o FILE` wrote"
        ) from exc
    evidence = document.get("evidence", document) if isinstance(document, dict) else None
    if not isinstance(evidence, dict) or not isinstance(evidence.get("ranks"), dict) or "world" not in evidence:
        raise UsageError(
            f"{os.fspath(path)} has no evidence of a dist-test", "give what `mldebug dist-test -o FILE` wrote"
        )
    if evidence.get("schema", SCHEMA) > SCHEMA:
        raise UsageError(
            f"{os.fspath(path)} has layout {evidence['schema']}, and this mldebug knows {SCHEMA}", "use a newer mldebug"
        )
    ranks = {
        str(name): {**new_rank(int(name), 0, "?", "", 0, 0), **one}
        for name, one in evidence["ranks"].items()
        if str(name).isdecimal() and isinstance(one, dict)
    }
    return {**empty(int(evidence["world"]), "", 0.0), **evidence, "ranks": ranks}
