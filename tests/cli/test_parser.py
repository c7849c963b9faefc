"""What the parsers of all commands share: spellings, the common options, the types of numbers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, file_to_write, seconds, whole, wholes
from mldebug.core.errors import UsageError


@pytest.fixture
def parser() -> Parser:
    return Parser(prog="mldebug thing")


@pytest.mark.parametrize("flag", ["--max-rows", "--max_rows"])
def test_options_of_groups_take_both_spellings_too(parser: Parser, flag: str) -> None:
    parser.add_argument_group("limits").add_argument("--max-rows", type=count)
    assert parser.parse_args([flag, "3"]).max_rows == 3
    assert "--max_rows" not in parser.format_help()
    with pytest.raises(UsageError, match="argument --max-rows: '0' is not a whole number of 1 or more"):
        parser.parse_args([flag, "0"])


def test_common_options_say_what_is_written_and_where(parser: Parser) -> None:
    add_common(parser.add_argument_group("output"), output="the new folder", metavar="DIR")
    assert "--output DIR" in parser.format_help() and "the new folder" in parser.format_help()
    args = parser.parse_args(["-o", "x", "-q", "--json", "--no_color"])
    assert vars(args) == {"output": "x", "quiet": True, "json": True, "no_color": True}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [(count, "1", 1), (whole, "0", 0), (wholes, "1, 0,12", (1, 0, 12)), (seconds, "0.5", 0.5), (seconds, "1e3", 1e3)],
)
def test_numbers(kind: Callable[[str], Any], text: str, value: Any) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (count, "0"), (count, "-1"), (count, "1.5"), (count, ""), (whole, "-1"), (whole, "x"), (wholes, "1,,2"),
        (seconds, "0"), (seconds, "-1"), (seconds, "nan"), (seconds, "inf"), (seconds, "ten"),
    ],
)  # fmt: skip
def test_what_is_no_such_number(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
        kind(text)


def test_options_of_the_script_have_their_place() -> None:
    parser = ScriptParser(prog="mldebug overflow")
    with pytest.raises(UsageError) as caught:
        parser.parse_args(["--lr", "3", "--", "train.py"])
    assert caught.value.message == "unrecognized arguments: --lr"
    assert caught.value.hint.endswith("those of the script go after it: mldebug overflow -- train.py --lr 1e-3")


def test_the_folder_that_a_hint_makes_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "al's runs"
    with pytest.raises(UsageError) as caught:
        file_to_write("--output", str(folder / "x.json"))
    assert shlex.split(caught.value.hint) == ["mkdir", "-p", str(folder)]
