"""The documentation keeps its word: each command line in it parses, and runs unless it needs what a test has not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mldebug.cli import COMMANDS, parser_of
from mldebug.core.errors import MldebugError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# What is not run, and why. The marks `<!-- needs a cluster -->` and `<!-- not run: why -->` before a block do the same.
# What tests/test_readme.py leaves out, by a plain `<!-- not run -->`, is looked at here.
NOT_RUN = {
    r"\b(srun|mpirun|kubectl)\b|--(hosts|hostfile|slurm|pods|nnodes)\b": "needs a cluster",
    r"^torchrun |-- (torchrun|accelerate) ": "needs as many CPUs or GPUs as ranks; tests of the command have two",
    r"^mldebug (mamf|allreduce|comms(?! --from)|pairs(?! --from)|dist-test(?!.*--nproc 2|.*--from))": "needs GPUs",
    r"^mldebug dataloader(?!.*--seconds 5)|--no-python|--load|--watch": "needs GPUs, or takes a minute",
    r"-m project|project\.data|path/to|MODEL|DATA|train\.jsonl|shards/|c4|tekken": "needs the reader's files",
    r"\.\.\.|/scratch|config\.json|node\.sh|logs/|~/": "needs the reader's files or folders",
    r"^mldebug (spy|numa$)|--diff": "looks at this machine, whatever runs there",
    r"^mldebug demo$": "tests/test_readme.py",
    r"--from (?!\S*recipe)|doctor-": "reads what a command above has measured",
    r"^mldebug troubleshoot( stuck)?$": "asks in a terminal",
    r"traces/|^mldebug trace-tail \.$|slurm-4711|unpack|pack records": "another line does the same",
    r"^mldebug dist-test --nproc 2$": "another line does the same",
    r"^python |^tools/": "tests/tools, and tests/benchmarks by hand",
    r"> |\|\|| \| ": "the shell of the reader",
}
# Commands whose exit status 1 is an answer, and not a failure.
JUDGES = {"logs", "trace-tail", "doctor", "dataloader", "compare"}

TRAIN = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_known_args()[0]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _, (batch,) in zip(range(args.steps), DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
print("trained with", args.lr)
"""

# Runs each line in a child of one process that has loaded the libraries, so that they are loaded once.
RUNNER = """
import atexit, gc, json, os, shlex, signal, sys, time
import datasets, torch, transformers
from mldebug.cli import main
torch.optim.SGD([torch.zeros(1)])  # the first one loads a lot more
gc.freeze()
results = []
for line in json.load(sys.stdin):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = shlex.split(line)
        status = main()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)  # taking the libraries apart would take a second
    deadline, status = time.monotonic() + 240, None
    while status is None:
        done, ended = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(ended)
        elif time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        else:
            time.sleep(0.02)
    results.append([line, status, open("out.txt", errors="replace").read()[-3000:]])
json.dump(results, sys.stdout)
"""


class Line(NamedTuple):
    """A command line of a page: its text, where it stands, and why it is not run, if it is not."""

    text: str
    page: str
    reason: str


def lines_of(text: str, page: str = "") -> Iterator[Line]:
    """Command lines in blocks of bash and in indented blocks, without their remarks."""
    mark, language, joined = "", None, ""
    for raw in text.splitlines():
        if found := re.fullmatch(r"<!-- (.*) -->", raw):
            mark = found[1]
        elif raw.startswith("```"):
            language = raw[3:] if language is None else None
            mark = mark if language is not None else ""
        elif language == "bash" or (language is None and raw.startswith("    ")):
            joined += re.split(r"\s+#|(?<=\S)\s{3,}", raw.strip())[0]
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            if is_command(joined):
                reason = mark if mark.startswith(("needs", "not run: ")) else why_not_run(joined)
                yield Line(joined, page, reason or ("tests/test_readme.py" if page == "README.md" and not mark else ""))
            joined = ""


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command in a line of the shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&>"):
            yield words
            words = []
        else:
            words.append(word)


def is_command(line: str) -> bool:
    first = line.partition(" ")[0]
    if first == "mldebug":
        return re.match(r"mldebug [a-z-]+(?![\w:])(?!.*: rank=)", line) is not None
    return (
        first.startswith(("torchrun", "srun", "mpirun", "python", "tools/"))
        and re.search(r"\bmldebug\b|\.py\b", line) is not None
    )


def each_once(texts: Iterable[str]) -> list[str]:
    """Without the lines that say what one before says, with the options in another order."""
    found: dict[str, str] = {}
    for text in texts:
        _, name, *arguments = shlex.split(text)
        found.setdefault(f"{name} {sorted(vars(parser_of(name).parse_args(arguments)).items())}", text)
    return list(found.values())


def why_not_run(line: str) -> str:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), "")


LINES = [line for page in PAGES for line in lines_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))]


