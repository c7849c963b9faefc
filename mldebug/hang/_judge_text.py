"""What the program's text says of its ranks: which conditions ask for a rank, and which way a rank takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache

_RANKS = {"rank", "global_rank", "local_rank", "world_rank", "rank_id", "proc_id", "process_index", "get_rank",
          "get_global_rank", "get_local_rank", "global_rank_id", "local_process_index", "my_rank"}  # fmt: skip
_MAINS = {"is_main_process", "is_main", "is_master", "is_rank_zero", "is_global_zero", "is_local_main_process",
          "is_world_process_zero", "is_chief", "is_rank0", "is_rank_0", "master_process", "main_process"}  # fmt: skip
_COUNTS = re.compile(r"\b(step|steps|i|it|iter|iters|iteration|epoch|epochs|batch_idx|idx|n|count|num_\w+|max_\w+)\b")
_POLLS = re.compile(
    r"(exists|isfile|is_completed|is_done|\bdone\b|poll|\btest\b|\bquery\b|empty|is_set|ready|wait_|_alive|status|stat\()"
)
_CLOCK = re.compile(r"(time\.|monotonic|perf_counter|deadline|\bend\b|timeout)")


@lru_cache(maxsize=1024)
def holds(guard: str, rank: int) -> bool | None:
    """Whether a rank gets past a guard ("if rank == 0", "else rank == 0"); None: not known."""
    word, _, text = guard.partition(" ")
    if word not in ("if", "else", "while"):
        return None
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    value = _truth(node, rank)
    return value if word != "else" or value is None else not value


def asks_rank(guard: str) -> bool:
    """Whether a guard looks at the rank at all."""
    word, _, text = guard.partition(" ")
    if word not in ("if", "else", "while"):
        return False
    return any(name in _RANKS or name in _MAINS for name in re.findall(r"\w+", text))


def sends_away(guard: str) -> bool:
    """Whether a guard in front of a jump lets some ranks jump for sure, whatever else is true."""
    return asks_rank(guard) and any(holds(guard, rank) for rank in range(64))


def parts_ranks(guard: str, inside: Iterable[int], outside: Iterable[int]) -> bool:
    """Whether a guard lets all of `inside` through (or may) and stops each of `outside`."""
    return (
        asks_rank(guard)
        and all(holds(guard, rank) is not False for rank in inside)
        and all(holds(guard, rank) is False for rank in outside)
    )


def is_main_guard(guard: str) -> bool:
    """Whether a guard tells rank 0 from all others, as guards of saving and printing do."""
    first, others = holds(guard, 0) is False, {holds(guard, rank) is False for rank in (1, 2, 3)}
    return asks_rank(guard) and others == {not first}


def picks_few(guard: str) -> bool:
    """Whether a guard names the few ranks that get past it (`rank == 1`), and not those that do not (`rank != 1`)."""
    passing = sum(holds(guard, rank) is not False for rank in range(64))
    return passing < 32


def spoken(guard: str) -> str:
    """A guard for a sentence: `if rank == 0`, the else of `if rank == 0`."""
    word, _, test = guard.partition(" ")
    return f"the else of `if {test}`" if word == "else" else f"`{guard}`"


def is_loop(guard: str) -> bool:
    return guard.startswith(("for ", "while "))


def is_condition(guard: str) -> bool:
    return guard.startswith(("if ", "else ", "case ", "except"))


def counts_only(guard: str) -> bool:
    """Whether a condition is about the number of steps or the end of the data, as `if step >= limit` is."""
    if re.fullmatch(r"(if|else) (not )?\w*(batch|data|sample|item|inputs|chunk)\w*( is (not )?None)?", guard):
        return True
    if set(re.findall(r"(\w+)\(", guard)) - {"len", "min", "max", "int", "abs", "range"}:
        return False  # who knows what it asks
    return bool(_COUNTS.search(guard)) and not re.search(
        r"loss|metric|best|patience|nan|score|acc|stop|stale|improv|converg", guard
    )


def is_poll(guard: str, text: str, steps: str) -> bool:
    """Whether a `while` waits for something from elsewhere, and not for time to pass or work to be done."""
    endless = re.match(r"for .* in (itertools\.)?count\(|for .* in range\(\d+ ?\*\*|for .* in iter\(int, 1\)", guard)
    if not (guard.startswith("while ") or endless) or _CLOCK.search(guard):
        return False
    return bool(_POLLS.search(guard) or "sleep(" in text or "sleep" in steps or _POLLS.search(text))


def counts_to(guard: str, names: set[str]) -> bool:
    """Whether a `while` compares one of the numbers with a bound, and asks for nothing else."""
    found = re.fullmatch(r"while (\w+) *(?:<|<=|>|>=|!=) *[\w.]+", guard)
    return found is not None and found.group(1) in names


def is_endless(guards: list[str], ways_out: list[list[str]]) -> bool:
    """Whether the innermost loop of a line is a `while True` without a way out."""
    loops = [guard for guard in guards if is_loop(guard)]
    if not loops or loops[-1] not in ("while True", "while 1"):
        return False
    return not any(loops[-1] in guard for guard in ways_out)


def same_count(guard: str) -> bool:
    """Whether a loop has the same number of iterations on all ranks: its bound is written in the program."""
    return bool(re.match(r"for .* in (enumerate\()?range\([\d_, ]+\)|while \w+ (<|<=|!=|>|>=) [\d_]+$", guard))


def long_sleep(text: str) -> bool:
    """Whether a line sleeps for ten minutes or more, as far as it says."""
    found = re.search(r"sleep\(([\d_.e+* ]+)\)", text)
    if not found:
        return False
    try:
        product = 1.0
        for factor in re.split(r"\*\*?", found.group(1)):
            product *= float(factor)
        return product >= 600 or "**" in found.group(1)
    except ValueError:
        return False


def _truth(node: ast.expr, rank: int) -> bool | None:
    """Three-valued: None where a part is not known."""
    if isinstance(node, ast.BoolOp):
        values = [_truth(value, rank) for value in node.values]
        stop = isinstance(node.op, ast.Or)
        if stop in values:
            return stop
        return None if None in values else not stop
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _truth(node.operand, rank)
        return None if value is None else not value
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node, rank)
    if _name(node) in _MAINS:
        return rank == 0
    number = _number(node, rank)
    return None if number is None else bool(number)


def _compare(node: ast.Compare, rank: int) -> bool | None:
    left, operator, right = _number(node.left, rank), node.ops[0], node.comparators[0]
    if left is None:
        return None
    if isinstance(operator, (ast.In, ast.NotIn)):
        if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            return None
        items = [_number(item, rank) for item in right.elts]
        if None in items:
            return None
        return (left in items) == isinstance(operator, ast.In)
    other = _number(right, rank)
    if other is None:
        return None
    table = {
        ast.Eq: left == other,
        ast.NotEq: left != other,
        ast.Lt: left < other,
        ast.LtE: left <= other,
        ast.Gt: left > other,
        ast.GtE: left >= other,
    }
    return table.get(type(operator))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _number(node: ast.expr, rank: int) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
        left, right = _number(node.left, rank), _number(node.right, rank)
        if left is None or not right:
            return None
        return left % right if isinstance(node.op, ast.Mod) else left // right
    return rank if _name(node) in _RANKS else None
