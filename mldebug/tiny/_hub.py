"""Repositories of the hub: found in its cache or fetched without weights, and errors that say what was in the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError

PATH = "is no file or folder"


def snapshot(name: str, patterns: Iterable[str], offline: bool | None, kind: str, what: str = PATH) -> Path:
    """The folder in the hub's cache with the files of `name` that match; `kind` is "model" or "tokenizer", and `what`
    says what else it was taken for.

    None for `offline` asks the network unless HF_HUB_OFFLINE is set. Where it does not answer, the cache will do.
    """
    from huggingface_hub import constants, snapshot_download

    local = constants.HF_HUB_OFFLINE if offline is None else offline
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=local))
    except Exception as exc:
        raise not_found(name, exc, kind, local, what) from exc


def not_found(name: str, exc: BaseException, kind: str, local: bool = False, what: str = PATH) -> MldebugError:
    """What to say of a name that is nothing else (`what`), after the hub or (`local`) its cache answered with `exc`."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    path = f"give a path, such as ./{name}"
    if isinstance(exc, HFValidationError):
        return UsageError(f"{name} {what}, and no repository can have this name", "check the path")
    if isinstance(exc, GatedRepoError):
        return MldebugError(
            f"{name} is gated: the hub shows it only to whom its owners let", "ask on its page, then `hf auth login`"
        )
    if isinstance(exc, RepositoryNotFoundError):
        return UsageError(
            f"{name} {what}, and the hub has no {kind} of this name",
            f"check the spelling, or {path}; `hf auth login`, if it is private",
        )
    if local:
        return UsageError(
            f"{name} {what}, and the cache of the hub has no {kind} of this name (offline)",
            f"{path}, or let it be fetched: without --offline and HF_HUB_OFFLINE=1",
        )
    return MldebugError(
        f"{name} {what}, and the hub cannot be reached over the network ({why(exc)})",
        f"{path}, or mend the network; --offline takes what an earlier run fetched",
    )


def why(exc: BaseException) -> str:
    """What went wrong in the end, in a few words: libraries wrap the system's error several times."""
    cause: BaseException | None = exc
    said = ""
    while cause is not None:
        said = getattr(cause, "strerror", None) or said
        cause = cause.__cause__ or cause.__context__
    return (said or " ".join(str(exc).split()) or type(exc).__name__)[:80]
