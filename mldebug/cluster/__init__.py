"""Is this cluster fit to train on: which rank, GPU, node, link or setting is bad.

    from mldebug.cluster import load_pairs, pair_matrix
    print(pair_matrix(load_pairs("pairs.csv")).text())

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.cluster.collectives._comms import comms
    from mldebug.cluster.collectives._report import CommsReport
    from mldebug.cluster.dist._dist_test import dist_test
    from mldebug.cluster.dist._judge import Culprit, DistVerdict, judge_dist_test
    from mldebug.cluster.dist._report import DistTestReport
    from mldebug.cluster.health._doctor import collect_doctor, doctor, judge_doctor, load_doctor
    from mldebug.cluster.health._report import DoctorReport
    from mldebug.cluster.pairs._evidence import PairsEvidence
    from mldebug.cluster.pairs._files import load_pairs, save_pairs
    from mldebug.cluster.pairs._judge import judge_pairs
    from mldebug.cluster.pairs._pairs import pair_matrix
    from mldebug.cluster.pairs._report import PairsReport
    from mldebug.cluster.pairs._schedule import gpu_rounds, node_rounds, sample_rounds
    from mldebug.cluster.pairs._verdict import PairsVerdict

__all__ = [
    "CommsReport",
    "Culprit",
    "DistTestReport",
    "DistVerdict",
    "DoctorReport",
    "PairsEvidence",
    "PairsReport",
    "PairsVerdict",
    "collect_doctor",
    "comms",
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
    "CommsReport": "mldebug.cluster.collectives._report",
    "Culprit": "mldebug.cluster.dist._judge",
    "DistTestReport": "mldebug.cluster.dist._report",
    "DistVerdict": "mldebug.cluster.dist._judge",
    "DoctorReport": "mldebug.cluster.health._report",
    "PairsEvidence": "mldebug.cluster.pairs._evidence",
    "PairsReport": "mldebug.cluster.pairs._report",
    "PairsVerdict": "mldebug.cluster.pairs._verdict",
    "collect_doctor": "mldebug.cluster.health._doctor",
    "comms": "mldebug.cluster.collectives._comms",
    "dist_test": "mldebug.cluster.dist._dist_test",
    "doctor": "mldebug.cluster.health._doctor",
    "gpu_rounds": "mldebug.cluster.pairs._schedule",
    "judge_dist_test": "mldebug.cluster.dist._judge",
    "judge_doctor": "mldebug.cluster.health._doctor",
    "judge_pairs": "mldebug.cluster.pairs._judge",
    "load_doctor": "mldebug.cluster.health._doctor",
    "load_pairs": "mldebug.cluster.pairs._files",
    "node_rounds": "mldebug.cluster.pairs._schedule",
    "pair_matrix": "mldebug.cluster.pairs._pairs",
    "sample_rounds": "mldebug.cluster.pairs._schedule",
    "save_pairs": "mldebug.cluster.pairs._files",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
