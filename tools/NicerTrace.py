"""NicerTrace under its classic name: `from NicerTrace import NicerTrace`.

Run by itself it shows the trace of a small program. The lines go to stdout, as
they always did. The options, and those that are new, are in docs/tracing.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.tracing import NicerTrace as _NicerTrace


class NicerTrace(_NicerTrace):
    """mldebug.NicerTrace, with `output="-"` (stdout) and without the time unless asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"output": "-", **({} if len(args) > 8 else {"timing": False}), **options})


class Tee:
    """Writes to stdout and to a file: `sys.stdout = Tee(filename)`."""

    def __init__(self, filename: str) -> None:
        self.stdout, self.file = sys.stdout, open(filename, "a")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stdout, name)

    def write(self, text: str) -> None:
        self.stdout.write(text)
        self.file.write(text)
        self.file.flush()

    def flush(self) -> None:
        self.stdout.flush()
        self.file.flush()


def main() -> None:
    from PIL import Image

    image = Image.new("RGB", (4, 4))
    time.sleep(1)
    image.convert("RGB")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    name = f"trace-{socket.gethostname()}-{os.environ.get('LOCAL_RANK', '0')}-{os.getpid()}.txt"
    sys.stdout = Tee(os.path.realpath(name))  # type: ignore[assignment]
    NicerTrace(trace=1, count=1, timing=True, packages_to_include=["PIL"]).run("main()")
