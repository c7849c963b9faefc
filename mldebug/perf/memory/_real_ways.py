"""The ways through attention and dropout that CUDA and the CPU take, for the meta device, which takes another one.

What differs is what is kept: a fused attention keeps queries, keys, values, the output and one number for each row; the
one that the meta device falls back to keeps matrices of sequence x sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def way_of(func: Any, kind: str) -> Callable[..., Any] | None:
    """What to call in place of `func`; None: itself."""
    if func is functional.scaled_dot_product_attention or func is torch._C._nn.scaled_dot_product_attention:
        return _attention_cuda if kind == "cuda" else _attention_cpu
    if func is torch.Tensor.__bool__:
        return _true
    if func is functional.dropout and kind == "cuda":
        return _dropout_cuda
    return None


def _true(_tensor: torch.Tensor) -> bool:
    """Models ask whether a mask leaves all tokens in, or whether positions are those of one text: here they are."""
    return True


def _attention_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention for half precision without a mask, the memory-efficient kernel for the rest, as torch chooses.

    Flash attention takes fewer heads of keys and values than of queries as they are; the other kernel does not.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and half and query.shape[-1] <= 256:
        width = query.shape[-1]
        if width % 8:  # the kernel takes multiples of 8, and keeps what is padded
            query, key, value = (functional.pad(part, (0, 8 - width % 8)) for part in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale or 1 / math.sqrt(width))[0][
            ..., :width
        ]
    if enable_gqa:
        key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    bias = _bias(attn_mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The CPU's flash attention; with dropout it has none, and takes the way of matrices as meta does."""
    if dropout_p > 0.0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def _for_all_heads(query: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Keys and values repeated for the query heads that share them."""
    return part.repeat_interleave(query.shape[-3] // part.shape[-3], -3)


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout_cuda(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """One kernel that keeps a boolean mask."""
    if not training or p == 0.0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
