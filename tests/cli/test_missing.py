"""Packages that are not installed: one error and status 2, and never a traceback of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mldebug
from mldebug.cli import COMMANDS
from mldebug.cli._missing import DISTRIBUTIONS, EXTRAS, as_usage_error, require
from mldebug.core.errors import UsageError

# Runs each command line of stdin where no module named in argv can be imported; prints the status and stderr of each.
WITHOUT = """
import contextlib, io, json, sys, traceback
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from mldebug.cli import main
seen = []
for argv in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(argv)
        except BaseException:
            status = traceback.format_exc()
    seen.append((status, err.getvalue()))
print(json.dumps(seen))
"""

# What each command is given, and the package that it names where nothing of torch's world is installed. The others
# work without: they run a program, read files or look at the machine.
NEEDS = {
    "overflow": (["--", "SCRIPT"], "torch"),
    "compare": (["run-a", "run-b"], "torch"),
    "memory": (["--", "SCRIPT"], "torch"),
    "dataloader": (["--", "SCRIPT"], "torch"),
    "mfu": (["--model", "llama-7b", "--tokens-per-second", "100"], "torch"),
    "mamf": ([], "torch"),
    "comms": ([], "torch"),
    "allreduce": ([], "torch"),
    "dist-test": ([], "torch"),
    "pairs": (["--backend", "gloo", "--nproc", "2"], "torch"),
    "tiny-model": (["gpt2", "-o", "made"], "torch"),
    "tiny-tokenizer": (["gpt2", "-o", "made"], "huggingface_hub"),
    "tiny-dataset": (["json", "-n", "3", "-o", "made"], "datasets"),
    "demo": ([], "torch"),
    "completion": (["bash"], "shtab"),
}
ABSENT = [*DISTRIBUTIONS, *EXTRAS]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str]]:
    folder = tmp_path_factory.mktemp("missing")
    (folder / "train.py").write_text("print('trains')\n")
    lines = [
        [name, *(word.replace("SCRIPT", str(folder / "train.py")) for word in words)]
        for name, (words, _package) in NEEDS.items()
    ]
    command = [sys.executable, "-c", WITHOUT, ",".join(ABSENT)]
    done = subprocess.run(
        command, check=False, input=json.dumps(lines), capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]  # nothing is left behind
    return dict(zip(NEEDS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", NEEDS)
def test_a_command_says_which_package_it_needs(seen: dict[str, tuple[object, str]], name: str) -> None:
    status, err = seen[name]
    package = NEEDS[name][1]
    first, second = err.splitlines()
    assert status == 2
    assert first == f"mldebug: {package} is not installed for the Python that runs this: {sys.executable}"
    assert second.startswith(f"hint: pip install {package}; ")


def test_the_other_commands_are_those_that_need_none() -> None:
    light = {"spy", "watch", "trace", "trace-tail", "doctor", "numa", "logs", "printflock", "emulate", "troubleshoot"}
    assert set(COMMANDS) == set(NEEDS) | light


@pytest.mark.parametrize(
    ("importer", "name", "hint"),
    [
        ("mldebug.room._file", "matplotlib.pyplot", "[plot]"),
        ("mldebug.room._file", "PIL.Image", "pip install pillow; "),
        ("mldebug.room._file", "their_package", None),
        ("transformers.utils", "torch", None),  # it looks for itself, and says so
        ("loaders", "torch", None),
    ],
)
def test_only_what_we_import_is_ours_to_say(importer: str, name: str, hint: str | None) -> None:
    source = f"raise ModuleNotFoundError('No module named {name}', name={name!r})"
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(source, {"__name__": importer})
    error = as_usage_error(caught.value)
    assert (error is None) if hint is None else (error is not None and hint in error.hint)


def test_a_module_that_a_script_misses_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def load():\n    import numpy\n\nload()\n")
    without = "import sys; sys.modules['numpy'] = None; from mldebug.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", without, "trace", "-o", str(tmp_path / "t.txt"), "--", str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert f'File "{script}", line 2, in load' in done.stderr
    assert "pip install" not in done.stderr


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (
            {"torch/__init__.py": "raise OSError('libcudnn.so.9: cannot open shared object file: No such file')"},
            "torch cannot be imported: OSError: libcudnn.so.9: cannot open shared object file: No such file",
            "LD_LIBRARY_PATH",
        ),
        (
            {
                "torch/__init__.py": "import torch._C",
                "torch/_C.py": "raise ImportError('undefined symbol: nccl')",
            },
            "torch cannot be imported: ImportError: undefined symbol: nccl",
            "-c 'import torch'` shows all of it",
        ),
        (
            {"torch/__init__.py": "import not_there_at_all"},
            "torch cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'",
            "rename it",
        ),
        ({"torch.py": "x = 1"}, "torch cannot be imported: ", "torch.py is yours, it hides the package"),
    ],
)
@pytest.mark.parametrize(
    "words", [["overflow", "--", "train.py"], ["memory", "--", "train.py"], ["compare", "a", "b"], ["demo"]]
)
def test_a_package_that_cannot_be_loaded_is_an_error_with_its_cause(
    tmp_path: Path, files: dict[str, str], message: str, hint: str, words: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("import torch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(mldebug.__file__).parents[1])])}
    done = subprocess.run(
        [sys.executable, "-m", "mldebug", words[0], "--json", *words[1:]],
        check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"mldebug: {message}")
    assert second.startswith("hint: ")
    assert hint in second
    assert json.loads(done.stdout)["error"]["message"] in first


def test_a_package_that_fails_under_a_script_is_the_scripts_to_show(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudnn.so.9')")
    (tmp_path / "train.py").write_text("import torch")
    done = subprocess.run(
        [sys.executable, "-m", "mldebug", "trace", "-q", "--", "train.py"],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "OSError: libcudnn.so.9"


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shtab").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "shtab", raising=False)
    with pytest.raises(UsageError, match="shtab is not installed"):
        require("shtab")


@pytest.mark.parametrize(
    "words", [["comms", "--nproc", "2"], ["pairs", "--backend", "gloo", "--nproc", "2"], ["dist-test", "--nproc", "2"]]
)
def test_ranks_that_cannot_load_a_package_say_why(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open it')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(mldebug.__file__).parents[1])])}
    done = subprocess.run(
        [sys.executable, "-m", "mldebug", *words],
        check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ImportError: libcudart.so.12: cannot open it" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
