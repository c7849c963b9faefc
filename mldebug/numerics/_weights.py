"""Parameters and buffers: measured once per step, in a batch."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mldebug.numerics._event import Role
from mldebug.numerics._tensors import is_plain, parts
from mldebug.numerics.replay._replay import versions
from mldebug.numerics.ring._records import Batch, Site, Watched
from mldebug.numerics.ring._stats import Stats

if TYPE_CHECKING:
    from mldebug.numerics.ring._memory import Memory


class BadBuffer(NamedTuple):
    """A buffer that held NaN or inf when it was first seen: whose, which, in which step."""

    owner: Watched
    name: str
    dtype: torch.dtype
    kind: str
    step: int


@dataclass
class _Cast:
    """The tensors to measure, worked out once: walking hundreds of modules in Python costs as much as measuring."""

    dicts: list[dict[str, Any]]  # the modules' own tables of parameters and buffers
    ids: list[int]  # of what was in them
    kinds: list[tuple[torch.dtype, torch.device]]
    tensors: list[Tensor]
    entries: list[tuple[Watched, str, Tensor, Role]]
    batches: list[Batch]  # the plain tensors, measured as they are
    odd: list[tuple[Watched, str, Tensor, Role]]  # taken apart at each pass
    parameters: list[Tensor]
    owners: list[tuple[Watched, str, int]]  # of the parameters: module, name, elements
    buffers: list[Tensor]
    places: list[tuple[dict[str, Any], str]]  # of the buffers: the module's own table, name
    homes: list[weakref.ref[nn.Module]]  # the modules that have buffers
    sites: dict[int, Site]  # of the plain buffers, by id
    changed: tuple[list[int], list[Batch]] = ([], [])  # those that a forward changed last
    fresh: bool = True  # not measured yet


_kind = operator.attrgetter("dtype", "device")


class Weights:
    """The parameters and buffers of the watched modules."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._owners: dict[int, tuple[Watched, weakref.ref[nn.Module]]] = {}
        self._matches: dict[int, bool] = {}  # id(optimizer) -> whether it holds one of our parameters
        self._aside: set[str] = set()  # dotted names known to be bad: not measured again
        self._seen: set[str] = set()  # dotted names measured before
        self.new_names: frozenset[str] = frozenset()  # those of the last pass that were not
        self.version = self._measured_version = 0  # sum of the parameters' version counters: now, at the last pass
        self._cast: _Cast | None = None
        self.builds = 0  # how often the list of parameters was made
        self.bad_buffers: dict[str, BadBuffer] = {}  # by dotted name: no event by themselves
        self.due = True  # to be measured at the next root forward
        self.passes = 0
        self.last_step = -1  # the step of the last pass

    def add(self, watched: Watched, module: nn.Module) -> None:
        self._owners[id(module)] = (watched, weakref.ref(module))
        self._matches.clear()
        self._cast = None

    def release(self) -> None:
        """Let go of every tensor: a root has died, or the recorder is taken off."""
        self._cast = None

    def modules(self) -> list[nn.Module]:
        return [module for _, ref in self._owners.values() if (module := ref()) is not None]

    def watched(self) -> list[Watched]:
        return [watched for watched, _ in self._owners.values()]

    def parameters(self) -> list[Tensor]:
        return self._current().parameters

    def parameter_owners(self) -> list[tuple[Watched, str, int]]:
        """(module, name, elements) of each of `parameters()`: in the order of the model, shared ones once."""
        return self._current().owners

    def buffer_homes(self) -> list[nn.Module]:
        """The modules that have buffers."""
        return [module for ref in self._current().homes if (module := ref()) is not None]

    def buffers(self) -> list[Tensor]:
        return self._current().buffers

    def buffer_places(self) -> list[tuple[dict[str, Any], str]]:
        """Where each of `buffers()` is: the table of its module, and its name there."""
        return self._current().places

    def owns(self, optimizer: torch.optim.Optimizer, alone: bool) -> bool:
        """Whether this optimizer steps the watched modules.

        It does if it holds one of their parameters. Where no optimizer does (DeepSpeed and FSDP step flat copies),
        a recorder that is `alone` takes any optimizer for its own.
        """
        key = id(optimizer)
        if key not in self._matches:
            ours = {id(p) for p in self.parameters()}
            self._matches[key] = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            weakref.finalize(optimizer, self._matches.pop, key, None).atexit = False
        return self._matches[key] or (alone and not any(self._matches.values()))

    def measure(self, step: int) -> tuple[int, int]:
        """Record all parameters and float buffers; returns their range of record numbers."""
        self.due = False
        self.last_step = step
        self.passes += 1
        cast = self._current()
        self._measured_version = self.version
        names = frozenset(join_name(watched.name, name) for watched, name, _, _ in cast.entries) if cast.fresh else None
        self.new_names = frozenset() if names is None else names - self._seen
        self._seen |= self.new_names
        cast.fresh = False
        start = self._memory.sequence
        for batch in cast.batches:
            self._memory.record_all(batch)
        for watched, name, tensor, role in cast.odd:
            for piece in parts(tensor):
                self._memory.record(watched.site(name, tensor.dtype, role), piece)
        return start, self._memory.sequence

    def measure_changed(self, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Record buffers that a forward may have changed, at its end: what made one bad can still be run again.

        They come in pairs: what was there before, and what is there now.
        """
        cast = self._current()
        ids = [id(now) for _, now in buffers]
        if cast.changed[0] != ids:
            groups: dict[int, list[tuple[Site, Tensor]]] = {}
            for before, now in buffers:
                site = cast.sites.get(id(before))
                if site is not None and is_plain(now) and now.dtype is before.dtype and now.numel():
                    groups.setdefault(now.get_device(), []).append((site, now))
            cast.changed = ids, [Batch(device, False, pairs) for device, pairs in groups.items()]
        for batch in cast.changed[1]:
            self._memory.record_all(batch)

    def first_look(self, start: int, end: int) -> bool:
        """The verdict on what is there before the first forward; True if a parameter is bad. Waits for the device.

        A buffer that was never good may be scratch space (`torch.empty`): it is set aside, and counts only if NaN
        follows from it.
        """
        self._memory.publish(start, end)
        seen = self._memory.flags(wait=True)
        if seen is None or seen[0] is None:
            return False
        numbers = self._memory.bad(range(start, end))
        bad = [(self._memory.site(n), stats) for n, stats in zip(numbers, self._memory.stats(numbers), strict=True)]
        for site, stats in bad:
            if site.role == "buffer":
                self.remember_buffer(site, stats, 0)
        if any(site.role == "parameter" for site, _ in bad):
            return True
        self._memory.clear_flags()
        return False

    def find(self, name: str) -> Tensor | None:
        """The parameter or buffer of this dotted name, as it is now."""
        for watched, key, _, role in self._current().entries:
            if join_name(watched.name, key) == name and (module := watched.ref()) is not None:
                found: Tensor | None = (module._parameters if role == "parameter" else module._buffers).get(key)
                return found
        return None

    def remember_buffer(self, site: Site, stats: Stats, step: int) -> None:
        """A buffer that was never good counts only if something bad follows from it; until then it is set aside."""
        assert site.owner is not None
        kind = "nan" if stats.has_nan else "inf"
        self.bad_buffers[full_name(site)] = BadBuffer(site.owner, site.path, site.dtype, kind, step)
        self.set_aside(full_name(site))

    def set_aside(self, name: str) -> None:
        """Do not report this parameter or buffer again: it is known to be bad."""
        self._aside.add(name)
        self._cast = None

    @property
    def spoiled(self) -> bool:
        """Whether one that was good, or a parameter, is known to be bad."""
        return not self._aside <= self.bad_buffers.keys()

    def buffer_versions(self) -> dict[int, int]:
        return {id(buffer): buffer._version for buffer in self.buffers() if not buffer.is_inference()}

    def refresh(self) -> None:
        """At the start of a forward: notice a parameter or buffer that was replaced, moved or cast."""
        cast = self._cast
        if cast is not None:
            values = itertools.chain.from_iterable(map(dict.values, cast.dicts))
            if list(map(id, values)) != cast.ids or list(map(_kind, cast.tensors)) != cast.kinds:
                self._cast = None
                self.due = True
        self.version = versions(self._current().parameters)
        if self.version != self._measured_version:
            self.due = True  # stepped by something that is no torch optimizer

    def _current(self) -> _Cast:
        if self._cast is None:
            self._cast = self._build()
            self.builds += 1
        return self._cast

    def _build(self) -> _Cast:
        owners = [(watched, module) for watched, ref in self._owners.values() if (module := ref()) is not None]
        tables = [table for _, module in owners for table in (module._parameters, module._buffers)]
        dicts = [table for table in tables if isinstance(table, dict)]  # a scripted module has tables of another kind
        entries: dict[int, tuple[Watched, str, Tensor, Role]] = {}
        places: dict[int, tuple[dict[str, Any], str]] = {}
        roles: tuple[Role, Role] = ("parameter", "buffer")
        for role in roles:
            for watched, module in owners:
                table = module._parameters if role == "parameter" else module._buffers
                for name, tensor in table.items():
                    if tensor is not None:
                        entries.setdefault(id(tensor), (watched, name, tensor, role))
                        places.setdefault(id(tensor), (table, name))
        groups: dict[tuple[int, bool], list[tuple[Site, Tensor]]] = {}
        odd: list[tuple[Watched, str, Tensor, Role]] = []
        sites: dict[int, Site] = {}
        for entry in entries.values():
            watched, name, tensor, role = entry
            if watched.muted or join_name(watched.name, name) in self._aside or tensor.is_meta or not tensor.numel():
                continue
            if is_plain(tensor):
                site = watched.site(name, tensor.dtype, role)
                # A parameter that is trained is no mask: there -inf is as bad as the rest.
                site.strict = role == "parameter" and tensor.requires_grad
                groups.setdefault((tensor.get_device(), site.strict), []).append((site, tensor))
                if role == "buffer":
                    sites[id(tensor)] = site
            elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or parts(tensor):
                odd.append(entry)
        return _Cast(
            dicts=dicts,
            ids=[id(value) for table in dicts for value in table.values()],
            kinds=[_kind(entry[2]) for entry in entries.values()],
            tensors=[entry[2] for entry in entries.values()],
            entries=list(entries.values()),
            batches=[Batch(device, strict, pairs) for (device, strict), pairs in groups.items()],
            odd=odd,
            parameters=[entry[2] for entry in entries.values() if entry[3] == "parameter"],
            owners=[(w, name, t.numel()) for w, name, t, role in entries.values() if role == "parameter"],
            buffers=[entry[2] for entry in entries.values() if entry[3] == "buffer"],
            places=[places[key] for key, entry in entries.items() if entry[3] == "buffer"],
            homes=[weakref.ref(module) for _, module in owners if module._buffers],
            sites=sites,
        )


def join_name(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def full_name(site: Site) -> str:
    """The dotted name of a parameter or buffer."""
    return join_name(site.module or "", site.path)
