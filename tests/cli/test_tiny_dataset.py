"""`mldebug tiny-dataset`: options, output, exit status, and errors of two lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.cli import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{i}", "label": i // 10}) + "\n" for i in range(40)))
    return path


def test_rows_of_a_file(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny-dataset", str(source), "-n", "5", "-o", str(tmp_path / "tiny")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "5 rows" in out and "rows: first, seed 0" in out and "text string" in out
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == [
        "README.md", "data", "mldebug_dataset.json",
    ]  # fmt: skip


def test_one_document_on_stdout(source: Path, tmp_path: Path, run_python: Run) -> None:
    arguments = [str(source), "-n", "6", "--rows", "stratified", "--seed", "4", "-o", str(tmp_path / "tiny"), "--json"]
    done = run_python("-m", "mldebug", "tiny-dataset", *arguments)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] and document["seed"] == 4 and document["splits"]["train"]["rows"] == 6
    assert document["path"] == str(tmp_path / "tiny") and document["columns"]["label"] == "int64"


def test_unpack_and_pack(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, made = tmp_path / "records", tmp_path / "set"
    assert main(["tiny-dataset", "unpack", str(source), "-n", "3", "-o", str(records)]) == 0
    assert (records / "00" / "text.txt").exists()
    assert main(["tiny-dataset", "pack", str(records), "-n", "500", "--unique", "-o", str(made), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["rows"] == 500 and document["records"] == 3 and document["unique"]


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["{source}", "-n", "0", "-o", "{out}"], "'0' is not a whole number of 1 or more", 2),
        (["{source}", "-n", "5"], "no folder to write to", 2),
        (["{source}", "-o", "{out}"], "--num-rows", 2),
        (["{source}x", "-n", "5", "-o", "{out}"], "did you mean", 2),
        (["{broken}", "-n", "5", "-o", "{out}"], "broken.jsonl:1", 1),
        (["{source}", "-n", "5", "-o", "{out}", "--rows", "best"], "invalid choice", 2),
        (["{source}", "-n", "5", "-o", "{out}", "--max-bytes", "much"], "no size", 2),
        (["{source}", "-n", "5", "-o", "{out}", "--rows", "stratified", "--by", "lable"], "label", 2),
        (["some/set", "-n", "5", "-o", "{out}", "--offline"], "offline", 2),
        (["pack", "{out}", "-o", "{out}"], "no such folder", 2),
        (["unpack", "{source}", "-n", "0", "-o", "{out}"], "'0' is not", 2),
    ],
)
def test_errors_of_two_lines(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, status: int
) -> None:
    (tmp_path / "broken.jsonl").write_text("{{{\n")
    names = {"source": str(source), "out": str(tmp_path / "out"), "broken": str(tmp_path / "broken.jsonl")}
    assert main(["tiny-dataset", *(word.format(**names) for word in arguments)]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mldebug: ") and "\nhint: " in err and said in err
    assert len(err.splitlines()) == 2 and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["tiny-dataset"], ["tiny-dataset", "unpack"]], ids=" ".join)
def test_bad_rows_are_skipped_when_asked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    source.write_text(source.read_text().replace('"t3"', '"t3'))
    command = [*words, str(source), "-n", "6", "--rows", "first", "-o", str(tmp_path / "tiny")]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert "data.jsonl:4: no JSON" in err and "hint: mend the source, or give --skip-bad" in err
    assert len(err.splitlines()) == 2 and not (tmp_path / "tiny").exists()
    assert main([*command, "--skip-bad"]) == 0
    assert "data.jsonl:4" in capsys.readouterr().out and (tmp_path / "tiny").is_dir()


@pytest.mark.parametrize("words", [["--help"], ["pack", "--help"], ["unpack", "--help"]], ids=" ".join)
def test_help_loads_nothing(words: list[str], run_python: Run) -> None:
    code = (
        "import sys; from mldebug.cli import main; main(['tiny-dataset', *sys.argv[1:]]);"
        "print(*sorted({'datasets', 'pyarrow', 'torch', 'PIL', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = run_python(code, *words)
    assert done.returncode == 0 and done.stderr.strip() == "" and "-o DIR" in done.stdout
