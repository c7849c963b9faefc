"""Tests under two ranks that pass, fail, die, hang, skip: test_ranks.py runs them by a pytest of its own."""

import os
import signal
import time

import pytest

RANK = int(os.environ.get("RANK", "-1"))


@pytest.fixture
def where():
    """Is set up in the ranks, and never outside of them."""
    assert RANK >= 0
    return f"rank {RANK}"


@pytest.mark.ranks(2, backend="gloo")
def test_fine(where, tmp_path, shared_tmp_path, seed, pytestconfig):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 2
    (shared_tmp_path / where).write_text(str(tmp_path))
    dist.barrier()
    folders = {(shared_tmp_path / f"rank {rank}").read_text() for rank in (0, 1)}
    assert len(folders) == 2 and seed == 7 and pytestconfig.getoption("size") == 3
    print(f"{where} drew {torch.rand(1).item():.6f}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("one", ["a[b]::c"])
def test_one_fails(one, tmp_path):
    if RANK == 1:
        (tmp_path / "checkpoint.pt").write_text("x")
        print("about to fail")
        assert one == "d"
    time.sleep(100)


class TestClass:
    @pytest.mark.ranks(2)
    def test_both_fail(self):
        raise KeyError("missing")


@pytest.mark.ranks(2)
def test_dies():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(100)


def stuck_here():
    os.system("sleep 300 &")
    time.sleep(300)


@pytest.mark.ranks(2, timeout=12)
def test_hangs():
    if RANK == 1:
        stuck_here()


@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("seen enough")


def number(x, *, y):
    print("in", RANK)
    return RANK + x * y


def spoilt():
    raise LookupError(f"of rank {RANK}") if RANK else SystemExit(0)


def test_a_function(run_ranks):
    found = run_ranks(number, 10, y=2, ranks=2)
    assert found.values == (20, 21) and found.out == ("in 0\n", "in 1\n")


def test_a_function_that_fails(run_ranks):
    run_ranks(spoilt)


def test_a_function_that_no_rank_can_find(run_ranks):
    run_ranks(lambda: 3)
