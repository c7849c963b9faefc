"""c4-10k: ten thousand rows with the columns of C4 (text, timestamp, url), for trying out a training loop.

python tiny/c4-10k.py c4-10k
python tiny/c4-10k.py c4-10k --source allenai/c4    # the first rows of the real one
"""

from __future__ import annotations

import datetime
from pathlib import Path

import _data

from mldebug import TinyDatasetReport, tiny_dataset

ROWS = 10_000


def build(output: str | Path, source: str | None = None) -> TinyDatasetReport:
    if source is not None:
        return tiny_dataset(source, ROWS, output, config="en", splits=["train"])
    from datasets import Dataset

    day = datetime.datetime(2019, 4, 25, 12, 0, 0)
    rows = [
        {
            "text": text,
            "timestamp": (day + datetime.timedelta(minutes=7 * number)).isoformat() + "Z",
            "url": f"https://example.com/{number % 97}/{number}",
        }
        for number, text in enumerate(_data.texts(ROWS))
    ]
    return tiny_dataset(Dataset.from_list(rows), ROWS, output)


if __name__ == "__main__":
    _data.run(build, __doc__)
