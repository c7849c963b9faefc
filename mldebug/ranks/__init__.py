"""Ranks that can be read and told apart: printing whole lines, who is who, who goes first.

    from mldebug.ranks import printflock as print
    print("whole lines, from every rank")

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.ranks._breakpoint import breakpoint_on
    from mldebug.ranks._emulate import EmulateReport, emulate
    from mldebug.ranks._first import local_main_process_first, main_process_by_path_first, main_process_first
    from mldebug.ranks._logs import logs
    from mldebug.ranks._logs_report import LogsReport
    from mldebug.ranks._output import LockedOutput
    from mldebug.ranks._printflock import print_once, printflock, rank0_print
    from mldebug.ranks._world import host, job, local_rank, rank, world_size

__all__ = [
    "EmulateReport",
    "LockedOutput",
    "LogsReport",
    "breakpoint_on",
    "emulate",
    "host",
    "job",
    "local_main_process_first",
    "local_rank",
    "logs",
    "main_process_by_path_first",
    "main_process_first",
    "print_once",
    "printflock",
    "rank",
    "rank0_print",
    "world_size",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "EmulateReport": "mldebug.ranks._emulate",
    "LockedOutput": "mldebug.ranks._output",
    "LogsReport": "mldebug.ranks._logs_report",
    "breakpoint_on": "mldebug.ranks._breakpoint",
    "emulate": "mldebug.ranks._emulate",
    "host": "mldebug.ranks._world",
    "job": "mldebug.ranks._world",
    "local_main_process_first": "mldebug.ranks._first",
    "local_rank": "mldebug.ranks._world",
    "logs": "mldebug.ranks._logs",
    "main_process_by_path_first": "mldebug.ranks._first",
    "main_process_first": "mldebug.ranks._first",
    "print_once": "mldebug.ranks._printflock",
    "printflock": "mldebug.ranks._printflock",
    "rank": "mldebug.ranks._world",
    "rank0_print": "mldebug.ranks._printflock",
    "world_size": "mldebug.ranks._world",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
