"""What would help where memory ran out, by what it was used for."""

from __future__ import annotations

from mldebug.perf.memory._reading import Reading, size


def advice(now: Reading, kinds: dict[str, int], asked: int | None) -> tuple[str, ...]:
    """The likely helpful things first. `kinds` are the bytes alive by kind, `asked` what could not be had."""
    found: list[tuple[float, str]] = []
    card, total = now.card, sum(kinds.values()) or 1
    free_inside = (card.reserved or 0) - (card.allocated or 0)
    if asked and free_inside >= asked:
        found.append(
            (
                2.0,
                f"torch holds {size(free_inside)} that is free but in pieces: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            )
        )
    if card.others and card.total and card.others > card.total / 50:
        found.append((1.5, f"other processes hold {size(card.others)} of this card: `nvidia-smi` names them"))
    share = {kind: nbytes / total for kind, nbytes in kinds.items()}
    found.append(
        (
            share.get("tensor", 0.0),
            "activations: a smaller micro-batch with gradient accumulation, or gradient checkpointing "
            "(model.gradient_checkpointing_enable())",
        )
    )
    states, weights = share.get("optimizer state", 0.0), share.get("parameter", 0.0)
    found.append((states, "optimizer states: shard them (FSDP, ZeRO-1), or use an 8-bit optimizer or Adafactor"))
    found.append(
        (weights + share.get("gradient", 0.0), "weights and gradients: shard them (FSDP, ZeRO-3), or train LoRA")
    )
    if card.total is None and now.host.limit:
        found.append((0.3, f"the cgroup's limit is {size(now.host.limit)}: ask the scheduler for more (--mem)"))
    found.sort(key=lambda entry: -entry[0])
    return tuple(text for weight, text in found if weight >= 0.2)[:3]
