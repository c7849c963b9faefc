"""A report as one page for a browser: the verdict, the merged tree, the stacks of all ranks. It loads nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from mldebug.hang._judge_case import Case, doing, name_ranks, ranges
from mldebug.hang._merge import chains, merge_stacks
from mldebug.hang._report import Spot, spots

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child, Frame, Sample, Thread
    from mldebug.hang._judge_views import View
    from mldebug.hang._report import SpyReport

_PLACES, _STACKS, _FRAMES = 400, 400, 120  # the most that are shown: rows of the tree, stacks, frames of a stack
_STATES = {"T": "stopped", "t": "traced", "Z": "zombie", "X": "dead", "D": "in the kernel", "R": "running"}

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--bad:#c62828;--good:#2e7d32;--dim:#666}
@media(prefers-color-scheme:dark){:root{--bad:#ff8a80;--good:#81c784;--dim:#aaa}}
body{font:15px/1.45 system-ui,sans-serif;max-width:75rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
.hung h1{color:var(--bad)}.fine h1{color:var(--good)}
code,pre,.tree,td,summary{font-family:ui-monospace,Consolas,monospace;font-size:13px}
.dim{color:var(--dim)}.culprit{color:var(--bad);font-weight:600}
.tree div{white-space:pre-wrap;overflow-wrap:anywhere;border-left:1px solid var(--line);padding:.1rem .6rem}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid var(--line);padding:.15rem .6rem .15rem 0;text-align:left;vertical-align:top}
td{overflow-wrap:anywhere}
details{border-bottom:1px solid var(--line);padding:.25rem 0}summary{cursor:pointer;overflow-wrap:anywhere}
pre{background:var(--soft);padding:.5rem;margin:.4rem 0;overflow-x:auto}
"""


def page(report: SpyReport) -> str:
    """The report as one HTML document; all text of the job is escaped, and nothing is loaded from elsewhere.

    Path("job.html").write_text(page(spy()))
    """
    return "\n".join(_lines(report)) + "\n"


def _lines(report: SpyReport) -> Iterator[str]:
    verdict, case = report.verdict, Case.of(report.evidence)
    head = report.headline
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{_text(head)}</title><style>{_STYLE}</style></head>"
    yield f'<body class="{"hung" if verdict.hung else "fine"}"><h1>{_text(head)}</h1>'
    yield f"<p>{_text(verdict.text)}</p>"
    if verdict.hint:
        yield f"<p>{_text(f'hint: {verdict.hint}')}</p>"
    rests = f", from {', '.join(verdict.rests_on)}" if verdict.rests_on else ""
    yield f'<p class="dim">{_text(f"sure: {verdict.sure}{rests}")}</p>'
    if report.since:
        yield f"<p>{_text(report.since)}</p>"
    yield f"<h2>Where {_text(report.size)} stand</h2>"
    yield from _tree(case, verdict.culprits)
    yield "<h2>Stacks</h2>"
    yield from _stacks(case, verdict.culprits)
    yield from _table(report, case)
    yield from _notes(report)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.evidence["time"]))
    yield f'<p class="dim">Seen at {when} by mldebug spy.</p></body></html>'


def _tree(case: Case, culprits: tuple[int, ...]) -> Iterator[str]:
    rows = chains(merge_stacks((view.number, spots(view)) for view in case.seen), culprits)
    yield '<div class="tree">'
    for depth, node, run in rows[:_PLACES]:
        guilty = ' class="culprit"' if culprits and set(node.ranks) <= set(culprits) else ""
        steps = " &gt; ".join(_text(_spot(spot)) for spot in run)
        margin = f' style="margin-left:{1.2 * min(depth, 20):.1f}rem"' if depth else ""
        yield f"<div{margin}><span{guilty}>{node.label}</span> {steps}</div>"
    yield "</div>"
    if len(rows) > _PLACES:
        yield f"<p>... and {len(rows) - _PLACES} more places.</p>"


