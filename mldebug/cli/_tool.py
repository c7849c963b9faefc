"""What the single files in tools/ share: how a program ends that is no command of `mldebug`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mldebug.cli._missing import as_usage_error
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.interrupt import Interrupts
from mldebug.core.report import tell, write


def run_tool(name: str, main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and leave with its status. Our errors are two lines that begin with `name`, and never a traceback:
    status 2 is wrong usage, 1 another trouble, 130 Ctrl-C, 141 a reader that went away.

        if __name__ == "__main__":
            run_tool("mamf-finder", main)
    """
    try:
        with Interrupts(name):
            status = main() or 0
        write("", sys.stdout)  # what is still in the buffer fails here, where it can be said
    except MldebugError as exc:
        status = _told(name, exc)
    except KeyboardInterrupt:
        tell(f"{name}: interrupted\n")
        status = 130
    except BrokenPipeError:  # `| head`: who has read enough wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 141
    except Exception as exc:
        error = as_usage_error(exc)
        if error is None:
            raise
        status = _told(name, error)
    sys.exit(status)


def _told(name: str, error: MldebugError) -> int:
    tell(f"{name}: {error}\n")
    return 2 if isinstance(error, UsageError) else 1
