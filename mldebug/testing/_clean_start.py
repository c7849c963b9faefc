"""Each test begins with the same seeds, and leaves environment variables, folder and sys.path as they were."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest

# Which pytest changes between the phases of a test, and what the compiler of torch sets for good when it is first used.
_LEFT_ALONE = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")


@pytest.fixture(autouse=True)
def clean_start(pytestconfig: pytest.Config) -> Iterator[None]:
    """Seeds random, numpy and torch; afterwards os.environ, the current folder and sys.path are restored.

    It is active in every test. Fixtures of wider scope come before it, and what they set stays for their scope.
    """
    environment, folder, path = _environment(), _current_folder(), list(sys.path)
    value = pytestconfig.getoption("test_seed")
    if value is not None:
        _seed(value)
    yield
    if folder and _current_folder() != folder:
        os.chdir(folder)
    if sys.path != path:
        sys.path[:] = path
    now = _environment()
    for name in now.keys() - environment.keys():
        del os.environ[name]
    for name, text in environment.items():
        if now.get(name) != text:
            os.environ[name] = text


@pytest.fixture
def seed(pytestconfig: pytest.Config, clean_start: None) -> int:
    """The seed of this run, `--test-seed`. A test that takes it has numpy and torch loaded and seeded.

    def test_loss(seed):
        model = Model(generator=torch.Generator().manual_seed(seed))
    """
    import numpy  # noqa: F401
    import torch  # noqa: F401

    value = pytestconfig.getoption("test_seed")
    value = 0 if value is None else value
    _seed(value)
    return int(value)


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(_LEFT_ALONE)}


def _current_folder() -> str:
    """Or "" where it is gone, such as a tmp_path that pytest has removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _seed(value: int) -> None:
    """Those of numpy and torch where they are loaded: a test that needs neither is not made to wait for them."""
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "manual_seed"):
        sys.modules["torch"].manual_seed(value)
