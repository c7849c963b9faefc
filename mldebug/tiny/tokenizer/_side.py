"""The files around a tokenizer: which tokens they name, and the same files after some tokens went."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError

CONFIG = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
ADDED = "added_tokens.json"
# Names that hold lists of further special tokens, by the version of transformers.
LISTS = ("additional_special_tokens", "extra_special_tokens")
# Copied as they are: they name tokens by their text.
COPIED = ("chat_template.jinja", "chat_template.json", "normalizer.json", "emoji.json", "additional_chat_templates")


def read_json(path: Path) -> Any:
    """The document in the file; a file that is not there, no text or no JSON is an MldebugError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as exc:
        raise MldebugError(
            f"{path} is no JSON: line {exc.lineno}, column {exc.colno}: {exc.msg}",
            "the file may be cut off, or be a pointer of Git LFS: download it again",
        ) from exc
    except UnicodeDecodeError as exc:
        raise MldebugError(f"{path} is no UTF-8 text", "is it really the tokenizer's file?") from exc
    except OSError as exc:
        raise MldebugError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    document = read_json(path)
    if not isinstance(document, dict):
        raise MldebugError(f"{path} holds no JSON object", "is it really the tokenizer's file?")
    return document


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def content(token: Any) -> str | None:
    """The text of a token that is written as such or as an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def named_specials(directory: Path) -> dict[str, str]:
    """Role -> token, of tokenizer_config.json and special_tokens_map.json."""
    named: dict[str, str] = {}
    for name in (SPECIALS, CONFIG):
        document = read_object(directory / name)
        for holder in (document, *_objects(document, "extra_special_tokens", "model_specific_special_tokens")):
            for role, token in holder.items():
                text = content(token)
                if role.endswith("_token") and text is not None and not isinstance(token, bool):
                    named[role] = text
    return named


def listed_specials(directory: Path) -> list[str]:
    """Tokens in the lists of further special tokens, and in the tables of added tokens."""
    found: list[str | None] = []
    for name in (SPECIALS, CONFIG):
        document = read_object(directory / name)
        for key in LISTS:
            value = document.get(key)
            value = list(value.values()) if isinstance(value, dict) else value
            found += [content(token) for token in (value if isinstance(value, list) else [])]
        table = document.get("added_tokens_decoder")
        if isinstance(table, dict):
            found += [content(token) for token in table.values()]
    found += list(read_object(directory / ADDED))
    return list(dict.fromkeys(token for token in found if token is not None))


def ids_in_configs(directory: Path) -> set[int]:
    """Token ids that config.json and generation_config.json name, nested configs included."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.is_file():
            found.update(_token_ids(read_json(path)))
    return {id for id in found if id >= 0}


def _token_ids(value: Any, key: str = "") -> Iterator[int]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _token_ids(item, str(name))
    elif key.endswith(("_token_id", "_token_ids", "_token_index")):
        items = value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, int) and not isinstance(item, bool))


def mentioned(directory: Path, tokens: Collection[str], templates: Collection[str]) -> set[str]:
    """Those of `tokens` that a template has in its text or a config of the folder has as a value.

    The lists of all added tokens do not count: to be in one is not a use.
    """
    texts = list(templates)
    for path in sorted([*directory.glob("*.jinja"), *directory.glob("*templates/*.jinja")]):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
    values: set[str] = set(named_specials(directory).values())
    for name in ("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"):
        values.update(_strings(read_object(directory / name)))
    config = read_object(directory / CONFIG)
    values.update(
        _strings({key: value for key, value in config.items() if key not in (*LISTS, "added_tokens_decoder")})
    )
    template = config.get("chat_template")
    texts += list(_strings(template))
    texts += list(_strings(read_object(directory / "chat_template.json")))
    return {token for token in tokens if token in values or any(token in text for text in texts)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _objects(document: Mapping[str, Any], *keys: str) -> list[dict[str, Any]]:
    return [document[key] for key in keys if isinstance(document.get(key), dict)]


def write_side_files(
    directory: Path,
    output: Path,
    ids: Mapping[str, int],
    old: Mapping[str, int],
    dropped: Collection[str],
    changes: Mapping[str, Any],
) -> None:
    """Copy the files around the tokenizer with the new ids, and without the tokens that went.

    `ids` and `old` map tokens to new and old ids; `changes` are keys of tokenizer_config.json to set.
    """
    backwards = {id: token for token, id in old.items()}

    def new_id(id: int) -> int | None:
        return ids.get(backwards.get(id, ""))

    for name in (CONFIG, SPECIALS):
        document = read_object(directory / name)
        if document or (name == CONFIG and changes):
            document = _rewritten(document, ids, dropped, new_id)
            if name == CONFIG:
                document.update(changes)
            write_json(output / name, document)
    added = read_object(directory / ADDED)
    if added:
        kept = {token: ids.get(token, id) for token, id in added.items() if token not in dropped}
        write_json(output / ADDED, dict(sorted(kept.items(), key=lambda item: item[1])))
    for name in COPIED:
        source = directory / name
        if source.is_dir():
            shutil.copytree(source, output / name, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, output / name)
    if "auto_map" in read_object(directory / CONFIG):
        for source in directory.glob("*.py"):  # the tokenizer is code of its own, which needs its files
            shutil.copyfile(source, output / source.name)


def _rewritten(
    document: Mapping[str, Any],
    ids: Mapping[str, int],
    dropped: Collection[str],
    new_id: Callable[[int], int | None],
) -> dict[str, Any]:
    new = dict(document)
    table = document.get("added_tokens_decoder")
    if isinstance(table, dict):
        rows = [(ids.get(content(token) or ""), token) for token in table.values() if content(token) not in dropped]
        known = sorted(((id, token) for id, token in rows if id is not None), key=lambda row: row[0])
        new["added_tokens_decoder"] = {str(id): token for id, token in known}
    for key in LISTS:
        value = document.get(key)
        if isinstance(value, list):
            new[key] = [token for token in value if content(token) not in dropped]
        elif isinstance(value, dict):
            new[key] = {role: token for role, token in value.items() if content(token) not in dropped}
    for key, value in document.items():
        if key.endswith("_token_id") and isinstance(value, int) and not isinstance(value, bool):
            new[key] = new_id(value)
    return new
