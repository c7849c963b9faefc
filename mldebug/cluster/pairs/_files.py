"""Pair matrices in files: CSV with the header src,dst,gbps,status, and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mldebug.cluster.pairs._evidence import SCHEMA, STATUSES, PairsEvidence, check_evidence
from mldebug.core.errors import MldebugError, UsageError

_MOST = 2 << 30  # bytes of a file
_FORM = "the header of a CSV file is src,dst,gbps,status; src and dst are host:gpu, gbps is a number or empty"
# Other programs' words for how a pair ended.
_WORDS = {
    "ok": "ok okay pass passed success succeeded successful good fine done complete completed finished healthy normal "
    "valid verified true yes 0 slow degraded warn warning",
    "hang": "hang hung hangs hanging timeout timed_out timedout stuck wedged stalled deadlock deadline expired "
    "unresponsive",
    "error": "error err errored fail failed failure exception abort aborted refused unreachable oom false no",
    "wrong": "wrong corrupt corrupted corruption mismatch bad_data wrong_contents invalid",
    "dead": "dead died killed crash crashed lost exited gone down",
    "missing": "missing nan none null na n/a unknown absent - not_measured untested not_tested",
    "skipped": "skipped skip self diagonal not_run not_sampled",
}
_EXTRA = ("latency_us", "round", "both_gbps", "connect_us", "lost")
_STATUS = {word: status for status, words in _WORDS.items() for word in words.split()}
_NO_NUMBER = frozenset(("", "nan", "none", "null", "na", "n/a", "-", "--", "inf", "+inf", "-inf", "infinity"))
_FAULT = re.compile(r"error|exception|fail|fault|abort")  # within a word, as in ncclSystemError
# A figure with its unit: programs write `24.3 GB/s` and `194 Gbit/s`; a small b is a bit where a unit is written.
_AMOUNT = re.compile(
    r"(?P<number>[-+]?[0-9.,]*[0-9](?:[eE][-+]?[0-9]+)?)\s*"
    r"(?:(?P<scale>[kKmMgGtT]?)(?P<binary>i?)(?P<unit>[bB](?:it|yte)?s?)(?:/s(?:ec)?|ps)?)?"
)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def load_pairs(path: str | os.PathLike[str]) -> PairsEvidence:
    """Read a pair matrix: CSV (`src,dst,gbps,status`, further columns `latency_us`, `round`, `both_gbps`) or JSON.

    src and dst are `host:gpu`, gbps is in GBps (10^9 bytes/s). JSON is what `save_pairs` writes, or a list of objects
    with the names of the CSV columns. Raises UsageError with the line of what cannot be read.

        evidence = load_pairs("pairs.csv")
    """
    name = os.fspath(path)
    try:
        if (size := os.stat(path).st_size) > _MOST:
            raise UsageError(f"{name} has {size:,} bytes, too many for a pair matrix", _FORM)
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise UsageError(f"cannot read {name}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"cannot read {name}: it is not text (byte {exc.start:,})", _FORM) from exc
    if not text.strip():
        raise UsageError(f"{name} is empty", _FORM)
    evidence = _from_json(text, name) if text.lstrip()[0] in "[{" else _from_csv(text, name)
    check_evidence(evidence)
    return evidence


def save_pairs(evidence: PairsEvidence, path: str | os.PathLike[str]) -> None:
    """Write `evidence` as CSV where `path` ends in .csv, else as JSON; load_pairs reads both again.

    Raises MldebugError where the file cannot be written.

        save_pairs(evidence, "pairs.csv")
    """
    try:
        with open(path, "w", encoding="utf-8", newline="") as stream:
            if os.fspath(path).lower().endswith(".csv"):
                csv.writer(stream, lineterminator="\n").writerows(_rows(evidence))
            else:
                json.dump(evidence, stream)
                stream.write("\n")
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot write {os.fspath(path)}: {reason}", "choose another file") from exc


def _rows(evidence: PairsEvidence) -> Iterator[Sequence[Any]]:
    more: dict[str, Any] = {name: values for name in _EXTRA if (values := evidence.get(name))}
    yield ["src", "dst", "gbps", "status", *more]
    gpus = evidence["gpus"]
    for place, (src, dst) in enumerate(zip(evidence["src"], evidence["dst"], strict=True)):
        value = evidence["gbps"][place]
        row: list[Any] = [gpus[src], gpus[dst], "" if value is None else f"{value:.6g}", evidence["status"][place]]
        yield row + [values[place] for values in more.values()]


def _ended(word: str) -> str | None:
    """Which of STATUSES a word stands for, or a few of them, as in `NCCL timeout (30 s)`; None where nothing tells."""
    if found := _STATUS.get(word) or _STATUS.get(word.replace(" ", "_").replace("-", "_")):
        return found
    parts = [_STATUS.get(part) for part in re.findall(r"[a-z]+", word)]
    if re.match(r"no (error|fail|fault|problem)", word):
        return "ok"
    if re.search(r"timed[ _-]?out", word):
        return "hang"
    if found := next((status for status in ("wrong", "dead", "hang", "error") if status in parts), None):
        return found
    return "error" if _FAULT.search(word) else "ok" if parts[:1] == ["ok"] else None


class _Table:
    """Gathers pairs row by row; `where` tells the place of a row that cannot be read."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.number: dict[str, int] = {}
        self.out: PairsEvidence = {
            "schema": SCHEMA, "gpus": [], "src": [], "dst": [], "gbps": [], "status": [], "notes": [],
        }  # fmt: skip
        self.strange: dict[str, list[int]] = {}  # words that are not known, and their pairs
        self.colons: bool | None = None
        self.comma_is_point = False

    def add(self, src: Any, dst: Any, gbps: Any, status: Any, where: str) -> None:
        value = self._bandwidth(gbps, where)
        word = "" if status is None else str(status).strip().lower()
        ended = _ended(word) if word else ("missing" if value is None else "ok")
        if ended is None:
            self.strange.setdefault(str(status).strip(), []).append(len(self.out["src"]))
            ended = "error"
        if value is not None and value < 0:
            if ended == "ok":
                raise self.wrong(f"gbps is {gbps}, and a bandwidth is not negative", where)
            value = None
        self.out["src"].append(self._gpu(src, "src", where))
        self.out["dst"].append(self._gpu(dst, "dst", where))
        self.out["gbps"].append(value)
        self.out["status"].append(ended)

    def _gpu(self, name: Any, column: str, where: str) -> int:
        found = self.number.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        text = name.strip() if isinstance(name, str) else ""
        host, colon, label = text.rpartition(":")
        if not text or (colon and not (host and label)):
            raise self.wrong(f"{column} is {name!r}, and should be host:gpu", where)
        if self.colons is None:
            self.colons = bool(colon)
        if self.colons != bool(colon):
            raise self.wrong(f"{column} is {name!r}: some names are host:gpu and some are not", where)
        if text not in self.number:
            self.number[text] = len(self.out["gpus"])
            self.out["gpus"].append(text)
        return self.number[text]

    def _bandwidth(self, value: Any, where: str) -> float | None:
        """GBps, of a number or of one with its unit; a small b is a bit, but not where all is written small."""
        found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            return self._number(value, "gbps", where)
        written, scale, unit = found["number"], found["scale"] or "", found["unit"] or ""
        if "," in written:
            one = written.count(",") == 1 and "." not in written
            decimal = one and (self.comma_is_point or re.search(r",\d{3}(?!\d)", written) is None)
            written = written.replace(",", "." if decimal else "")
        number = self._number(written, "gbps", where)
        if number is None or not unit:
            return number
        number *= float((1024 if found["binary"] else 1000) ** _POWER[scale.lower()]) / 1e9
        bits = "it" in unit or (unit[0] == "b" and "yte" not in unit and scale.isupper())
        return number / 8 if bits else number

    def _number(self, value: Any, column: str, where: str) -> float | None:
        if value is None or (isinstance(value, str) and value.strip().lower() in _NO_NUMBER):
            return None
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            raise self.wrong(f"{column} is {str(value)[:40]!r}, and should be a number", where) from None
        return number if math.isfinite(number) else None

    def extra(self, column: str, values: list[Any], wheres: Callable[[int], str]) -> None:
        """A further column, where it has a value."""
        numbers = [self._number(value, column, wheres(place)) for place, value in enumerate(values)]
        if column == "round":
            self.out["round"] = [None if number is None else int(number) for number in numbers]
        else:
            self.out[column] = numbers  # type: ignore[literal-required]

    def wrong(self, what: str, where: str) -> UsageError:
        return UsageError(f"{self.file}, {where}: {what}", _FORM)

    def evidence(self) -> PairsEvidence:
        if not self.out["src"]:
            raise UsageError(f"{self.file} has no pairs", _FORM)
        for word, pairs in list(self.strange.items())[:5]:
            count = f"{len(pairs)} pair{'s' if len(pairs) != 1 else ''}"
            usual = self._is_usual(pairs)
            taken = "taken for ok, as most pairs have it, and a bandwidth" if usual else "taken for an error"
            self.out["notes"].append(f"status {word[:40]!r} of {count} is not known and is {taken}")
        for pairs in self.strange.values():
            if self._is_usual(pairs):
                for place in pairs:
                    self.out["status"][place] = "ok"
        return self.out

    def _is_usual(self, pairs: list[int]) -> bool:
        """Whether a word that is not known is that of most pairs, and all of these moved something."""
        gbps = self.out["gbps"]
        return 2 * len(pairs) > len(gbps) and all((gbps[place] or 0) > 0 for place in pairs)


