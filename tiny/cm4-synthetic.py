"""cm4-synthetic: a hundred documents of pictures and texts in turns; where one is, the other has an empty slot.

The records are folders of files first (images_00.jpg, images_01.null, texts_00.null, texts_01.txt), as a person would
edit them, and `pack` makes as many distinct rows of them as are wanted.

python tiny/cm4-synthetic.py cm4-synthetic
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import _data

from mldebug import PackReport, pack

ROWS = 100
RECORDS = ("it", "ti", "itti", "tit", "iit", "t", "i", "ititititit")  # i: a picture, t: a text


def build(output: str | Path) -> PackReport:
    words = list(_data.texts(100, ("en", "fr"), seed=3))
    with tempfile.TemporaryDirectory() as folder:
        for number, pattern in enumerate(RECORDS):
            record = Path(folder) / f"{number:02d}"
            record.mkdir()
            for slot, kind in enumerate(pattern):
                if kind == "i":
                    _data.picture(10 * number + slot).save(record / f"images_{slot:02d}.jpg", quality=95)
                    (record / f"texts_{slot:02d}.null").touch()
                else:
                    (record / f"images_{slot:02d}.null").touch()
                    (record / f"texts_{slot:02d}.txt").write_text(words[10 * number + slot], encoding="utf-8")
            (record / "general_metadata.json").write_text(f'{{"url": "https://example.com/{number}"}}')
        return pack(folder, output, ROWS, unique=True)


if __name__ == "__main__":
    _data.run(build, __doc__)
