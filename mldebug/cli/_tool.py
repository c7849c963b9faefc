"""What the single files in tools/ share: how a program ends that is no command of `mldebug`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mldebug.cli._missing import as_usage_error
from mldebug.core.errors import MldebugError, UsageError


def run_tool(name: str, main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and leave with its status. Our errors are two lines that begin with `name`, and never a traceback:
    status 2 is wrong usage, 1 another trouble, 130 Ctrl-C, 141 a reader that went away.

        if __name__ == "__main__":
            run_tool("mamf-finder", main)
    """
    try:
        status = main() or 0
        sys.stdout.flush()
    except ModuleNotFoundError as exc:
        error = as_usage_error(exc)
        if error is None:
            raise
        status = _told(name, error)
    except MldebugError as exc:
        status = _told(name, exc)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # `| head`: who has read enough wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 141
    sys.exit(status)


def _told(name: str, error: MldebugError) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
