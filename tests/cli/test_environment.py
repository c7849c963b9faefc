"""`mldebug --version --json`: what a bug report needs, quick, without secrets, with torch broken or absent."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mldebug
from mldebug.cli import _environment
from mldebug.cli._environment import environment, variables

ROOT = Path(mldebug.__file__).parent.parent


def test_it_has_what_a_bug_report_needs_and_loads_no_torch() -> None:
    program = "import json, sys; from mldebug.cli import main; main(['--version', '--json']); "
    program += "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert found["version"] == mldebug.__version__
    assert found["python"].endswith(platform.python_version())
    assert found["os"] and found["kernel"] and found["cpus"] >= 1
    assert isinstance(found["gpus"]["cards"], list)
    assert found["packages"]["torch"] == found["torch"]["version"]


def test_secrets_are_left_out_and_the_home_folder_is_a_tilde() -> None:
    home = os.path.expanduser("~")
    found = variables(
        {
            "HF_TOKEN": "hf_abc", "NCCL_API_KEY": "s1", "HF_HOME": f"{home}/hf", "TOKENIZERS_PARALLELISM": "false",
            "HF_ENDPOINT": "https://ada:pw@hub.example/x", "NCCL_DEBUG": "INFO", "AWS_SECRET": "s2", "SHELL": "/bin/sh",
            "MLDEBUG_PASSWORD": "s3", "LD_LIBRARY_PATH": f"/opt:{home}/lib:{home}dir",
        }
    )  # fmt: skip
    assert found == {
        "HF_ENDPOINT": "https://(hidden)@hub.example/x", "HF_HOME": "~/hf", "HF_TOKEN": "(hidden)",
        "LD_LIBRARY_PATH": f"/opt:~/lib:{home}dir", "MLDEBUG_PASSWORD": "(hidden)", "NCCL_API_KEY": "(hidden)",
        "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"torch/__init__.py": "raise OSError('libcudart.so.13')", "torch/version.py": "cuda: str = '13.0'"}, None),
        ({"torch/__init__.py": ""}, "version.py cannot be read: no such file or directory"),
        ({"torch/lib/x": ""}, "version.py cannot be read: no such file or directory"),
    ],
    ids=["import fails", "no version", "a folder only"],
)
def test_a_broken_torch_is_described_and_not_imported(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], files: dict[str, str], problem: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # -S: without site-packages, where the real one is
    done = run_python("-S", "-m", "mldebug", "--version", "--json", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    torch = json.loads(done.stdout)["torch"]
    assert torch.get("problem") == problem
    assert torch["path"].endswith("/torch")
    if problem is None:
        assert torch["cuda"] == "13.0"


def test_no_torch_is_said(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python("-S", "-m", "mldebug", "--version", "--json", env={"PYTHONPATH": str(ROOT)})
    found = json.loads(done.stdout)
    assert found["torch"] == {"problem": "torch is not installed"}
    assert found["packages"] == {}
    assert found["gpus"]["problem"] == "NVML: No module named 'pynvml'"


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(_environment, "_NVML_SECONDS", 0.05)
    monkeypatch.setattr(_environment, "_ask_nvml", lambda answer: release.wait(60))
    monkeypatch.setattr(_environment, "_amd", lambda root: {"cards": []})
    try:
        assert environment()["gpus"] == {"cards": [], "problem": "NVML did not answer in 0.05 s: the driver hangs"}
    finally:
        release.set()
