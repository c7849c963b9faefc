"""What became of a loader that failed: which sample, which worker, and why; and its processes ended for good."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.perf.loader._limits import descendants
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._watched import COLLATES, FAILED, IDLE, READS, Board

_SIGNALS = {
    signal.SIGKILL: "the kernel kills what takes too much memory: `dmesg`, and the memory limit of this cgroup",
    signal.SIGBUS: "/dev/shm may be full: docker --shm-size, or an emptyDir with medium: Memory on Kubernetes",
    signal.SIGSEGV: "native code crashed: run that index with `python -X faulthandler`",
    signal.SIGABRT: "native code gave up: its message is on stderr",
}
_AT_START = (
    "worker_init_fn, or the fork of a process with threads: DataLoader(..., multiprocessing_context='forkserver') "
    "starts workers out of a clean one"
)


class LoaderFailure(MldebugError):
    """A dataset that raises, or a worker that died or hangs. `worker_signal` is what ended it, 0 for anything else;
    `begun` is False where that was before its first sample, which the dataset has no part in then."""

    worker_signal = 0
    begun = True


def explain(
    exc: BaseException, workers: Any, board: Board, setting: Setting, timeout: float, stream: bool
) -> MldebugError:
    """The failure of a loader in the words of its user. `workers` is torch's iterator, None before there is one."""
    if isinstance(exc, MldebugError):
        return exc
    text = str(exc)
    forget_workers(workers)
    if isinstance(exc, (ConnectionError, EOFError)):  # a pipe that broke: its worker is about to be dead
        for one in getattr(workers, "_workers", ()):
            one.join(0.2)
    dead = [(worker, code) for worker, code in _codes(workers) if code not in (None, 0) and code != -signal.SIGTERM]
    places = [board.look(worker) for worker in range(board.workers)]
    broken = isinstance(exc, (ConnectionError, EOFError)) and dead
    if broken or (isinstance(exc, RuntimeError) and re.search(r"DataLoader worker \(pid(\(s\))? [\d, ]+\)", text)):
        killed = _killed(exc, workers, dead)
        return _died(killed, board, setting, stream, text)
    if isinstance(exc, RuntimeError) and "DataLoader timed out" in text:
        return hangs(places, setting, timeout, stream)
    if isinstance(exc, OSError) and not any(state == FAILED for state, _, _ in places) and workers is None:
        reason = (exc.strerror or text).lower()
        return LoaderFailure(f"cannot start {setting.num_workers} workers: {reason}", "ulimit -u; free memory")
    if "Too many open files" in text:
        return LoaderFailure("too many open files: each batch that waits holds one for each tensor", "ulimit -n 65536")
    return raised(exc, places, stream)


def raised(exc: BaseException, places: list[tuple[int, str, float]], stream: bool) -> MldebugError:
    """What a dataset or a collate_fn raised. Torch's text from a worker has the traceback of the worker in it."""
    text = str(exc)
    kind = re.match(r"Caught (\w+) in ", text)
    name = kind[1] if kind else type(exc).__name__
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text) or _frames(exc)
    where = f" ({os.path.basename(frames[-1][0])}:{frames[-1][1]}, in {frames[-1][2]})" if frames else ""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    says = last.partition(": ")[2] if kind and last.startswith(name) else last
    if "shared memory" in text and ("No space left" in text or "errno: 28" in text):
        failure = LoaderFailure("a batch of a worker does not fit into /dev/shm", "docker --shm-size, or no workers")
        failure.worker_signal = signal.SIGBUS  # as where a worker is ended for it
        return failure
    says = f": {says.strip()[:200]}" if says else ""
    failed = next((words for state, words, _ in places if state == FAILED), None)
    collating = next((words for state, words, _ in places if state == COLLATES), None)
    if failed is not None:
        what = f"sample {failed} of the stream" if stream else f"index {failed}"
        hint = "iterate the dataset alone" if stream else f"dataset[{failed}] in a Python shell shows it alone"
        return LoaderFailure(f"the dataset raised {name} at {what}{says}{where}", hint)
    if collating is not None:
        after = f"sample {collating}" if stream else f"index {collating}"
        hint = "samples of different shapes? pad them in a collate_fn of your own"
        if "NoneType" in says:
            hint = "the dataset returns None for a sample: leave those out in a collate_fn of your own"
        return LoaderFailure(f"collate_fn raised {name} for the batch that ends with {after}{says}{where}", hint)
    return LoaderFailure(f"the DataLoader raised {name}{says}{where}", "iterate it without mldebug to see all of it")