def _stacks(case: Case, culprits: tuple[int, ...]) -> Iterator[str]:
    """Each distinct stack once, with the ranks that have it; those of culprits first, then the rare ones."""
    groups: dict[str, list[View]] = {}
    for view in case.views:
        groups.setdefault("\n".join(_process(view)), []).append(view)
    rows = sorted(groups.items(), key=lambda row: (row[1][0].number not in culprits, len(row[1]), row[1][0].number))
    for text, views in rows[:_STACKS]:
        numbers = [view.number for view in views]
        guilty = ' class="culprit"' if numbers[0] in culprits else ""
        shown = f"{name_ranks(numbers)}: {doing(views[0].wait) if views[0].waits else views[0].rank['status']}"
        opened = " open" if guilty and len(rows) > 1 else ""
        yield f"<details{opened}><summary{guilty}>{_text(shown)}</summary><pre>{_text(text)}</pre></details>"
    if len(rows) > _STACKS:
        yield f"<p>... and {len(rows) - _STACKS} more stacks.</p>"


def _process(view: View) -> Iterator[str]:
    """All threads of a rank in its last sample, and its children, without what differs by chance."""
    rank = view.rank
    if rank["status"] != "ok":
        yield f"{rank['status']}: {rank.get('why', '')}"
    if rank["state"] in "TtZXD":
        yield f"process is {_STATES[rank['state']]}"
    yield from _threads(rank["samples"])
    for child in rank["children"]:
        yield f"{child['kind']} child {_STATES.get(child['state'], '')}".rstrip()
        yield from _threads(child["samples"], indent="  ")
        yield from _why(child)


def _threads(samples: list[Sample], indent: str = "") -> Iterator[str]:
    threads = next((sample["threads"] for sample in reversed(samples) if sample["threads"]), [])
    for thread in sorted(threads, key=_main_first):
        if thread["frames"]:
            marks = [mark for mark, on in (("runs", thread["active"]), ("has the GIL", thread["gil"])) if on]
            yield f"{indent}thread {thread['name']}{' (' + ', '.join(marks) + ')' if marks else ''}"
            frames = thread["frames"][:_FRAMES]
            yield from (f"{indent}  {_frame(frame)}" for frame in frames)
            if len(thread["frames"]) > len(frames):
                yield f"{indent}  ... and {len(thread['frames']) - len(frames)} more frames"


def _why(child: Child) -> Iterator[str]:
    if "why" in child:
        yield f"  {child['why']}"


def _table(report: SpyReport, case: Case) -> Iterator[str]:
    if not case.views:
        return
    yield f"<details><summary>All ranks ({len(case.views)})</summary><table>"
    yield "<tr>" + "".join(f"<th>{head}</th>" for head in ("rank", "host", "pid", "state", "it", "moved")) + "</tr>"
    for view in case.views:
        rank = view.rank
        state = _STATES.get(rank["state"], "asleep") if rank["status"] == "ok" else rank["status"]
        what = doing(view.wait) if view.waits else rank.get("why", "")
        cells = (str(view.number), rank["host"], str(rank["pid"]), state, what, "yes" if view.moved else "")
        mark = ' class="culprit"' if view.number in report.verdict.culprits else ""
        yield f"<tr{mark}>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"
    yield "</table></details>"


def _notes(report: SpyReport) -> Iterator[str]:
    silent = [host for host in report.evidence["hosts"] if host["status"] != "ok"]
    rows = [f"{host['host']}: {host['status']}. {host.get('why', '')}".strip() for host in silent]
    rows += report.evidence["notes"]
    absent = report.absent
    if absent:
        rows.append(f"No process has rank {ranges(absent)}.")
    if rows:
        yield f"<h2>Not seen, and notes</h2><ul>{''.join(f'<li>{_text(row)}</li>' for row in rows)}</ul>"


def _main_first(thread: Thread) -> bool:
    return thread["name"] != "MainThread"


def _frame(frame: Frame) -> str:
    return f"{frame['name']} ({frame['file']}:{frame['line']})"


def _spot(spot: Spot) -> str:
    file, function, line = spot
    return f"{function} {file.rpartition('/')[2]}:{line}" if file else function


def _text(text: str) -> str:
    """Text of the job for the page: escaped, and without what would not print."""
    return escape("".join(_printable(text)), quote=True)


def _printable(text: str) -> Iterable[str]:
    return (char if char == "\n" or char.isprintable() else "\ufffd" for char in text)
