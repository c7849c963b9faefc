"""What an optimizer remembers of each parameter: averages that are not finite, squares that underflow, a lost eps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mldebug.core.world import world
from mldebug.numerics._event import Event
from mldebug.numerics._tensors import is_plain
from mldebug.numerics._weights import join_name
from mldebug.numerics.ring._stats import LIMIT

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_EVERY = 16  # steps between two looks: a state that is lost stays lost
_HALF = (torch.float16, torch.bfloat16)


class BadState(NamedTuple):
    """A state that holds nan or inf: of which parameter (its index among those of the model), its name, its dtype."""

    param: int
    name: str
    dtype: torch.dtype
    kind: str
    step: int


@dataclass
class _Look:
    """The largest magnitudes of the states of one optimizer, on their way to the host."""

    step: int
    places: list[tuple[int, str, torch.dtype]]
    largest: list[Tensor]
    events: list[Any]


class OptimizerStates:
    """Looks at the states of a recorder's optimizers every 16 steps, one pass each; no device is waited for."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._weights = recorder.weights
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._waiting: list[_Look] = []
        self._said: set[tuple[int, str]] = set()

    def after_step(self, optimizer: torch.optim.Optimizer, step: int) -> Event | None:
        """A step of an optimizer of the model is over: the event of a state that has turned bad. Notes are told."""
        notes, bad = self._look(optimizer, step)
        for note in notes:
            self._recorder.remark(note)
        return self._event(bad[-1]) if bad else None

    def _look(self, optimizer: torch.optim.Optimizer, step: int) -> tuple[list[str], list[BadState]]:
        count = self._steps[optimizer] = self._steps.get(optimizer, -1) + 1
        notes = list(self._lost_eps(optimizer)) if count == 0 else []
        if count % _EVERY:
            return notes, []
        waiting, self._waiting = self._waiting, []
        self._waiting += self._take(optimizer, step)
        ready = [look for look in self._waiting if not look.events]
        self._waiting = [look for look in self._waiting if look.events]
        bad: list[BadState] = []
        for look in [*waiting, *ready]:
            more, found = self._read(look)
            notes += more
            bad += found
        return notes, bad

    def _take(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[_Look]:
        index = {id(param): i for i, param in enumerate(self._weights.parameters())}
        groups: dict[torch.device, tuple[list[tuple[int, str, torch.dtype]], list[Tensor]]] = {}
        for param, state in list(optimizer.state.items()):
            if id(param) not in index or not isinstance(state, dict):
                continue
            for name, value in state.items():
                whole = isinstance(value, Tensor) and value.numel() == param.numel() > 1
                if whole and value.is_floating_point() and is_plain(value):
                    places, tensors = groups.setdefault(value.device, ([], []))
                    places.append((index[id(param)], str(name), value.dtype))
                    tensors.append(value)
        for device, (places, tensors) in groups.items():
            with torch.no_grad():
                largest = [torch.stack([norm.float() for norm in torch._foreach_norm(tensors, math.inf)])]
            if device.type != "cuda":
                yield _Look(step, places, [norms.cpu() for norms in largest], [])
                continue
            cuda: Any = torch.cuda
            host = [torch.empty_like(norms, device="cpu", pin_memory=True) for norms in largest]
            copies = [to.copy_(norms, non_blocking=True) for to, norms in zip(host, largest, strict=True)]
            yield _Look(step, places, copies, [cuda.current_stream(device).record_event()])

    def _read(self, look: _Look) -> tuple[list[str], list[BadState]]:
        for event in look.events:
            event.synchronize()
        values = {
            (index, name): (dtype, value)
            for (index, name, dtype), value in zip(
                look.places, (v for t in look.largest for v in t.tolist()), strict=True
            )
        }
        notes, bad = [], []
        lost = []
        for (index, name), (dtype, value) in values.items():
            if not math.isfinite(value) and (index, name) not in self._said:
                self._said.add((index, name))
                bad.append(BadState(index, name, dtype, "nan" if value != value else "inf", look.step))
            mean = values.get((index, "exp_avg"))
            if name == "exp_avg_sq" and value == 0.0 and dtype in _HALF and mean is not None and mean[1] > 0.0:
                lost.append((index, dtype))
        lost = [(index, dtype) for index, dtype in lost if (index, "lost") not in self._said]
        if lost:
            self._said |= {(index, "lost") for index, _ in lost}
            names, narrow = self._names([index for index, _ in lost]), str(lost[0][1]).removeprefix("torch.")
            notes.append(
                f"underflow: exp_avg_sq of {names} is all zero in {narrow} while its gradients are not: squares below "
                f"{_smallest(lost[0][1]):.1g} are zero there, and Adam then divides by eps alone; keep the parameters, "
                "and with them its states, in float32"
            )
        return notes, bad

    def _event(self, bad: BadState) -> Event:
        owner, name, numel = self._weights.parameter_owners()[bad.param]
        forwards = self._recorder.forwards
        return Event(
            step=bad.step,
            batch=max(forwards.batches - 1, 0),
            micro_batch=max(forwards.micro_batch - 1, 0),
            phase="optimizer",
            module=owner.name,
            module_class=owner.cls,
            role="state",
            kind="nan" if bad.kind == "nan" else "inf",
            name=bad.name,
            dtype=str(bad.dtype).removeprefix("torch."),
            limit=LIMIT.get(bad.dtype, math.inf),
            param=join_name(owner.name, name),
            rank=world().rank,
            numel=numel,
        )

    def _names(self, indices: list[int]) -> str:
        owners = self._weights.parameter_owners()
        named = [join_name(owners[i][0].name, owners[i][1]) for i in indices if i < len(owners)]
        return named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more" if named else "a parameter"

    def _lost_eps(self, optimizer: torch.optim.Optimizer) -> Iterator[str]:
        """An eps that is zero in the dtype of the parameters, and so of the states, guards against nothing."""
        ours = {id(param) for param in self._weights.parameters()}
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps <= 0.0 or (group.get("fused") and group["params"][0].is_cuda):
                continue
            dtypes = {p.dtype for p in group["params"] if id(p) in ours and p.dtype in _HALF}
            for dtype in dtypes:
                if float(torch.tensor(eps, dtype=dtype)) == 0.0:
                    name = str(dtype).removeprefix("torch.")
                    yield (
                        f"{type(optimizer).__name__}'s eps {eps:g} is zero in {name}, the dtype of its parameters: it "
                        f"divides by zero where a gradient is; the smallest number there is {_smallest(dtype):.1g}"
                    )
                    return


def _smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
