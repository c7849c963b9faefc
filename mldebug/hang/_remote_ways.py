"""The ways to other nodes: ssh (through gateways where there are many), srun, kubectl exec."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mldebug.core import launch
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.hosts import checked
from mldebug.core.launch import Call, Ending
from mldebug.hang._remote_frames import FrameReader, frame, pack
from mldebug.hang._remote_gather import Sink, Trouble, trouble_document, unanswered
from mldebug.hang._remote_request import Below, Request, ask_word
from mldebug.hang._remote_why import why
from mldebug.hang._remote_wire import WIRE

_TREE = 12.0  # seconds below which gateways would have too little time
_RETURN = 0.7  # seconds for the way of an answer
_TURN = 3.0  # seconds that a node may well need
_FEW = 16  # nodes of a SLURM job that get a step each, so that none waits for another
_RECORDED = 400_000  # calls of the record of collectives that are sent in all

# Not `-m mldebug`: that would import modules from the folder where the far end happens to start.
_PROGRAM = "import sys; sys.path[:] = [p for p in sys.path if p]; from mldebug.cli import main; sys.exit(main())"


@dataclass
class Asked:
    """What every node is asked, and how."""

    options: dict[str, Any]
    deadline: float  # of time.monotonic()
    python: str
    ssh: Sequence[str]
    fanout: int
    calls: int | None = None

    def words(
        self, name: str, deadline: float, nodes: int, below: Below | None = None, slurm: bool = False
    ) -> list[str]:
        """The command for a node."""
        seconds = max(1.0, deadline - time.monotonic() - _RETURN)
        calls = self.calls if self.calls is not None else max(64, _RECORDED // nodes)
        request: Request = {
            "wire": WIRE, "name": name, "seconds": seconds, "options": self.options, "calls": calls, "slurm": slurm,
        }  # fmt: skip
        if below is not None:
            request["below"] = below
        return [self.python, "-c", _PROGRAM, "spy", "--node", ask_word(request)]


def by_ssh(sink: Sink, asked: Asked) -> None:
    """Ask hosts over ssh: many through gateways first, and then those that gave no answer directly."""
    names, now = sink.names, time.monotonic()
    left = asked.deadline - now
    if len(names) > asked.fanout and left >= _TREE:
        groups = _groups(names, asked.fanout)
        deadline = now + left * 0.55

        def gateway(group: Sequence[str]) -> Call:
            below: Below = {
                "hosts": list(group[1:]), "python": asked.python, "ssh": list(asked.ssh), "fanout": asked.fanout,
            }  # fmt: skip
            words = asked.words(group[0], deadline, len(names), below=below)
            return Call(group[0], launch.ssh_command(group[0], words, left / 3, asked.ssh), deadline)

        _run(sink, asked, "ssh", map(gateway, groups), {group[0]: group for group in groups})

    def direct(name: str) -> Call:
        words = asked.words(name, asked.deadline, len(names))
        seconds = asked.deadline - time.monotonic()
        return Call(name, launch.ssh_command(name, words, seconds, asked.ssh), asked.deadline)

    _run(sink, asked, "ssh", map(direct, unanswered(sink, names)))


def pass_on(request: Request, began: float, say: Callable[[bytes], None]) -> None:
    """As a gateway: ask the hosts below, and hand on what they say."""
    below = request["below"]
    deadline = began + request["seconds"] - _RETURN
    asked = Asked(request["options"], deadline, below["python"], below["ssh"], below["fanout"], request["calls"])
    relay = _Relay(checked(below["hosts"]), say)
    by_ssh(relay, asked)
    relay.finish()


class _Relay:
    """The sink of a gateway: answers go up as they are."""

    def __init__(self, names: Sequence[str], say: Callable[[bytes], None]) -> None:
        self.names, self.say = names, say
        self._answered: set[str] = set()
        self.troubles: dict[str, Trouble] = {}

    def take(self, name: str, packed: bytes) -> None:
        if name not in self._answered:
            self._answered.add(name)
            for line in frame(name, packed):
                self.say(line)

    def fail(self, name: str, trouble: Trouble) -> None:
        self.troubles[name] = trouble

    def settled(self, name: str) -> bool:
        return name in self._answered

    def finish(self) -> None:
        for name, trouble in self.troubles.items():
            if name not in self._answered:
                for line in pack(name, trouble_document(trouble)):
                    self.say(line)


def nodes_of_job(job: str, deadline: float) -> list[str]:
    """The nodes of a SLURM job that runs."""
    if not re.fullmatch(r"\d{1,12}([_+]\d{1,9})?", job):
        raise UsageError(f"{job[:40]!r} is no number of a SLURM job", "`squeue --me` lists your jobs")
    ending, text = _asked("squeue", ["--noheader", f"--jobs={job}", "--format=%T|%N"], deadline)
    rows = [line.split("|") for line in text.split() if "|" in line]
    if ending.code != 0 or not rows:
        said = f": {ending.complaint.splitlines()[-1]}" if ending.complaint else ""
        raise MldebugError(f"SLURM knows no job {job} that runs{said}", "`squeue --me` lists your jobs")
    lists = [row[1] for row in rows if row[1] and row[0] in ("RUNNING", "SUSPENDED", "COMPLETING", "STOPPED")]
    if not lists:
        raise MldebugError(f"job {job} has no nodes: it is {rows[0][0].lower()}", f"`squeue -j {job}` says more")
    ending, text = _asked("scontrol", ["show", "hostnames", ",".join(lists)], deadline)
    if ending.code != 0 or not text.split():
        raise MldebugError(f"scontrol does not tell the nodes of job {job}: {ending.complaint[:200]}", "use --hosts")
    return checked(text.split())


def by_srun(sink: Sink, asked: Asked, job: str) -> None:
    """Ask the nodes of a job by steps beside what it runs; a node that is lost must not keep the others waiting."""
    names, now = sink.names, time.monotonic()

    def step(group: Sequence[str], deadline: float) -> Call:
        words = asked.words("", deadline, len(names), slurm=True)
        return Call(group[0], launch.srun_command(job, group, words), deadline, launch.srun_environment())

    if len(names) > _FEW:
        deadline = now + (asked.deadline - now) * 0.6
        _run(sink, asked, "srun", iter([step(names, deadline)]), {names[0]: names})
    rest = unanswered(sink, names)
    _run(sink, asked, "srun", (step([name], asked.deadline) for name in rest))


def kubectl_options(namespace: str | None, context: str | None) -> list[str]:
    options = []
    for flag, value in (("--namespace", namespace), ("--context", context)):
        if value is not None:
            if not re.fullmatch(r"[^\s\0]{1,253}", value):
                raise UsageError(f"{flag} {value!r} is no name", "`kubectl config get-contexts` lists them")
            options.append(f"{flag}={value}")
    return options


def list_pods(
    selector: str, options: Sequence[str], container: str | None, deadline: float
) -> tuple[list[str], dict[str, Trouble]]:
    """The pods of a selector that run, and why the others do not."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./=!,() -]{0,500}", selector):
        raise UsageError(f"{selector[:60]!r} is no label selector", "for example: --pods app=train")
    if container is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", container):
        raise UsageError(f"{container[:60]!r} is no name of a container", "`kubectl describe pod` lists them")
    ending, text = _asked("kubectl", [*options, "get", "pods", f"--selector={selector}", "--output=json"], deadline)
    if ending.how != "exit" or ending.code != 0:
        said = ending.complaint.splitlines()[-1] if ending.complaint else f"no answer in {ending.seconds:.0f} s"
        raise MldebugError(f"kubectl does not list the pods: {said[:300]}", "`kubectl get pods` must work here")
    try:
        items = json.loads(text)["items"]
        pods = {str(item["metadata"]["name"]): item for item in items}
    except (ValueError, KeyError, TypeError) as exc:
        raise MldebugError(f"kubectl gave no list of pods: {exc}", "`kubectl get pods -o json` says more") from exc
    if not pods:
        raise MldebugError(f"no pod has the labels {selector}", "`kubectl get pods --show-labels`, or --namespace NAME")
    running, others = [], {}
    for name in checked(pods):
        phase, reason = _phase(pods[name])
        if phase == "Running":
            running.append(name)
        else:
            others[name] = Trouble("failed", f"the pod is {phase}{reason}: `kubectl describe pod {name}`", True)
    return running, others


