"""The second opinion: a warning, and never a culprit, where all siblings are equally slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldebug.cluster import PairsEvidence, load_pairs, pair_matrix, save_pairs
from mldebug.cluster.pairs._reference import second_opinion


def matrix(device: str, inside: float, between: float) -> PairsEvidence:
    names = [f"{host}:{gpu}" for host in "ab" for gpu in range(4)]
    ends = [(one, other) for one in range(8) for other in range(8) if one != other]
    gbps: list[float | None] = [
        (inside if one // 4 == other // 4 else between) * (1 + (one * 7 + other) % 5 / 500) for one, other in ends
    ]
    return {
        "schema": 1, "gpus": names, "src": [one for one, _ in ends], "dst": [other for _, other in ends], "gbps": gbps,
        "status": ["ok"] * len(ends), "notes": [], "device": device,
    }  # fmt: skip


@pytest.mark.parametrize(
    "device, inside, between, what",
    [
        ("NVIDIA H100 80GB HBM3", 380.0, 46.0, []),
        ("NVIDIA H100 80GB HBM3", 25.0, 46.0, ["NVLink 4"]),
        ("NVIDIA H100 80GB HBM3", 380.0, 1.1, ["plain TCP"]),
        ("NVIDIA A100 80GB PCIe", 22.0, 11.0, []),
        ("NVIDIA A100 80GB PCIe", 6.0, 11.0, ["PCIe 4"]),
        ("a card that nobody knows", 1.0, 0.1, []),
    ],
    ids=["good", "no NVLink", "TCP", "PCIe", "slow PCIe", "unknown"],
)
def test_a_warning_and_no_culprit(device: str, inside: float, between: float, what: list[str], tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    save_pairs(matrix(device, inside, between), path)
    warnings = second_opinion(load_pairs(path))
    assert len(warnings) == len(what)
    assert all(word in warning for word, warning in zip(what, warnings, strict=True))
    report = pair_matrix(path)
    assert report.ok and report.to_dict()["warnings"] == warnings
    assert report.text().count("warning: ") == len(what)
