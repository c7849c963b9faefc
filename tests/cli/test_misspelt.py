"""What a newcomer types: options that are misspelt or cut short, and files that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldebug.cli import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(words)
    told = capsys.readouterr()
    assert told.out == ""
    return status, told.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("mfu", "--tokens-per-secnd", "1"), "did you mean --tokens-per-second?"),  # the right one is required
        (("mfu", "--tokens_per_secnd=1", "--model", "x"), "did you mean --tokens-per-second?"),
        (("mfu", "--tokens-per", "1", "--model", "x"), "did you mean --tokens-per-second?"),
        (("mfu", "--model", "x"), "`mldebug mfu --help` lists the options"),
        (("comms", "--bakend", "gloo"), "did you mean --backend?"),
        (("comms", "--min", "3"), "`mldebug comms --help` lists the options"),  # --minbytes or --min-busbw
        (("numa", "--splt", "--", "train.py", "--spli"), "did you mean --split?"),
        (("numa", "--", "-m"), "mldebug numa -- train.py, or mldebug numa -- -m package.module"),
        (("memory", "-m", "train"), "the script goes after `--`: mldebug memory -- -m package.module"),
        (("tiny-dataset", "pack", "--jsn", "x"), "did you mean --json?"),
        (("doctor", "--qqqqqq"), "`mldebug doctor --help` lists the options"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_the_option_that_was_meant(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], hint: str) -> None:
    status, err = said(capsys, *words)
    assert status == 2 and err.splitlines()[-1] == f"hint: {hint}", err


@pytest.mark.parametrize(
    "words",
    [
        "spy --from {}", "pairs --from {}", "comms --from {}", "dist-test --from {}", "doctor --from {}",
        "memory -- {}", "dataloader -- {}", "dataloader {}:make", "numa -- {}", "numa --no-python -- {}",
        "overflow -- {}", "trace -- {}", "printflock -- {}", "compare --record {}.d -- {}", "trace-tail {}", "logs {}",
        "mfu --tokens-per-second 1 --model {}", "mfu --tokens-per-second 1 --model llama2-7b --mamf {}",
        "mamf --model {}", "mamf --resume {}", "compare {} {}",
    ],
)  # fmt: skip
def test_a_file_that_is_not_there_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "gone.json" if "model" in words or "from" in words else "gone.py"
    status, err = said(capsys, *(word.format(name) for word in words.split()))
    lines = err.splitlines()
    assert status == 2 and len(lines) == 2, err  # and nothing was printed before
    assert lines[0].startswith("mldebug: ") and name in lines[0] and lines[1].startswith("hint: ")
    assert not list(tmp_path.iterdir()), "nothing is left behind"
