"""The interpreters that are here, and programs that run under the tracer with each of them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


@functools.cache
def find_python(version: str) -> str | None:
    """This interpreter, one of the path, or one of pyenv. They need no packages."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))):
        if path is None:
            continue
        # A shim of pyenv is there for versions that are not chosen, too.
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.startswith(f"{version}."):
            return path
    return None


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    path = find_python(request.param)
    if path is None:
        pytest.skip(f"Python {request.param} is not here")
    return path


class Done:
    """How a program ended, and what its traces say: lines without the time."""

    def __init__(self, done: subprocess.CompletedProcess[str], folder: Path) -> None:
        self.status, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        self.folder = folder

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("trace-*"))

    @property
    def lines(self) -> list[str]:
        return self.of(self.files[0])

    def of(self, path: Path) -> list[str]:
        if path.suffix == ".ring":
            from mldebug.tracing._ring_read import RingReader

            raw = [line.decode() for line in RingReader(path).lines()]
        else:
            raw = path.read_text("utf-8", "surrogateescape").splitlines()
        return [re.sub(r"^(\d+ )?\d+:\d\d:\d\d ", r"\1", line) for line in raw if not line.startswith("#")]


@pytest.fixture
def traced(python: str, tmp_path: Path) -> Callable[..., Done]:
    """`traced(program, options="ring=1 << 20", under="with")`: run its main() in NicerTrace, or all of it bare."""

    def run(program: str, options: str = "", *, bare: bool = False, env: dict[str, str] | None = None) -> Done:
        folder = tmp_path / "traces"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        text = textwrap.dedent(program)
        if not bare:
            text += (
                "\nif __name__ == '__main__':\n"
                "    from mldebug.tracing import NicerTrace\n"
                f"    tracer = NicerTrace(output={str(folder)!r}, {options})\n"
                "    tracer(main)()\n"
            )
        path = tmp_path / "prog.py"
        path.write_text(text)
        done = subprocess.run(
            [python, str(path)], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OUT": str(folder), **(env or {})},
        )  # fmt: skip
        return Done(done, folder)

    return run
