"""Every test of the recorder starts with one thread and must leave no hook behind."""

from __future__ import annotations

import random
import warnings

import numpy
import pytest
import torch
import torch._dynamo  # sets an environment variable of its own when it is first imported

from .kit import clear_hooks, hooks_now


@pytest.fixture(autouse=True)
def clean_torch():
    threads, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    before = hooks_now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    after = hooks_now()
    clear_hooks(before)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    assert after == before, f"hooks left behind: {after} for {before}"
