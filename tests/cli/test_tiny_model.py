"""`mldebug tiny-model`: options, output, exit status, and errors of two lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.cli import main
from mldebug.cli._tiny_model import parse_settings
from mldebug.core.errors import UsageError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_model_of_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny-model", "llama", "-o", str(tmp_path / "tiny"), "--layers", "2"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out and "ok   reload" in out and "import" in out
    assert (tmp_path / "tiny" / "model.safetensors").exists()


def test_one_document_on_stdout(tmp_path: Path, run_python: Run) -> None:
    done = run_python("-m", "mldebug", "tiny-model", "llama", "-o", tmp_path / "tiny", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] and document["path"] == str(tmp_path / "tiny")
    assert all(set(check) == {"ok", "why"} for check in document["checks"].values())
    assert done.stderr == ""


def test_a_check_that_fails_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny-model", "llama", "--budget", "1kB", "-q"]) == 1
    assert "FAIL budget" in capsys.readouterr().out
    assert main(["tiny-model", "llama", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_fields_are_set_and_the_recipe_rebuilds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert (
        main(["tiny-model", "llama", "-o", str(first), "--set", "rms_norm_eps=0.25", "--set", "hidden_act=relu"]) == 0
    )
    config = json.loads((first / "config.json").read_text())
    assert (config["rms_norm_eps"], config["hidden_act"]) == (0.25, "relu")
    assert main(["tiny-model", "--from-recipe", str(first / "mldebug_recipe.json"), "-o", str(again)]) == 0
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert "byte for byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["lama"], "lama", None),
        ([], "no source", 2),
        (["llama", "--layers", "0"], "'0' is not a whole number of 1 or more", 2),
        (["llama", "--seed", "x"], "'x' is not a whole number", 2),
        (["llama", "--set", "hidden_size"], "--set hidden_size: there is no NAME=VALUE in it", 2),
        (["llama", "--set", "hidden_sze=3"], "hidden_size", None),
        (["llama", "--budget", "big"], "the budget 'big' is no size", 2),
        (["llama", "--dtype", "int8"], "int8", None),
        (["--from-recipe", "nowhere.json"], "cannot read the recipe nowhere.json: no such file", 1),
        (
            ["llama", "--from-recipe", "nowhere.json", "--layers", "2"],
            "--from-recipe is given with SOURCE, --layers",
            2,
        ),
        (["no/such/folder"], "no/such/folder", None),
        (["config.json"], "config.json", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_two_lines_and_nothing_is_written(
    arguments: list[str],
    said: str,
    status: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["tiny-model", *arguments, "-o", "tiny", "--offline"])
    lines = capsys.readouterr().err.splitlines()
    assert code == status if status is not None else code in (1, 2)
    assert len(lines) == 2 and lines[0].startswith("mldebug: ") and lines[1].startswith("hint: "), lines
    assert said in lines[0] + lines[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("a=2", 2),
        ("a.b=x", "x"),
        ("a=None", None),
        ("a=true", True),
        ("a=True", True),
        ("a=[1, 2]", [1, 2]),
        ("a=1e-5", 1e-5),
        ("a=", ""),
        ("a=b=c", "b=c"),
    ],
)
def test_values_are_read(pair: str, value: object) -> None:
    assert parse_settings([pair]) == {pair.partition("=")[0]: value}


def test_a_setting_needs_a_name() -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_settings(["=3"])


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from mldebug.tiny.model import _checks\n"
        "_checks.run_checks = lambda subject: (print('checking', file=sys.stderr, flush=True), time.sleep(60))\n"
        "from mldebug.cli import main\n"
        f"sys.exit(main(['tiny-model', 'llama', '-o', {str(tmp_path / 'tiny')!r}]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline() == "checking\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and rest.splitlines() == ["mldebug: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_heavy(run_python: Run) -> None:
    program = (
        "import sys\nfrom mldebug.cli import main\nmain(['tiny-model', '--help'])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    assert run_python(program).stdout.splitlines()[-1] == "[]"
