"""Who keeps tensors: the list, dict or attribute that has them, and its name in the program."""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

_KEYED = (dict, collections.OrderedDict, collections.defaultdict)
_LRU = type(functools.lru_cache(int))


@dataclass(frozen=True)
class Holder:
    """A container that has `count` things, tensors or what contains them; `graph`: they have their autograd graph;
    `most`: it holds no more than so many (a deque with a maxlen, an lru_cache)."""

    name: str
    kind: str
    count: int
    graph: bool
    most: int | None = None

    @property
    def may_be_cache(self) -> bool:
        """Whether it has keys: then it may grow only until each key was seen."""
        return self.kind in ("cache", *(one.__name__ for one in _KEYED))


def find_holder(is_wanted: Callable[[Any], bool], least: int = 6) -> tuple[Holder, int, Any] | None:
    """The largest list, deque, set, dict or lru_cache of at least `least` things of which the last and the one `least`
    before are, or contain, tensors that are wanted; its id, for `length_of`; and such a tensor.

    Looks at all containers that Python's collector knows, which takes about a tenth of a second per million.
    """
    best: tuple[int, Any, Any] | None = None
    for thing in gc.get_objects():
        if type(thing) is _LRU:
            if (tensor := _cached(thing, is_wanted, least)) is not None:
                size = thing.cache_info().currsize
                best = (size, thing, tensor) if best is None or size > best[0] else best
            continue
        if type(thing) not in (list, collections.deque, set, *_KEYED) or len(thing) < least:
            continue
        if type(thing) is dict and "__name__" in thing:  # the names of a module
            continue
        try:
            ends = _ends(thing, least)
            tensors = [_tensor_in(end, is_wanted) for end in ends]
        except Exception:  # a container that changes meanwhile, or a tensor of an odd kind
            continue
        if all(tensor is not None for tensor in tensors) and (best is None or len(thing) > best[0]):
            best = (len(thing), thing, tensors[-1])
    if best is None:
        return None
    count, container, tensor = best
    graph = getattr(tensor, "grad_fn", None) is not None
    if type(container) is _LRU:
        most = container.cache_info().maxsize
        holder = Holder(f"`{container.__name__}`", "cache" if most is None else "lru_cache", count, graph, most)
    else:
        most = getattr(container, "maxlen", None)
        holder = Holder(name_of(container), type(container).__name__, count, graph, most)
    return holder, id(container), tensor


def _cached(cache: Any, is_wanted: Callable[[Any], bool], least: int) -> Any:
    """A wanted tensor that an lru_cache keeps, if it is one of `least` at least."""
    torch = sys.modules["torch"]
    if cache.cache_info().currsize < least:
        return None
    # One that is bounded has an entry for each result, and the others a dict.
    kept = [part for thing in gc.get_referents(cache) for part in (thing.values() if type(thing) is dict else [thing])]
    entries = [item for one in kept for item in ([one] if isinstance(one, torch.Tensor) else gc.get_referents(one))]
    found = [tensor for item in entries if (tensor := _tensor_in(item, is_wanted)) is not None]
    return found[-1] if len(found) >= least else None


def length_of(address: int, kind: str) -> int | None:
    """How many things the container holds by now; None where it is there no more."""
    for thing in gc.get_objects():
        if id(thing) == address:
            if type(thing) is _LRU:
                return int(thing.cache_info().currsize)
            if type(thing).__name__ == kind:
                return len(thing)
    return None


def _ends(container: Any, least: int) -> tuple[Any, Any]:
    """The last one and one before: the first ones may be older than the window looked at."""
    if isinstance(container, (dict, set)):
        values = container.values() if isinstance(container, dict) else container
        rest = list(itertools.islice(values, len(container) - least, None))
        return rest[0], rest[-1]
    return container[-least], container[-1]


def _tensor_in(thing: Any, is_wanted: Callable[[Any], bool], depth: int = 0) -> Any:
    """A wanted tensor that is the thing, or is in it: a tuple of them, a dict, an output with fields."""
    torch = sys.modules["torch"]
    if isinstance(thing, torch.Tensor):
        return thing if is_wanted(thing) else None
    if depth < 2:
        for item in _parts(thing):
            found = _tensor_in(item, is_wanted, depth + 1)
            if found is not None:
                return found
    return None


def _parts(thing: Any) -> list[Any]:
    """What a thing is made of: items, what a function has closed over, attributes of an object of the program's; of a
    model and an optimizer their tensors."""
    torch = sys.modules["torch"]
    if isinstance(thing, torch.nn.Module):
        return list(itertools.islice(thing.parameters(), 16))
    if isinstance(thing, torch.optim.Optimizer):
        return [value for state in itertools.islice(thing.state.values(), 4) for value in state.values()]
    if isinstance(thing, (list, tuple, dict)):
        return list(thing.values() if isinstance(thing, dict) else thing)[:16]
    if isinstance(thing, FunctionType):
        return [*(cell.cell_contents for cell in thing.__closure__ or ()), *(thing.__defaults__ or ())][:16]
    if isinstance(thing, (str, int, float, type, ModuleType)) or thing is None:
        return []
    return list(getattr(thing, "__dict__", {}).values())[:16]


def name_of(container: Any, deep: bool = True) -> str:
    """`losses` of a function that is running, `module.losses`, `Class.losses` of an object, or `history['losses']`; ""
    if none has it."""
    for function, name, value in running():
        if value is container:
            return f"`{name}`" if function == "<module>" else f"`{name}` in {function}()"
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith("mldebug."):
            for name, value in list(vars(module).items()):
                if value is container:
                    return f"`{name}`" if module.__name__ == "__main__" else f"`{module.__name__}.{name}`"
    for referrer in gc.get_referrers(container):
        if type(referrer) is dict:
            name = next((str(key) for key, value in referrer.items() if value is container), "")
            owner = next(
                (one for one in gc.get_referrers(referrer) if getattr(one, "__dict__", None) is referrer), None
            )
            if name and owner is not None:
                return f"`{type(owner).__name__}.{name}`"
            if name and deep and (outer := name_of(referrer, deep=False)):
                last = outer.rindex("`")
                return f"{outer[:last]}[{name!r}]{outer[last:]}"
        elif hasattr(referrer, "__dict__"):  # newer Pythons keep attributes without a dict of their own
            name = next((key for key, value in vars(referrer).items() if value is container), "")
            if name:
                return f"`{type(referrer).__name__}.{name}`"
    return ""


def running() -> Iterator[tuple[str, str, Any]]:
    """(function, name, value) of all that the functions of the program that run in this thread have names for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("mldebug."):
            made = frame.f_locals
            found = list(made.items())
            # Older Pythons keep the dict that they make with the frame, and alive what the names have now. It is
            # emptied, unless it is what the code itself works with, or the program has it too, by `locals()`.
            is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
            if is_copy and sys.getrefcount(made) == 3:  # the frame, `made`, and the call
                made.clear()
            for name, value in found:
                yield frame.f_code.co_name, name, value
        frame = frame.f_back
