"""Growth of the process that no tensor explains: Python objects and numpy arrays, and what keeps them."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mldebug.perf.memory._growth import grows, thinned
from mldebug.perf.memory._holders import name_of, running
from mldebug.perf.memory._host import anonymous
from mldebug.perf.memory._reading import size

_SAMPLES = 256
_LEAST = 64  # steps, before anything is said
_EVERY = 16  # steps between two looks at the containers
_LOOK = 16 << 20  # bytes of growth from which it is looked for what keeps them
_SLACK = 64 << 20  # bytes of growth that are told without it: allocators take and keep memory in pieces


@dataclass(frozen=True)
class HostLeak:
    """A container of the program that gets more things step after step, and the process with it: `per_step` bytes.
    Its last thing is of type `item`, with `item_bytes`."""

    per_step: float
    steps: int
    name: str
    kind: str
    count: int
    item: str
    item_bytes: int


class Process:
    """Hears of each step. `leak` is a container that explains at least half of a steady growth; `per_step` and `note`
    say of growth that nothing explains: mapped files are left out, but allocators and libraries grow as well."""

    def __init__(self, read: Callable[[], int | None] = anonymous) -> None:
        self._read = read
        self.begin_again()

    def begin_again(self) -> None:
        self._uses: collections.deque[int] = collections.deque(maxlen=_SAMPLES)
        self._before: dict[int, int] = {}  # id -> length of the containers at the last look
        self._since, self._next = 0, _LEAST
        self.leak: HostLeak | None = None
        self.per_step: float | None = None
        self._fills = ""  # a deque with a bound that explains it

    @property
    def note(self) -> str:
        if self.per_step is None or self.leak is not None:
            return ""
        if self._fills:
            return f"the process grew by {size(self.per_step)} a step: {self._fills}, and is no leak"
        return (
            f"the process grew by {size(self.per_step)} a step over {len(self._uses)} steps, and no place that makes "
            "tensors did, nor a list that was found: Python objects, numpy arrays, or a library's own memory"
        )

    def ended(self, step: int) -> int:
        """A step has ended; bytes in use."""
        use = self._read() or 0
        self._uses.append(use)
        if self._before and step - self._since >= _EVERY:
            self._compare()
            self._before = {}
        elif not self._before and step >= self._next:
            self._next = 2 * step
            if self._growth() > _LOOK:
                self._before, self._since = _lengths(), step
        return use

    def judge(self) -> None:
        """At the end, where no place that makes tensors is to blame."""
        grown = self._growth()
        if not grown:
            self.leak = None
        # Of a cache that is full by now, what was said while it filled holds no more.
        self.per_step = grown / len(self._uses) if grown > _SLACK else None

    def _growth(self) -> float:
        """Bytes by which it grew, steadily, over the steps kept; 0 where it did not."""
        if len(self._uses) < _LEAST:
            return 0.0
        uses = thinned(self._uses, 64)
        return float(uses[-1] - uses[0]) if grows(uses) is not None else 0.0

    def _compare(self) -> None:
        per_step = self._growth() / len(self._uses)
        best: tuple[float, Any, int] | None = None
        for container, length in _containers(8):
            more = length - self._before.get(id(container), length)
            if more >= _EVERY // 2 and id(container) != id(self._uses):
                nbytes = _bytes(_last(container))
                if best is None or more * nbytes > best[0]:
                    best = (more * nbytes, container, nbytes)
        self.leak, self._fills = None, ""
        if best is not None and best[0] / _EVERY > per_step / 2 > 0:
            _, kept, nbytes = best
            name, kind, item = name_of(kept), type(kept).__name__, type(_last(kept)).__name__
            if (most := getattr(kept, "maxlen", None)) is not None:
                self._fills = f"{name or 'a deque'} fills up to {most}"
            else:
                self.leak = HostLeak(per_step, len(self._uses), name, kind, len(kept), item, nbytes)


def _containers(least: int) -> list[tuple[Any, int]]:
    """All lists, dicts, deques and sets with their lengths. The names of modules are left out."""
    kinds = (list, dict, collections.deque, set)
    known = gc.get_objects()
    found = [thing for thing in known if type(thing) in kinds]
    # Python's collector leaves a dict out that has nothing but numbers, texts and arrays: it is found where it is kept.
    kept = [*gc.get_referents(*known), *(value for _, _, value in running())]
    found += {id(thing): thing for thing in kept if type(thing) is dict and not gc.is_tracked(thing)}.values()
    long = [(thing, len(thing)) for thing in found if len(thing) >= least]
    return [(thing, length) for thing, length in long if not (type(thing) is dict and "__name__" in thing)]


def _lengths() -> dict[int, int]:
    return {id(container): length for container, length in _containers(1)}


def _last(container: Any) -> Any:
    try:
        if isinstance(container, dict):
            return next(reversed(container.values()), None)
        return next(iter(container), None) if isinstance(container, set) else container[-1]
    except (RuntimeError, IndexError):  # another thread changes it
        return None


def _bytes(thing: Any, depth: int = 0) -> int:
    """What a thing takes, with what is in it; of a long one a part is looked at."""
    own = sys.getsizeof(thing, 64)
    nbytes = getattr(thing, "nbytes", None)
    if isinstance(nbytes, int):  # an array: of a view sys.getsizeof knows the frame alone
        return max(own, nbytes)
    if depth >= 3 or isinstance(thing, (str, bytes, int, float, type)):
        return own
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set, collections.deque)):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    if not parts:
        return own
    looked_at = parts[:16]
    return own + sum(_bytes(part, depth + 1) for part in looked_at) * len(parts) // len(looked_at)
