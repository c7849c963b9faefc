"""Wheel and sdist, built and used as somebody would: `python tests/benchmarks/wheel.py [--full] [--keep FOLDER]`.

Builds both with hatchling, of this environment or else of a fresh one (which pip fetches), and looks at what is in
them: all data files of the package, and no tests, tools or docs in the wheel, which stays under 500 kB. Then installs
the wheel into a clean virtual environment, outside the checkout, and runs `mldebug --help`, `mldebug --version`,
`mldebug demo` and the import of DebugUnderflowOverflow from it. Dependencies are those of this environment, which the
clean one is told to look into; --full installs them (minutes). Exit status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 500_000  # bytes of the wheel
OUTSIDE = ("tests", "tools", "docs", "examples", "tiny")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="install the dependencies too")
    parser.add_argument("--keep", metavar="FOLDER", help="leave wheel and sdist there")
    args = parser.parse_args()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = Path(args.keep) if args.keep else folder / "dist"
        copy_tracked(folder / "source")
        run([*builder(folder), "build", "-t", "sdist", "-t", "wheel", "-d", str(built.resolve())], folder / "source")
        [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
        problems += look_at(wheel, sdist)
        problems += use(wheel, folder, args.full)
    print("\n".join(problems) or "all is as it should be")
    return 1 if problems else 0


def copy_tracked(target: Path) -> None:
    """The files that git knows, as they are now: what a clean clone has."""
    for name in run(["git", "ls-files"], ROOT).splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def builder(folder: Path) -> list[str]:
    """The command of hatchling."""
    if find_spec("hatchling"):
        return [sys.executable, "-m", "hatchling"]
    python = make_venv(folder / "builder")
    run([python, "-m", "pip", "install", "--quiet", "hatchling"], folder)
    return [python, "-m", "hatchling"]


def look_at(wheel: Path, sdist: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        sources = {name.partition("/")[2] for name in tar.getnames()}
    tracked = run(["git", "ls-files"], ROOT).splitlines()
    package = {name for name in tracked if name.startswith("mldebug/") and (ROOT / name).exists()}
    data = {name for name in package if not name.endswith(".py")}
    size, source = wheel.stat().st_size, sdist.stat().st_size
    print(f"wheel: {size / 1e3:.0f} kB, {len(names)} files, {len(data)} of data; sdist: {source / 1e3:.0f} kB")
    problems = [f"the wheel has {size} bytes, more than {MOST}"] if size > MOST else []
    names |= {"mldebug/hang/mldebug_agent.pth"} if "mldebug_agent.pth" in names else set()  # it is moved to there
    problems += [f"not in the wheel: {name}" for name in sorted(package - names)]
    problems += [f"not in the sdist: {name}" for name in sorted({*package, "pyproject.toml", "LICENSE"} - sources)]
    problems += [f"in the wheel: {name}" for name in sorted(names) if name.partition("/")[0] in OUTSIDE]
    if any(name.startswith((".git/", ".venv/")) for name in sources):
        problems.append("the sdist has files of git or of a virtual environment")
    return problems


def use(wheel: Path, folder: Path, full: bool) -> list[str]:
    """The wheel in a clean environment; what does not work there."""
    python = make_venv(folder / "clean")
    run([python, "-m", "pip", "install", "--quiet", *([] if full else ["--no-deps"]), str(wheel)], folder)
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    if not full:
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = str(Path(python).with_name("mldebug"))
    seen, problems = "import mldebug; print(mldebug.__file__)", []
    if not Path(
        run([python, "-c", f"from mldebug import DebugUnderflowOverflow; {seen}"], folder).strip()
    ).is_relative_to(site):
        problems.append("the import came from somewhere else than the wheel")
    for words, status in (([command, "--help"], 0), ([command, "--version"], 0), ([command, "demo"], 0)):
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
        )
        print(f"mldebug {words[1]}: status {done.returncode}, {time.monotonic() - began:.1f} s")
        if done.returncode != status or not done.stdout:
            problems.append(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return problems


def make_venv(path: Path) -> str:
    venv.create(path, with_pip=True)
    return str(path / ("Scripts" if os.name == "nt" else "bin") / "python")


def environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
