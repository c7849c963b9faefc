"""An argparse parser with the habits that all commands share."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mldebug.core.errors import UsageError
from mldebug.core.extras import how_to_install
from mldebug.core.report import write


class Parser(argparse.ArgumentParser):
    """Takes `--a-b` also as `--a_b`, and raises UsageError where argparse would print its usage and leave."""

    def __init__(self, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)

    def add_argument(self, *flags: Any, **kwargs: Any) -> argparse.Action:
        return _add_both_spellings(super().add_argument, *flags, **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        group = super().add_argument_group(*args, **kwargs)
        group.add_argument = functools.partial(_add_both_spellings, group.add_argument)  # type: ignore[method-assign]
        return group

    def print_help(self, file: Any = None) -> None:
        write(self.format_help(), sys.stdout if file is None else file)  # flushed here, where a failure is ours

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [str(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith(("unrecognized arguments: ", "the following arguments are required: ")):
            for word in self._given:  # what is required may be there, and misspelt
                if near := self._near(word):
                    raise UsageError(f"unrecognized arguments: {word}", f"did you mean {near}?")
        if choice := re.search(r": invalid choice: '([^']+)' \(choose from (.*)\)$", message, re.S):
            known = re.findall(r"[^\s,']+", choice[2])  # newer Pythons put no quotes around them
            for close in difflib.get_close_matches(choice[1], known, n=1, cutoff=0.7):
                raise UsageError(message, f"did you mean {close}?")
        raise UsageError(message, f"`{self.prog} --help` lists the options")

    def _near(self, word: str) -> str:
        """The option that a misspelt one was to be; "" for what is none."""
        name = word.partition("=")[0].replace("_", "-")
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        if not name.startswith("--") or name == "--" or name in options:
            return ""
        longer = [option for option in options if option.startswith(name)]  # abbreviations are not taken
        close = longer if len(longer) == 1 else difflib.get_close_matches(name, options, n=1, cutoff=0.7)
        return close[0] if close else ""


def _add_both_spellings(add: Callable[..., argparse.Action], *flags: Any, **kwargs: Any) -> argparse.Action:
    hidden = [flag.replace("-", "_").replace("__", "--", 1) for flag in flags if flag.startswith("--")]
    action = add(*flags, *(flag for flag in hidden if flag not in flags), **kwargs)
    if flags and flags[0].startswith("-"):
        action.option_strings = list(flags)  # what --help and the errors show; parsing knows all of them
    return action


class ScriptParser(Parser):
    """For a command that runs a script: `script` holds what follows the first `--`, untouched.

    Without `--` the script begins at the first word that is no option; options of its own stay its own.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.usage = f"{self.prog} [options] -- train.py [its arguments]"
        self.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        own, script = list(args), []
        if "--" in own:
            # Split here: argparse keeps or drops a `--` before the rest differently from one Python to the next.
            at = own.index("--")
            own, script = own[:at], own[at + 1 :]
        parsed = super().parse_args(own, namespace)
        parsed.script = [*parsed.script, "--", *script] if parsed.script and script else parsed.script or script
        return parsed

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: ") and "-m" in message.split():
            raise UsageError(message, f"the script goes after `--`: {self.prog} -- -m package.module")
        try:
            super().error(message)
        except UsageError as exc:
            if message.startswith("unrecognized arguments: ") and exc.message == message and "--help" in exc.hint:
                after = f"those of the script go after it: {self.prog} -- train.py --lr 1e-3"
                raise UsageError(message, f"{exc.hint}; {after}") from None
            raise


def file_to_write(option: str, path: str | None) -> str | None:
    """The path from the root on, as the script may change the folder; one that cannot be written is a UsageError now,
    before the run and not after it."""
    if path is None:
        return None
    full = os.path.abspath(path)
    folder = os.path.dirname(full)
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}", f"mkdir -p {shlex.quote(folder)}")
    if os.path.isdir(full):
        raise UsageError(f"{option} {path}: this is a folder", f"name a file in it: {os.path.join(path, 'FILE')}")
    if not os.access(full if os.path.exists(full) else folder, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write it", "choose another file")
    return full


def file_or_picture_to_write(option: str, path: str | None) -> str | None:
    """`file_to_write`, where FILE.png is a picture: one that cannot be drawn is told before the measurement, too."""
    full = file_to_write(option, path)
    if full is not None and full.lower().endswith(".png") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} {path}: a picture needs matplotlib, which is not installed", how_to_install("plot"))
    return full


def add_common(parser: argparse._ActionsContainer, output: str, metavar: str = "FILE") -> None:
    """The options of every command, for a parser or a group of it. `output` says what -o writes to `metavar`."""
    parser.add_argument("-o", "--output", metavar=metavar, help=output)
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing unless there is trouble")
    parser.add_argument("--no-color", action="store_true", help="no terminal colours; NO_COLOR=1 does the same")


def add_remote(parser: argparse._ActionsContainer) -> None:
    """The options of commands that start ranks on other hosts."""
    parser.add_argument(
        "--remote-python", metavar="PATH", help="the Python that has mldebug there (default: the path of this one)"
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="configuration file for ssh")
    parser.add_argument(
        "--ssh-option", metavar="K=V", action="append", default=[], help="option as in ~/.ssh/config; repeatable"
    )
    parser.add_argument(
        "--collector", default="", metavar="HOST:PORT", help="where rank 0 listens, if it cannot be worked out"
    )


# What `type=` of an option takes. argparse puts the name of the option before these messages.


def count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers of 0 or more with commas between them."""
    return tuple(whole(part.strip()) for part in text.split(","))


def size(text: str) -> int:
    """64MB, 64M, 1GiB, 4096: a number of bytes above 0. B may be left out; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    value = int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64MB")
    return value


def seconds(text: str) -> float:
    """A time above 0, at most some 100 days: what is longer than that is a slip."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
