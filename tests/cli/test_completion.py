"""The script for bash completes in a real bash; the other shells get theirs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mldebug.cli import COMMANDS, main
from mldebug.cli._completion import SHELLS


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "mldebug.bash"
    assert main(["completion", "bash", "-o", str(path)]) == 0
    return path


def completed(script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    program = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
        how=$(complete -p mldebug); function=${how#*-F }; function=${function%% *}
        "$function" mldebug "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", program, "bash", str(script), *words],
        cwd=folder, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return sorted(filter(None, (line.strip() for line in done.stdout.splitlines())))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["mldebug", "t"], ["tiny-dataset", "tiny-model", "tiny-tokenizer", "trace", "trace-tail", "troubleshoot"]),
        (["mldebug", "overflow", "--max"], ["--max-frames"]),
        (["mldebug", "overflow", "--check", ""], ["async", "each", "step"]),
        (["mldebug", "dist-test", "--back"], ["--backend"]),
        (["mldebug", "overflow", "tra"], ["train.py"]),
        (["mldebug", "troubleshoot", "st"], ["stuck"]),
        (["mldebug", "spy", "--from", "no"], ["node1.json"]),
        (["mldebug", "--v"], ["--version"]),
    ],
    ids=lambda value: " ".join(value) if "mldebug" in value else None,
)
def test_bash_completes(script: Path, tmp_path: Path, words: list[str], offered: list[str]) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "node1.json").touch()
    assert completed(script, tmp_path, *words) == offered


def test_bash_offers_all_commands(script: Path, tmp_path: Path) -> None:
    assert set(completed(script, tmp_path, "mldebug", "")) >= set(COMMANDS)


def test_each_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        out = capsys.readouterr().out
        assert "trace-tail" in out and "max-frames" in out
        checker = shutil.which(shell)
        if checker and shell != "tcsh":  # tcsh has no check without running
            subprocess.run([checker, "-n", "-c", out], check=True, timeout=60)
    assert main(["completion", "bash", "--json"]) == 0
    assert "_shtab_mldebug" in json.loads(capsys.readouterr().out)["script"]


def test_a_shell_that_is_not_known_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd.exe"]) == 2
    assert "invalid choice: 'cmd.exe'" in capsys.readouterr().err
    assert main(["completion", "bash", "-o", "no/where/x"]) == 2
