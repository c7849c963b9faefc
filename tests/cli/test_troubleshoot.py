"""Three questions and a command: in a terminal, with answers as arguments, and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mldebug
from mldebug.cli import COMMANDS, main, parser_of
from mldebug.cli._troubles import TROUBLES, WHERE

ROOT = Path(mldebug.__file__).parent.parent
ALL = [
    (trouble, sign, where) for trouble, one in TROUBLES.items() for sign in one.signs for where in WHERE
]  # fmt: skip


def test_answers_as_arguments_need_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["troubleshoot", "stuck", "now", "slurm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("    mldebug spy --slurm JOB\n")
    assert "If it finds nothing: " in out
    assert main(["troubleshoot", "stuck", "now", "slurm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "mldebug spy --slurm JOB"
    assert document["ok"] is True and document["reason"] and document["otherwise"]
    assert main(["troubleshoot", "stuck", "now", "slurm", "-q"]) == 0
    assert capsys.readouterr().out == "mldebug spy --slurm JOB\n"


def test_every_command_that_is_proposed_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options parse; its page exists; it fits the terminal."""
    seen = set()
    for trouble, sign, where in ALL:
        assert main(["troubleshoot", trouble, sign, where]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        assert main(["troubleshoot", trouble, sign, where, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        words = shlex.split(document["command"])
        at = words.index("mldebug")
        name, arguments = words[at + 1], words[at + 2 :]
        parser_of(name).parse_args(arguments)
        seen.add(name)
        assert (ROOT / document["page"]).is_file(), document["page"]
    assert len(seen) >= 15 and seen < set(COMMANDS)


def test_list_has_all_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["troubleshoot", "--list"]) == 0
    out = capsys.readouterr().out
    for trouble, sign, where in ALL:
        assert f"  {trouble} {sign}: " in out and f"\n  {where}: " in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["troubleshoot", "--list", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [(one["trouble"], one["sign"], one["where"]) for one in answers] == ALL


def test_what_is_to_be_replaced_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["troubleshoot", "numbers", "nan", "ssh"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Run it on each node. Put your own in the place of: train.py, node01:29500, " in out
    assert "--rdzv-backend c10d" in out  # torchrun's own default makes every node the first
    assert main(["troubleshoot", "stuck", "now", "node"]) == 0
    assert "Put your own" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "stdin is no terminal", "numbers|stuck|died|slow|memory|output|before|small SIGN WHERE"),
        (["stuck"], "stdin is no terminal", "stuck now|sometimes|start WHERE"),
        (["stuck", "now"], "stdin is no terminal", "stuck now one|node|slurm|ssh|pods"),
        (["stuk"], "invalid choice: 'stuk'", "did you mean stuck?"),
        (["stuck", "nan"], "'nan' is not a sign of 'stuck'", "one of now, sometimes, start"),
        (["stuck", "now", "moon"], "invalid choice: 'moon'", "--help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_without_a_terminal_it_says_how_to_answer(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str, hint: str
) -> None:
    assert main(["troubleshoot", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and hint in err and err.count("\n") == 2


class Terminal:
    """`mldebug troubleshoot` in a terminal of its own; its stdout is a pipe."""

    def __init__(self, *words: str) -> None:
        self.fd, side = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mldebug", "troubleshoot", *words],
            stdin=side, stderr=side, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        os.close(side)

    def answer(self, text: str) -> None:
        """Write it once the program asks."""
        asked, deadline = self.seen.count("q to leave: "), time.monotonic() + 60
        while self.seen.count("q to leave: ") == asked and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 4096).decode()
        os.write(self.fd, text.encode())

    def end(self) -> tuple[int, str]:
        out = self.process.communicate(timeout=60)[0]
        while select.select([self.fd], [], [], 0)[0]:
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:  # the other side has gone
                break
        os.close(self.fd)
        return self.process.returncode, out


def test_it_asks_three_questions_in_a_terminal() -> None:
    terminal = Terminal("--json")
    for text in ("2\n", "99\n", "nonsense\n", "now\n", "\n", "2\n"):
        terminal.answer(text)
    status, out = terminal.end()
    assert status == 0
    assert json.loads(out)["command"] == "mldebug spy"
    assert "there is no answer '99'" in terminal.seen and "there is no answer 'nonsense'" in terminal.seen
    for question in ("What is wrong?", "What does it look like?", "Where does it run?"):
        assert terminal.seen.count(question) == 1


@pytest.mark.parametrize("way", ["end of input", "q", "ctrl-c"])
def test_leaving_in_the_middle(way: str) -> None:
    terminal = Terminal("slow")
    terminal.answer({"end of input": "\x04", "q": "q\n", "ctrl-c": ""}[way])
    if way == "ctrl-c":
        terminal.process.send_signal(signal.SIGINT)
    status, out = terminal.end()
    assert (status, out) == (130 if way == "ctrl-c" else 0, "")
    assert ("interrupted" in terminal.seen) == (way == "ctrl-c")
    assert "Traceback" not in terminal.seen
