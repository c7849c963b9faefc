"""What a step was given: the arguments of the root's forwards, and the random states before them."""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import leaves
from mldebug.numerics.ops._kept import copied

if TYPE_CHECKING:
    from mldebug.numerics.ring._records import Call

_MAX_COPIED = 32 << 20  # bytes of arguments that are copied; larger ones are held as they are, until they change
_FORWARDS = 8  # of one step that are held: micro-batches


class StepInputs:
    """The arguments of one forward of the root, by path (`input[0]`, `input.labels`), and the random states before."""

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.batch, self.step = call.batch, call.step
        self._values: dict[str, Any] = {}
        self._held: dict[str, tuple[Tensor, int]] = {}
        pairs = [pair for i, value in enumerate(args) for pair in leaves(value, f"input[{i}]")]
        pairs += [pair for key, value in kwargs.items() for pair in leaves(value, f"input.{key}")]
        size = 0
        for path, value in pairs:
            if not isinstance(value, Tensor):
                self._values[path] = value if value is None or isinstance(value, (bool, int, float, str)) else None
                self._values[path] = f"{type(value)}" if self._values[path] is None and value is not None else value
                continue
            size += value.numel() * value.element_size()
            if size <= _MAX_COPIED and value.layout is torch.strided:
                self._values[path] = copied(value)
            else:
                self._held[path] = value.detach(), 0 if value.is_inference() else value._version
        self._random: dict[str, Tensor] = {"torch.cpu": torch.get_rng_state()}
        for index in sorted({t.device.index for _, t in pairs if isinstance(t, Tensor) and t.is_cuda}):
            self._random[f"torch.cuda.{index}"] = torch.cuda.get_rng_state(index)
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def write(self, folder: Path) -> None:
        """inputs.safetensors and inputs.json, rng.safetensors and rng.json."""
        from mldebug.numerics.bundle._bundle import save, write_json

        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {"batch": self.batch, "step": self.step, "arguments": {}}
        for path, value in self._values.items():
            plain["arguments"][path] = self._entry(path, value, tensors)
        for path, (value, version) in self._held.items():
            changed = not value.is_inference() and value._version != version
            plain["arguments"][path] = "it was changed in place" if changed else self._entry(path, value, tensors)
        save(tensors, folder / "inputs.safetensors")
        write_json(folder / "inputs.json", plain)
        states, more = dict(self._random), {"python": self._python[0], "gauss_next": self._python[2]}
        states["python"] = torch.tensor(self._python[1], dtype=torch.int64)
        if self._numpy is not None:
            more["numpy"] = [self._numpy[0], *self._numpy[2:]]
            states["numpy"] = torch.from_numpy(self._numpy[1].astype("int64"))
        save(states, folder / "rng.safetensors")
        write_json(folder / "rng.json", more)

    def _entry(self, path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        about: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype), "device": str(value.device)}
        if value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
            return {**about, "left out": "no plain tensor"}
        plain = getattr(value, "_local_tensor", value)
        tensors[path] = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        return about


class HeldInputs:
    """The inputs of the last forwards, as long as somebody may ask for them."""

    def __init__(self) -> None:
        self._forwards: deque[StepInputs] = deque(maxlen=_FORWARDS)

    def keep(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._forwards and self._forwards[0].step < call.step - 1:
            self._forwards.popleft()
        self._forwards.append(StepInputs(call, args, kwargs))

    def of(self, batch: int) -> StepInputs | None:
        return next((one for one in self._forwards if one.batch == batch), None)

    def clear(self) -> None:
        self._forwards.clear()
