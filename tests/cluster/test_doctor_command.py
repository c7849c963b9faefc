"""`mldebug doctor`: exit status, JSON, files, what its text looks like, and wrong usage."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from mldebug.cli import _doctor as command
from mldebug.cluster.health._remote import MARK
from mldebug.core.errors import UsageError
from tests.cluster.doctor_kit import Machine


def parse(*words: str) -> argparse.Namespace:
    parser = command.PARSER(prog="mldebug doctor", epilog=command.EPILOG)
    command.add_arguments(parser)
    parsed: argparse.Namespace = parser.parse_args(list(words))
    return parsed


def run(*words: str) -> int:
    return command.run(parse(*words))


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    return written(tmp_path, "sick", ecc_uncorrected=2)


@pytest.fixture
def well(tmp_path: Path) -> Path:
    return written(tmp_path, "well")


def written(folder: Path, name: str, **answers: Any) -> Path:
    machine = Machine(folder / name, gpus=2, rdma=2)
    machine.gpu(1).update(answers)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"schema": 1, "kind": "doctor", "nodes": [machine.look()], "failed": [], "notes": []}))
    return path


def test_the_bad_comes_first_with_its_hint(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(sick)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("node1: 1 bad, 0 to look at,") and lines[1] == ""
    assert lines[2].startswith("BAD   ECC") and "GPU 1: 2 uncorrected memory errors" in lines[2]
    assert "hint: drain the node" in lines[3] or "hint: drain the node" in lines[4]
    assert all(len(line) <= 80 for line in lines)
    levels = [line[:6].strip() for line in lines[2:] if line[:6].strip()]
    assert levels == sorted(levels, key=["BAD", "warn", "ok", "-"].index)


def test_the_same_of_several_gpus_is_one_line_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(tmp_path / "m", gpus=4, rdma=2)
    for index in (0, 1, 3):
        machine.gpu(index)["limit"] = 500000
    evidence = {"schema": 1, "kind": "doctor", "nodes": [machine.look()], "failed": [], "notes": []}
    (tmp_path / "m.json").write_text(json.dumps(evidence))
    assert run("--from", str(tmp_path / "m.json")) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "GPU 0-1,3: 500 W, and the default is 700 W" in text and "nvidia-smi -i 0,1,3 -pl 700" in text
    assert run("--from", str(tmp_path / "m.json"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["where"] for one in document["findings"] if one["level"] == "warn"] == ["GPU 0", "GPU 1", "GPU 3"]


def test_a_healthy_machine_is_status_0_and_quiet_prints_nothing(well: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(well)) == 0
    assert "node1: 0 bad" in capsys.readouterr().out
    assert run("--from", str(well), "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_json_is_one_line_with_culprits(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(sick), "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert (document["schema"], document["ok"], document["counts"]["bad"]) == (1, False, 1)
    reason = "2 uncorrected memory errors since the driver was loaded"
    assert document["culprits"] == [{"hosts": ["node1"], "where": "GPU 1", "check": "ECC", "reason": reason}]


def test_what_was_written_is_judged_again(
    sick: Path, well: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.json"
    assert run("--from", str(sick), "-o", str(out), "-q") == 1
    first = capsys.readouterr().out
    assert run("--from", str(out)) == 1
    assert capsys.readouterr().out == first


def test_a_file_for_each_host_and_all_of_them_judged(sick: Path, well: Path, tmp_path: Path) -> None:
    assert run("--from", str(sick), "-q", "-o", str(tmp_path / "doctor-%h.json")) == 1
    assert (tmp_path / f"doctor-{socket.gethostname()}.json").exists()
    assert run("--from", str(well), str(sick)) == 1 and run("--from", str(well)) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--hosts", "a", "--slurm", "1"],
        ["--from", "x.json", "--load"],
        ["--from", "x.json", "--hosts", "a"],
        ["--timeout", "5"],
        ["--fanout", "5"],
        ["--ssh-option", "Port=1"],
        ["--watch", "0"],
        ["--hosts", "-oProxyCommand=evil"],
        ["--slurm", "1; rm"],
        ["-o", "/nowhere/x.json"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(UsageError):
        run(*words)


def test_this_machine_and_its_answer_to_another(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pynvml")
    assert run() in (0, 1)
    assert "bad" in capsys.readouterr().out.splitlines()[0]
    assert run("--node") == 0
    (line,) = capsys.readouterr().out.splitlines()
    node = json.loads(line.removeprefix(MARK))
    assert line.startswith(MARK) and {"host", "sent", "gpu", "limits"} <= set(node)


def test_colours_are_for_terminals(sick: Path) -> None:
    from mldebug.cluster import doctor, load_doctor

    report = doctor(load_doctor([sick]))
    assert "\x1b" not in report.text()
    assert "\x1b[1;31mBAD" in report.text(color=True)


def test_importing_the_room_loads_neither_torch_nor_nvml(run_python: Any) -> None:
    program = (
        "import sys, mldebug.cluster; mldebug.cluster.doctor; import mldebug.cli._doctor\n"
        "print({'torch', 'pynvml', 'numpy', 'rich'} & set(sys.modules))"
    )
    assert run_python(program).stdout == "set()\n"
