"""doctor on other nodes: each looks at itself and sends its evidence as one line; who does not answer is named."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mldebug.core import launch
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.hosts import checked, parse_hosts
from mldebug.core.launch import Call, Ending

MARK = "mldebug-doctor1 "
INTERRUPTED = "interrupted: what was seen until then is judged"
_MOST = 8 << 20  # bytes of one answer

# Not `-m mldebug`: that would import modules from the folder where the far end happens to start.
_PROGRAM = "import sys; sys.path[:] = [p for p in sys.path if p]; from mldebug.cli import main; sys.exit(main())"
Progress = Callable[[int, int], None]

# What ssh, srun or the far end says -> why there is no answer, and the fix.
_WHY = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
     "its host key is not the one known here: `ssh-keygen -R {host}`, or `ssh {host}` once"),
    (r"Permission denied|Too many authentication failures",
     "no permission to log in without a password: `ssh-copy-id {host}`"),
    (r"Could not resolve hostname|Name or service not known", "there is no host of that name: `getent hosts {host}`"),
    (r"Connection refused", "the machine is up and no sshd listens there"),
    (r"banner exchange|not responding|Connection reset|Broken pipe",
     "it takes the connection and does not answer: frozen, overloaded or out of memory"),
    (r"timed out|No route to host|Network is unreachable|Host is down", "the network does not reach it: `ping {host}`"),
    (r"No module named '?mldebug",
     "mldebug is not installed there for {python}: --remote-python PATH of a Python that has it"),
    (r"no command named|unrecognized arguments", "another version of mldebug is there: install the same"),
    (r"not found|No such file or directory|cannot execute", "{python} cannot be run there: --remote-python PATH"),
    (r"Invalid job id|already complet", "the job has ended"),
    (r"Access/permission denied", "SLURM does not let you into this job"),
)  # fmt: skip


def collect_remote(
    *,
    hosts: str | Sequence[str] | None = None,
    slurm: str | None = None,
    words: Sequence[str] = (),
    timeout: float = 30.0,
    python: str | None = None,
    ssh: Sequence[str] = (),
    fanout: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The evidence of other nodes, over ssh or by steps beside a SLURM job; `words` are options for each of them.

    `timeout` is for everything. A node that gives no answer is in "failed", with the reason.
    """
    if (hosts is None) == (slurm is None):
        raise UsageError("give one of hosts and slurm", "each of them says which nodes are asked")
    deadline = time.monotonic() + timeout
    interpreter = python or sys.executable
    command = [interpreter, "-c", _PROGRAM, "doctor", "--node", *words]
    if slurm is not None:
        names = _nodes_of(slurm, deadline)
    else:
        names = parse_hosts(hosts) if isinstance(hosts, str) else checked(hosts or ())
    gathering = _Gathering(names, interpreter, progress)

    def call(name: str) -> Call:
        if slurm is not None:
            return Call(name, launch.srun_command(slurm, [name], command), deadline, launch.srun_environment())
        return Call(name, launch.ssh_command(name, command, deadline - time.monotonic(), ssh), deadline)

    def begin(name: str) -> Call:
        gathering.asked[name] = time.time()
        return call(name)

    try:
        _run(map(begin, names), gathering, fanout)
    except KeyboardInterrupt:
        gathering.note = INTERRUPTED
    return gathering.evidence()


def _run(calls: Iterable[Call], gathering: _Gathering, fanout: int) -> None:
    launch.call_all(calls, read=gathering.read, done=gathering.done, fanout=fanout)


class _Gathering:
    def __init__(self, names: Sequence[str], python: str, progress: Progress | None) -> None:
        self.names, self.python, self.progress = names, python, progress
        self.asked: dict[str, float] = {}
        self.note = ""
        self.nodes: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self._parts: dict[str, bytearray] = {}
        self._answered: dict[str, float] = {}

    def read(self, call: Call, data: bytes) -> None:
        kept = self._parts.setdefault(call.host, bytearray())
        kept += data
        self._answered[call.host] = time.time()
        if len(kept) > _MOST:
            raise launch.Refused("its answer is too long")

    def done(self, ending: Ending) -> None:
        host, text = ending.call.host, bytes(self._parts.pop(ending.call.host, b"")).decode("utf-8", "replace")
        line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
        node = _read(line[len(MARK) :]) if line is not None else None
        if node is None:
            self.failed[host] = self._why(ending, text)
        else:
            node["clock"] = {"asked": self.asked[host], "sent": node.get("sent", 0.0), "answered": self._answered[host]}
            node["host"] = host.rpartition("@")[2]
            self.nodes[host] = node
        if self.progress is not None:
            self.progress(len(self.nodes), len(self.names))

    def _why(self, ending: Ending, noise: str) -> str:
        if ending.how == "refused":
            return ending.complaint
        said = f"{ending.complaint}\n{noise}"
        for pattern, text in _WHY:
            if re.search(pattern, said):
                return text.format(host=ending.call.host, python=self.python)
        if ending.how == "timeout":
            return f"no answer within {ending.seconds:.0f} s: frozen, unreachable or overloaded"
        last = [line.strip() for line in said.splitlines() if line.strip()][-1:]
        return f"no answer (status {ending.code}): {last[0][:200] if last else 'it said nothing'}"

    def evidence(self) -> dict[str, Any]:
        missing = {
            name: self.failed.get(name, "it was not asked to the end") for name in self.names if name not in self.nodes
        }
        failed = [{"host": name, "why": why} for name, why in missing.items()]
        notes = [self.note] if self.note else []
        return {"schema": 1, "kind": "doctor", "nodes": [self.nodes[name] for name in self.names if name in self.nodes],
                "failed": failed, "notes": notes}  # fmt: skip


def _read(text: str) -> dict[str, Any] | None:
    try:
        node = json.loads(text)
    except ValueError:
        return None
    return node if isinstance(node, dict) and isinstance(node.get("host"), str) else None


def _nodes_of(job: str, deadline: float) -> list[str]:
    """The nodes of a SLURM job that runs."""
    if not re.fullmatch(r"\d{1,12}([_+]\d{1,9})?", job):
        raise UsageError(f"{job[:40]!r} is no number of a SLURM job", "`squeue --me` lists your jobs")
    ending, output = launch.ask(
        (launch.program("squeue"), "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N"), deadline
    )
    lists = output.decode("utf-8", "replace").split()
    if ending.code != 0 or not lists:
        raise MldebugError(f"SLURM knows no job {job} that runs", "`squeue --me` lists your jobs")
    ending, output = launch.ask((launch.program("scontrol"), "show", "hostnames", ",".join(lists)), deadline)
    if ending.code != 0 or not output.split():
        raise MldebugError(f"scontrol does not tell the nodes of job {job}: {ending.complaint[:200]}", "use --hosts")
    return checked(output.decode("utf-8", "replace").split())


def answer(node: Mapping[str, Any]) -> str:
    """What the far end prints: one line, with the time at which it was sent."""
    return MARK + json.dumps({**node, "sent": time.time()}, allow_nan=False) + "\n"
