"""printflock: a print whose lines come out whole, however many processes print at once."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection
from typing import Any

from mldebug.ranks._ordered import in_order
from mldebug.ranks._prefix import Prefix, in_line, no_prefix, whoami
from mldebug.ranks._write import write_whole


def printflock(
    *args: Any,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = False,
    prefix: str | bool | None = None,
    print_ranks: Collection[int] | None = None,
    ordered: bool = False,
) -> None:
    """Print as `print` does, whole: no line of another process or thread of this node comes in between.

    The text is made first, then written and flushed under a lock that the processes of the job on this node share. A
    process that holds the lock and stands still (stopped, in a debugger) is passed by after 5 seconds, with a warning.

    prefix: put before every line: True for "[host:rank] ", or a format with any of {host} {rank} {local_rank}
        {world_size} {pid} {time}; a space is added where it does not end in one.
    print_ranks: the global ranks that print; the others do nothing.
    ordered: print in the order of ranks. All ranks (of print_ranks) have to make the call. Needs torch.distributed
        to be initialised, and prints in any order else. A rank that does not come in 10 seconds is named and left out.

    Raises what print raises (BrokenPipeError, UnicodeEncodeError ...), and UsageError for a prefix that is no format.

        from mldebug import printflock as print
        print(f"rank {rank}: {loss=}", prefix=True)
    """
    stream = sys.stdout if file is None else file
    if print_ranks is not None and whoami()["rank"] not in print_ranks:
        return
    text = as_text(args, sep, end)
    if stream is None:  # Python's own where stdout is closed; print is silent then
        return
    if flush and not hasattr(stream, "flush"):
        builtins.print("", end="", file=stream, flush=True)  # raises as print does
    if prefix:
        text = Prefix.of(prefix).before_lines(text, stream)
    elif in_line:
        no_prefix(text, stream)
    if ordered:
        with in_order(print_ranks):
            write_whole(stream, text)
    else:
        write_whole(stream, text)


def rank0_print(*args: Any, **kwargs: Any) -> None:
    """printflock on global rank 0 of the job, and nothing on the others. Takes all options of printflock.

    `print_ranks` chooses other ranks than 0. The rank is the launcher's (RANK, SLURM_PROCID and the like), so it is
    known before torch.distributed is; without a launcher every process is rank 0. Raises what printflock raises.

        from mldebug import rank0_print
        rank0_print(f"epoch {epoch}: {loss=}")
    """
    kwargs.setdefault("print_ranks", (0,))
    printflock(*args, **kwargs)


def print_once(*args: Any, **kwargs: Any) -> None:
    """rank0_print, once for each line of the program that calls it: for loops and forwards.

    What counts is the place of the call and not the text, so that a text with a step or a shape in it is printed the
    first time only. `print_ranks` chooses other ranks, each of which prints once. A restarted process prints anew.

        for batch in loader:
            print_once(batch["input_ids"].shape)
    """
    frame = sys._getframe(1)
    place = (frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)
    if place not in _printed:
        _printed.add(place)
        rank0_print(*args, **kwargs)


_printed: set[tuple[str, str, int]] = set()


def as_text(args: tuple[Any, ...], sep: str | None, end: str | None) -> str:
    """What print would write."""
    for name, value in (("sep", sep), ("end", end)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be None or a string, not {type(value).__name__}")
    between = " " if sep is None else sep
    after = "\n" if end is None else end
    return between.join([str(arg) for arg in args]) + after
