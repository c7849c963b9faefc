"""The matrix products of a transformer, from its config: what one step of one rank computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import UsageError
from mldebug.perf.matmul._config import load_config
from mldebug.perf.matmul._layout import Layout, layout_of
from mldebug.perf.matmul._shapes import Matmul

if TYPE_CHECKING:
    from mldebug.perf.matmul._advice import Advice


@dataclass(frozen=True)
class ModelShapes:
    """The forward of one step of one of `tp` ranks: `batch` sequences of `seq` tokens.

    `matmuls` are in the order of the model, equal layers together. `params` are the weights of the whole model,
    `active_params` those that one token meets: of experts the chosen ones. `assumed` says what was not known of this
    type of model and taken to be as in Llama; "" where the layout was checked against the model itself.
    """

    name: str
    layout: Layout
    seq: int
    batch: int
    tp: int
    matmuls: tuple[Matmul, ...]
    params: float
    active_params: float
    assumed: str

    @property
    def tokens(self) -> int:
        """Tokens of a step; of an encoder and a decoder those of one side."""
        return self.seq * self.batch

    def flops(self, *, causal: bool = False, backward: bool = False) -> float:
        """Operations of a step on one rank: of the forward, or with `backward` of both, which is three times as much.

        Attention counts all pairs of positions, or with `causal` only those that the mask leaves. What kernels compute
        again in the backward is not counted.
        """
        forward = sum(one.flops * (one.useful if causal else 1.0) for one in self.matmuls)
        return forward * (3 if backward else 1)

    def attention_flops(self, *, causal: bool = False) -> float:
        """The part of the forward's operations that are scores and values of attention, in all layers."""
        return sum(one.flops * (one.useful if causal else 1.0) for one in self.matmuls if one.attention)

    def advice(self, dtype: str = "bfloat16") -> tuple[Advice, ...]:
        """Which sizes to pad, or to divide otherwise, what costs most first: see `advise()`.

        for one in model_shapes("gpt2").advice(): print(one.line())
        """
        from mldebug.perf.matmul._advice import advise

        return advise(self, dtype=dtype)


def model_shapes(
    source: str | os.PathLike[str] | Mapping[str, Any], *, seq: int = 0, batch: int = 1, tp: int = 1
) -> ModelShapes:
    """The matrix products of a model: projections, attention, MLP or experts, and the head.

    `source` is a config.json, a folder, a short name (llama-7b), a repository in the hub's cache, a model type or a
    config. `seq` 0 is the longest the config names, 4096 at most. With `tp` ranks the widths are those of one rank:
    heads, MLP and vocabulary are divided, rounded up where they do not divide. Tokens of experts are spread evenly.
    Wrong sizes, and models that are no transformers, are a UsageError.

        model_shapes("llama-7b", seq=4096).flops() / 1e12
    """
    name, config = load_config(source)
    layout = layout_of(name, config)
    seq = seq or min(layout.longest or 4096, 4096)
    for what, value in (("seq", seq), ("batch", batch), ("tp", tp)):
        if not 0 < value <= 1 << 31:
            raise UsageError(f"{what} is {value}", "give a whole number of 1 or more")
    if tp > layout.heads:
        raise UsageError(f"tp is {tp}, more than the {layout.heads} heads of {name}", f"tp of {layout.heads} at most")
    matmuls = tuple(_Counting(layout, seq, batch, tp).all())
    whole = _Counting(layout, seq, batch, 1)
    linear = [one for one in whole.all() if not one.attention]
    embedding = layout.vocab * layout.hidden
    untied = 0 if layout.tied else embedding
    active = sum(one.flops for one in linear) / (2.0 * seq * batch)
    return ModelShapes(
        name=name,
        layout=layout,
        seq=seq,
        batch=batch,
        tp=tp,
        matmuls=matmuls,
        params=whole.weights() + untied,
        active_params=active + untied,
        assumed=layout.assumed,
    )


