"""The words of the report: sets of ranks, counts, short and wrapped lines."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from mldebug.ranks._logs_fold import rank_set


def who(ranks: tuple[int, ...], others: tuple[str, ...]) -> str:
    """`[0-3]`, and the names of writers of which no rank is known."""
    parts = [brackets(ranks)] if ranks else []
    alike: dict[tuple[str, str, str], list[int]] = {}  # job-worker-0 and job-worker-1 are job-worker-[0-1]
    for one in others:
        found = re.fullmatch(r"(.*\D|)(0|[1-9]\d{0,5})(\D*)", one, re.S)
        key = (found[1], found[2], found[3]) if found else (one, "", "")
        alike.setdefault((key[0], "#" if found else "", key[2]), []).append(int(key[1] or -1))
    names = [
        f"{before}{(brackets(numbers) if len(numbers) > 1 else numbers[0]) if mark else ''}{after}"
        for (before, mark, after), numbers in alike.items()
    ]
    more = [f"and {len(names) - 3} more"] if len(names) > 4 else []
    return " ".join([*parts, *(names[:3] if more else names), *more])


def brackets(ranks: Any) -> str:
    return f"[{rank_set(ranks)}]"


def short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def wrap(text: str, width: int, **more: Any) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **more)
