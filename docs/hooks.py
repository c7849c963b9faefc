"""For mkdocs: pages that the nav of mkdocs.yml does not name come at the end of the section "Parts"."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    named = set(_pages(config["nav"]))
    docs = Path(config["docs_dir"])
    rest = [path.name for path in sorted(docs.glob("*.md")) if path.name not in named]
    troubles = [f"troubles/{path.name}" for path in sorted((docs / "troubles").glob("*.md"))]
    commands = [f"commands/{path.name}" for path in sorted((docs / "commands").glob("*.md"))]
    for section in config["nav"]:
        if "Parts" in section:
            section["Parts"] += rest
        elif "Troubles" in section:
            section["Troubles"] += [page for page in troubles if page not in named]
        elif "Commands" in section:
            section["Commands"] += [page for page in commands if page not in named]
    return config


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]
