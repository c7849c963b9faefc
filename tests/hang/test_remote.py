"""`mldebug spy` on other nodes, with programs that stand in for ssh and kubectl: answers, failures, limits."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang import _evidence, judge, spy
from mldebug.hang import _remote_shape as shapes
from mldebug.hang._remote import collect_remote
from mldebug.hang._remote_frames import Damaged, FrameReader, frame, pack, unpack
from mldebug.hang._remote_gather import INTERRUPTED
from mldebug.hang._remote_shape import Unreadable
from mldebug.hang._remote_wire import Decoder, encode
from tests.hang.remote_kit import EVIDENCE, put_answer, put_answers, put_kubectl, put_program, put_ssh, recorded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CASES = sorted(path.stem for path in EVIDENCE.glob("*.json"))
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the false ssh answers from; it is first on PATH."""
    folder = tmp_path / "answers"
    folder.mkdir()
    put_ssh(tmp_path / "bin", folder)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    return folder


def status_of(evidence: Any) -> dict[str, str]:
    return {host["host"]: host["status"] for host in evidence["hosts"]}


def why_of(evidence: Any, name: str) -> str:
    return next(host.get("why", "") for host in evidence["hosts"] if host["host"] == name)


def carried(evidence: Any, name: str = "h") -> Any:
    """The evidence after a way through lines of text."""
    taken: dict[str, bytes] = {}
    reader = FrameReader(lambda host: True, taken.__setitem__)
    for line in pack(name, encode(evidence, 100_000)):
        reader.feed(line)
    return Decoder().evidence(name, unpack(taken[name]))


# What is sent


@pytest.mark.parametrize("case", CASES)
def test_evidence_survives_the_way(case: str) -> None:
    before = recorded(case)
    for rank in before["ranks"]:
        rank["host"] = "h"
    after = carried(copy.deepcopy(before))
    for rank in before["ranks"]:
        for process in (rank, *rank["children"]):
            process["command"] = process["command"].replace("\n", "\\n")
            for sample in process["samples"]:
                sample.setdefault("wchan", "")
                for thread in sample["threads"]:
                    for one in thread["frames"]:
                        if not one.get("locals", True):
                            del one["locals"]
    assert after["ranks"] == before["ranks"]
    assert after["source"] == before["source"]
    assert judge(after) == judge(before)


def test_every_field_is_carried() -> None:
    evidence = recorded("skip_collective")
    evidence["ranks"] = evidence["ranks"][:1]
    rank = evidence["ranks"][0]
    threads = rank["samples"][0]["threads"]
    threads[0] |= {"ticks": 7, "switches": 5, "io": 9}
    rank["samples"][0] |= {"woke": [1, 2], "io": [3, 4]}
    call = {"group": "0", "seq": 3, "op": "all_reduce", "done": True, "sizes": [[4, 2]], "p2p": True}
    rank |= {
        "why": "because", "local_world_size": 2, "user": "ada", "native": threads,
        "progress": {"step": [3, 4], "heartbeat": [1, 1]},
        "locks": [{"pid": 5, "kind": "FLOCK", "inode": "08:01:1", "waits": True, "file": "/tmp/x"}],
        "pipes": [{"fd": 3, "inode": "77", "write": False}],
        "nccl": [{"name": "a", "size": 4, "rank": 0, "status": "running", "issued": [{"AllReduce": 12}]}],
        "gpus": [{"index": 0, "busy": [100, 100]}],
        "record": {
            "calls": [{**call, "frames": threads[0]["frames"]}, {key: call[key] for key in list(call)[:4]}],
            "whole": True, "groups": {"0": {"desc": "default", "ranks": [0, 1]}},
        },
        "host": "h",
    }  # fmt: skip
    rank["children"] = [
        {"pid": 9, "parent": 5, "command": "x", "kind": "other", "state": "S", "samples": [], "why": "no Python",
         "pipes": rank["pipes"]}
    ]  # fmt: skip
    assert carried(copy.deepcopy(evidence))["ranks"] == evidence["ranks"]


