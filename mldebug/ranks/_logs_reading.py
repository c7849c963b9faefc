"""One pass over the files of a log: lines, their writers, and what they bring."""

from __future__ import annotations

import re
from collections.abc import Callable

from mldebug.core.errors import MldebugError
from mldebug.ranks._logs_ends import MARKS, Ends
from mldebug.ranks._logs_fold import Window
from mldebug.ranks._logs_normal import STAMP, TIME, normal_peer
from mldebug.ranks._logs_prefix import Prefixes, Who, inside, ranks_of_names, recognise
from mldebug.ranks._logs_read import LogFile, cleaned, in_turns, looks_binary
from mldebug.ranks._logs_source import Source, Sources
from mldebug.ranks._logs_split import Split
from mldebug.ranks._logs_traceback import HEADER, Gathering, Kinds, begins
from mldebug.ranks._logs_weave import Weave

_NAMED = re.compile(rb"\[(?:PG [^\]]*?)?[Rr]ank (\d+)\]")
_SPAWNED = re.compile(rb"-- Process (\d+) terminated with the following error:")
_TOLD = 16 << 20  # bytes between two words of progress


class _File:
    """What is known of one file while it is read."""

    def __init__(self, file: LogFile, label: str, rank: int | None, prefixes: Prefixes) -> None:
        self.file = file
        self.label = label
        self.rank = rank
        self.prefixes = prefixes
        self.known: dict[bytes, Source] = {}
        self.inside: dict[bytes, Source] = {}
        self.other: Source | None = None  # the writer of lines without a prefix
        self.last: Source | None = None
        self.weave = Weave()
        self.time = b""
        self.hook = True  # `[rank3]: ` is there by torch's hook alone, before lines of tracebacks