def test_every_command_line_parses() -> None:
    wrong = []
    for line in LINES:
        if "mldebug" not in line.text:
            continue
        for words in commands_of(line.text):
            if "mldebug" not in words or "..." in words:
                continue
            name, *arguments = words[words.index("mldebug") + 1 :]
            if name == "--version":
                continue
            try:
                assert name in COMMANDS, f"no command {name}"
                parser_of(name).parse_args(arguments)
            except (MldebugError, AssertionError) as exc:
                wrong.append(f"{line.page}: {line.text}: {exc}")
    assert not wrong, "\n".join(wrong)
    assert len(LINES) > 200


@pytest.mark.timeout(900)
def test_the_command_lines_run(tmp_path: Path, run_python: Run) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("could not import 'torch'")
    elsewhere = {line.text for line in LINES if line.reason == "tests/test_readme.py"}
    texts = list(dict.fromkeys(line.text for line in LINES if not line.reason and line.text not in elsewhere))
    texts = each_once(part.strip() for text in texts for part in text.split("; "))
    prepare(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"OMP_NUM_THREADS": "1", "PATH": path}
    done = run_python(RUNNER, cwd=tmp_path, timeout=600, input=json.dumps(texts), env=environment)
    assert done.returncode == 0, done.stderr
    wrong = []
    for text, status, out in json.loads(done.stdout):
        fine = (0, 1) if text.split()[1] in JUDGES else (0,)
        if status not in fine or "Traceback (most recent call last)" in out.replace("    Traceback", ""):
            wrong.append(f"{text}\nexit status {status}\n{out}")
    assert not wrong, "\n\n".join(wrong)
    assert len(texts) >= 20


def prepare(folder: Path) -> None:
    """What a reader has beside him."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "data.jsonl").write_text("".join(f'{{"text": "row {i}", "label": {i % 3}}}\n' for i in range(300)))
    log = "".join(f"[rank{rank}]: step {step} loss {9 - step}.00\n" for step in range(5) for rank in range(4))
    (folder / "job.log").write_text(log)
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([PAGES[-1].read_text(encoding="utf-8")], vocab_size=600, show_progress=False)
    (folder / "my-model").mkdir()
    tokenizer.save(str(folder / "my-model" / "tokenizer.json"))


def test_reading_of_pages() -> None:
    text = """
```bash
mldebug overflow -- train.py   # watch
srun mldebug pairs
```
    mldebug trace \\
        -- train.py
    mldebug: not a command
    mldebug memory: rank=0/1 host=vm
<!-- not run: because -->
```bash
mldebug demo
```
"""
    found = [(line.text, bool(line.reason)) for line in lines_of(text)]
    assert found == [
        ("mldebug overflow -- train.py", False), ("srun mldebug pairs", True), ("mldebug trace -- train.py", False),
        ("mldebug demo", True),
    ]  # fmt: skip


def test_lines_that_say_the_same_run_once() -> None:
    lines = ["mldebug logs a b --json", "mldebug logs --json a b", "mldebug logs b a --json"]
    assert each_once(lines) == [lines[0], lines[2]]


def test_generated_pages_are_fresh(run_python: Run) -> None:
    done = run_python(ROOT / "docs" / "generate.py", "--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_told(run_python: Run, tmp_path: Path) -> None:
    """Of a copy: a page that was edited, one that is missing, and one of a command that is no more."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = tmp_path / "docs" / "commands"
    (commands / "spy.md").write_text("edited")
    (commands / "logs.md").unlink()
    (commands / "gone.md").write_text("")
    done = run_python(tmp_path / "docs" / "generate.py", "--check")
    assert done.returncode == 1
    assert done.stderr.count("stale: ") == 3
    assert run_python(tmp_path / "docs" / "generate.py").returncode == 0
    assert run_python(tmp_path / "docs" / "generate.py", "--check").returncode == 0
    assert (commands / "spy.md").read_text() == (ROOT / "docs" / "commands" / "spy.md").read_text()
    assert not (commands / "gone.md").exists()


def test_outputs_in_trouble_pages_are_those_of_the_examples() -> None:
    marks = [
        mark
        for page in (ROOT / "docs" / "troubles").glob("*.md")
        for mark in re.findall(r"<!-- output of: (.*) -->", page.read_text())
    ]
    assert len(marks) >= 10
    for mark in marks:
        assert mark.startswith("mldebug mfu") or (ROOT / mark).is_file(), mark


def test_the_output_of_mfu_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from mldebug.cli import main

    page = (ROOT / "docs" / "troubles" / "half-speed.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- output of: mldebug (mfu .*) -->\n```text\n(.*?)```", page, re.S)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    assert capsys.readouterr().out == found[2]


def test_examples_that_pages_name_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`(examples/\w+\.py)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_ci_builds_the_site() -> None:
    """By `make docs`, strictly: a link to nowhere or a name that is not found fails. CI calls it."""
    assert "make docs" in (ROOT / ".ci" / "run").read_text()
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
