"""num_workers=0, measured in a process of its own: it can hang or crash there, and the files that a dataset opens stay
closed in this process, which later forks workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.perf.loader._failure import LoaderFailure, died, hangs, raised
from mldebug.perf.loader._limits import descendants
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._source import Source
from mldebug.perf.loader._visit import How, Visit
from mldebug.perf.loader._visit import _watch as watch
from mldebug.perf.loader._watched import Board, die_with_parent


def visit_alone(source: Source, setting: Setting, how: How) -> Visit | None:
    """Measure a loader without workers; None where this system cannot fork."""
    if "fork" not in multiprocessing.get_all_start_methods() or _method(source.context) not in (None, "fork"):
        return None
    loader, board, sizes = source.loader(setting, 0)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(theirs, loader, sizes, setting, how), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads, as it does for each DataLoader
        child.start()
    theirs.close()
    try:
        message = _answer(ours, child, board, setting, how)
    finally:
        ours.close()
        if child.is_alive() and child.pid:
            for pid in [*descendants(child.pid), child.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        child.join()
    stream = source.indices is None
    if message is None:
        raise died(child.exitcode or 0, "the process without workers", board, 0, stream)
    if isinstance(message, tuple):
        raise _told(message, board.look(0), stream)
    found: Visit = message
    if source.indices is not None:  # the child went on in its own copy of the stream
        for _ in range(found.batches):
            next(source.indices)
    return found


def _answer(ours: Any, child: Any, board: Board, setting: Setting, how: How) -> Any:
    """What the child has to say, or None where it died. One that is at the same sample for too long is a failure."""
    ends = max(how.deadline, time.perf_counter() + how.window) + how.timeout
    while True:
        with contextlib.suppress(EOFError):
            if ours.poll(0.05):
                return ours.recv()
            if not child.is_alive() and not ours.poll(0):
                return None
            place = board.look(0)
            if (place[0] and place[2] > how.timeout) or time.perf_counter() > ends:
                raise hangs([place], setting, how.timeout, False)
            continue
        child.join()
        return None


def _run(pipe: Any, loader: Any, sizes: Any, setting: Setting, how: How) -> None:
    """In the child. As in a worker of torch there is one thread: those of the parent's pool are not in a fork."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    import torch

    torch.set_num_threads(1)
    found = Visit()
    began = time.perf_counter()
    try:
        watch(iter(loader), [os.getpid()], setting, how, found, began, sizes)
    except BaseException as exc:
        frames = [(one.filename, one.lineno, one.name) for one in traceback.extract_tb(exc.__traceback__)]
        hint = exc.hint if isinstance(exc, MldebugError) else None
        pipe.send((type(exc).__name__, str(getattr(exc, "message", exc)), frames, hint))
    else:
        pipe.send(found)
    finally:
        pipe.close()


def _told(message: tuple[str, str, list[tuple[str, int, str]], str | None], place: Any, stream: bool) -> MldebugError:
    name, text, frames, hint = message
    if hint is not None:
        return LoaderFailure(text, hint)
    listed = "".join(f'File "{file}", line {line}, in {where}\n' for file, line, where in frames)
    # In the form in which torch hands on what a worker raised.
    return raised(RuntimeError(f"Caught {name} in a process.\n{listed}{name}: {text}"), [place], stream)


def _method(context: Any) -> str | None:
    """The start method that the user asked for."""
    if isinstance(context, str):
        return context
    return context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
