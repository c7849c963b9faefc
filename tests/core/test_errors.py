from __future__ import annotations

import pickle

import pytest

from mldebug.core.errors import MldebugError, UsageError


def test_two_lines_with_a_hint_and_one_without() -> None:
    assert str(MldebugError("cannot read x: no such file", "give another")) == (
        "cannot read x: no such file\nhint: give another"
    )
    assert str(MldebugError("it failed")) == "it failed"


def test_the_parts_are_kept_and_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(UsageError("what", "do this")))
    assert type(error) is UsageError
    assert (error.message, error.hint) == ("what", "do this")


def test_an_error_can_also_be_a_value_error() -> None:
    class Mixed(MldebugError, ValueError):
        pass

    with pytest.raises(ValueError, match="what\nhint: do this"):
        raise Mixed("what", "do this")