@pytest.mark.parametrize(
    ("kind", "shape", "others"),
    [
        (_evidence.Rank, shapes.RANK, {"host", "samples", "children", "native", "record"}),
        (_evidence.Child, shapes.CHILD, {"samples"}),
        (_evidence.Sample, shapes.SAMPLE, {"time", "state", "ticks", "threads", "wchan"}),
        (_evidence.Thread, shapes.THREAD, {"name", "tid", "active", "gil", "frames", "ticks"}),
        (_evidence.Frame, {}, {"name", "file", "line", "locals"}),
        (_evidence.Local, {}, {"name", "repr", "arg"}),
        (_evidence.Call, {}, {"group", "seq", "op", "done", "sizes", "frames", "p2p"}),
        (_evidence.Record, {}, {"calls", "whole", "groups"}),
        (_evidence.Lock, shapes.LOCK, set()),
        (_evidence.Pipe, shapes.PIPE, set()),
        (_evidence.GroupInfo, shapes.GROUPS[str], set()),
        (_evidence.Communicator, shapes.COMMUNICATOR, set()),
        (_evidence.Gpu, shapes.GPU, set()),
        (_evidence.Source, shapes.SOURCE, set()),
        (_evidence.Evidence, {}, {"schema", "time", "hosts", "ranks", "notes", "source"}),
    ],
)
def test_evidence_has_no_field_that_would_be_lost_on_the_way(kind: Any, shape: Any, others: set[str]) -> None:
    assert set(kind.__annotations__) == {key.rstrip("?") for key in shape} | others


def test_an_old_record_is_cut_and_says_so() -> None:
    evidence = recorded("skip_collective")
    calls = [{"group": "0", "seq": number, "op": "barrier", "done": True} for number in range(50)]
    evidence["ranks"][0]["record"] = {"calls": calls, "whole": True}
    sent = Decoder().evidence("h", json.loads(json.dumps(encode(evidence, 10))))
    record = sent["ranks"][0]["record"]
    assert [call["seq"] for call in record["calls"]] == list(range(40, 50)) and not record["whole"]


def test_equal_things_are_shared_between_nodes() -> None:
    decoder = Decoder()
    document = json.loads(json.dumps(encode(recorded("skip_collective"), 100)))
    first, second = (decoder.evidence(name, copy.deepcopy(document))["ranks"][0]["samples"] for name in ("a", "b"))
    assert first[0]["threads"][0]["frames"][0] is second[0]["threads"][0]["frames"][0]
    assert len(b"".join(pack("a", document))) < (EVIDENCE / "skip_collective.json").stat().st_size / 3


def test_lines_are_short_and_noise_is_none() -> None:
    lines = list(pack("n1", encode(recorded("dataloader_fork_lock"), 100)))
    assert len(lines) > 3 and max(map(len, lines)) <= 1000
    found: list[str] = []
    reader = FrameReader({"n1"}.__contains__, lambda name, packed: found.append(unpack(packed)["host"]))
    data = b"Last login: today\n" + b"Unauthorized use is forbidden\n".join(lines)
    for start in range(0, len(data), 777):
        reader.feed(data[start : start + 777])
    assert len(found) == 1 and b"Last login" in reader.noise


def test_a_lost_line_is_no_answer_and_a_second_try_is() -> None:
    lines = list(frame("n1", b"QUJD" * 400))
    found: list[bytes] = []
    reader = FrameReader(lambda name: True, lambda name, packed: found.append(packed))
    for line in [*lines[:1], *lines[2:]]:
        reader.feed(line)
    assert found == []
    for line in lines:
        reader.feed(line)
    assert found == [b"QUJD" * 400]


def test_a_bomb_is_refused() -> None:
    with pytest.raises(Damaged):
        unpack(base64.b64encode(zlib.compress(b"[" + b"0," * 100_000_000 + b"0]", 9)))
    with pytest.raises(Damaged):
        unpack(base64.b64encode(zlib.compress(b"[" * 100_000)))
    with pytest.raises(Damaged):
        unpack(b"AAAA")
    with pytest.raises(Damaged):
        unpack(base64.b64encode(zlib.compress(b'{"a": 1}')[:-3]))


