"""mldebug_recipe.json: what a tiny model was made from and how, and the hashes of what came out."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug import __version__
from mldebug.core.errors import MldebugError
from mldebug.core.report import jsonable

FILE = "mldebug_recipe.json"
SCHEMA = 1


def write_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write `recipe` with the hashes of every file and tensor of `folder`. Nothing in it depends on time or place."""
    document = {
        "schema": SCHEMA,
        "kind": "tiny-model",
        **recipe,
        "versions": versions(),
        "tensors": tensor_hashes(folder),
        "files": file_hashes(folder),
    }
    text = json.dumps(jsonable(document), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The recipe in a file, or in the folder that holds it."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(
            f"cannot read the recipe {file}: {reason}", f"give the {FILE} that a tiny model has beside it"
        ) from exc
    except ValueError as exc:
        raise MldebugError(f"the recipe {file} is no JSON: {exc}", "make the tiny model again from its source") from exc
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != "tiny-model":
        raise MldebugError(
            f"{file} is no recipe of a tiny model: its kind is {kind!r}", f"give the {FILE} of a tiny model"
        )
    if document.get("schema") != SCHEMA:
        raise MldebugError(
            f"the recipe {file} has layout {document.get('schema')!r}, this version reads {SCHEMA}",
            "install the mldebug that the recipe names under versions",
        )
    found: dict[str, Any] = document
    lacking = [key for key in ("source", "options", "tensors", "files") if not isinstance(document.get(key), dict)]
    if lacking:
        raise MldebugError(f"the recipe {file} lacks {', '.join(lacking)}", "make the tiny model again from its source")
    return found


def compare(folder: Path, recipe: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the files of `folder` are those that the recipe names, byte for byte."""
    now, then = file_hashes(folder), recipe["files"]
    differing = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
    if not differing:
        return (
            True,
            f"all {len(then)} files and {len(recipe['tensors'])} tensors are those of the recipe, byte for byte",
        )
    changed = {name: version for name, version in versions().items() if recipe.get("versions", {}).get(name) != version}
    tensors = tensor_hashes(folder)
    moved = [name for name, value in recipe["tensors"].items() if tensors.get(name) != value]
    why = f"{', '.join(differing[:3])} differ"
    if moved:
        why += f"; {len(moved)} of {len(tensors)} tensors, {moved[0]} first"
    if changed:
        was = ", ".join(
            f"{name} {recipe.get('versions', {}).get(name)} then, {version} now" for name, version in changed.items()
        )
        why += f"; {was}"
    return False, why


def versions() -> dict[str, str]:
    """What a rebuild depends on. The version of Python is left out: it changes nothing."""
    import tokenizers
    import torch
    import transformers

    return {
        "mldebug": __version__,
        "torch": str(torch.__version__).partition("+")[0],
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
    }


def tensor_hashes(folder: Path) -> dict[str, str]:
    """sha256 of the bytes of each saved tensor, with its dtype and shape."""
    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            for name, entry in sorted(header.items()):
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                stream.seek(8 + length + begin)
                digest = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
                digest.update(stream.read(end - begin))
                hashes[name] = digest.hexdigest()
    return hashes


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of each file but the recipe."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }
