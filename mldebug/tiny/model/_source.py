"""Where a model's config comes from: a folder, a config.json, a repository of the hub, or the defaults of a type."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._files import path_of
from mldebug.tiny._hub import snapshot
from mldebug.tiny.model._quirks import FILL

# What is fetched of a repository: everything but weights.
PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.jinja", "*.py", "tokenizer*")


@dataclass(frozen=True)
class Source:
    """A config at full size, every field written out, and what else lies beside it."""

    name: str  # as the user gave it
    kind: str  # "folder", "file", "hub" or "type"
    config: dict[str, Any]
    directory: Path | None  # where tokenizer and processor may be
    sha256: str  # of config.json as it is stored; of the defaults for a type
    files: frozenset[str] = field(default_factory=frozenset)  # names of the files in `directory`
    filled: dict[str, Any] = field(default_factory=dict)  # fields that a type's defaults lack and a rule gave


def resolve(source: str | os.PathLike[str], *, trust_remote_code: bool = False, offline: bool | None = None) -> Source:
    """The config that `source` names: an existing folder or file, else a model type, else a repository of the hub.

    The hub is asked unless `offline` is true, or None with HF_HUB_OFFLINE set: then a repository must be in the local
    cache. Code that comes with a config runs only with `trust_remote_code`. What cannot be found or read is an
    MldebugError.

        resolve("llama").config["hidden_size"]
    """
    name = os.fspath(source)
    there = path_of(name)
    if there is not None and there.is_dir():
        return _from_folder(name, "folder", there, trust_remote_code)
    if there is not None:
        return _from_file(name, "file", there, None, trust_remote_code)
    path = Path(name).expanduser()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name in CONFIG_MAPPING:
        return _from_type(name)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise UsageError(f"cannot read {name}: no such file or directory", _nearest_file(path))
    what = "is no file or folder" if "/" in name else "is neither a folder nor a model type that transformers knows"
    try:
        directory = snapshot(name, PATTERNS, offline, "model", what)
    except MldebugError as exc:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), list(CONFIG_MAPPING), 1)
        raise type(exc)(exc.message, f"did you mean {near[0]}?" if near else exc.hint) from exc
    return _from_folder(name, "hub", directory, trust_remote_code)


def _nearest_file(path: Path) -> str:
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, 1)
    return f"did you mean {path.parent / near[0]}?" if near else "give a folder that has a config.json"


def _from_folder(name: str, kind: str, directory: Path, trust_remote_code: bool) -> Source:
    file = directory / "config.json"
    if not file.is_file():
        held = ", ".join(sorted(path.name for path in directory.iterdir())[:6]) or "nothing"
        raise MldebugError(f"{name} has no config.json: there is {held}", "give the folder of a model")
    return _from_file(name, kind, file, directory, trust_remote_code)


def _from_file(name: str, kind: str, file: Path, directory: Path | None, trust_remote_code: bool) -> Source:
    try:
        data = file.read_bytes()
        raw = json.loads(data.decode("utf-8"))
    except OSError as exc:
        raise MldebugError(
            f"cannot read {file}: {(exc.strerror or str(exc)).lower()}", "check its permissions"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise MldebugError(f"{file} is no JSON: {exc}", "is it the config.json of a model, whole?") from exc
    if not isinstance(raw, dict):
        raise MldebugError(
            f"{file} holds a {type(raw).__name__}, not the fields of a config", "give a model's config.json"
        )
    files = frozenset(path.name for path in (directory or file.parent).iterdir())
    config = _complete(raw, file, trust_remote_code)
    return Source(name, kind, config, directory, hashlib.sha256(data).hexdigest(), files)


def _complete(raw: dict[str, Any], file: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The config with the defaults of its class written out, as they decide the size of what the file leaves out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw.get("model_type")
    remote = (raw.get("auto_map") or {}).get("AutoConfig") if isinstance(raw.get("auto_map"), dict) else None
    if remote and (trust_remote_code or model_type not in CONFIG_MAPPING):
        if not trust_remote_code:
            raise MldebugError(
                f"{file} is of the type {model_type!r}, whose code comes with it",
                "read that code, then --trust-remote-code",
            )
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(file.parent, trust_remote_code=True, local_files_only=True)
        except Exception as exc:
            raise MldebugError(
                f"the code of {file.parent} cannot read its config: {_first_line(exc)}", "is it complete?"
            ) from exc
        return {**to_plain(config), "auto_map": raw["auto_map"], "_name_or_path": str(file.parent)}
    if model_type not in CONFIG_MAPPING:
        if model_type is None:
            raise MldebugError(f"{file} names no model_type", "give the config.json of a transformers model")
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), 1)
        hint = f"did you mean {near[0]}?" if near else "install a transformers that knows it"
        raise MldebugError(f"{file} is of the type {model_type!r}, which transformers does not know", hint)
    try:
        config = CONFIG_MAPPING[str(model_type)].from_dict(dict(raw))
    except Exception as exc:
        raise MldebugError(
            f"{file} is no config of a {model_type}: {_first_line(exc)}", "repair the field that it names"
        ) from exc
    return to_plain(config)


def _from_type(name: str) -> Source:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    filled = dict(FILL.get(name, {}))
    try:
        config_class = CONFIG_MAPPING[name]
        config = config_class(**filled)
        plain = to_plain(config)
    except Exception as exc:
        raise MldebugError(
            f"the default config of {name} is incomplete: {_first_line(exc)}",
            f"give a folder with the config.json of a {name} model",
        ) from exc
    text = json.dumps(plain, sort_keys=True, default=str)
    return Source(name, "type", plain, None, hashlib.sha256(text.encode()).hexdigest(), filled=filled)


def to_plain(config: Any) -> dict[str, Any]:
    """A config as a dict of plain values: dtypes and keys are strings, tuples are lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(item) for item in value]
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        if hasattr(value, "to_dict"):
            return plain(value.to_dict())
        return str(value).removeprefix("torch.")

    made: dict[str, Any] = plain(config.to_dict())
    return made


def _first_line(exc: Exception) -> str:
    """The line of an error that says what is wrong: validators put a heading before it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    said = lines[1] if len(lines) > 1 and lines[0].startswith("Class validation error") else lines[0]
    return said[:300]
