"""spy(): collect, judge, report; and evidence from and to files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug import hang
from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang._evidence import Evidence, is_evidence, merge_evidence
from mldebug.hang._html import page
from mldebug.hang._judge import judge, judge_case
from mldebug.hang._judge_case import Case, name_ranks
from mldebug.hang._judge_views import view
from mldebug.hang._remote_shape import Unreadable, check
from mldebug.hang._report import SpyReport
from mldebug.hang._source import annotate
from mldebug.hang._stacks_out import folded, speedscope
from mldebug.hang._watch_moves import stirred

if TYPE_CHECKING:
    from mldebug.hang._evidence import Rank


def spy(evidence: Evidence | None = None, *, earlier: Evidence | None = None, **options: Any) -> SpyReport:
    """Which rank of a hung job holds the others up, at which line, and why.

    Without `evidence` the ranks of this node are found and looked at (`options` are those of `collect`); with `hosts`,
    `slurm` or `pods` those of other nodes (`options` are those of `collect_remote`). `earlier` evidence of the same job
    tells who moved since. Raises MldebugError where nothing can be looked at at all.

        report = spy()
        print(report.text())
    """
    if evidence is None:
        if options.keys() & {"hosts", "slurm", "pods"}:
            evidence = hang.collect_remote(**options)
        else:
            evidence = hang.collect(**options)
            annotate(evidence)
        for rank in evidence["ranks"]:
            if user := _owner(rank["pid"]):
                rank["user"] = user
    since = ""
    if earlier is not None:
        evidence, since = _with_earlier(evidence, earlier)
    case = Case.of(evidence)
    report = SpyReport(judge_case(case), evidence, since)
    vars(report)["_case"] = case  # read once: ten thousand ranks take a second
    return report


def load_evidence(paths: Sequence[str | os.PathLike[str]]) -> Evidence:
    """The evidence in one or more files, one for each node.

    judge(load_evidence(["node1.json", "node2.json"]))
    """
    parts: list[Evidence] = []
    for path in paths:
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as exc:
            raise UsageError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{path} is not JSON: {exc}", _WROTE) from exc
        if not is_evidence(document):
            raise UsageError(f"{path} is no evidence of mldebug spy", _WROTE)
        try:
            check(document)
        except (Unreadable, RecursionError) as exc:
            raise UsageError(f"{path} is no evidence of mldebug spy, or is damaged: {exc}", _WROTE) from exc
        parts.append(document)
    return merge_evidence(parts)


_WROTE = "give a file that `mldebug spy -o FILE` wrote"


def save_evidence(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Write evidence for `load_evidence`, readable by its owner only: stacks and locals may hold anything.

    A name that ends in .html gets the report as a page; one in .folded or .speedscope.json the stacks for such viewers.
    """
    name = os.fspath(path)
    if name.endswith(".folded"):
        text = folded(evidence)
    elif name.endswith(".speedscope.json"):
        text = speedscope(evidence)
    elif name.endswith((".html", ".htm")):
        text = page(SpyReport(judge(evidence), evidence))
    else:
        text = json.dumps(evidence)
    try:
        _write(name, text)
    except OSError as exc:
        raise MldebugError(f"cannot write {name}: {(exc.strerror or str(exc)).lower()}", "choose another file") from exc


def _write(name: str, text: str) -> None:
    """All of it or nothing: what a file of that name had is lost only once the new text is there."""
    if os.path.exists(name) and not os.path.isfile(name):  # a pipe, or /dev/stdout
        with open(name, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    name = os.path.realpath(name)
    beside = f"{name}.{os.getpid()}.new"
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(beside, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _owner(pid: int) -> str:
    """The name of the user whose process it is; "" where it has ended."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def _with_earlier(evidence: Evidence, earlier: Evidence) -> tuple[Evidence, str]:
    """The evidence with the last samples of an earlier one in front, and a sentence on who moved."""
    old: dict[tuple[str, int], Rank] = {(rank["host"], rank["pid"]): rank for rank in earlier["ranks"]}
    ranks: list[Rank] = []
    moved: list[int] = []
    stayed: list[int] = []
    fresh: list[int] = []
    for rank in evidence["ranks"]:
        before = old.get((rank["host"], rank["pid"]))
        number = rank["rank"] if rank["rank"] is not None else rank["pid"]
        if before is None or abs(before["start"] - rank["start"]) > 1 or not before["samples"]:
            fresh.append(number)
            ranks.append(rank)
            continue
        joined: Rank = {**rank, "samples": [before["samples"][-1], *rank["samples"]]}
        ranks.append(joined)
        seen = view(joined, number, evidence)
        woke = seen.communicates and stirred(joined["samples"])
        (moved if seen.moved or woke else stayed).append(number)
    seconds = evidence["time"] - earlier["time"]
    parts = [f"since the earlier look, {seconds:.0f} s before:"]
    for numbers, what in ((moved, "moved"), (stayed, "did not move"), (fresh, "not seen then")):
        if numbers:
            parts.append(f"{name_ranks(numbers)} {what};")
    return {**evidence, "ranks": ranks}, " ".join(parts).rstrip(";") + "."