def _from_csv(text: str, file: str) -> PairsEvidence:
    """Lines of comma, semicolon or tab separated values; empty lines and those that begin with # are left out."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    comma = max(",;\t", key=first.count)
    table = _Table(file)
    table.comma_is_point = comma != ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=comma)
    header: list[str] = []
    extras: dict[str, list[Any]] = {}
    lines: list[int] = []
    try:
        for row in reader:
            if not row or not "".join(row).strip() or row[0].lstrip().startswith("#"):
                continue
            where = f"line {reader.line_num}"
            if not header:
                header = [cell.strip().lower() for cell in row]
                absent = [name for name in ("src", "dst", "gbps") if name not in header]
                if absent:
                    raise table.wrong(f"the header {','.join(row)[:60]!r} has no {' and no '.join(absent)}", where)
                src, dst, gbps = (header.index(name) for name in ("src", "dst", "gbps"))
                status = header.index("status") if "status" in header else None
                extras = {name: [] for name in _EXTRA if name in header}
                at = {name: header.index(name) for name in extras}
                continue
            if len(row) != len(header):
                raise table.wrong(f"{len(row)} values where the header has {len(header)}", where)
            table.add(row[src], row[dst], row[gbps], row[status] if status is not None else None, where)
            for name, values in extras.items():
                values.append(row[at[name]])
            if extras:
                lines.append(reader.line_num)
    except csv.Error as exc:
        raise table.wrong(str(exc), f"line {reader.line_num}") from exc
    for name, values in extras.items():
        table.extra(name, values, lambda place: f"line {lines[place]}")
    return table.evidence()


def _from_json(text: str, file: str) -> PairsEvidence:
    """The evidence itself, a report that has it, a list of pairs, or a square matrix with its GPUs."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        line = f", line {exc.lineno}" if isinstance(exc, json.JSONDecodeError) else ""
        raise UsageError(f"{file}{line}: this is no JSON: {getattr(exc, 'msg', exc)}", _FORM) from exc
    if isinstance(document, Mapping) and isinstance(document.get("evidence"), Mapping):
        document = document["evidence"]
    if isinstance(document, Mapping) and {"gpus", "src", "dst", "gbps", "status"} <= document.keys():
        return _checked(document, file)
    table = _Table(file)
    if isinstance(document, Mapping) and isinstance(document.get("gpus"), list) and "matrix" in document:
        _add_matrix(table, document["gpus"], document["matrix"])
        return table.evidence()
    pairs = document.get("pairs") if isinstance(document, Mapping) else document
    if not isinstance(pairs, list):
        raise UsageError(f"{file} has no list of pairs", "a list of objects with src, dst, gbps and status")
    _add_objects(table, pairs)
    return table.evidence()


