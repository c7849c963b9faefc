"""activation_memory: what each layer of a model keeps for the backward, measured, on the meta device or a real one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldebug.core.device import find_device
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.extras import needs
from mldebug.core.report import Report, paint
from mldebug.perf.memory._reading import size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that the forward of one layer keeps for its backward and that no earlier part of the model keeps already;
    `copies` is that in tensors of the size of the hidden states, batch x sequence x hidden size x bytes of dtype."""

    name: str
    kind: str
    nbytes: int
    copies: float | None


@dataclass(frozen=True)
class ActivationReport(Report):
    """Bytes. `total` is all that a forward keeps for the backward, without weights and buffers; `layers` the parts of
    it by layer, `rest` what is kept outside of layers (embedding, head, loss), `inputs` the share that the caller's own
    inputs are. `copies` is the median of the layers'."""

    model: str
    device: str
    dtype: str
    batch: int
    sequence: int
    hidden: int
    checkpointing: bool
    total: int
    inputs: int
    rest: int
    layers: tuple[LayerMemory, ...]
    by_module: dict[str, int]  # module class -> bytes that its own code keeps

    @property
    def copies(self) -> float | None:
        known = sorted(layer.copies for layer in self.layers if layer.copies is not None)
        return known[len(known) // 2] if known else None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "copies": self.copies}

    def text(self, color: bool = False, width: int = 80) -> str:
        how = ", with gradient checkpointing" if self.checkpointing else ""
        lines = [
            f"{self.model}: {size(self.total)} of activations{how}",
            f"batch {self.batch} x {self.sequence} tokens, {self.dtype}, measured on {self.device}",
        ]
        if self.copies is not None:
            one = size(self.total and self.batch * self.sequence * self.hidden * _bytes_of(self.dtype))
            lines.append(f"a layer keeps {self.copies:.1f} times its hidden states ({one})")
        rows: list[tuple[str, str, LayerMemory]] = []
        for layer in self.layers:  # equal neighbours on one line
            if rows and (rows[-1][2].kind, rows[-1][2].nbytes) == (layer.kind, layer.nbytes):
                rows[-1] = (rows[-1][0], layer.name, layer)
            else:
                rows.append((layer.name, layer.name, layer))
        lines.append("")
        for first, last, layer in rows:
            name = first if first == last else f"{first} .. {last.rpartition('.')[2]}"
            times = f"{layer.copies:6.1f} x" if layer.copies is not None else ""
            lines.append(f"  {size(layer.nbytes):>10} {times}  {name} ({layer.kind}){' each' if first != last else ''}")
        lines.append(f"  {size(self.rest):>10}  outside of layers (embedding, head, loss)")
        lines += ["", "by the class of module whose code keeps it:"]
        lines += [f"  {size(nbytes):>10}  {name}" for name, nbytes in list(self.by_module.items())[:12]]
        text = "\n".join(lines)
        return paint(text) if color else text


def activation_memory(
    model: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    sequence: int = 2048,
    dtype: str = "bfloat16",
    device: str = "meta",
    like: str = "cuda",
    checkpointing: bool = False,
) -> ActivationReport:
    """What the forward of a training step keeps for the backward, in bytes, by layer.

    `model` is a module, or for transformers a folder, a config.json, a config object or a model type such as "llama"
    (with the sizes of its default config), which is built without weights. `inputs` are the arguments of its forward;
    by default token ids of `batch` x `sequence`, with labels. Measured by running one forward and counting the memory
    of each tensor that autograd saves, once, the model's own weights and buffers left out: on `device="meta"` nothing
    is allocated, and a model of any size takes a second or two. There attention and dropout are those of the device
    `like` ("cuda": flash attention, boolean dropout masks; "cpu"). A module that is given is used as it is, on its
    device; its mode and hooks are as before afterwards. Raises UsageError for what cannot be built or called.

        report = activation_memory("path/to/config.json", batch=1, sequence=4096)
        print(report.text(), report.copies)
    """
    import torch

    if isinstance(model, torch.nn.Module):
        name, module = type(model).__name__, model
    else:
        if device != "meta":
            wanted, _, index = device.partition(":")
            device = str(find_device(wanted, int(index) if index.isdecimal() else None).torch_device)
        name, module = _build(model, dtype, device)
    place = next((parameter.device for parameter in module.parameters()), torch.device(device))
    kind = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)
    given = dict(inputs) if inputs is not None else _inputs_of(module, batch, sequence, place)
    ids = next((value for value in given.values() if isinstance(value, torch.Tensor) and value.dim() > 1), None)
    if ids is not None:
        batch, sequence = int(ids.shape[0]), int(ids.shape[1])
    saved = _Saved(module, given)
    was_training = {part: part.training for part in module.modules()}
    with contextlib.ExitStack() as stack:
        module.train()
        stack.callback(_set_modes, was_training)
        if checkpointing:
            _checkpoint(module, stack)
        if place.type == "meta":
            stack.enter_context(_as_on(like))
        stack.enter_context(saved.watching())
        stack.enter_context(torch.enable_grad())
        try:
            output = module(**given)
        except Exception as exc:
            raise UsageError(
                f"the forward of {name} failed on {place}: {type(exc).__name__}: {str(exc).splitlines()[0][:200]}",
                "give inputs=..., the arguments of its forward; or device='cpu' where it cannot run on meta",
            ) from exc
        del output
    hidden = int(getattr(getattr(module, "config", None), "hidden_size", 0) or 0)
    one = batch * sequence * hidden * kind.itemsize
    layers = tuple(
        LayerMemory(layer, type(part).__name__, saved.under(layer), saved.under(layer) / one if one else None)
        for layer, part in _layers_of(module)
    )
    total = sum(saved.sizes.values())
    return ActivationReport(
        name,
        place.type if place.type != "meta" else f"meta, as on {like}",
        str(kind).removeprefix("torch."),
        batch,
        sequence,
        hidden,
        checkpointing,
        total,
        saved.inputs,
        total - sum(layer.nbytes for layer in layers),
        layers,
        saved.by_class(),
    )


