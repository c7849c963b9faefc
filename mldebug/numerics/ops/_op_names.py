"""What torch's operations do to NaN and inf, by name: data for the watch over operations.

Names are without namespace, overload and underscores: `aten._softmax.default` and `aten.div_.Tensor` are `softmax` and
`div`.
"""

from __future__ import annotations

from typing import Any


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Their result is whatever the memory held.
EMPTY = words(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize resize_as empty_quantized"
)
# They write over the tensor that they change: what it held before is no operand.
OVERWRITES = words("copy fill zero normal uniform random bernoulli exponential cauchy log_normal geometric set")
# They take some elements and leave others out, on purpose: a bad element that is left out is of no consequence.
# And those that end in a limit, where inf gives the right one: tanh(inf) is 1.
SELECTS = words(
    """where masked_fill nan_to_num clamp clamp_min clamp_max minimum maximum fmin fmax max min amax amin aminmax topk
    sort median nanmedian kthvalue mode nansum nanmean masked_select masked_scatter index index_select gather take
    index_put index_fill index_copy scatter relu hardtanh threshold threshold_backward hardtanh_backward relu6 tril
    triu cummax cummin max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
    embedding renorm tanh sigmoid erf atan hardsigmoid
    amp_foreach_non_finite_check_and_unscale amp_update_scale copysign sign sgn"""
)
# They move values: what comes out clean is a clean part.
MOVES = words(
    """slice select split split_with_sizes unbind view unsafe_view reshape permute transpose t expand alias detach clone
    to_copy cat stack unfold as_strided repeat roll flip constant_pad_nd squeeze unsqueeze narrow diagonal chunk
    lift_fresh copy slice_backward select_backward unsafe_split slice_scatter select_scatter zeros_like ones_like
    full_like rand_like randn_like new_zeros new_ones new_full empty_like new_empty new_empty_strided
    reshape_alias"""
)
# In the space of logarithms -inf stands for a probability of zero: these take it as such.
LOG_SPACE = words("""exp exp2 expm1 softmax log_softmax safe_softmax logsumexp logaddexp logaddexp2 sigmoid logcumsumexp
    softmax_backward_data log_softmax_backward_data ctc_loss_backward""")
ATTENTION = (
    "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention "
    "scaled_dot_product_flash_attention scaled_dot_product_attention_math scaled_dot_product_cudnn_attention "
    "transformer_encoder_layer_fwd native_multi_head_attention"
)
FUSED = "fused_adam fused_adamw fused_adagrad"  # a whole step of an optimizer
SOFTMAX = words("softmax log_softmax safe_softmax logsumexp")
LOGS = words("log log2 log10 log1p log_softmax xlogy logit special_xlog1py logsumexp log_sigmoid_forward")
# They turn -inf into +inf and mean nothing by it.
SIGNS = words("neg abs mul sub rsub div")
# Their further results are for backward: the inner log-alpha of CTC holds -inf wherever no alignment ends.
FIRST_RESULT = ("ctc_loss", "cudnn_ctc_loss", "scaled_dot_product", "native_layer_norm", "native_batch_norm",
                "native_group_norm", "cudnn_batch_norm", "batch_norm_impl_index", "flash_attention",
                "efficient_attention", "fused_rms_norm")  # fmt: skip
# They update running statistics, and their schemas do not say so.
RUNNING = words("native_batch_norm cudnn_batch_norm miopen_batch_norm")
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


def base_name(op: str) -> str:
    """`aten._foreach_div_.List` -> `div`."""
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_").removeprefix("foreach_").strip("_")


def short_name(func: Any) -> str:
    """The name of an operation as a report has it: `aten.mm`, `aten.std.correction`."""
    return str(func).removesuffix(".default")


def takes_minus_infinity(base: str) -> bool:
    """Whether an operation gives -inf the meaning of a probability of zero."""
    return base in LOG_SPACE or "attention" in base or "scaled_dot_product" in base


def results_for_backward(base: str) -> bool:
    return base.startswith(FIRST_RESULT)
