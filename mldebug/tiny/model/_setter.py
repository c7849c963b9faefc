"""How the rules change a config."""

from __future__ import annotations

import copy
from typing import Any

from mldebug.tiny.model._roles import OPAQUE, Level


class Setter:
    """Changes fields, but for those that were set by hand."""

    def __init__(self, config: dict[str, Any], pins: frozenset[str]) -> None:
        self.config = config
        self.pins = pins

    def set(self, level: Level, key: str, value: Any) -> None:
        if not self.has_pin(level, key):
            level.fields[key] = value

    def has_pin(self, level: Level, key: str) -> bool:
        """Whether the field, or one inside it, was set by hand."""
        return level.at(key) in self.pins or any(pin.startswith(level.at(key) + ".") for pin in self.pins)

    def hold(self, level: Level, key: str, value: Any) -> None:
        """Set a field that follows from one set by hand: no rule changes it any more."""
        self.set(level, key, value)
        self.pins |= {level.at(key)}

    def free(self, level: Level, key: str) -> bool:
        return level.at(key) not in self.pins

    def path(self, path: str, value: Any) -> None:
        if path in self.pins:
            return
        *parents, key = path.split(".")
        place: Any = self.config
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and (key in place or (parents and parents[-1] in OPAQUE)):
            place[key] = copy.deepcopy(value)
