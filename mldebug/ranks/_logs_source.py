"""The writers of a log: a rank each, or what is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.ranks._logs_prefix import Who

if TYPE_CHECKING:
    from mldebug.ranks._logs_traceback import Gathering, Kind


NOBODY = "no rank"
_LIFE = 50  # lines after a traceback; wandb's last words are fewer


class Source:
    """One writer. `rank` may be learnt late: torchrun's `[default3]:` is a local rank until a traceback says more."""

    __slots__ = ("after", "bit", "group", "index", "last", "local", "open", "rank", "time", "traced", "wanted", "words")

    @property
    def nobody(self) -> bool:
        """Whether these are the lines that name no writer, and may be of many."""
        return self.rank is None and self.local is None and self.words == NOBODY

    def __init__(self, index: int, rank: int | None, local: int | None, group: tuple[str, ...], words: str) -> None:
        self.index = index
        self.bit = 1 << index
        self.rank = rank
        self.local = local
        self.group = group  # which node its local rank is of
        self.words = words  # how to call it where no number is known
        self.last = b""
        self.time = b""
        self.open: Gathering | None = None  # a traceback under way
        self.wanted = True
        self.traced: list[Kind] = []  # its tracebacks, until it is seen that it lives on
        self.after = 0  # lines since then

    def goes_on(self) -> None:
        """A line after a traceback: many of them say that the traceback was not the end."""
        self.after += 1
        if self.after == _LIFE:
            for kind in self.traced:
                kind.survived |= self.bit
            self.traced.clear()


class Sources:
    """All writers, found by what their prefixes say."""

    def __init__(self) -> None:
        self.all: list[Source] = []
        self._by: dict[object, Source] = {}
        self._settled = 0

    def of(self, who: Who, file: str, file_rank: int | None) -> Source:
        """The writer that a prefix in a file names."""
        place = tuple(filter(None, (file, *who.outer))) if who.local is not None or not who.outer else who.outer
        inner = ("local", place, who.local) if who.local is not None else None
        if who.rank is not None:
            source = self._get(("rank", who.rank), who.rank, who.local, place, "")
            if inner is not None:  # now it is known which rank this local rank is
                earlier = self._by.get(inner)
                if earlier is not None:
                    earlier.rank = who.rank
                self._by[inner] = source
                source.local = who.local
            return source
        if inner is not None:
            return self._get(inner, None, who.local, place, "")
        if who.outer:
            return self._get(("outer", who.outer), None, None, place, "/".join(who.outer))
        if file_rank is not None:
            return self._get(("rank", file_rank), file_rank, None, place, "")
        return self._get(("file", file), None, None, place, NOBODY)

    def _get(self, key: object, rank: int | None, local: int | None, group: tuple[str, ...], words: str) -> Source:
        source = self._by.get(key)
        if source is None:
            source = self._by[key] = Source(len(self.all), rank, local, group, words)
            self.all.append(source)
        return source

    def settle(self) -> None:
        """At the end: local ranks of one node are ranks, those of several are called by the node as well."""
        self._settled = len(self.all)
        groups = {source.group for source in self.all if source.local is not None}
        for source in self.all:
            if source.rank is None and source.local is not None:
                if len(groups) == 1:
                    source.rank = source.local
                else:
                    source.words = f"{'/'.join(source.group)}:{source.local}"

    def members(self, mask: int) -> list[Source]:
        """The writers whose bits these are."""
        if len(self.all) != self._settled:
            self.settle()
        found = []
        while mask:
            low = mask & -mask
            found.append(self.all[low.bit_length() - 1])
            mask ^= low
        return found
