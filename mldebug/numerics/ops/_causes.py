"""What makes NaN and inf, as data: one row a cause, with what it means and what helps. The first that fits is taken."""

from __future__ import annotations

from mldebug.numerics._event import Operation
from mldebug.numerics.ops._cause import Cause, fits
from mldebug.numerics.ops._causes_gradients import GRADIENTS
from mldebug.numerics.ops._op_names import ATTENTION, FUSED


def cause_of(op: str, node: str, phase: str, facts: frozenset[str]) -> Cause | None:
    """The first row that fits, or None."""
    made = Operation(op, node, facts=tuple(facts))
    return next((cause for cause in CAUSES if fits(cause, made, phase)), None)


CAUSES: tuple[Cause, ...] = (
    # The loss scale, before all: what it does looks like an overflow of the model.
    Cause(
        "loss scale", "*", "by the loss scale",
        "The scaled gradient is beyond the range of its dtype; without the loss scale it is within. GradScaler skips "
        "this step and lowers its scale.",
        "nothing to do, unless it goes on for more than some dozen steps",
    ),
    Cause(
        "loss scale collapsed", "*", "the loss scale is down",
        "GradScaler has lowered its scale so far that it cannot be what made the gradient overflow: it skips every "
        "step, and nothing is trained.",
        "look for the operation named here, not at the scale: a gradient of its own is not finite",
    ),
    # Attention and softmax.
    Cause(
        "fully masked row", f"softmax log_softmax safe_softmax logsumexp masked_softmax {ATTENTION}", "a row of -inf",
        "A whole row of the softmax is -inf: every key of one query is masked, and exp(-inf) / sum of exp(-inf) is "
        "0/0.",
        "leave one key open in every row (a padded query may look at itself), mask with torch.finfo(dtype).min, or set "
        "these rows to 0 with torch.where; a loss mask that multiplies does not remove NaN",
    ),
    Cause(
        "fully masked row", "logsumexp softmax logsoftmax safesoftmax", "nan, an inf operand",
        "Every value of a row is -inf: its logsumexp is -inf, and the gradient of that is exp(-inf - -inf) = NaN, also "
        "where torch.where leaves the row out.",
        "leave one value open in every row, or fill such rows with 0 before the softmax, not after it",
        phase="backward",
    ),
    Cause(
        "inf score", f"softmax log_softmax safe_softmax logsumexp {ATTENTION}", "a row with +inf",
        "The softmax was given +inf: inf - inf is NaN.",
        "find what made the +inf: divide the scores by sqrt(d) before the product, or compute them in float32",
    ),
    Cause(
        "mask twice", "add sub", "inf, finite operands, two lowest",
        "Two masks that both hold the lowest value of their dtype are added: the sum is -inf, which neither was.",
        "combine masks with torch.minimum or as booleans, and fill once",
    ),
    # Divisions.
    Cause(
        "eps too small", f"addcdiv div reciprocal rsqrt {FUSED}", "a zero divisor, half",
        "The optimizer divides by zero in float16: sqrt(v) and eps are both below what float16 can hold (eps=1e-8 is "
        "0).",
        "keep the weights of the optimizer in float32 (autocast), or raise eps to 1e-4 and more",
        phase="optimizer",
    ),
    Cause(
        "zero denominator of the optimizer", f"addcdiv div reciprocal rsqrt {FUSED}", "a zero divisor",
        "The optimizer divides by zero: sqrt(v) + eps is 0 where a gradient was always 0, and so is its norm.",
        "give the optimizer an eps above 0 that its dtype can hold; leave out what has no gradient",
        phase="optimizer",
    ),
    Cause(
        "negative variance of the optimizer", "sqrt addcmul", "a negative operand",
        "The optimizer takes the root of a variance that rounding has made negative: a mean of squares less the square "
        "of a mean, as RMSprop with centered=True does.",
        "centered=False, or an eps inside of the root: gradients that hardly change leave no variance",
        phase="optimizer",
    ),
    Cause(
        "learning rate", "*", "a bad scalar",
        "The optimizer multiplies by inf or NaN: that is what its learning rate (or another option) is.",
        "look at the schedule: a division by zero, or by a number of steps that is 0",
        phase="optimizer",
    ),
    Cause(
        "update beyond the range", "*", "inf, finite operands",
        "The gradients are finite, and the update takes the parameter beyond its range: training diverges.",
        "lower the learning rate (and weight decay), clip the gradients, warm up",
        phase="optimizer",
    ),
    Cause(
        "empty mean", "mean", "no element",
        "The mean of no element is 0/0: nothing was selected.",
        "divide the sum by count.clamp(min=1), or leave this term out where nothing is selected",
    ),
    Cause(
        "zero over zero", "div addcdiv", "zero over zero",
        "0 / 0: the divisor is zero where the numerator is zero too, as in a mean over a mask without a one.",
        "divide by divisor.clamp(min=1) for counts, by divisor + eps (one that the dtype can hold) for norms",
        phase="forward",
    ),
    Cause(
        "eps too small", "div reciprocal rsqrt", "a zero divisor, half",
        "A division by zero in half precision: an eps of 1e-8 or less is 0 in float16, and lost beside 1 in bfloat16.",
        "compute this in float32, or use an eps that the dtype can hold (torch.finfo(dtype).tiny and more)",
        phase="forward",
    ),
    Cause(
        "division by zero", "div reciprocal rsqrt remainder fmod", "a zero divisor",
        "Something is divided by exactly 0.",
        "add an eps to the divisor or clamp it; torch.where afterwards does not help backward",
        phase="forward",
    ),
    # Logarithms, roots, powers.
    Cause(
        "log of zero", "log log2 log10 logit xlogy log1p", "inf, a zero operand",
        "log(0) = -inf: a probability underflowed to 0, and 0 * -inf is NaN.",
        "use log_softmax (or logsigmoid) on the logits, torch.xlogy for p * log(p), or clamp p first",
        phase="forward",
    ),
    Cause(
        "log of a negative number", "log log2 log10 log1p", "a negative operand",
        "The logarithm of a negative number is NaN.",
        "clamp the operand at a small positive value, and find out why it is negative",
        phase="forward",
    ),
    Cause(
        "beyond the domain", "acos asin acosh atanh erfinv logit", "beyond the domain, nan",
        "acos, asin, atanh and erfinv are defined from -1 to 1, acosh from 1 on and logit from 0 to 1: beyond, the "
        "result is NaN. Rounding takes a cosine to 1.0000001.",
        "clamp the operand to the domain (for a gradient a bit inside of it), or use atan2",
        phase="forward",
    ),
    Cause(
        "edge of the domain", "atanh erfinv", "at the edge, inf",
        "atanh and erfinv are infinite at -1 and 1: the operand is exactly there, as tanh of a large number is.",
        "clamp the operand to +-(1 - eps), or keep the value from before the tanh",
        phase="forward",
    ),
    Cause(
        "root of a negative number", "sqrt rsqrt", "a negative operand",
        "The square root of a negative number is NaN: often 1 - x**2, or a variance as a difference of two means.",
        "clamp the operand at 0 (with an eps if a gradient is taken)",
        phase="forward",
    ),
    Cause(
        "power of a negative number", "pow", "a negative operand, a fractional power, nan",
        "A negative number to a fractional power is NaN.",
        "take the power of x.abs() or x.clamp(min=eps)",
        phase="forward",
    ),
    Cause(
        "zero to a negative power", "pow", "a zero operand, a negative power",
        "0 to a negative power is 1/0.",
        "clamp the operand, or add an eps that the dtype can hold",
        phase="forward",
    ),
    Cause(
        "singular matrix",
        "linalg_solve_ex linalg_inv_ex linalg_lu_factor_ex lu_solve linalg_solve_triangular cholesky_solve "
        "linalg_slogdet",
        "finite operands",
        "The matrix has no inverse (its rank is too low), or hardly one in this dtype.",
        "add a small multiple of the identity, use torch.linalg.lstsq, or compute this in float64",
        phase="forward",
    ),
    Cause(
        "pole of the gamma function", "lgamma digamma polygamma", "a pole",
        "lgamma, digamma and polygamma have no finite value at 0, -1, -2 ...: a concentration, count or rate is there, "
        "as softplus or relu of a very negative number is 0.",
        "clamp the operand at an eps (softplus(x) + eps), or exp() of a bounded number",
        phase="forward",
    ),
    *GRADIENTS,
    # Statistics and losses.
    Cause(
        "std of one sample", "std var std_mean var_mean", "one sample",
        "The deviation of a single sample divides by N - 1 = 0: the batch (or group) has one element, as the last one "
        "of a data set may.",
        "DataLoader(drop_last=True), correction=0, or leave the statistic out for one sample",
    ),
    Cause(
        "negative running variance", "native_batch_norm", "a negative variance, nan",
        "In evaluation BatchNorm takes the root of running_var + eps, and that is negative: no training makes such a "
        "variance, but arithmetic on weights does (a difference, an extrapolated mean, a bad checkpoint).",
        "look at what wrote running_var; leave it out of the arithmetic, or clamp it at 0",
        phase="forward",
    ),
    Cause(
        "running statistics overflow", "native_batch_norm cudnn_batch_norm miopen_batch_norm", "inf, finite operands",
        "The mean or variance of this batch is beyond the range of its dtype, and the running statistics keep that: "
        "training goes on, with outputs of 0, and evaluation is wrong from here on.",
        "find the sample that is far off and keep it away from the forward; set running_mean and running_var back",
        phase="forward",
    ),
    Cause(
        "norm of a constant",
        "native_layer_norm native_group_norm native_batch_norm fused_rms_norm",
        "nan, finite operands",
        "The values to be normalised are all equal and eps is 0 (or below what the dtype can hold): 0 / sqrt(0).",
        "give the layer an eps that its dtype can hold",
    ),
    Cause(
        "weight norm of zero",
        "weight_norm_interface",
        "nan, finite operands",
        "A row of the weight is the zero vector, and weight norm divides by its length: 0/0.",
        "initialise the weight with a row that is not zero",
    ),
    Cause(
        "no label", "nll_loss_forward nll_loss2d_forward", "no label",
        "Every label of this (micro-)batch is ignore_index: the mean is over no token, 0/0.",
        'use reduction="sum" and divide by the count of labels, at least 1; or leave out batches without a label',
    ),
    Cause(
        "label of a masked class", "nll_loss_forward nll_loss2d_forward", "an inf operand",
        "The label is a class whose logit is -inf: its loss is inf.",
        "do not mask the classes that are labels, or give these tokens ignore_index",
    ),
    Cause(
        "sum over a masked class", "sum mean", "inf, an inf operand, a partly masked row",
        "The sum runs over -inf, the log-probability of a masked class: label smoothing adds up all classes.",
        "set what is masked to 0 before the sum, mask with torch.finfo(dtype).min, or do without label_smoothing here",
        phase="forward",
    ),
    Cause(
        "target too long for CTC", "ctc_loss cudnn_ctc_loss", "",
        "CTC cannot align a target with so few input frames (a target needs its length plus its repeats): the loss is "
        "inf.",
        "CTCLoss(zero_infinity=True), or leave out samples with input_length < target_length + repeats",
    ),
    # Overflows.
    Cause(
        "exp overflow", "exp exp2 expm1 sinh cosh", "inf, finite operands",
        "exp() of a number beyond the logarithm of the largest value: 88.7 in float32 and bfloat16, 11.1 in float16.",
        "subtract the maximum first (logsumexp, softmax), clamp the operand, or work with logarithms",
    ),
    Cause(
        "square overflow", "pow square mul", "inf, float16, finite operands, a square",
        "The square of a number above 256 is beyond float16 (65504): a norm or variance must be taken in float32.",
        "x.float() before the square, as LayerNorm and RMSNorm do",
    ),
    Cause(
        "square overflow", "mse_loss var std var_mean std_mean linalg_vector_norm norm",
        "inf, float16, finite operands",
        "It squares numbers: above 256 the square, or before that their sum, is beyond float16 (65504).",
        "take it in float32: F.mse_loss(output.float(), target.float()), x.float().var()",
    ),
    Cause(
        "sum overflow", "sum mean cumsum linalg_vector_norm norm", "inf, half, finite operands",
        "The sum of finite numbers is beyond the range of its dtype.",
        "sum in float32 (dtype=torch.float32), or take the mean",
    ),
    Cause(
        "product overflow", "mm addmm bmm baddbmm matmul linear convolution mkldnn_linear mv addmv dot",
        "inf, float16, finite operands",
        "A sum of products is beyond the range of float16 (65504); in bfloat16 or float32 it is an ordinary number.",
        "run this module in bfloat16 or float32, or scale down what it takes",
    ),
    Cause(
        "cast overflow", "to_copy copy", "inf, half, finite operands",
        "The value is an ordinary number in the wider dtype, and beyond the range of this one.",
        "keep this tensor in float32 or bfloat16, or scale it down before the cast",
    ),
    Cause(
        "cast overflow", "to_copy copy", "float8, finite operands",
        "float8_e5m2 ends at 57344, float8_e4m3fn at 448, and the latter has no inf: what is beyond may become NaN.",
        "scale by amax before the cast, and clamp to torch.finfo(dtype).max",
    ),
    Cause(
        "power overflow", "pow", "inf, finite operands",
        "The power is beyond the range of its dtype.",
        "clamp the operand, or work with logarithms",
    ),
    Cause(
        "overflow", "*", "inf, finite operands",
        "All operands are finite and the result is beyond the range of its dtype.",
        "scale the operands down, or compute this in a wider dtype",
    ),
    # What is left of NaN.
    Cause(
        "inf minus inf", "add sub sum cumsum mean native_layer_norm native_batch_norm", "nan, an inf operand",
        "inf - inf is NaN: an operand was inf before.",
        "find what made the inf: it stands among the operands",
    ),
    Cause(
        "0 * inf", "*", "nan, an inf scalar",
        "A mask is multiplied by an infinite constant: 0 * inf is NaN where the mask is 0.",
        'fill instead: torch.zeros_like(x).masked_fill(mask, float("-inf"))',
    ),
    Cause(
        "0 * inf", "*", "nan, zero and inf",
        "0 * inf is NaN: an operand holds inf, another 0.",
        "find what made the inf, and use torch.where in place of a product with a mask",
    ),
    Cause(
        "uninitialised memory", "empty empty_like new_empty empty_strided resize", "",
        "The memory was never written: torch.empty holds whatever was there.",
        "use torch.zeros, or write every element before it is read",
    ),
    Cause(
        "hook on an output", "*", "a hook",
        "The gradient of the loss was finite; a hook on what the model returned (register_hook) made it bad.",
        "look at the hook: it divides by a norm that is 0, or scales beyond the range",
        phase="backward",
    ),
    # What the graph of a loss takes from outside of it.
    Cause(
        "bad before the graph", "*", "no graph, nan, one element",
        "It was made without gradients, from rewards or weights say, and is one number alone: the deviation of one "
        "sample is NaN, and so is the mean of none.",
        "std(correction=0) or no division where there is one sample; mldebug.check(value, name) tells where it begins, "
        "and diagnose(model, step) its operation",
    ),
    Cause(
        "bad before the graph", "*", "no graph",
        "It was made without gradients, of rewards, weights or labels say: by 0/0, a log of zero, the deviation of one "
        "sample.",
        "mldebug.check(value, name) after the lines that make it tells where it begins, and diagnose(model, step) its "
        "operation",
    ),
    # Precision.
    Cause(
        "positions in half precision", "arange to_copy copy cumsum", "positions",
        "Neighbouring positions are one number in this dtype: bfloat16 holds whole numbers up to 256 only, float16 up "
        "to 2048.",
        "keep positions (and the angles of rotary embeddings) in int64 or float32 and cast the result",
    ),
)  # fmt: skip
