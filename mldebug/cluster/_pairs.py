"""pair_matrix(): which GPU, node or path is bad, from the bandwidths of all pairs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mldebug.cluster._pairs_evidence import PairsEvidence
from mldebug.cluster._pairs_files import load_pairs, merge_pairs
from mldebug.cluster._pairs_report import PairsReport


def pair_matrix(source: PairsEvidence | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> PairsReport:
    """Judge a recorded matrix of pairs: evidence, or files that `load_pairs` reads (several are one matrix).

    Bandwidths are in GBps (10^9 bytes/s). Raises UsageError for a file that is no pair matrix.

        report = pair_matrix("pairs.csv")
        print(report.text()); report.verdict.culprits
    """
    from mldebug.cluster._pairs_judge import judge_pairs

    if isinstance(source, dict):
        evidence: PairsEvidence = source  # type: ignore[assignment]
    else:
        paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        evidence = merge_pairs([load_pairs(path) for path in paths])
    return PairsReport(judge_pairs(evidence), evidence)
