"""A matrix that is the same in both directions: judged once, and shown whole."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from mldebug.cluster import PairsEvidence, pair_matrix  # noqa: E402


def symmetric(nodes: int, gpus: int, upper_only: bool = False) -> PairsEvidence:
    """GPU 3 of the first node is slow in both directions."""
    size = nodes * gpus
    node = np.arange(size) // gpus
    rate = np.random.default_rng(0).uniform(0.97, 1.03, (size, size))
    rate *= np.where(node[:, None] == node[None, :], 350.0, 45.0)
    rate[3, :] *= 0.5
    rate[:, 3] *= 0.5
    rate = np.triu(rate, 1) + np.triu(rate, 1).T
    src, dst = np.nonzero(np.triu(np.ones((size, size)), 1) if upper_only else ~np.eye(size, dtype=bool))
    found: PairsEvidence = {
        "schema": 1, "gpus": [f"n{at // gpus}:{at % gpus}" for at in range(size)], "src": src.tolist(),
        "dst": dst.tolist(), "gbps": rate[src, dst].tolist(), "status": ["ok"] * len(src), "notes": [],
    }  # fmt: skip
    return found


def cells_of(text: str, head: str) -> list[list[str]]:
    """The rows below the line that begins so."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[first:]:
        if not line.strip():
            break
        rows.append(line[13:].replace("!", "! ").split())
    return rows


def test_the_map_of_gpus_has_both_halves() -> None:
    report = pair_matrix(symmetric(1, 8))
    rows = cells_of(report.text(), "GBps, from the row")
    assert report.verdict.culprits == ("n0:3",)
    assert len(rows) == 8 and rows == [list(column) for column in zip(*rows, strict=True)]
    assert not any("-" in row for row in rows) and rows[5][3].endswith("!") and rows[3][5].endswith("!")


def test_the_map_of_nodes_has_both_halves() -> None:
    rows = cells_of(pair_matrix(symmetric(12, 8)).text(), "% of what siblings")
    assert len(rows) == 12 and not any("-" in cell for row in rows for cell in row)
    assert rows[0][7].endswith("!") and rows[7][0].endswith("!")


def test_a_half_that_was_not_measured_stays_empty() -> None:
    rows = cells_of(pair_matrix(symmetric(1, 8, upper_only=True)).text(), "GBps, from the row")
    assert rows[7][:7] == ["-"] * 7 and "-" not in rows[0]