def damaged() -> Iterator[tuple[str, Any]]:
    """Documents with one thing wrong."""
    whole = json.loads(json.dumps(encode(recorded("skip_collective"), 100)))
    for key in whole:
        if key not in ("host", "id"):
            yield f"no {key}", {name: value for name, value in whole.items() if name != key}
        for value in (None, 7, "x", [1], {"a": 1}, [None], [[9999, 9999, 9999]], [["a", {}, []]]):
            if key not in ("host", "id", "time") and not (key == "notes" and value == []):
                yield f"{key}={value!r}", {**whole, key: value}
    for key in ("rank", "pid", "samples", "world_size", "state", "status"):
        for value in (-1, 1 << 80, "x", [[]], {}, True, 1.5):
            if key in ("state", "status") and value == "x":
                continue
            if (key, value) == ("pid", -1):
                continue
            changed = copy.deepcopy(whole)
            changed["ranks"][0][key] = value
            yield f"rank.{key}={value!r}", changed
    yield "a list", [whole]
    yield "a number", 7


@pytest.mark.parametrize("document", [pytest.param(value, id=name) for name, value in damaged()])
def test_what_is_no_evidence_is_refused(document: Any) -> None:
    with pytest.raises(Unreadable):
        Decoder().evidence("h", document)


def test_signs_that_a_terminal_obeys_are_escaped() -> None:
    evidence = recorded("skip_collective")
    evidence["ranks"][0]["command"] = "x\x1b]0;owned\x07\ny"
    assert carried(evidence)["ranks"][0]["command"] == "x\\x1b]0;owned\\x07\\ny"


# Over ssh


