"""Is this cluster fit to train on: which rank, GPU, node, link or setting is bad.

    from mldebug.cluster import load_pairs, pair_matrix
    print(pair_matrix(load_pairs("pairs.csv")).text())

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.cluster._dist_judge import Culprit, DistVerdict, judge_dist_test
    from mldebug.cluster._dist_report import DistTestReport
    from mldebug.cluster._dist_test import dist_test
    from mldebug.cluster._doctor import collect_doctor, doctor, judge_doctor, load_doctor
    from mldebug.cluster._doctor_report import DoctorReport
    from mldebug.cluster._pairs import pair_matrix
    from mldebug.cluster._pairs_evidence import PairsEvidence
    from mldebug.cluster._pairs_files import load_pairs, save_pairs
    from mldebug.cluster._pairs_judge import judge_pairs
    from mldebug.cluster._pairs_report import PairsReport
    from mldebug.cluster._pairs_schedule import gpu_rounds, node_rounds, sample_rounds
    from mldebug.cluster._pairs_verdict import PairsVerdict

__all__ = [
    "Culprit",
    "DistTestReport",
    "DistVerdict",
    "DoctorReport",
    "PairsEvidence",
    "PairsReport",
    "PairsVerdict",
    "collect_doctor",
    "dist_test",
    "doctor",
    "gpu_rounds",
    "judge_dist_test",
    "judge_doctor",
    "judge_pairs",
    "load_doctor",
    "load_pairs",
    "node_rounds",
    "pair_matrix",
    "sample_rounds",
    "save_pairs",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "Culprit": "mldebug.cluster._dist_judge",
    "DistTestReport": "mldebug.cluster._dist_report",
    "DistVerdict": "mldebug.cluster._dist_judge",
    "DoctorReport": "mldebug.cluster._doctor_report",
    "PairsEvidence": "mldebug.cluster._pairs_evidence",
    "PairsReport": "mldebug.cluster._pairs_report",
    "PairsVerdict": "mldebug.cluster._pairs_verdict",
    "collect_doctor": "mldebug.cluster._doctor",
    "dist_test": "mldebug.cluster._dist_test",
    "doctor": "mldebug.cluster._doctor",
    "gpu_rounds": "mldebug.cluster._pairs_schedule",
    "judge_dist_test": "mldebug.cluster._dist_judge",
    "judge_doctor": "mldebug.cluster._doctor",
    "judge_pairs": "mldebug.cluster._pairs_judge",
    "load_doctor": "mldebug.cluster._doctor",
    "load_pairs": "mldebug.cluster._pairs_files",
    "node_rounds": "mldebug.cluster._pairs_schedule",
    "pair_matrix": "mldebug.cluster._pairs",
    "sample_rounds": "mldebug.cluster._pairs_schedule",
    "save_pairs": "mldebug.cluster._pairs_files",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
