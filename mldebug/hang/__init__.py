"""Why a job hangs: which rank holds the others up, at which line, and what says so.

    from mldebug.hang import spy
    print(spy().text())

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.hang._agent import enable, mark
    from mldebug.hang._collect import collect
    from mldebug.hang._evidence import Evidence, merge_evidence
    from mldebug.hang._inspect import load_evidence, save_evidence, spy
    from mldebug.hang._judge import judge
    from mldebug.hang._remote import collect_remote
    from mldebug.hang._report import SpyReport
    from mldebug.hang._source import annotate
    from mldebug.hang._verdict import Verdict
    from mldebug.hang._watch import WatchReport, watch
    from mldebug.hang._watchdog import hang_watchdog

__all__ = [
    "Evidence",
    "SpyReport",
    "Verdict",
    "WatchReport",
    "annotate",
    "collect",
    "collect_remote",
    "enable",
    "hang_watchdog",
    "judge",
    "load_evidence",
    "mark",
    "merge_evidence",
    "save_evidence",
    "spy",
    "watch",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "Evidence": "mldebug.hang._evidence",
    "SpyReport": "mldebug.hang._report",
    "Verdict": "mldebug.hang._verdict",
    "WatchReport": "mldebug.hang._watch",
    "annotate": "mldebug.hang._source",
    "collect": "mldebug.hang._collect",
    "collect_remote": "mldebug.hang._remote",
    "enable": "mldebug.hang._agent",
    "hang_watchdog": "mldebug.hang._watchdog",
    "judge": "mldebug.hang._judge",
    "load_evidence": "mldebug.hang._inspect",
    "mark": "mldebug.hang._agent",
    "merge_evidence": "mldebug.hang._evidence",
    "save_evidence": "mldebug.hang._inspect",
    "spy": "mldebug.hang._inspect",
    "watch": "mldebug.hang._watch",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
