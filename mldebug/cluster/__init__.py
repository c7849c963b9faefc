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
    from mldebug.cluster._pairs_verdict import Finding, PairsVerdict

__all__ = [
    "Culprit",
    "DistTestReport",
    "DistVerdict",
    "DoctorReport",
    "Finding",
    "PairsVerdict",
    "collect_doctor",
    "dist_test",
    "doctor",
    "judge_dist_test",
    "judge_doctor",
    "load_doctor",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "Culprit": "mldebug.cluster._dist_judge",
    "DistTestReport": "mldebug.cluster._dist_report",
    "DistVerdict": "mldebug.cluster._dist_judge",
    "dist_test": "mldebug.cluster._dist_test",
    "judge_dist_test": "mldebug.cluster._dist_judge",
    "DoctorReport": "mldebug.cluster._doctor_report",
    "Finding": "mldebug.cluster._pairs_verdict",
    "PairsVerdict": "mldebug.cluster._pairs_verdict",
    "collect_doctor": "mldebug.cluster._doctor",
    "doctor": "mldebug.cluster._doctor",
    "judge_doctor": "mldebug.cluster._doctor",
    "load_doctor": "mldebug.cluster._doctor",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
