"""Write what the documentation takes from the program: a page for each command, the API page, outputs of examples.

python docs/generate.py            # write
python docs/generate.py --check    # exit status 1, and the names, where a page is not what would be written
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path

import mldebug
from mldebug.cli import COMMANDS, parser_of

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

# The pages about the part that a command belongs to, where their names are others.
PAGES = {
    "overflow": "diagnose frameworks numerics-page", "spy": "hang remote", "watch": "hang",
    "trace": "tracing", "trace-tail": "tracing",
    "allreduce": "comms", "tiny-model": "tiny-models", "tiny-tokenizer": "tiny-tokenizers",
    "tiny-dataset": "tiny-datasets",
}  # fmt: skip
ROOMS = {
    "mldebug.numerics": "NaN, inf and overflow",
    "mldebug.hang": "A job that hangs",
    "mldebug.tracing": "A process that dies without a word",
    "mldebug.ranks": "Ranks",
    "mldebug.cluster": "Clusters",
    "mldebug.perf": "Speed and memory",
    "mldebug.tiny": "Tiny models, tokenizers and datasets",
    "mldebug.preflight": "Before training",
    "mldebug.core.errors": "Errors",
}
NOTE = "<!-- Written by docs/generate.py. -->"


def pages() -> dict[Path, str]:
    """Every file that is written, with its text."""
    found = {DOCS / "commands" / f"{name}.md": command_page(name) for name in COMMANDS}
    found[DOCS / "commands" / "index.md"] = command_index()
    found[DOCS / "api.md"] = api_page()
    for path in sorted((DOCS / "troubles").glob("*.md")):
        found[path] = with_outputs(path.read_text(encoding="utf-8"))
    return found


def command_index() -> str:
    rows = [
        f"| [{name}]({name}.md) | {trouble} | {summary} |" for name, (_module, trouble, summary) in COMMANDS.items()
    ]
    return "\n".join(
        [
            NOTE,
            "",
            "# Commands",
            "",
            "| command | the trouble | what it does |",
            "|---|---|---|",
            *map(escaped, rows),
            "",
        ]
    )


def command_page(name: str) -> str:
    _module, trouble, summary = COMMANDS[name]
    parser = parser_of(name)
    epilog = parser.epilog or ""
    examples, _, rest = epilog.partition("\n\n") if epilog.startswith("examples:") else ("", "", epilog)
    lines = [NOTE, "", f"# mldebug {name}", "", f"*{trouble[0].upper()}{trouble[1:]}*", ""]
    lines += [f"{summary[0].upper()}{summary[1:]}.", ""]
    if examples:
        lines += ["```bash", *textwrap.dedent(examples.partition("\n")[2]).rstrip().splitlines(), "```", ""]
    if rest:
        lines += [prose(rest.strip()), ""]
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            title = group.title or "options"
            lines += [f"## {title[0].upper()}{title[1:]}", "", *([group.description, ""] if group.description else [])]
            lines += ["| | |", "|---|---|", *rows, ""]
    more = [page for page in PAGES.get(name, name).split() if (DOCS / f"{page}.md").exists()]
    if more:
        lines += [f"More: {', '.join(f'[{page}](../{page}.md)' for page in more)}", ""]
    return "\n".join(lines)


def row(action: argparse.Action) -> str:
    """A line of the table of options. Choices that --help shows in braces are shown here, too."""
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices and not action.metavar else ""
        metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
        value = choices or metavar or (action.dest.upper() if action.option_strings else action.dest)
    names = ", ".join(f"`{name}{' ' + value if value else ''}`" for name in action.option_strings) or f"`{value}`"
    words = prose((action.help or "").replace("%%", "%"))
    return escaped(f"| {names} | {' '.join(words.split())} |", but=2)


def escaped(line: str, but: int | None = None) -> str:
    """A row of a table whose cells may have `|` in them. `but` is the number of cells."""
    if but is None:
        return line
    cells = line.strip("|").split(" | ")
    cells = [" | ".join(cells[: len(cells) - but + 1]), *cells[len(cells) - but + 1 :]]
    return "|" + " | ".join(cell.replace("|", "\\|") for cell in cells) + "|"


def prose(text: str) -> str:
    """Words of --help as Markdown shows them: signs that mean something there are escaped, but in `code`."""
    parts = text.split("`")
    return "`".join(
        part if number % 2 else part.replace("<", "&lt;").replace("*", "\\*") for number, part in enumerate(parts)
    )


def api_page() -> str:
    lines = [
        NOTE,
        "",
        "# API",
        "",
        "Everything here is imported from `mldebug`; a name is loaded when it is first used.",
        "",
    ]
    homes = dict(mldebug._HOMES)
    for room in [*ROOMS, *sorted(set(homes.values()) - set(ROOMS))]:
        lines += [f"## {ROOMS.get(room, room)}", ""] if room in homes.values() else []
        for name in sorted((one for one in homes if homes[one] == room), key=lambda one: (one[0].isupper(), one)):
            lines += [f"::: mldebug.{name}", ""]
    return "\n".join(lines)


def with_outputs(text: str) -> str:
    """What stands behind `<!-- output of: examples/x.py -->` becomes the output in that example's doc string."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}```text\n{example_output(ROOT / found[2])}\n```"

    return re.sub(r"(<!-- output of: (examples/\w+\.py) -->\n)```text\n.*?```", fill, text, flags=re.S)


def example_output(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return textwrap.dedent(doc.partition("It prints:\n")[2].strip("\n"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is stale")
    check = parser.parse_args().check
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in (DOCS / "commands").glob("*.md") if path not in wanted]
    for path in stale:
        if check:
            print(f"stale: {path.relative_to(ROOT)}: run python docs/generate.py", file=sys.stderr)
        elif path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:  # the page of a command that is no more
            path.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
