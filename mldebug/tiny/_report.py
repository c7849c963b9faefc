"""What the reports of the tiny room have in common: lines with a name, and checks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was checked: whether it holds, and what was seen. `ok` is None where it does not apply."""

    name: str
    ok: bool | None
    why: str


def layout(lines: list[tuple[str, str]], width: int) -> str:
    """Names and what they say, in two columns; paths and numbers are not broken."""
    indent = max(len(name) for name, _text in lines) + 2
    return "\n".join(
        textwrap.fill(
            f"{name:<{indent}}{text}",
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in lines
    )


def holds(checks: Iterable[Check]) -> bool:
    """Whether no check failed."""
    return all(check.ok is not False for check in checks)
