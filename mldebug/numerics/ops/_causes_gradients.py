"""The rows of the table of causes for what the formulas of gradients do: they stand in the middle of it."""

from __future__ import annotations

from mldebug.numerics.ops._cause import Cause

GRADIENTS: tuple[Cause, ...] = (
    Cause(
        "norm of the gradients overflows", "linalg_vector_norm norm", "inf, finite operands",
        "The norm of finite gradients is inf: their squares are beyond the dtype. clip_grad_norm_ then multiplies all "
        "gradients by 0, and an inf gradient by 0 is NaN.",
        "take the norm in float32, scale the loss down, and call clip_grad_norm_(..., error_if_nonfinite=True)",
        phase="backward",
    ),
    Cause(
        "gradient beyond float16", "*", "inf, float16, finite operands, no zero",
        "A gradient is larger than float16 can hold (65504).",
        "use a GradScaler (or a smaller loss scale), clip before the cast, or train in bfloat16",
        phase="backward",
    ),
    Cause(
        "gradient overflow", "*", "inf, finite operands, no zero",
        "The gradient is beyond the range of its dtype, although all that it is computed from is finite.",
        "look for a steep function before it (exp, a power, a division by a tiny number), and bound what it takes",
        phase="backward",
    ),
    Cause(
        "repeated singular values", "linalgeigh linalgsvd linalgeig symeig svd", "a gradient",
        "The gradient of eigenvectors and singular vectors divides by the differences of the values: where two are "
        "equal (or one is 0, for svd) it is 0/0 or inf.",
        "use only the values (eigvalsh, svdvals), add a small random diagonal first, or do not differentiate this",
        phase="backward",
    ),
    Cause(
        "gradient of a singular matrix",
        "linalgslogdet linalgdet linalginvex linalgsolveex linalgcholeskyex linalglufactorex linalgsolvetriangular "
        "choleskysolve linalgqr",
        "a gradient",
        "The gradient of a determinant, an inverse or a factorisation takes the inverse of the matrix, which is "
        "singular (its rank is too low), or hardly not.",
        "add a small multiple of the identity, use torch.linalg.lstsq, or compute this in float64",
        phase="backward",
    ),
    Cause(
        "gradient of sqrt at zero", "sqrt", "a gradient",
        "The gradient of sqrt(x) is 1 / (2 sqrt(x)): at x = 0 it is inf, and NaN where the gradient that comes in is "
        "0, as it does behind torch.where or a mask.",
        "take the root of a safe x: torch.sqrt(torch.where(ok, x, 1.0)), or of x + eps or x.clamp(min=eps)",
        phase="backward",
    ),
    Cause(
        "gradient of a power at zero", "pow", "a gradient",
        "The gradient of x**p has the factor x**(p - 1), which is inf at x = 0 for p < 1.",
        "take the power of x.clamp(min=eps), or of torch.where(ok, x, 1.0)",
        phase="backward",
    ),
    Cause(
        "gradient of log at zero", "log log2 log10 log1p logit xlogy special_entr specialentr", "a gradient",
        "The gradient of log(x) is 1/x: at x = 0 it is inf, and NaN where the gradient that comes in is 0, as it does "
        "behind torch.where or a mask.",
        "take the log of a safe x: torch.log(torch.where(ok, x, 1.0)), or of x.clamp(min=eps)",
        phase="backward",
    ),
    Cause(
        "gradient of the gamma function at a pole", "lgamma digamma polygamma", "a gradient",
        "The gradients of lgamma and digamma are not finite at 0, -1, -2 ..., also where torch.where leaves that out.",
        "give it a safe operand: torch.lgamma(torch.where(ok, x, 1.0)), or x.clamp(min=eps)",
        phase="backward",
    ),
    Cause(
        "gradient of a quotient at zero", "div reciprocal rsqrt", "a gradient",
        "The gradient of a / b has the factor 1 / b, which is inf at b = 0; behind torch.where or a mask it is "
        "multiplied by 0, and 0 * inf is NaN.",
        "divide by a safe divisor: a / torch.where(ok, b, 1.0)",
        phase="backward",
    ),
    Cause(
        "gradient of arccos or arcsin at the edge", "acos asin atanh acosh", "a gradient",
        "The gradient of acos, asin and atanh is inf at -1 and 1.",
        "clamp the operand to +-(1 - eps) first, or use atan2",
        phase="backward",
    ),
    Cause(
        "gradient of exp behind where", "exp expm1", "an inf operand",
        "exp overflowed in a branch that torch.where (or clamp) leaves out: its gradient there is 0 * inf = NaN.",
        "clamp the operand of exp first: torch.exp(torch.where(ok, x, 0.0))",
        phase="backward",
    ),
    Cause(
        "0 * inf behind where", "*", "zero and inf, nan",
        "Forward hid an inf behind torch.where or a mask; backward multiplies it by a gradient of 0, and 0 * inf is "
        "NaN.",
        "make the operand safe before the operation, not its result: f(torch.where(ok, x, 1.0))",
        phase="backward",
    ),
    Cause(
        "gradient beyond float16", "*", "inf, float16, finite operands",
        "A gradient is larger than float16 can hold (65504).",
        "use a GradScaler (or a smaller loss scale), clip before the cast, or train in bfloat16",
        phase="backward",
    ),
)  # fmt: skip
