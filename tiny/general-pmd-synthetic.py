"""general-pmd-synthetic: a hundred pairs of a picture and a text, with their source and meta data, no two alike.

The records are folders of files first (image.png, text.txt, source.txt, meta.json), and `pack` makes rows of them.

python tiny/general-pmd-synthetic.py general-pmd-synthetic
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import _data

from mldebug import PackReport, pack

ROWS = 100
SOURCES = ("captions", "localized", "encyclopedia", "genome", "web")


def build(output: str | Path) -> PackReport:
    with tempfile.TemporaryDirectory() as folder:
        for number, (source, text) in enumerate(zip(SOURCES, _data.texts(len(SOURCES), seed=4), strict=True)):
            record = Path(folder) / f"{number:02d}"
            record.mkdir()
            _data.picture(100 + number).save(record / "image.png")
            (record / "text.txt").write_text(text, encoding="utf-8")
            (record / "source.txt").write_text(source)
            (record / "meta.json").write_text(f'{{"id": {number}, "license": "none"}}')
        return pack(folder, output, ROWS, unique=True)


if __name__ == "__main__":
    _data.run(build, __doc__)
