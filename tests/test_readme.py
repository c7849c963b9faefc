"""The README keeps its word: its python blocks and commands run, and its report is that of the demo."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKS = {"not run", "figures", "/figures", "output of: mldebug demo", "shortened"}

# What the commands of the README run.
TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).pow(2).mean().backward()
    optimizer.step()
print("trained with", args.lr)
"""


class Block(NamedTuple):
    """A fenced block: the comment before it, its language, its text, and the line that it begins at."""

    mark: str
    language: str
    text: str
    line: int


def blocks(readme: str) -> list[Block]:
    pattern = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<lang>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
    return [
        Block(found["mark"] or "", found["lang"], found["text"], readme.count("\n", 0, found.start()) + 1)
        for found in pattern.finditer(readme)
    ]


def of(language: str) -> list[Any]:
    found = [block for block in blocks(README) if block.language == language and block.mark != "not run"]
    return [pytest.param(block.text, id=f"line {block.line}") for block in found]


COMMANDS = [
    pytest.param(line.partition("#")[0].strip(), id=line)
    for param in of("bash")
    for line in param.values[0].splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def torch() -> Any:
    """Loaded before a test begins: its first optimizer sets TORCHINDUCTOR_CACHE_DIR, for good."""
    found = pytest.importorskip("torch")
    found.optim.SGD([found.zeros(1)])
    return found


@pytest.fixture
def names(torch: Any) -> dict[str, Any]:
    """What a reader has in his script before he copies a block."""
    model = torch.nn.Sequential()
    model.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1))
    model.head = torch.nn.Linear(8, 1)
    return {
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
        "criterion": torch.nn.MSELoss(),
        "inputs": torch.randn(3, 4),
        "targets": torch.randn(3, 1),
        "train": lambda: None,
    }


def train(names: dict[str, Any]) -> None:
    for _ in range(3):
        names["optimizer"].zero_grad()
        names["criterion"](names["model"](names["inputs"]), names["targets"]).backward()
        names["optimizer"].step()


@pytest.mark.parametrize("text", of("python"))
def test_python_blocks_run(text: str, names: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    from mldebug.numerics import _hub

    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(text, "README.md", "exec"), names)
        train(names)  # with what the block has attached
        attached = list(_hub.RECORDERS)
        for recorder in attached:
            assert recorder.report.event is None
            assert recorder.step == 3
        assert bool(attached) == bool(re.search(r"^DebugUnderflowOverflow\(", text, re.M))
    finally:
        for recorder in list(_hub.RECORDERS):
            recorder.remove()
    for name in re.findall(r"\"(\w+\.(?:png|jsonl))\"", text):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, tmp_path: Path, run_torch: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    if "my-model" in line:
        make_tokenizer(tmp_path / "my-model")
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "row {i}", "label": {i % 3}}}\n' for i in range(300)))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if line.startswith("mldebug "):
        done = run_torch("-m", *shlex.split(line), cwd=tmp_path, timeout=110)
    elif line.startswith("torchrun "):
        words = ("-m", "torch.distributed.run", *shlex.split(line)[1:])
        done = run_torch(ROOT / "tests" / "forked.py", *words, cwd=tmp_path, timeout=110)
    else:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "train.py" in line:
        assert "trained with" in done.stdout
    for name in re.findall(r"\S+\.(?:png|jsonl)", line):
        assert (tmp_path / name).stat().st_size > 0
    for name in re.findall(r"-o (\S+-tiny)", line):
        assert list((tmp_path / name).iterdir())


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 600 tokens, learnt from the README."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([README], vocab_size=600, show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_change_of_import_works() -> None:
    pytest.importorskip("transformers")
    (param,) = of("diff")
    found: dict[str, Any] = {}
    for line in param.values[0].splitlines():
        names: dict[str, Any] = {}
        exec(line[1:], names)
        found[line[0]] = names["DebugUnderflowOverflow"]
    assert found["-"].__module__.startswith("transformers")
    assert found["+"].__module__.startswith("mldebug")


def test_the_report_is_what_the_demo_prints(run_torch: Any) -> None:
    """All but the numbers: another processor rounds differently."""
    pytest.importorskip("transformers")
    (shown,) = [block.text for block in blocks(README) if block.mark == "output of: mldebug demo"]
    done = run_torch("-m", "mldebug", "demo", timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    rest = without_numbers(done.stdout)
    assert rest.startswith(without_numbers(shown.partition("[...]")[0]))
    for piece in filter(None, map(without_numbers, shown.split("[...]"))):
        assert piece in rest, f"not in the demo's output, or in another order:\n{piece}"
        rest = rest.partition(piece)[2]


def without_numbers(text: str) -> str:
    return re.sub(r"(?<![\w.\[])[\d.]+(e[+-]\d+)?(?![\w\[])", "#", " ".join(text.split()))


def test_the_report_check_can_fail() -> None:
    assert without_numbers("step\n  77, in block.0.wo 6.55e+04 input[0]") == "step #, in block.0.wo # input[0]"
    assert without_numbers("inf output") != without_numbers("1.0 output")


def test_every_block_and_mark_is_known() -> None:
    assert {block.language for block in blocks(README)} == {"python", "bash", "text", "diff"}
    assert set(re.findall(r"^<!-- (.*?) -->$", README, re.M)) == MARKS
    assert README.count("\n```") == 2 * len(blocks(README))
    assert len(COMMANDS) >= 3 and len(of("python")) >= 5
    assert blocks("<!-- not run -->\n```bash\nmake\n```\n")[0] == Block("not run", "bash", "make\n", 1)


def test_figures_are_measured_ones() -> None:
    """A factor in the README stands in docs/measurements.md."""
    table = README.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    measurements = ROOT / "docs" / "measurements.md"
    known = measurements.read_text(encoding="utf-8") if measurements.exists() else ""
    factors = {factor for factor in re.findall(r"\d+\.\d+x", table) if factor != "1.00x"}
    assert factors <= set(re.findall(r"\d+\.\d+x", known))


def test_files_that_the_readme_names_are_there() -> None:
    for name in re.findall(r"`((?:docs|tests)/[\w./]+|[A-Z]+\.md)`", README):
        assert (ROOT / name).exists() or name == "docs/measurements.md", name