def test_a_job_on_two_hosts(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1", "node2"])
    seen: list[tuple[int, int]] = []
    evidence = collect_remote(hosts=["node1", "node2"], timeout=20, progress=lambda *counts: seen.append(counts))
    assert status_of(evidence) == {"node1": "ok", "node2": "ok"} and seen[-1] == (2, 2)
    assert [(rank["rank"], rank["host"]) for rank in evidence["ranks"]] == [
        (0, "node1"), (1, "node1"), (2, "node2"), (3, "node2")
    ]  # fmt: skip
    verdict = spy(evidence).verdict
    assert (verdict.kind, verdict.culprits, verdict.sure) == ("skipped-collective", (2,), "high")


FAULTS = {
    "refused": ("unreachable", "no sshd listens"),
    "dark": ("unreachable", "ping dark"),
    "frozen": ("timeout", "frozen"),
    "nowhere": ("unreachable", "getent hosts nowhere"),
    "denied": ("failed", "ssh-copy-id denied"),
    "unknown": ("failed", "StrictHostKeyChecking"),
    "changed": ("failed", "ssh-keygen -R changed"),
    "silent": ("timeout", "frozen"),
    "half": ("failed", "no answer"),
    "garbage": ("failed", "Install the same version"),
    "huge": ("failed", "8 MiB"),
    "endless": ("failed", "8 MiB"),
    "liar": ("failed", "no answer"),
    "nomodule": ("failed", "pip install mldebug-toolkit"),
    "nopython": ("failed", "--remote-python"),
    "dies": ("failed", "signal 9"),
    "hang": ("timeout", "no answer within"),
}


def test_every_fault_has_its_reason_and_the_rest_is_judged(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1", "node2"])
    began = time.monotonic()
    evidence = collect_remote(hosts=["node1", *FAULTS, "node2"], timeout=12)
    assert time.monotonic() - began < 12
    found = {host["host"]: (host["status"], host.get("why", "")) for host in evidence["hosts"]}
    for name, (status, words) in FAULTS.items():
        assert found[name][0] == status and words in found[name][1], (name, found[name])
    assert found["node1"][0] == found["node2"][0] == "ok"
    report = spy(evidence)
    assert report.verdict.culprits == (2,) and report.verdict.sure != "high"
    assert len(report.text().splitlines()) < 60
    pid = int((answers / "hanging").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_report_on_many_silent_hosts_is_short() -> None:
    evidence = recorded("skip_collective")
    why = "no permission to log in: `ssh-copy-id {0}`"
    names = [f"denied{number}" for number in range(1, 401)]
    evidence["hosts"] += [{"host": name, "status": "failed", "why": why.format(name)} for name in names]
    evidence["hosts"] += [{"host": "dark1", "status": "unreachable", "why": "`ping dark1`"}]
    text = spy(evidence).text()
    assert len(text.splitlines()) < 25
    assert "denied[1-400]: host failed: no permission to log in: `ssh-copy-id HOST`" in " ".join(text.split())
    assert "dark1: host unreachable: `ping dark1`" in text


@pytest.mark.parametrize("case", ["wire", "error"])
def test_what_another_version_or_a_node_itself_says(answers: Path, case: str) -> None:
    said = {
        "wire": {"wire": 99},
        "error": {"wire": 1, "error": "py-spy is not installed", "hint": "pip install py-spy"},
    }
    put_answer(answers, "node1", said[case])
    evidence = collect_remote(hosts=["node1"], timeout=10)
    words = {"wire": "Install the same version", "error": "pip install py-spy"}
    assert status_of(evidence) == {"node1": "failed"} and words[case] in why_of(evidence, "node1")


def test_nobody_answers(answers: Path) -> None:
    report = spy(hosts=["refused1", "denied1"], timeout=10)
    assert report.evidence["ranks"] == [] and not report.verdict.hung
    assert "refused1" in report.text() and "ssh-copy-id" in report.text()


def test_two_names_of_one_machine_count_once(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1"])
    put_answer(answers, "node2", {**encode(recorded("skip_collective"), 100), "id": "machine node1"})
    evidence = collect_remote(hosts=["node1", "node2"], timeout=10)
    assert len(evidence["ranks"]) == 4
    assert any("same host" in note for note in evidence["notes"])


def test_ranks_of_another_job_are_left_out(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1"])
    other = recorded("skip_collective")
    other["ranks"] = other["ranks"][:1]
    other["ranks"][0]["job"] = "elsewhere:1"
    put_answer(answers, "node2", {**encode(other, 100), "id": "another"})
    evidence = collect_remote(hosts=["node1", "node2"], timeout=10)
    assert [rank["host"] for rank in evidence["ranks"]] == ["node1"] * 4
    assert any("another job on node2" in note for note in evidence["notes"])


def test_an_interrupt_keeps_what_there_is(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1"])

    def interrupt(answered: int, asked: int) -> None:
        if answered:
            raise KeyboardInterrupt

    evidence = collect_remote(hosts=["hang1", "node1"], timeout=30, progress=interrupt)
    assert status_of(evidence) == {"hang1": "timeout", "node1": "ok"}
    assert INTERRUPTED in evidence["notes"] and len(evidence["ranks"]) == 4


def test_many_hosts_are_asked_through_gateways(answers: Path) -> None:
    names = [f"node{number}" for number in range(1, 5)]
    put_answers(answers, "skip_collective", names)
    # Of three groups the first hosts are the gateways: one runs the real far end here, one is lost.
    hosts = ["here1", "refused1", "node1", "node2", "node3", "node4"]
    evidence = collect_remote(hosts=hosts, timeout=40, fanout=2, name="no such program")
    assert status_of(evidence) == {**dict.fromkeys(hosts, "ok"), "refused1": "unreachable"}
    calls = (answers / "calls").read_text().split()
    assert sorted(calls[:2]) == ["here1", "refused1"] and sorted(calls[2:]) == [
        "node1",
        "node2",
        "node3",
        "node4",
        "refused1",
    ]
    assert judge(evidence).culprits == (2,)


def test_a_gateway_tells_why_a_host_below_it_is_silent(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1"])
    hosts = ["here1", "node1", "denied1"]
    evidence = collect_remote(hosts=hosts, timeout=40, fanout=2, name="no such program")
    assert status_of(evidence) == {"here1": "ok", "node1": "ok", "denied1": "failed"}
    assert "ssh-copy-id" in why_of(evidence, "denied1")


# The far end itself


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    """Two processes that look like ranks of a job; a word that is in their command lines."""
    word = f"rank_of_{os.getpid()}_{tmp_path.name}"
    program = "import sys, time\ndef wait_for_good():\n    time.sleep(600)\nwait_for_good()\n"
    path = tmp_path / f"{word}.py"
    path.write_text(program)
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen([sys.executable, str(path)], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    time.sleep(0.5)
    yield word
    for rank in ranks:
        rank.kill()
        rank.wait()


def test_the_real_far_end_answers(answers: Path, job: str) -> None:
    evidence = collect_remote(hosts=["here1", "here2"], timeout=30, name=job)
    assert status_of(evidence) == {"here1": "ok", "here2": "ok"}
    assert sorted(rank["rank"] for rank in evidence["ranks"]) == [0, 1]
    frames = [one["name"] for one in evidence["ranks"][0]["samples"][-1]["threads"][0]["frames"]]
    assert "wait_for_good" in frames
    assert any(source["text"] == "time.sleep(600)" for source in evidence["source"].values())


def test_a_remote_python_without_mldebug(answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = f"{bare}/bin/python"
    evidence = collect_remote(hosts=["here1"], timeout=20, python=python)
    assert status_of(evidence) == {"here1": "failed"}
    assert f"`{python} -m pip install mldebug-toolkit`" in why_of(evidence, "here1")


def test_hostile_paths_are_words(answers: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evidence = collect_remote(hosts=["here1"], timeout=20, python=f"/nowhere; touch {mark} #")
    assert status_of(evidence) == {"here1": "failed"} and not mark.exists()
    assert "--remote-python" in why_of(evidence, "here1")


def test_the_far_end_ends_itself(tmp_path: Path) -> None:
    """Its reader is gone and something that it started hangs: at its deadline both are ended."""
    from mldebug.hang._remote_request import ask_word

    put_program(tmp_path / "bin", "py-spy", "#!/bin/sh\nexec sleep 600\n")
    request: Any = {
        "wire": 1, "name": "h", "seconds": 3.0, "options": {"pids": [os.getpid()], "timeout": 600}, "calls": 1,
        "slurm": False,
    }  # fmt: skip
    program = (
        "import sys\nfrom mldebug.core import stacks\n"
        f"stacks.find_py_spy = lambda: {str(tmp_path / 'bin' / 'py-spy')!r}\n"
        "from mldebug.hang._remote_node import serve\nserve(sys.argv[1])\n"
        "import time; time.sleep(600)\n"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", program, ask_word(request)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    assert process.wait(20) == -signal.SIGKILL
    assert 2.5 < time.monotonic() - began < 10
    assert process.stdout is not None
    process.stdout.close()
    left = subprocess.run(["ps", "-eo", "pgid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in left if line.split()[0] == str(process.pid) and "sleep" in line] == []


@pytest.mark.parametrize("word", ["", "x", "e30=", "bnVsbA=="])
def test_the_hidden_option_is_not_for_people(word: str) -> None:
    from mldebug.hang._remote_node import serve

    with pytest.raises(UsageError):
        serve(word)


# In pods


def test_pods(answers: Path, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = {"train-0": "Running", "train-1": "Pending", "train-forbidden": "Running", "train-gone": "Running"}
    put_kubectl(tmp_path / "bin", answers, phases)
    evidence = collect_remote(
        pods="app=train", timeout=30, name=job, python=sys.executable, namespace="research", container="main"
    )
    assert status_of(evidence) == {
        "train-0": "ok", "train-1": "failed", "train-forbidden": "failed", "train-gone": "failed"
    }  # fmt: skip
    assert sorted(rank["rank"] for rank in evidence["ranks"]) == [0, 1]
    assert "Pending" in why_of(evidence, "train-1") and "pods/exec" in why_of(evidence, "train-forbidden")
    listing, *calls = [json.loads(line) for line in (answers / "calls").read_text().splitlines()]
    assert listing[:4] == ["--namespace=research", "get", "pods", "--selector=app=train"]
    assert all(call[:3] == ["--namespace=research", "exec", "--container=main"] for call in calls)


def test_pods_that_are_not_there(answers: Path, tmp_path: Path) -> None:
    put_kubectl(tmp_path / "bin", answers, {})
    with pytest.raises(MldebugError, match="no pod has the labels app=train"):
        collect_remote(pods="app=train", timeout=10)
    put_kubectl(tmp_path / "bin", answers, {"-ohostile": "Running"})
    with pytest.raises(MldebugError):
        collect_remote(pods="app=train", timeout=10)


@pytest.mark.parametrize("labels", ["-oyaml", "--all", "a=b;c", "$(x)", "", "a\nb"])
def test_hostile_labels(labels: str) -> None:
    with pytest.raises(UsageError):
        collect_remote(pods=labels, timeout=5)


@pytest.mark.parametrize("job", ["", "-1", "12;ls", "12 13", "a", "$(x)", "1\n2"])
def test_hostile_job_numbers(job: str) -> None:
    with pytest.raises(UsageError):
        collect_remote(slurm=job, timeout=5)


# The command


def spy_command(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mldebug", "spy", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def test_the_command(answers: Path, tmp_path: Path) -> None:
    put_answers(answers, "skip_collective", ["node1", "node2"])
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2\nrefused1\n")
    done = spy_command("--hostfile", str(tmp_path / "hosts"), "--timeout", "20", "-o", str(tmp_path / "e.json"))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("hung: skipped-collective, rank 2")
    assert "refused1" in done.stdout and "no sshd listens" in " ".join(done.stdout.split())
    assert (tmp_path / "e.json").stat().st_mode & 0o777 == 0o600
    again = spy_command("--from", str(tmp_path / "e.json"))
    assert again.stdout == done.stdout


def test_an_interrupted_command_says_what_it_has(answers: Path) -> None:
    put_answers(answers, "skip_collective", ["node1", "node2"])
    command = [sys.executable, "-m", "mldebug", "spy", "--hosts", "node1,node2,hang1", "--timeout", "50"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(200):
        if (answers / "hanging").exists() and (answers / "hanging").read_text():
            break
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert stdout.startswith("hung: skipped-collective, rank 2") and "interrupted" in stdout
    assert not Path(f"/proc/{(answers / 'hanging').read_text()}").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a", "--slurm", "1"], "both where the job runs"),
        (["--hosts", "a", "--pid", "7"], "--pid is a process of this node"),
        (["--hosts=-oProxyCommand=x"], "no host name"),
        (["--namespace", "x"], "--namespace has no meaning here"),
        (["--remote-python", "x"], "--remote-python has no meaning here"),
        (["--slurm", "x;y"], "no number of a SLURM job"),
        (["--hosts", "a", "--ssh-option", "x"], "no option of ssh"),
        (["--hosts", "a", "--ssh-config", "/nowhere"], "no such file"),
        (["--hosts", "a", "--fanout", "0"], "whole number"),
        (["--from", "x.json", "--hosts", "a"], "--from looks at no process"),
        (["--node", "x"], "is for mldebug itself"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(words: list[str], message: str) -> None:
    from mldebug.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert main(["spy", *words]) == 2
    assert message in stream.getvalue() and "hint: " in stream.getvalue()


def test_help_has_groups_and_no_hidden_option() -> None:
    text = spy_command("--help").stdout
    assert re.findall(r"^(this node|other nodes|output):$", text, re.M) == ["this node", "other nodes", "output"]
    assert "--node" not in re.findall(r"--[\w-]+", text)
