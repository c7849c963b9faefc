"""Rows of what datasets has loaded, or streams: a Dataset in memory or mapped from disk, and an IterableDataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mldebug.tiny.dataset._lines import gap
from mldebug.tiny.dataset._media import leaves
from mldebug.tiny.dataset._rows import READ_ERRORS, Reader, Row
from mldebug.tiny.dataset._tables import Batch, TableReader


class DatasetReader(TableReader):
    """A Dataset in memory or mapped from disk, with its indices where it has some."""

    def __init__(self, dataset: Any, name: str) -> None:
        super().__init__(dataset.features)
        self.dataset, self.title = dataset.with_format("arrow"), name
        self.count = len(dataset)

    def parts(self) -> Iterator[str]:
        yield self.title

    def name(self, part: Any) -> str:
        return str(part)

    def batches(self, part: Any, columns: list[str] | None = None) -> Iterator[Any]:
        dataset = self.dataset if columns is None else self.dataset.select_columns(columns)
        for start in range(0, len(dataset), 64):
            yield _valid(dataset[start : start + 64])

    def fetch(self, indices: Iterable[int]) -> Iterator[Row]:
        for index in sorted(set(indices)):
            try:
                table = _valid(self.dataset[index : index + 1])
            except READ_ERRORS as exc:
                yield gap(Path(self.title), f"row {index} cannot be read: {' '.join(str(exc).split())}", index)
                continue
            yield Batch(self, table).row(0, index, f"{self.title} row {index}", table.nbytes)


def _valid(table: Any) -> Any:
    """Offsets that lead out of a corrupt file that is mapped would end the process."""
    table.validate(full=True)
    return table


class StreamReader(Reader):
    """What only datasets can read, through its streaming, without decoding any file in the rows."""

    def __init__(self, make: Callable[[], Any], features: Any, name: str) -> None:
        self.make, self.features, self.title = make, features, name

    def rows(self) -> Iterator[Row]:
        index = 0
        try:
            for values in _undecoded(self.make()):
                yield Row(index, f"{self.title} row {index}", _Values(values), _rough_size(values))
                index += 1
        except Exception as exc:  # the loaders of datasets raise what they like
            cause = exc.__cause__ or exc
            reason = " ".join(str(cause).split())[:300] or type(cause).__name__
            yield gap(Path(self.title), f"it cannot be read after row {index}: {reason}", index)


def _undecoded(stream: Any) -> Iterator[Mapping[str, Any]]:
    """The rows with files as paths or bytes. Sounds are let through before datasets encodes them: to look at one it
    wants a codec, even where nothing is decoded."""
    if stream.features is None:
        yield from stream
    elif any(type(leaf).__name__ in ("Audio", "Video") for leaf in leaves(stream.features)):
        for _key, values in stream._ex_iterable:
            yield values
    else:
        yield from stream.decode(False)


class _Values:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __call__(self) -> Mapping[str, Any]:
        return self.values


def _rough_size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_rough_size, value.values()))
    return sum(map(_rough_size, value)) if isinstance(value, (list, tuple)) else 8
