"""Commands for other machines: their names, their quoting, their deadlines, and that nothing of them stays."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mldebug.core import launch
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.hosts import fold_hosts, parse_hosts, read_hostfile
from mldebug.core.launch import Call, Ending, Refused

HOSTILE = [
    "-oProxyCommand=touch /tmp/x", "--", "a b;touch x", "a;b", "a`b`", "a$(b)", "a'b", 'a"b', "a|b", "a&b", "a\tb;",
    "a>b", "user@-oProxyCommand=x", "-l@host", "a/b", "a\\b", "a#", "h\x1b[31m", "hÖst", "x" * 300,
]  # fmt: skip


def run(calls: list[Call], **more: Any) -> tuple[dict[str, Ending], dict[str, bytes]]:
    endings: dict[str, Ending] = {}
    output: dict[str, bytes] = {}

    def read(call: Call, data: bytes) -> None:
        output[call.host] = output.get(call.host, b"") + data

    more.setdefault("read", read)
    launch.call_all(calls, done=lambda ending: endings.__setitem__(ending.call.host, ending), **more)
    return endings, output


def sh(host: str, text: str, seconds: float = 20.0) -> Call:
    return Call(host, ("/bin/sh", "-c", text), time.monotonic() + seconds)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_lists_of_hosts() -> None:
    assert parse_hosts("a, b,a c") == ["a", "b", "c"]
    assert parse_hosts("ada@n1.example.org,10.0.0.7,fe80::1") == ["ada@n1.example.org", "10.0.0.7", "fe80::1"]


def test_ranges_of_hosts() -> None:
    pytest.importorskip("ClusterShell")
    assert parse_hosts("node[08-10,12],head") == ["node08", "node09", "node10", "node12", "head"]
    assert parse_hosts("ada@n[1-2]") == ["ada@n1", "ada@n2"]
    assert len(parse_hosts("node[001-512]")) == 512
    assert fold_hosts(["n3", "n1", "n2"]) == "n[1-3]"


def test_without_clustershell_a_range_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ClusterShell.NodeSet", None)
    assert parse_hosts("a,b") == ["a", "b"]
    with pytest.raises(MldebugError, match="ClusterShell") as caught:
        parse_hosts("n[1-2]")
    assert "pip install" in caught.value.hint
    assert fold_hosts(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 others"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(name)
    with pytest.raises(UsageError):
        parse_hosts(f"good,{name}")


@pytest.mark.parametrize("text", ["", " , ", "a\nb", "n[1-", "n[1-99999999]", "@nosuchgroup", "a[1-2]b;[3]"])
def test_lists_that_name_no_hosts(text: str) -> None:
    pytest.importorskip("ClusterShell")
    with pytest.raises(MldebugError):
        parse_hosts(text)


def test_host_files(tmp_path: Path) -> None:
    pytest.importorskip("ClusterShell")
    path = tmp_path / "hosts"
    path.write_text("# mine\nn1 slots=8\n\nn2:8\nn[3-4]   # two\nn1\n")
    assert read_hostfile(path) == ["n1", "n2", "n3", "n4"]
    path.write_text("n1\n-oProxyCommand=x\n")
    with pytest.raises(UsageError):
        read_hostfile(path)
    path.write_text("\n# nothing\n")
    with pytest.raises(UsageError):
        read_hostfile(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        read_hostfile(path)
    with pytest.raises(UsageError):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    "word", ["plain", "a b", "a;touch x", "$(x)", "`x`", "'", '"', "a'b\"c", "-x", "*", "~", "!x", "\\", "", "ä", "\t"]
)
def test_quoting_gives_the_same_words_at_the_other_end(word: str) -> None:
    line = launch.remote_command(["printf", "%s|", word, "end"])
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{word}|end|"


@pytest.mark.parametrize("word", ["a\nb", "a\0b", "a\rb"])
def test_line_breaks_are_refused(word: str) -> None:
    with pytest.raises(UsageError):
        launch.remote_command(["printf", word])


def test_the_ssh_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name: f"/usr/bin/{name}")
    own = launch.ssh_options(None, ["Port=2222", "ProxyJump gate"])
    words = launch.ssh_command("n1", ["/opt/my python", "-c", "x; y"], 30.0, own)
    assert words[-3:] == ("--", "n1", "'/opt/my python' -c 'x; y'")
    assert words.index("Port=2222") < words.index("BatchMode=yes")  # what ssh sees first counts
    assert {"ConnectTimeout=10", "ServerAliveInterval=3", "ServerAliveCountMax=2", "ControlMaster=no"} <= set(words)
    assert shlex.split(words[-1]) == ["/opt/my python", "-c", "x; y"]


@pytest.mark.parametrize("option", ["-oPort=1", "Port", "Port=1\nProxyCommand=x", "", "=x", "Port="])
def test_options_that_ssh_has_not(option: str) -> None:
    with pytest.raises(UsageError):
        launch.ssh_options(None, [option])


def test_a_configuration_file_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    assert launch.ssh_options(str(tmp_path / "config"), []) == ["-F", str(tmp_path / "config")]
    with pytest.raises(UsageError):
        launch.ssh_options(str(tmp_path / "none"), [])


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MldebugError, match="kubectl is not installed") as caught:
        launch.kubectl_command("pod", ["true"], [], None)
    assert caught.value.hint


def test_output_and_status_come_back() -> None:
    endings, output = run([sh("a", "echo one; echo bad >&2; exit 3"), sh("b", "printf two")])
    assert output == {"a": b"one\n", "b": b"two"}
    assert (endings["a"].how, endings["a"].code, endings["a"].complaint) == ("exit", 3, "bad")
    assert (endings["b"].how, endings["b"].code) == ("exit", 0)


def test_a_deadline_ends_a_command_and_all_that_it_started() -> None:
    stubborn = "trap '' TERM; sleep 600 & echo $$ $!; while :; do sleep 1; done"
    began = time.monotonic()
    endings, output = run([sh("slow", stubborn, 1.0), sh("quick", "echo fine")])
    assert time.monotonic() - began < 60
    assert endings["slow"].how == "timeout" and endings["quick"].how == "exit"
    assert output["quick"] == b"fine\n"
    time.sleep(0.1)
    assert [pid for pid in map(int, output["slow"].split()) if alive(pid)] == []


def test_what_an_ended_command_left_behind_is_not_waited_for() -> None:
    began = time.monotonic()
    endings, output = run([sh("a", "sleep 30 & echo $!")])
    assert time.monotonic() - began < 25
    assert endings["a"].how == "exit"
    os.kill(int(output["a"]), signal.SIGKILL)


def test_a_reader_may_refuse() -> None:
    size = 0

    def read(call: Call, data: bytes) -> None:
        nonlocal size
        size += len(data)
        if size > 1_000_000:
            raise Refused("too much")

    began = time.monotonic()
    endings, _ = run([sh("a", "cat /dev/zero")], read=read)
    assert time.monotonic() - began < 60
    assert (endings["a"].how, endings["a"].complaint) == ("refused", "too much")
    assert size < 2_000_000


def test_stderr_is_kept_short() -> None:
    endings, _ = run([sh("a", "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo last >&2")])
    assert endings["a"].complaint.endswith("last") and len(endings["a"].complaint) <= 4096


def test_no_more_than_the_fanout_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    text = f"touch {tmp_path}/now/$$; ls {tmp_path}/now | wc -l; sleep 0.2; rm {tmp_path}/now/$$"
    _, output = run([sh(f"h{number}", text) for number in range(9)], fanout=3)
    assert len(output) == 9
    assert max(int(text) for text in output.values()) <= 3


def test_no_more_than_the_open_files_allow() -> None:
    program = (
        "import resource, time\nresource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))\n"
        "from mldebug.core import launch\nended = []\n"
        "calls = [launch.Call(str(n), ('/bin/sleep', '0.05'), time.monotonic() + 60) for n in range(60)]\n"
        "launch.call_all(calls, read=print, done=lambda one: ended.append(one.code), fanout=60)\n"
        "print(sum(ended), len(ended))\n"
    )
    root = str(Path(launch.__file__).parent.parent.parent)
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "0 60\n", done.stderr


def test_calls_are_made_only_when_there_is_room() -> None:
    made: list[float] = []

    def calls() -> Any:
        for number in range(3):
            made.append(time.monotonic())
            yield sh(f"h{number}", "sleep 0.3")

    launch.call_all(calls(), read=lambda call, data: None, done=lambda ending: None, fanout=1)
    assert made[2] - made[0] > 0.5


def test_a_deadline_that_is_over_starts_nothing() -> None:
    endings, output = run([sh("a", "echo started", -1.0)])
    assert (endings["a"].how, endings["a"].seconds, output) == ("timeout", 0.0, {})


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    def read(call: Call, data: bytes) -> None:
        path.write_bytes(data)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sh("a", "trap '' TERM; echo $$; sleep 600; sleep 600")], read=read)
    assert not alive(int(path.read_text()))


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom mldebug.core import launch\n"
        "call = launch.Call('a', ('/bin/sh', '-c', 'echo $$; exec sleep 600'), time.monotonic() + 60)\n"
        "launch.call_all([call], read=lambda c, d: (sys.stdout.write(d.decode()), sys.stdout.flush()), done=print)\n"
    )
    root = str(Path(launch.__file__).parent.parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.terminate()
    assert process.wait(10) == 143
    process.stdout.close()
    assert not alive(pid)


def test_it_works_beside_other_threads() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run([sh("a", "echo x")])[1]))
    thread.start()
    thread.join(20)
    assert found == [{"a": b"x\n"}]


def test_ask_has_a_limit() -> None:
    ending, output = launch.ask(("/bin/sh", "-c", "echo hello"), time.monotonic() + 10)
    assert (ending.code, output) == (0, b"hello\n")
    ending, _ = launch.ask(("/bin/sh", "-c", "cat /dev/zero"), time.monotonic() + 10, limit=100_000)
    assert ending.how == "refused"