class _Counting:
    """Walks the parts of a layout."""

    def __init__(self, layout: Layout, seq: int, batch: int, tp: int) -> None:
        self.layout, self.seq, self.batch, self.tp = layout, seq, batch, tp
        self.tokens = seq * batch

    def all(self) -> list[Matmul]:
        lay = self.layout
        if lay.encoder_layers:
            found = [*self.attention(lay.encoder_layers, "encoder "), *self.mlp(lay.encoder_layers, "encoder ")]
            found += self.attention(lay.layers, "decoder ", causal=True)
            found += self.attention(lay.layers, "cross ", causal=False)
            found += self.mlp(lay.layers, "decoder ")
        else:
            found = self.mla() if lay.kv_rank else self.attention(lay.layers, "", causal=True)
            found += self.mlp(lay.dense_layers, "")
            found += self.experts(lay.moe_layers)
        return [*found, self.linear("lm_head", self.split(lay.vocab), lay.hidden, 1)]

    def weights(self) -> float:
        """All weights of the linear layers, each expert's too; `tp` is 1 here."""
        lay = self.layout
        active = sum(one.flops for one in self.all() if not one.attention) / (2.0 * self.tokens)
        idle = lay.moe_layers * (lay.experts - lay.top_k) * self.expert_weights() if lay.moe_layers else 0
        return active + idle

    def expert_weights(self) -> int:
        return (3 if self.layout.gated else 2) * self.layout.hidden * self.layout.expert_inter

    def linear(self, name: str, n: int, k: int, count: float) -> Matmul:
        return Matmul(name, self.tokens, n, k, count=float(count))

    def split(self, width: int) -> int:
        return -(-width // self.tp)

    def attention(self, layers: int, part: str, causal: bool = False) -> list[Matmul]:
        """Projections and products of attention whose heads share keys and values in groups."""
        lay = self.layout
        heads, kv = self.split(lay.heads), self.split(lay.kv_heads)
        q, wide = heads * lay.head_dim, kv * lay.head_dim
        if lay.fused_qkv:
            inputs = [self.linear(f"{part}qkv", q + 2 * wide, lay.hidden, layers)]
        elif kv == heads:
            inputs = [self.linear(f"{part}q, k, v", q, lay.hidden, 3 * layers)]
        else:
            inputs = [self.linear(f"{part}q", q, lay.hidden, layers)]
            inputs.append(self.linear(f"{part}k, v", wide, lay.hidden, 2 * layers))
        products = self.products(part, layers, heads, lay.head_dim, lay.head_dim, causal)
        return [*inputs, *products, self.linear(f"{part}o", lay.hidden, q, layers)]

    def products(self, part: str, layers: int, heads: int, qk: int, v: int, causal: bool) -> list[Matmul]:
        """Scores and values, by layers that see all positions and layers with a window."""
        found = []
        windowed = min(self.layout.windowed_layers, layers) if causal else 0
        for some, window in ((layers - windowed, 0), (windowed, self.layout.window)):
            if some:
                useful = _visible(self.seq, window) if causal else 1.0
                label = f"{part}windowed " if window else part
                size = dict(batch=heads * self.batch, count=float(some), attention=True, useful=useful)
                found.append(Matmul(f"{label}scores", self.seq, self.seq, qk, **size))  # type: ignore[arg-type]
                found.append(Matmul(f"{label}values", self.seq, v, self.seq, **size))  # type: ignore[arg-type]
        return found

    def mla(self) -> list[Matmul]:
        """Attention of DeepSeek: queries, and keys with values, through a narrow layer that all ranks compute."""
        lay, layers = self.layout, self.layout.layers
        heads = self.split(lay.heads)
        qk = lay.nope_dim + lay.rope_dim
        if lay.q_rank:
            found = [self.linear("q_a", lay.q_rank, lay.hidden, layers)]
            found.append(self.linear("q_b", heads * qk, lay.q_rank, layers))
        else:
            found = [self.linear("q", heads * qk, lay.hidden, layers)]
        found.append(self.linear("kv_a", lay.kv_rank + lay.rope_dim, lay.hidden, layers))
        found.append(self.linear("kv_b", heads * (lay.nope_dim + lay.v_dim), lay.kv_rank, layers))
        found += self.products("", layers, heads, qk, lay.v_dim, causal=True)
        return [*found, self.linear("o", lay.hidden, heads * lay.v_dim, layers)]

    def mlp(self, layers: int, part: str, inter: int = 0) -> list[Matmul]:
        lay = self.layout
        if not layers:
            return []
        inter = self.split(inter or lay.inter)
        if not lay.gated:
            first = self.linear(f"{part}up", inter, lay.hidden, layers)
        elif lay.fused_gate:
            first = self.linear(f"{part}gate_up", 2 * inter, lay.hidden, layers)
        else:
            first = self.linear(f"{part}gate, up", inter, lay.hidden, 2 * layers)
        return [first, self.linear(f"{part}down", lay.hidden, inter, layers)]

    def experts(self, layers: int) -> list[Matmul]:
        """The router, the experts with their even share of the tokens, and those that all tokens pass."""
        lay = self.layout
        if not layers:
            return []
        found = [self.linear("router", lay.experts, lay.hidden, layers)]
        routed = self.tokens * lay.top_k
        share = max(1, round(routed / lay.experts))
        calls = layers * routed / share
        inter = self.split(lay.expert_inter)
        wide = 2 * inter if lay.gated else inter
        name = "expert gate_up" if lay.gated else "expert up"
        found.append(Matmul(name, share, wide, lay.hidden, count=calls))
        found.append(Matmul("expert down", share, lay.hidden, inter, count=calls))
        if lay.shared_inter:
            found += self.mlp(layers, "shared ", lay.shared_inter)
        if lay.shared_gate:
            found.append(self.linear("shared expert gate", 1, lay.hidden, layers))
        return found


def _visible(seq: int, window: int) -> float:
    """The share of the seq x seq pairs that a causal mask leaves, with a window of so many positions back."""
    width = min(window or seq, seq)
    return (width * seq - width * (width - 1) / 2) / seq**2