class Reading:
    """One pass over the files."""

    window: Window
    progress: Callable[[int], None] | None = None

    def __init__(self, own: Prefixes | None, ranks: frozenset[int] | None, split: Split | None) -> None:
        self.sources = Sources()
        self.kinds = Kinds()
        self.ends = Ends()
        self.split = split
        self.split_files = 0
        self.broken = 0  # lines in which two writers met
        self.interleaved = 0
        self.lines = 0
        self.size = 0
        self.names: list[str] = []
        self.used: list[str] = []  # a prefix of each kind, as it was found
        self.notes: list[str] = []
        self.interrupted = False
        self._own = own
        self.ranks = ranks
        self._open = 0  # tracebacks under way
        self._begun = 0  # tracebacks so far

    def read(self, paths: list[str]) -> None:
        states: dict[int, _File] = {}
        for path, rank in zip(paths, ranks_of_names(paths), strict=True):
            file = LogFile(path)
            head = file.head(max(4096, min(64 << 10, (2 << 20) // len(paths))))
            if looks_binary(head):
                if len(paths) == 1:
                    raise MldebugError(f"{path} is no log: it looks binary", "name the file that the job printed into")
                self.notes.append(f"{path} looks binary: it was left out")
                continue
            prefixes = self._own or recognise(cleaned(head).split(b"\n"))
            states[id(file)] = _File(file, path if len(paths) > 1 else "", rank, prefixes)
        self.names = [state.file.path for state in states.values()]
        groups: dict[int, list[LogFile]] = {}
        for state in states.values():  # what was tried first is read first
            attempt = re.search(r"attempt_(\d+)[/\\]", state.file.path)
            groups.setdefault(int(attempt[1]) if attempt else 0, []).append(state.file)
        told = 0
        try:
            for _attempt, files in sorted(groups.items()):
                for file, data in in_turns(files):
                    self._piece(states[id(file)], data)
                    if self.progress is not None and self.size - told > _TOLD:
                        told = self.size
                        self.progress(told)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("interrupted: this is what was read until then")
        for state in states.values():
            for one in state.weave.open:
                self._finish(one, self._other(state), 0)
            self.interleaved += state.weave.interleaved
            if state.file.note:
                self.notes.append(f"{state.file.path}: {state.file.note}")
        for source in self.sources.all:
            if source.open is not None:
                self._finish(source.open, source, 0)
        self.sources.settle()
        self.window.finish()
        if self.split is not None:
            self.split_files = self.split.finish()

    def _piece(self, state: _File, data: bytes) -> None:
        number = state.file.number
        count = data.count(b"\n") + 1
        state.file.number += count
        self.lines += count
        self.size += len(data) + 1
        stem = state.prefixes.stem
        mixed = len(stem) > 2 and data.count(stem) != data.count(b"\n" + stem) + data.startswith(stem)
        if mixed or self._open or self.ends.mpi.pending or any(mark in data for mark in MARKS):
            for line in data.split(b"\n"):
                number += 1
                self._careful(state, line, number)
        else:
            self._plain(state, data, number)

    def _plain(self, state: _File, data: bytes, number: int) -> None:
        """Lines that end nothing: the common case, and the fast one. Most are equal to one that is known already."""
        known, add, split = state.known, self.window.add, self.split
        timed, untimed = self.window.timed, self.window.known
        source = other = self._other(state)
        for prefix, stamp, rest in state.prefixes.lines(data):
            number += 1
            if prefix:
                source = known.get(prefix) or self._learn(state, prefix, plain=True)
            elif b"ank " in rest or b"] NCCL " in rest:
                source = self._without_prefix(state, stamp + rest)
            else:
                source = other
            if rest:
                source.last = rest
                if source.traced:
                    source.goes_on()
                if source.wanted:
                    entry = timed.get(rest) if stamp else untimed.get(rest)
                    if entry is not None and not entry.mask & source.bit:
                        entry.mask |= source.bit
                        if stamp:
                            entry.differs |= TIME
                    else:
                        add(stamp + rest, source, number)
            if split is not None:
                split.add(source, stamp + rest)
        state.last = source

    def _careful(self, state: _File, line: bytes, number: int) -> None:
        """The same where a traceback or another end may be: every line is looked at."""
        found = state.prefixes.match(line)
        if found and found.end() == len(line) and state.weave.open:
            found = None  # `[1]:` in the summary of torchrun
        if found:
            prefix = found[1]
            source = state.known.get(prefix) or self._learn(state, prefix)
            text = line[found.end() :]
        else:
            prefix, text = b"", line
            last = state.last
            if (
                last is not None
                and last.open is not None
                and last is not state.other
                and (not line.strip() or line[:1] in b" \t")
            ):
                source = last  # torch's hook leaves the empty lines of a traceback without a prefix
            else:
                source = self._without_prefix(state, line)
        within = state.prefixes.within(text) if b"]" in text else None
        if within is not None and not within.string[: within.start()].rstrip().endswith((b'"', b"'", b"`")):
            self.broken += 1
            self._one(state, source, prefix, text[: within.start()], number)
            self._careful(state, text[within.start() :], number)
            return
        self._one(state, source, prefix, text, number)

    def _one(self, state: _File, source: Source, prefix: bytes, text: bytes, number: int) -> None:
        state.last = source
        if self.split is not None:
            self.split.add(source, text)
        if text.count(b":") > 1 and (stamp := STAMP.search(text)):
            state.time = source.time = stamp[0]
        if not self._of_traceback(state, source, prefix, text, number) and text.strip():
            self.ends.look(text, self._named_in(text) or source if source.rank is None else source)
            source.last = text
            if state.hook and b"[rank" in prefix and text[:1] not in b"[ \t":
                state.hook = False
            if source.traced:
                source.goes_on()
            if source.wanted:
                self.window.add(text, source, number)

    def _of_traceback(self, state: _File, source: Source, prefix: bytes, text: bytes, number: int) -> bool:
        """Whether the line is part of a traceback; begins and ends them."""
        hook = state.hook and b"[rank" in prefix
        alone = source is not state.other or source.rank is not None
        if alone and source.open is not None:
            verdict = source.open.take(text, hook)
            if verdict is not None:
                return verdict
            self._finish(source.open, source, number)
            source.open = None
        elif not alone and state.weave.open:
            taken, over = (
                (False, []) if begins(text) and state.weave.open[-1].state != "chain" else state.weave.take(text)
            )
            for one in over:
                self._finish(one, source, number)
            if taken:
                return True
        at = 0 if begins(text) else text.find(HEADER)
        if at < 0:
            return False
        start = text.rfind(b"+ Exception Group ", 0, at)
        before = text[: at if start < 0 else start].strip()
        if before and (b" " in before or len(before) > 60):  # somebody's line had no end: this is another's
            self.broken += 1
        time = source.time or state.time
        one = Gathering(text[at:] if start < 0 else text, number, state.file.path, time, hook, self._begun)
        if source.nobody and (found := _SPAWNED.match(source.last)):
            one.named = int(found[1])
        self._open += 1
        self._begun += 1
        one.entry = self.window.reserve(source, number)
        if alone:
            source.open = one
        elif (oldest := state.weave.begin(one)) is not None:
            self._finish(oldest, source, number)
        return True

    def _finish(self, one: Gathering, source: Source, number: int) -> None:
        self._open -= 1
        if one.named is not None and one.entry is not None:
            source = self.sources.of(Who(rank=one.named), "", None)
            self._choose(source)
            one.entry.mask = source.bit
        if any(b"ChildFailedError" in line for line in one.exceptions):
            self.ends.read_summary(one.lines)
        if not source.wanted:
            source.last = source.last or one.lines[-1]
            return
        kind = self.kinds.add(one, source)
        if kind is not None and not source.nobody:
            kind.survived &= ~source.bit
            source.traced.append(kind)
            source.after = 0
        if kind is not None and not kind.launcher and one.entry is not None:
            text = b"<traceback> " + (one.exceptions[-1] if one.exceptions else kind.exception)
            self.window.settle(
                one.entry, text, b"<traceback>%d " % kind.order + normal_peer(text, source.rank, source.local)
            )

    # Whose line is it

    def _learn(self, state: _File, prefix: bytes, plain: bool = False) -> Source:
        if plain and b"[rank" in prefix and prefix.endswith(b" "):
            state.hook = False
        who = state.prefixes.who(prefix)
        source = self.sources.of(who, state.label, state.rank)
        state.known[prefix] = source
        if (
            who.rank is not None and who.local is not None
        ):  # what came before under the outer prefix alone is the same rank
            for earlier in [known for known in state.known if prefix.startswith(known)]:
                state.known[earlier] = source
        if not any(prefix.startswith(re.split(rb"\d", other.encode())[0]) for other in self.used):
            self.used.append(prefix.decode("utf-8", "replace").strip())
        self._choose(source)
        return source

    def _without_prefix(self, state: _File, line: bytes) -> Source:
        if state.rank is None and (found := inside(line)) is not None:
            key, who = found
            source = state.inside.get(key)
            if source is None:
                source = state.inside[key] = self.sources.of(who, state.label, None)
                self._choose(source)
            return source
        return self._other(state)

    def _named_in(self, text: bytes) -> Source | None:
        """The rank that a line without a prefix names somewhere, behind a progress bar or in the words of C++."""
        found = _NAMED.search(text) if b"ank " in text else None
        return self.sources.of(Who(rank=int(found[1])), "", None) if found else None

    def _other(self, state: _File) -> Source:
        if state.other is None:
            state.other = self.sources.of(Who(), state.label, state.rank)
            self._choose(state.other)
        return state.other

    def _choose(self, source: Source) -> None:
        if self.ranks is not None:
            rank = source.local if source.rank is None else source.rank
            source.wanted = rank in self.ranks
