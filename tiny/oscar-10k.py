"""oscar-10k: ten thousand texts in five languages with an id, as OSCAR has them.

python tiny/oscar-10k.py oscar-10k
python tiny/oscar-10k.py oscar-10k --source path/to/oscar    # the first rows of the real one
"""

from __future__ import annotations

from pathlib import Path

import _data

from mldebug import TinyDatasetReport, tiny_dataset

ROWS = 10_000


def build(output: str | Path, source: str | None = None) -> TinyDatasetReport:
    if source is not None:
        return tiny_dataset(source, ROWS, output, splits=["train"])
    from datasets import Dataset

    rows = {"id": list(range(ROWS)), "text": list(_data.texts(ROWS, tuple(_data.WORDS), seed=2))}
    return tiny_dataset(Dataset.from_dict(rows), ROWS, output)


if __name__ == "__main__":
    _data.run(build, __doc__)
