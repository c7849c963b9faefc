"""Verdicts on pair matrices: by hand, and on simulated clusters with and without a fault."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterable

import pytest

from mldebug.cluster import PairsVerdict, judge_pairs
from mldebug.cluster.pairs._evidence import STATUSES, PairsEvidence
from mldebug.cluster.pairs._verdict import KINDS
from mldebug.core.errors import UsageError
from tests.cluster.simulate import FAULTS, healthy, planted, right

Value = float | str | None


def matrix(hosts: Iterable[str], gpus: Iterable[str], value: Callable[[str, str, str, str], Value]) -> PairsEvidence:
    """`value(host, gpu, other host, other gpu)` is GBps, a status, or None for a pair that nobody wanted."""
    names = [(host, gpu) for host in hosts for gpu in gpus]
    out: PairsEvidence = {
        "schema": 1, "gpus": [":".join(name) for name in names], "src": [], "dst": [], "gbps": [], "status": [],
        "notes": [],
    }  # fmt: skip
    for src, one in enumerate(names):
        for dst, other in enumerate(names):
            found = value(*one, *other) if src != dst else None
            if found is not None:
                wobble = 1 + ((src * 7919 + dst * 104729) % 21 - 10) / 500  # 2%, the same in each run
                out["src"].append(src)
                out["dst"].append(dst)
                out["gbps"].append(found * wobble if isinstance(found, float) else None)
                out["status"].append("ok" if isinstance(found, float) else found)
    return out


def said(verdict: PairsVerdict) -> tuple[str, set[str]]:
    return verdict.kind, set(verdict.culprits)


def test_only_gpus_eight_apart_reach_each_other() -> None:
    """16 x 16, good diagonals, bad elsewhere between the nodes: the fabric, and not 16 GPUs."""
    for ends_as in ("hang", "error", 0.4):
        verdict = judge_pairs(
            matrix(
                ("n1", "n2"), "01234567",
                lambda a, i, b, j, bad=ends_as: 380.0 if a == b else 45.0 if i == j else bad,
            )
        )  # fmt: skip
        assert said(verdict) == ("inter-rail", set())
        assert "rails are isolated" in verdict.reading


def test_peer_copies_are_wrong_but_over_the_one_nvlink() -> None:
    """GPUs 6 and 7 have NVLink, all other pairs deliver wrong bytes: the node, and an IOMMU to look for."""
    verdict = judge_pairs(
        matrix(("box",), "01234567", lambda a, i, b, j: 250.0 if {i, j} == {"6", "7"} else "wrong")
    )  # fmt: skip
    assert said(verdict) == ("node", {"box"})
    healthy = judge_pairs(matrix(("box",), "01234567", lambda a, i, b, j: 250.0 if {i, j} == {"6", "7"} else 11.0))
    assert said(healthy) == ("none", set())


@pytest.mark.parametrize("hosts", ["ab", "abc", "abcdef"])
def test_two_rails_of_eight(hosts: str) -> None:
    """Slow or failing for all nodes: the rails, and not two GPUs of each node."""
    for bad in (12.0, "hang"):
        verdict = judge_pairs(
            matrix(
                hosts, "01234567",
                lambda a, i, b, j, bad=bad: 380.0 if a == b else bad if {i, j} & {"2", "5"} else 45.0,
            )
        )  # fmt: skip
        assert said(verdict) == ("inter-rail", {"rail 2", "rail 5"})


def test_leaf_switch_and_what_is_built_so() -> None:
    """Four of sixteen nodes slow to all are a fault; four switches of four that are slow to each other are not."""
    names = [f"n{i:02}" for i in range(16)]
    low = set(names[4:8])
    verdict = judge_pairs(matrix(names, "01", lambda a, i, b, j: 300.0 if a == b else 20.0 if low & {a, b} else 45.0))
    assert said(verdict) == ("several", low)
    built = judge_pairs(
        matrix(
            names, "01", lambda a, i, b, j: 300.0 if a == b else 45.0 if int(a[1:]) // 4 == int(b[1:]) // 4 else 20.0
        )
    )
    assert built.kind == "none"


@pytest.mark.parametrize("status", ["hang", "error", "wrong", "dead"])
def test_one_gpu_fails_in_each_way(status: str) -> None:
    verdict = judge_pairs(
        matrix(("a-1", "b-2"), "0123", lambda a, i, b, j: status if ("b-2", "3") in ((a, i), (b, j)) else 20.0)
    )
    assert said(verdict) == ("gpu", {"b-2:3"})
    assert verdict.findings[0].ratio == 0.0
    assert verdict.findings[0].pairs == 14


def test_worker_that_dies_half_way() -> None:
    """Its first pairs were fine."""
    verdict = judge_pairs(
        matrix(
            ("a", "b"), "0123",
            lambda a, i, b, j: 20.0 if ("a", "2") not in ((a, i), (b, j)) or {i, j} <= {"2", "0"} else "dead",
        )
    )  # fmt: skip
    assert said(verdict) == ("gpu", {"a:2"})


def test_gpu_that_never_reported() -> None:
    verdict = judge_pairs(
        matrix(("a", "b"), "0123", lambda a, i, b, j: "missing" if ("a", "1") in ((a, i), (b, j)) else 20.0)
    )
    assert said(verdict) == ("gpu", {"a:1"})
    assert "never measured" in verdict.reading
    left_out = judge_pairs(
        matrix(("a", "b"), "0123", lambda a, i, b, j: "skipped" if ("a", "1") in ((a, i), (b, j)) else 20.0)
    )
    assert left_out.kind == "none"


def test_all_gpus_of_a_node_are_the_node() -> None:
    verdict = judge_pairs(matrix(("a", "b", "c"), "01", lambda a, i, b, j: "hang" if "b" in (a, b) else 20.0))
    assert said(verdict) == ("node", {"b"})


def test_two_nodes_that_do_not_reach_each_other_are_a_path() -> None:
    """Nothing says which of the two it is."""
    verdict = judge_pairs(matrix(("a", "b"), "0123", lambda a, i, b, j: 300.0 if a == b else "hang"))
    assert said(verdict) == ("path", {"a <-> b"})


def test_one_direction_of_one_path() -> None:
    verdict = judge_pairs(matrix(("a", "b", "c"), "01", lambda a, i, b, j: 3.0 if a + i + b + j == "a0c1" else 20.0))
    assert said(verdict) == ("path", {"a:0 -> c:1"})


def test_two_gpus_tell_little() -> None:
    fine = judge_pairs(matrix(("a",), "01", lambda a, i, b, j: 20.0))
    assert (fine.kind, fine.confidence) == ("none", "low")
    assert said(judge_pairs(matrix(("a",), "01", lambda a, i, b, j: "hang"))) == ("path", {"a:0 <-> a:1"})
    lame = judge_pairs(matrix(("a",), "01", lambda a, i, b, j: 2.0 if i == "0" else 20.0))
    assert said(lame) == ("path", {"a:0 -> a:1"})


def test_three_gpus_with_a_bad_one() -> None:
    verdict = judge_pairs(matrix(("a",), "012", lambda a, i, b, j: 5.0 if "1" in (i, j) else 20.0))
    assert said(verdict) == ("gpu", {"a:1"})


def test_several() -> None:
    def value(a: str, i: str, b: str, j: str) -> Value:
        if "d" in (a, b) and a != b:
            return 6.0
        return "hang" if ("a", "0") in ((a, i), (b, j)) else 20.0

    assert said(judge_pairs(matrix("abcdef", "0123", value))) == ("several", {"d", "a:0"})


def test_flapping_link() -> None:
    evidence = matrix("abc", "01", lambda a, i, b, j: 20.0)
    for turn in range(1, 4):
        again = matrix("abc", "01", lambda a, i, b, j, t=turn: 4.0 if t == 2 and a + i + b + j == "a0b1" else 20.0)
        for column in ("src", "dst", "gbps", "status"):
            evidence[column] += again[column]  # type: ignore[literal-required]
    verdict = judge_pairs(evidence)
    assert said(verdict) == ("path", {"a:0 -> b:1"})
    assert "some rounds" in verdict.reading


def test_scale_does_not_matter() -> None:
    """The same cluster in GBps and in a thousandth of it."""
    for scale in (1e-3, 1.0, 1e3):
        verdict = judge_pairs(
            matrix("abcd", "0123", lambda a, i, b, j, s=scale: s * (8.0 if ("c", "2") in ((a, i), (b, j)) else 20.0))
        )
        assert said(verdict) == ("gpu", {"c:2"})


def test_nodes_against_nodes() -> None:
    """Evidence with hosts in place of GPUs."""
    evidence = matrix("abcdef", ("",), lambda a, i, b, j: 90.0 if "e" in (a, b) else 180.0)
    evidence["gpus"] = [name.rstrip(":") for name in evidence["gpus"]]
    assert said(judge_pairs(evidence)) == ("node", {"e"})


def test_status_alone_is_enough() -> None:
    """No bandwidths: what ended well speaks for its ends."""
    evidence = matrix("ab", "0123", lambda a, i, b, j: "hang" if ("b", "2") in ((a, i), (b, j)) else 1.0)
    evidence["gbps"] = [None] * len(evidence["gbps"])
    assert said(judge_pairs(evidence)) == ("gpu", {"b:2"})
    evidence = matrix(("n1", "n2"), "0123", lambda a, i, b, j: 1.0 if a == b or i == j else "error")
    evidence["gbps"] = [None] * len(evidence["gbps"])
    assert said(judge_pairs(evidence)) == ("inter-rail", set())


def test_nothing_measured() -> None:
    verdict = judge_pairs(matrix("ab", "01", lambda a, i, b, j: "skipped"))
    assert (verdict.kind, verdict.confidence) == ("none", "low")
    assert "no pair was measured" in verdict.reading


def test_ended_well_and_moved_nothing_is_an_error() -> None:
    verdict = judge_pairs(matrix("abc", "01", lambda a, i, b, j: 0.0 if ("a", "0") in ((a, i), (b, j)) else 20.0))
    assert said(verdict) == ("gpu", {"a:0"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": [0]}, "equally long"),
        ({"dst": [0, 9]}, "past the last GPU"),
        ({"status": ["ok", "lost"]}, "other words"),
        ({"gpus": ["a:0", "a:0"]}, "twice"),
        ({"gbps": None}, "no pair matrix"),
    ],
)
def test_what_is_no_matrix(change: dict[str, object], message: str) -> None:
    whole = {"schema": 1, "gpus": ["a:0", "a:1"], "src": [0, 1], "dst": [1, 0], "gbps": [1.0, 1.0], "notes": []}
    with pytest.raises(UsageError, match=message):
        judge_pairs({**whole, "status": ["ok", "ok"], **change})  # type: ignore[typeddict-item]


def test_plants_and_healthy_clusters() -> None:
    """A part of what tests/benchmarks/pairs_simulated.py counts."""
    wrong = []
    for seed in range(2 * len(FAULTS)):
        case = planted(seed)
        verdict = judge_pairs(case.evidence)
        if not right(case, verdict.kind, verdict.culprits):
            wrong.append((seed, case.story, verdict.kind, verdict.culprits))
    assert len(wrong) <= 0.05 * 2 * len(FAULTS), wrong
    for seed in range(30):
        case = healthy(seed)
        verdict = judge_pairs(case.evidence)
        assert verdict.kind == "none", (seed, case.story, verdict.culprits)


def test_large() -> None:
    """256 GPUs, all pairs; ten times as much is a matter of seconds too."""
    case = planted(0, "gpu slow", (32, 8))
    start = time.process_time()
    verdict = judge_pairs(case.evidence)
    assert right(case, verdict.kind, verdict.culprits)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("seed", range(40))
def test_odd_matrices_have_a_verdict(seed: int) -> None:
    """A few pairs, none, twice the same, NaN, zeros, one value for all: nothing of it is an error."""
    chance = random.Random(seed)
    names = [f"h{host}:{gpu}" for host in range(chance.randint(1, 5)) for gpu in range(chance.randint(1, 5))]
    chance.shuffle(names)
    size = len(names)
    pool = chance.choice([("ok",), STATUSES, ("hang",), ("ok", "dead"), ("missing",), ("skipped", "ok")])
    values = chance.choice([(5.0,), (1.0, None, math.nan), (1e-12, 1e12, 0.0), (None,), (math.inf, 3.0, 2.0)])
    many = chance.choice([0, 1, 5, size * size, 3 * size * size])
    evidence: PairsEvidence = {
        "schema": 1, "gpus": names, "notes": [],
        "src": [chance.randrange(size) for _ in range(many)],
        "dst": [chance.randrange(size) for _ in range(many)],
        "gbps": [chance.choice(values) for _ in range(many)],
        "status": [chance.choice(pool) for _ in range(many)],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = judge_pairs(evidence)
    assert verdict.kind in KINDS
    assert (verdict.kind == "none") == (not verdict.findings)
    assert verdict.kind in ("none", "inter-rail") or verdict.culprits
