"""What the commands share that run somebody's script in their own process."""

from __future__ import annotations

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.script import check_script, exit_status, print_traceback, run_script, script_traceback


def script_of(words: list[str], command: str) -> tuple[list[str], bool]:
    """The script with its arguments, and whether it is a module. Only the first `--` is ours.

    A script that is not there is a UsageError now, before anything is watched or printed.
    """
    words = words[1:] if words[:1] == ["--"] else words
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words:
        raise UsageError(
            "no module after -m" if module else "no script to run",
            f"mldebug {command} -- train.py, or mldebug {command} -- -m package.module",
        )
    if not module:
        check_script(words[0])
    return words, module


def run_to_its_end(script: list[str], module: bool) -> int:
    """Run it, and say the status to leave with. A script that is not there is raised as the UsageError that it is."""
    try:
        run_script(script, module=module)
    except SystemExit as exc:
        return exit_status(exc)
    except BaseException as exc:
        if isinstance(exc, MldebugError) and script_traceback(exc) is None:
            raise
        print_traceback(exc)
        return 130 if isinstance(exc, KeyboardInterrupt) else 1
    return 0