def _add_objects(table: _Table, pairs: Iterable[Any]) -> None:
    kept: list[Mapping[str, Any]] = []
    for place, pair in enumerate(pairs, 1):
        if not isinstance(pair, Mapping) or not {"src", "dst"} <= pair.keys():
            raise table.wrong(f"{str(pair)[:60]!r} is no object with src, dst and gbps", f"pair {place}")
        table.add(pair["src"], pair["dst"], pair.get("gbps"), pair.get("status"), f"pair {place}")
        kept.append(pair)
    for name in _EXTRA:
        if any(name in pair for pair in kept):
            table.extra(name, [pair.get(name) for pair in kept], lambda place: f"pair {place + 1}")


def _add_matrix(table: _Table, gpus: list[Any], matrix: Any) -> None:
    if not isinstance(matrix, list) or len(matrix) != len(gpus):
        raise table.wrong(f"the matrix should have a row for each of {len(gpus)} GPUs", "matrix")
    for src, row in zip(gpus, matrix, strict=True):
        if not isinstance(row, list) or len(row) != len(gpus):
            raise table.wrong(f"a row should have a value for each of {len(gpus)} GPUs", f"row {src}")
        for dst, value in zip(gpus, row, strict=True):
            if src != dst:
                table.add(src, dst, value, None, f"row {src}")


