"""The classic table of a search for a SwiGLU MLP's size: the baseline, then the best sizes near it."""

from __future__ import annotations

from mldebug.perf.matmul._swiglu import SwigluReport

_MOST = 5  # sizes that are listed
_RULE = "-" * 25


def heading(hidden: int, near: int, distance: int, step: int) -> str:
    """What is searched, which is told before the minutes that it takes."""
    return (
        f"Wanted the closest to {near} d_ff value that leads to the highest TFLOPS (d_hidden={hidden})\n\n"
        f"Searching {2 * distance // step} steps in the range of {near - distance} .. {near + distance}\n"
    )


def table(report: SwigluReport) -> str:
    """Lines of d_ff, TFLOPS and the MLP's parameters, those of the size that was asked for first.

    print(table(best_swiglu(4096)))
    """
    ranked = sorted(report.sizes, key=lambda one: -(one.tflops or 0.0))
    first = [_line(one.intermediate, one.tflops, report.hidden) for one in ranked if one.intermediate == report.asked]
    best = [_line(one.intermediate, one.tflops, report.hidden) for one in ranked[:_MOST]]
    title = "Results: baseline, followed by near-by best performing d_ff results:"
    return "\n".join([title, "", " d_ff  tflops mlp_params", _RULE, *first, _RULE, *best, ""])


def _line(size: int, tflops: float | None, hidden: int) -> str:
    return f"{size} {tflops or 0.0:7.2f} {3 * size * hidden}"