def hangs(places: list[tuple[int, str, float]], setting: Setting, timeout: float, stream: bool) -> MldebugError:
    """No batch came in time: the worker that has been at one sample for the longest is named."""
    busy = [(seconds, worker, state, words) for worker, (state, words, seconds) in enumerate(places) if state != IDLE]
    hint = "a larger --timeout if that may take so long; `mldebug spy` or `py-spy dump` shows where it stands"
    if not busy:
        return LoaderFailure(f"no batch came within {timeout:g} s, and no worker is at a sample", hint)
    seconds, worker, state, words = max(busy)
    what = f"sample {words} of the stream" if stream else f"index {words}"
    who = f"worker {worker} of {setting.num_workers} has" if setting.num_workers else "it has"
    doing = "read" if state in (READS, FAILED) else "put together the batch that ends with"
    return LoaderFailure(f"no batch came within {timeout:g} s: {who} {doing} {what} for {seconds:.0f} s", hint)


def died(code: int, who: str, board: Board, worker: int, stream: bool) -> LoaderFailure:
    """A process that ended by `code` (negative: a signal) while it was where the board says."""
    state, words, _ = board.look(worker)
    begun = board.has_begun(worker)
    doing = "between two samples" if begun else "before its first sample"
    if state != IDLE:
        what = f"sample {words} of the stream" if stream else f"index {words}"
        doing = f"while it put together the batch that ends with {what}" if state == COLLATES else f"at {what}"
    number = -code if code < 0 else 0
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = _SIGNALS.get(signal.Signals(number), "who sent it?") if number in set(signal.Signals) else ""
        hint = _AT_START if number == signal.SIGSEGV and not begun else hint
        failure = LoaderFailure(f"{who} was ended by {name} {doing}", hint)
    else:
        failure = LoaderFailure(f"{who} left with status {code} {doing}", "the dataset, or what it uses, calls exit")
    failure.worker_signal, failure.begun = number, begun
    return failure


def forget_workers(workers: Any) -> None:
    """Let torch no longer raise, from a signal handler and so anywhere, for a worker of this iterator that has died."""
    for _ in range(2):
        if not getattr(workers, "_worker_pids_set", False):
            return
        handling: Any = importlib.import_module("torch.utils.data._utils.signal_handling")
        with contextlib.suppress(RuntimeError):  # the handler raises at this moment, for the last time
            handling._remove_worker_pids(id(workers))
            workers._worker_pids_set = False


def kill_workers(workers: Any) -> None:
    """End workers that may hang, and what they have started: torch would wait for each of them, and then ask."""
    forget_workers(workers)
    for one in getattr(workers, "_workers", ()):
        for pid in [*descendants(one.pid), one.pid] if one.pid else []:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    for one in getattr(workers, "_workers", ()):
        with contextlib.suppress(RuntimeError):  # torch's own handler tells of the child that ended
            one.join(5)


def _died(dead: list[tuple[int, int]], board: Board, setting: Setting, stream: bool, text: str) -> MldebugError:
    if not dead:
        return LoaderFailure(f"a worker died: {text.splitlines()[0]}", "its own message is on stderr")
    worker, code = dead[0]
    return died(code, f"worker {worker} of {setting.num_workers}", board, worker, stream)


def _killed(exc: BaseException, workers: Any, dead: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that torch names: by now others may have been ended by us."""
    match = re.search(r"pid(?:\(s\))? ([\d, ]+)", str(exc))
    named = {int(one) for one in (match[1] if match else "").replace(",", " ").split()}
    pids = {worker: one.pid for worker, one in enumerate(getattr(workers, "_workers", ()))}
    found = [(worker, code) for worker, code in dead if pids.get(worker) in named]
    return found or dead


def _codes(workers: Any) -> list[tuple[int, Any]]:
    return [(worker, one.exitcode) for worker, one in enumerate(getattr(workers, "_workers", ()))]


def _frames(exc: BaseException) -> list[tuple[str, str, str]]:
    found, at = [], exc.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        found.append((code.co_filename, str(at.tb_lineno), code.co_name))
        at = at.tb_next
    return found
