"""openwebtext-10k: ten thousand texts in one column, as OpenWebText has them.

python tiny/openwebtext-10k.py openwebtext-10k
python tiny/openwebtext-10k.py openwebtext-10k --source Skylion007/openwebtext    # the first rows of the real one
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

    return tiny_dataset(Dataset.from_dict({"text": list(_data.texts(ROWS, seed=1))}), ROWS, output)


if __name__ == "__main__":
    _data.run(build, __doc__)
