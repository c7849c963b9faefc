"""What the near end asks of a node: a request, as one word of the far end's command line."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, TypedDict

from mldebug.core.errors import UsageError
from mldebug.hang._remote_wire import WIRE

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class Request(TypedDict):
    """What the near end asks for."""

    wire: int
    name: str  # what the near end calls this node; "" where one request goes to many
    seconds: float  # after which nobody waits for the answer any more
    options: dict[str, Any]  # of collect()
    calls: int  # of the record of collectives, at most
    slurm: bool  # only ranks of the SLURM job that this runs in
    below: NotRequired[Below]


class Below(TypedDict):
    """The nodes that this one is to ask in turn."""

    hosts: list[str]
    python: str
    ssh: list[str]
    fanout: int


def ask_word(request: Request) -> str:
    """A request as one word that no shell changes."""
    return base64.urlsafe_b64encode(json.dumps(request).encode()).decode()


def asked_in(word: str) -> Request:
    """The request that a word is; a UsageError where it is none, or of another version."""
    try:
        request: Request = json.loads(base64.urlsafe_b64decode(word.encode()))
        wire = request["wire"]
    except (ValueError, KeyError, TypeError) as exc:
        raise UsageError("--node is for mldebug itself", "`mldebug spy` looks at this node") from exc
    if wire != WIRE:
        raise UsageError(f"mldebug here speaks layout {WIRE} and was asked in {wire}", "install one version everywhere")
    return request
