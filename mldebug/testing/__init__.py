"""A pytest plugin for tests of training code: tests under N ranks, GPUs, seeds, output, programs with a deadline.

It is off until it is asked for, with `pytest -p mldebug.testing` or, in the top conftest.py,

    pytest_plugins = ["mldebug.testing"]

Marks: ranks(n), require_gpus(n), slow. Fixtures: run_ranks, run_python, shared_tmp_path, seed. See docs/testing.md.
"""

from __future__ import annotations

from mldebug.testing._captured import captured
from mldebug.testing._clean_start import clean_start, seed
from mldebug.testing._plugin import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_terminal_summary,
    require_gpus,
    run_python,
    run_ranks,
    shared_tmp_path,
)
from mldebug.testing._ranks import RanksResult

__all__ = [
    "RanksResult",
    "captured",
    "clean_start",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
    "require_gpus",
    "run_python",
    "run_ranks",
    "seed",
    "shared_tmp_path",
]
