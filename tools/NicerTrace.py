"""NicerTrace under its classic name: `python NicerTrace.py` shows it at work; `from NicerTrace import NicerTrace`.

The lines go to stdout, as they always did. The options, and those that are new, are in docs/tracing.md.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any, TextIO

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from mldebug.tracing import NicerTrace as _NicerTrace


class NicerTrace(_NicerTrace):
    """mldebug.NicerTrace, with `output="-"` (stdout) and without the time unless asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"output": "-", **({} if len(args) > 8 else {"timing": False}), **options})


class Tee:
    """Writes to stdout and to a file: `sys.stdout = Tee(filename)`."""

    def __init__(self, filename: str) -> None:
        self.stdout: TextIO = sys.stdout
        self.file = open(filename, "a")  # noqa: SIM115

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
    try:
        from PIL import Image
    except ImportError:
        time.sleep(1)
        return
    image = Image.new("RGB", (4, 4))
    time.sleep(1)
    image.convert("RGB")


if __name__ == "__main__":
    name = f"trace-{socket.gethostname()}-{os.environ.get('LOCAL_RANK', '0')}-{os.getpid()}.txt"
    sys.stdout = Tee(os.path.realpath(name))  # type: ignore[assignment]
    NicerTrace(trace=1, count=1, timing=True, packages_to_include=["PIL"]).run("main()")
