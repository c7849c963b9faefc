"""Stands in for ssh, srun and kubectl: programs on PATH that answer from a folder, run the command here, or fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mldebug.hang._remote_frames import pack
from mldebug.hang._remote_wire import encode

EVIDENCE = Path(__file__).parent / "evidence"

# What a host does is the first part of its name, up to a dash or a digit.
_SSH = """\
#!{python}
import os, re, signal, sys, time
FOLDER = {folder!r}
words = sys.argv[1:]
host, command = words[words.index("--") + 1 :]
with open(FOLDER + "/calls", "a") as stream:
    stream.write(host + "\\n")
kind = re.match(r"[a-z]+", host)[0]
SAYS = {{
    "refused": "ssh: connect to host %s port 22: Connection refused",
    "dark": "ssh: connect to host %s port 22: Connection timed out",
    "frozen": "Connection timed out during banner exchange",
    "nowhere": "ssh: Could not resolve hostname %s: Name or service not known",
    "denied": "root@%s: Permission denied (publickey).",
    "unknown": "Host key verification failed.",
    "changed": "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\\nHost key verification failed.",
    "silent": "Timeout, server %s not responding.",
}}
def answer(name):
    with open(FOLDER + "/" + name, "rb") as stream:
        return stream.read()
def say(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
if kind in SAYS:
    sys.stderr.write((SAYS[kind] % host if "%s" in SAYS[kind] else SAYS[kind]) + "\\n")
    sys.exit(255)
if kind == "node":
    say(b"Welcome to " + host.encode() + b"!\\n" + answer(host))
elif kind == "here":
    os.execv("/bin/sh", ["sh", "-c", command])
elif kind == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(FOLDER + "/hanging", "w") as stream:
        stream.write(str(os.getpid()))
    time.sleep(600)
elif kind == "half":
    say(answer("node1")[:900])
elif kind == "garbage":
    say(os.urandom(50000) + b"\\nmldebug1 " + host.encode() + b" 1 1 AAAA\\n")
elif kind == "huge":
    while True:
        say(b"mldebug1 " + host.encode() + b" 1 9 " + b"A" * 600 + b"\\n")
elif kind == "endless":
    while True:
        say(b"x" * 65536)
elif kind == "liar":
    say(answer("node1"))
elif kind == "nomodule":
    sys.exit("Traceback (most recent call last):\\nModuleNotFoundError: No module named 'mldebug'")
elif kind == "nopython":
    sys.stderr.write("sh: 1: /venv/bin/python: not found\\n")
    sys.exit(127)
elif kind == "dies":
    os.kill(os.getpid(), 9)
"""

_KUBECTL = """\
#!{python}
import json, os, sys
words = sys.argv[1:]
with open({folder!r} + "/calls", "a") as stream:
    stream.write(json.dumps(words) + "\\n")
if "get" in words:
    sys.stdout.write(open({folder!r} + "/pods.json").read())
    sys.exit(0)
at = words.index("--")
pod = words[at - 1]
if pod == "train-forbidden":
    sys.exit('Error from server (Forbidden): pods "train-forbidden" is forbidden: User "ada" cannot create resource')
if pod == "train-gone":
    sys.exit('Error from server (NotFound): pods "train-gone" not found')
os.execvp(words[at + 1], words[at + 1 :])
"""


def put_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def put_ssh(folder: Path, answers: Path) -> None:
    put_program(folder, "ssh", _SSH.format(python=sys.executable, folder=str(answers)))


def put_kubectl(folder: Path, answers: Path, pods: dict[str, str]) -> None:
    """`pods`: name -> phase."""
    items = [{"metadata": {"name": name}, "status": {"phase": phase}} for name, phase in pods.items()]
    (answers / "pods.json").write_text(json.dumps({"items": items}))
    put_program(folder, "kubectl", _KUBECTL.format(python=sys.executable, folder=str(answers)))


def recorded(case: str) -> Any:
    return json.loads((EVIDENCE / f"{case}.json").read_text())


def put_answers(answers: Path, case: str, names: list[str]) -> None:
    """A recorded job as the answers of nodes, with equal parts of its ranks on each."""
    whole = recorded(case)
    count = -(-len(whole["ranks"]) // len(names))
    for number, name in enumerate(names):
        part = {**whole, "ranks": whole["ranks"][number * count : (number + 1) * count]}
        put_answer(answers, name, {**encode(part, 1000), "id": f"machine {name}"})


def put_answer(answers: Path, name: str, document: dict[str, Any]) -> None:
    (answers / name).write_bytes(b"".join(pack(name, document)))