def by_kubectl(
    sink: Sink, asked: Asked, pods: Sequence[str], options: Sequence[str], container: str | None
) -> None:  # fmt: skip
    def call(pod: str) -> Call:
        words = asked.words(pod, asked.deadline, len(pods))
        return Call(pod, launch.kubectl_command(pod, words, options, container), asked.deadline)

    _run(sink, asked, "kubectl", map(call, pods))


def _run(
    sink: Sink, asked: Asked, way: str, calls: Iterable[Call], members: dict[str, Sequence[str]] | None = None
) -> None:
    """Make the calls; `members` are the nodes that answer through each, where it is not its host alone."""
    readers: dict[str, FrameReader] = {}

    def group(host: str) -> Sequence[str]:
        return members[host] if members is not None else (host,)

    def read(call: Call, data: bytes) -> None:
        reader = readers.get(call.host)
        if reader is None:
            names = frozenset(group(call.host))
            reader = readers[call.host] = FrameReader(names.__contains__, sink.take, len(names))
        reader.feed(data)

    def done(ending: Ending) -> None:
        host = ending.call.host
        reader = readers.pop(host, None)
        noise = bytes(reader.noise) if reader is not None else b""
        for name in unanswered(sink, group(host)):
            if name == host or way == "srun":
                trouble = why(ending, name, way, asked.python, noise)
            else:
                trouble = Trouble("timeout", f"its gateway {host} gave no answer for it, and no time was left")
            if name not in sink.troubles or (name == host and ending.seconds > 0):  # what is known already says more
                sink.fail(name, trouble)

    # In little time all have to be asked at once, as one that hangs keeps its place until the end.
    turns = max(1, int((asked.deadline - time.monotonic()) / _TURN))
    launch.call_all(calls, read=read, done=done, fanout=max(asked.fanout, -(-len(sink.names) // turns)))


def _groups(names: Sequence[str], fanout: int) -> list[Sequence[str]]:
    """The names in up to `fanout` parts of equal size, as few as let each gateway ask all of its part at once."""
    count = min(fanout, -(-len(names) // fanout))
    return [names[start::count] for start in range(count)]


def _asked(name: str, words: Sequence[str], deadline: float) -> tuple[Ending, str]:
    ending, output = launch.ask((launch.program(name), *words), deadline)
    return ending, output.decode("utf-8", "replace")


def _phase(pod: dict[str, Any]) -> tuple[str, str]:
    try:
        status = pod["status"]
        for one in status.get("containerStatuses", []):
            waiting = one.get("state", {}).get("waiting")
            if waiting and status["phase"] != "Running":
                return str(status["phase"]), f" ({str(waiting.get('reason', ''))[:60]})"
        return str(status["phase"])[:40], ""
    except (KeyError, TypeError, AttributeError):
        return "in a state that cannot be read", ""