class _Saved:
    """Counts what autograd saves in a forward, each piece of memory once, by the module whose forward was running."""

    def __init__(self, module: torch.nn.Module, given: Mapping[str, Any]) -> None:
        self._module = module
        self._left_out = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        self._given = {value.untyped_storage()._cdata for value in given.values() if hasattr(value, "untyped_storage")}
        self._stack: list[str] = []
        self._seen: dict[int, Any] = {}  # keeps each storage, so that no address is used twice while it counts
        self._classes = {name: type(part).__name__ for name, part in module.named_modules()}
        self.sizes: dict[str, int] = {}
        self.inputs = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        import torch

        handles = []
        for name, part in self._module.named_modules():
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            handles.append(part.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def under(self, name: str) -> int:
        """Bytes of a module with all that is in it."""
        return sum(count for part, count in self.sizes.items() if part == name or part.startswith(f"{name}."))

    def by_class(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for part, count in self.sizes.items():
            sums[self._classes.get(part, part)] = sums.get(self._classes.get(part, part), 0) + count
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _leave(self) -> None:
        if self._stack:
            self._stack.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._left_out and key not in self._seen:
            self._seen[key] = storage
            name = self._stack[-1] if self._stack else ""
            self.sizes[name] = self.sizes.get(name, 0) + storage.nbytes()
            if key in self._given:
                self.inputs += storage.nbytes()
        return tensor


def _set_modes(modes: Mapping[torch.nn.Module, bool]) -> None:
    for part, training in modes.items():
        part.training = training


def _layers_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The members of the outermost lists of modules with more than one or of a class that is repeated."""
    import torch

    found: list[tuple[str, torch.nn.Module]] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer, _ in found)
        if isinstance(part, torch.nn.ModuleList) and not inside:
            found += [(f"{name}.{index}" if name else str(index), item) for index, item in enumerate(part)]
    return found


def _build(source: Any, dtype: str, device: str) -> tuple[str, torch.nn.Module]:
    import torch

    try:
        import transformers
    except ImportError as exc:
        raise MldebugError("activation_memory of a config needs transformers", "pip install transformers") from exc
    needs("activation memory of a config", "transformers", 5)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"dtype is {dtype!r}, and torch has no such dtype", "such as bfloat16 or float32")
    if isinstance(source, transformers.PretrainedConfig):
        config, title = source, source.model_type
    else:
        config, title = _config_of(os.fspath(source), transformers), os.fspath(source)
    names = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
    for name in names:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            with torch.device(device):
                return title, auto.from_config(config, dtype=kind)
    raise UsageError(f"no model class of transformers takes {title} ({config.model_type})", "give the module itself")


def _config_of(source: str, transformers: Any) -> Any:
    if source in transformers.CONFIG_MAPPING and not os.path.exists(source):
        return transformers.CONFIG_MAPPING[source]()
    try:
        return transformers.AutoConfig.from_pretrained(source)
    except Exception as exc:
        raise UsageError(
            f"cannot read a config from {source}: {str(exc).splitlines()[0][:200]}",
            "give a folder, a config.json, a model type such as llama, or an id that is in the cache",
        ) from exc


def _inputs_of(module: torch.nn.Module, batch: int, sequence: int, place: torch.device) -> dict[str, Any]:
    import torch

    ids = torch.zeros(batch, sequence, dtype=torch.long, device=place)
    config = getattr(module, "config", None)
    if config is None:
        raise UsageError(f"{type(module).__name__} has no config to make inputs from", "give inputs=...")
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "LM" in type(module).__name__ or "Conditional" in type(module).__name__:
        given["labels"] = ids.clone()
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids.clone()
    return given


def _checkpoint(module: Any, stack: contextlib.ExitStack) -> None:
    if any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        return
    verb = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"  # its newer name
    try:
        getattr(module, f"{verb}_checkpointing_enable")()
    except (AttributeError, ValueError) as exc:
        raise UsageError(f"{type(module).__name__} has no gradient checkpointing", "leave checkpointing out") from exc
    stack.callback(getattr(module, f"{verb}_checkpointing_disable"))


@contextlib.contextmanager
def _as_on(kind: str) -> Iterator[None]:
    """On the meta device, take the ways through attention and dropout that a real device takes."""
    if kind not in ("cuda", "cpu"):
        raise UsageError(f"like is {kind!r}", 'it is "cuda" or "cpu"')
    from torch.overrides import TorchFunctionMode

    from mldebug.perf.memory._real_ways import way_of

    class _Ways(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            way = way_of(func, kind)
            return (way or func)(*args, **(kwargs or {}))

    with _Ways():
        yield


def _bytes_of(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
