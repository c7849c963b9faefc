"""Small models, one way to train them, and what the tests ask of torch's hook tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

NAN, INF = float("nan"), float("inf")

_TABLES = [
    (module_hooks, "_global_forward_hooks"),
    (module_hooks, "_global_forward_pre_hooks"),
    (module_hooks, "_global_forward_hooks_always_called"),
    (module_hooks, "_global_forward_hooks_with_kwargs"),
    (module_hooks, "_global_backward_hooks"),
    (module_hooks, "_global_backward_pre_hooks"),
    (module_hooks, "_global_parameter_registration_hooks"),
    (module_hooks, "_global_module_registration_hooks"),
    (optimizer_hooks, "_global_optimizer_pre_hooks"),
    (optimizer_hooks, "_global_optimizer_post_hooks"),
]


def hooks_now() -> dict[str, Any]:
    """The keys of torch's global hook tables and the functions that a recorder may wrap."""
    seen: dict[str, Any] = {name: tuple(getattr(where, name, ())) for where, name in _TABLES}
    seen["GradScaler.step"] = torch.amp.GradScaler.step
    seen["Module.__call__"] = nn.Module.__call__
    seen["GradScaler.scale"] = torch.amp.GradScaler.scale
    seen["Tensor.backward"] = torch.Tensor.backward
    seen["autograd.backward"] = torch.autograd.backward
    seen["autograd.grad"] = torch.autograd.grad
    return seen


def clear_hooks(before: Mapping[str, Any]) -> None:
    """Take out what one failed test left, so that the next one is judged by itself."""
    for where, name in _TABLES:
        table = getattr(where, name, None)
        for key in [key for key in table or () if key not in before[name]]:
            table.pop(key)
    torch.amp.GradScaler.step = before["GradScaler.step"]
    torch.amp.GradScaler.scale = before["GradScaler.scale"]
    torch.autograd.backward = before["autograd.backward"]
    torch.autograd.grad = before["autograd.grad"]


def own_hooks(model: nn.Module) -> int:
    """Hooks on the modules themselves (a recorder has none there)."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


class Plant(nn.Module):
    """Hands its input on; while `value` is set, the first element is that value."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        if self.value is None:
            return x
        first = torch.zeros_like(x, dtype=torch.bool)
        first.view(-1)[0] = True
        return torch.where(first, torch.full_like(x, self.value), x)


class Net(nn.Module):
    """fc1 -> plant -> fc2, with a loss taken outside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.plant = Plant()
        self.fc2 = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.plant(self.fc1(x)))


def train(
    model: nn.Module,
    plan: Mapping[int, float] = {},
    steps: int = 3,
    micro: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], Any] | None = None,
) -> list[float]:
    """Plain training; `plan` says at which forward `model.plant` plants which value."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(steps * micro, 3, 4, generator=generator)
    opt = optimizer or torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for i in range(steps):
        opt.zero_grad()
        for j in range(micro):
            batch = i * micro + j
            if hasattr(model, "plant"):
                model.plant.value = plan.get(batch)
            loss = model(data[batch]).pow(2).mean()
            loss.backward()
        opt.step()
        losses.append(loss.item())
        if after is not None:
            after(i)
    return losses


def watch(model: nn.Module | None, run: Callable[[], Any], **options: Any) -> Any:
    """Run under the recorder and return its report, whether or not it raised."""
    from mldebug import DebugUnderflowOverflow, NumericsError

    recorder = DebugUnderflowOverflow(model, **options)
    try:
        with recorder:
            run()
    except NumericsError as error:
        assert error.report.event is not None
        return error.report
    return recorder.report


def agrees(event: Any, **wanted: Any) -> None:
    """Compare an event with what was planted; a tuple holds alternatives."""
    assert event is not None, f"no event for {wanted}"
    for key, want in wanted.items():
        have = getattr(event, key)
        assert have in (want if isinstance(want, tuple) else (want,)), f"{key}: {have!r} for {want!r} in {event}"


def bits(model: nn.Module) -> list[bytes]:
    """Weights and buffers as bytes, so that NaN equals NaN and -0 differs from 0."""
    return [
        v.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in model.state_dict().values()
    ]


def tiny(kind: str, dropout: float = 0.1, layers: int = 2, **more: Any) -> nn.Module:
    """A small random transformers model."""
    import transformers as tr

    torch.manual_seed(0)
    if kind == "gpt2":
        config = tr.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=16, n_layer=layers, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=1, eos_token_id=2, **more,
        )  # fmt: skip
        return tr.GPT2LMHeadModel(config)
    if kind == "bert":
        config = tr.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **more,
        )  # fmt: skip
        return tr.BertForMaskedLM(config)
    if kind == "llama":
        config = tr.LlamaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, attention_dropout=dropout, pad_token_id=0, **more,
        )  # fmt: skip
        return tr.LlamaForCausalLM(config)
    config = tr.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=layers, num_heads=2, dropout_rate=dropout,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    return tr.T5ForConditionalGeneration(config)


def tokens(batch: int = 2, length: int = 8, pad: int = 0) -> dict[str, Tensor]:
    """input_ids, labels and an attention mask whose last sample has `pad` masked tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if pad:
        mask[-1, -pad:], labels[-1, -pad:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