def _checked(document: Mapping[str, Any], file: str) -> PairsEvidence:
    """Evidence as save_pairs wrote it; anything else in its columns is a UsageError."""
    columns = {name: document[name] for name in ("gpus", "src", "dst", "gbps", "status")}
    whole = all(isinstance(column, list) for column in columns.values())
    if not (
        whole
        and all(isinstance(name, str) and name for name in columns["gpus"])
        and all(type(index) is int for name in ("src", "dst") for index in columns[name])
        and all(value is None or type(value) in (int, float) for value in columns["gbps"])
        and all(status in STATUSES for status in columns["status"])
        and len({len(column) for name, column in columns.items() if name != "gpus"}) == 1
    ):
        raise UsageError(f"{file} has columns that are no pair matrix", _FORM)
    notes = [str(note) for note in document.get("notes") or []]
    evidence: PairsEvidence = {"schema": SCHEMA, "notes": notes, **columns}  # type: ignore[typeddict-item]
    for name in _EXTRA:
        values = document.get(name)
        if isinstance(values, list) and len(values) == len(columns["src"]):
            evidence[name] = values  # type: ignore[literal-required]
    whys = document.get("why")
    if isinstance(whys, list) and len(whys) == len(evidence["src"]):
        evidence["why"] = [str(why) for why in whys]
    if isinstance(document.get("device"), str):
        evidence["device"] = document["device"]
    if document.get("backend") == "gloo":
        evidence["backend"] = "gloo"
    blame = document.get("blame")
    if isinstance(blame, list) and all(isinstance(entry, dict) for entry in blame):
        evidence["blame"] = blame
    return evidence


def merge_pairs(parts: Sequence[PairsEvidence]) -> PairsEvidence:
    """Several matrices as one; what some of them lack (latencies, rounds) is empty there.

    merge_pairs([load_pairs("rack1.csv"), load_pairs("rack2.csv")])
    """
    if len(parts) == 1:
        return parts[0]
    number: dict[str, int] = {}
    whole: PairsEvidence = {
        "schema": SCHEMA, "gpus": [], "src": [], "dst": [], "gbps": [], "status": [], "notes": [],
    }  # fmt: skip
    more: dict[str, list[Any]] = {name: [] for name in _EXTRA}
    blame = [entry for part in parts for entry in part.get("blame", [])]
    for part in parts:
        at = [number.setdefault(name, len(number)) for name in part["gpus"]]
        whole["src"] += [at[src] for src in part["src"]]
        whole["dst"] += [at[dst] for dst in part["dst"]]
        whole["gbps"] += part["gbps"]
        whole["status"] += part["status"]
        whole["notes"] += part["notes"]
        for name, values in more.items():
            own: Any = part.get(name)
            values += own or [None] * len(part["src"])
    whole["gpus"] = list(number)
    for name, values in more.items():
        if any(value is not None for value in values):
            whole[name] = values  # type: ignore[literal-required]
    if blame:
        whole["blame"] = blame
    return whole
