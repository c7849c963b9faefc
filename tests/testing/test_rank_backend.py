"""@pytest.mark.ranks(backend=...) with a name that torch does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mldebug.testing._processes import clean_environment

pytest.importorskip("torch")

TEST = """
import pytest

@pytest.mark.ranks(2, backend="glo")
def test_it():
    raise AssertionError("nobody comes here")
"""


@pytest.mark.timeout(300)
def test_a_backend_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "mldebug.testing", "-p", "no:cacheprovider", "--color=no"]
    root = str(Path(__file__).parents[2])
    env = clean_environment(PYTHONPATH=root)
    env.pop("CI", None)  # there pytest's summary at the end has the whole text once more
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'tmp'}"], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.count("this torch has no backend 'glo', but gloo") == 1, done.stdout
    assert "Traceback" not in done.stdout and "nobody comes here" not in done.stdout
