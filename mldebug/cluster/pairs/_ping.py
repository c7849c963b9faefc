"""The matrix over TCP: which hosts reach each other, and how well, in rounds of disjoint pairs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mldebug.cluster._hub import address_for
from mldebug.cluster.dist._wire import Message, connects, resolve
from mldebug.cluster.pairs._coordinator import Coordinator
from mldebug.cluster.pairs._evidence import SCHEMA, PairsEvidence
from mldebug.cluster.pairs._parts import Gpu
from mldebug.cluster.pairs._ping_worker import BATCH, LOOKS
from mldebug.cluster.pairs._schedule import node_rounds, sample_rounds
from mldebug.core.hosts import fold_hosts

_CONNECT = 3.3  # seconds: a first packet that is lost is sent again after 1 s and 3 s
_STALL = 3.0  # seconds for what should take milliseconds
_LITTLE = 0.6  # the same, with a host that stalled again and again
_STALLS = 3
_LASTS = 0.1  # seconds of sending
_TIMES, _MOST_AGAIN = 2, 64  # how often suspicious pairs are measured again, and how many of them
_SLACK = 3.0  # seconds more that a worker has to answer
_FIRST = 3  # rounds before anything is said of the rest
_SSH = 22
_ASKED = 128  # hosts that did not come are looked at, at once
_FULL = (
    "the table of neighbours (ARP) was full, so connections were lost that are fine: "
    "raise net.ipv4.neigh.default.gc_thresh3 to twice the hosts of the network"
)


class PingCoordinator(Coordinator):
    """`run()` measures; `evidence()` is what came out. Its ends are hosts."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._facts: dict[str, Message] = {}
        self._answers: dict[int, Message] = {}
        self._count = 0
        self._stalls: dict[str, int] = {}
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}

    def run(self) -> None:
        self._gather()
        self._await_workers()
        ready = self._ready()
        self._check_names(ready)
        turns = node_rounds(len(ready))
        if self.wanted.sample:
            turns = [[(one, other) for (one, _), (other, _) in turn] for turn in sample_rounds([1] * len(ready))]
        self._reach(ready, turns)
        began = time.monotonic()
        for number, turn in enumerate(turns, 1):
            self._round = number
            left = (time.monotonic() - began) / max(number - 1, 1) * (len(turns) - number + 1)
            more = f", about {left:.0f} s more" if number > _FIRST else ""
            for way in (0, 1):
                self.progress(f"round {number} of {len(turns)}{more}")
                self._flows([(ready[pair[way]], ready[pair[1 - way]]) for pair in turn])
        self._again(ready)

    def evidence(self, names: list[str]) -> PairsEvidence:
        number = {name: place for place, name in enumerate(names)}
        found: PairsEvidence = {
            "schema": SCHEMA, "gpus": names, "src": [], "dst": [], "gbps": [], "status": [],
            "notes": self.notes, "latency_us": [], "connect_us": [], "lost": [], "round": [], "why": [],
            "blame": self.blame,
        }  # fmt: skip
        lost = {gpu.host: "missing" if gpu.lost == "missing" else "dead" for gpu in self.gpus if gpu.state == "gone"}
        for one in names:
            for other in names:
                row = self._rows.get((one, other), {})
                gone = lost.get(one) or lost.get(other)
                if one == other or not (row or gone):
                    continue
                found["src"].append(number[one])
                found["dst"].append(number[other])
                found["status"].append(row.get("status") or gone or "missing")
                for key in ("gbps", "latency_us", "connect_us", "lost", "round"):
                    found[key].append(row.get(key))
                found["why"].append(row.get("why", ""))
        return found

    # Who is there

    def _name_gpus(self) -> None:
        told = self.failures
        came = {agent.name for agent in self.came}
        missing = [host for host in self.wanted.hosts if host not in came]
        known = {host: why for host, why in told().items() if host in missing}
        with ThreadPoolExecutor(_ASKED) as pool:  # one after the other would take longer than the others wait
            whys = dict(zip(missing, pool.map(lambda host: _absent(host, known.get(host, "")), missing), strict=True))
        self.failures = lambda: {**told(), **whys}
        super()._name_gpus()
        first: dict[str, Gpu] = {}
        for gpu in self.gpus:  # many ranks of a host are one
            first.setdefault(gpu.host, gpu)
        self.gpus = list(first.values())

    def _blame(self, gpu: Gpu, what: str, why: str, task: object = None) -> None:
        self.blame.append({"gpu": gpu.host, "what": what, "why": why, "with": [], "round": self._round})

    def _ready(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.state == "ready"]

    def _check_names(self, ready: list[Gpu]) -> None:
        for gpu in ready:
            assert gpu.agent is not None
            if why := wrong_name(self._facts[gpu.host]):
                self._blame(gpu, "name", why)

    # What is measured

    def _reach(self, ready: list[Gpu], turns: list[list[tuple[int, int]]]) -> None:
        """All ports of all hosts from those that are measured with them, at once; in the order of the rounds, so that
        not all begin with the same one."""
        asked = {}
        wanted: list[list[Gpu]] = [[] for _ in ready]
        for one, other in (pair for turn in turns for pair in turn):
            wanted[one].append(ready[other])
            wanted[other].append(ready[one])
        for gpu, others in zip(ready, wanted, strict=True):
            peers = [[other.host, self._address(gpu, other), self._ports(other)] for other in others]
            asked[gpu] = self._ask(gpu, {"do": "reach", "peers": peers, "seconds": _CONNECT})
        many = max(sum(len(self._ports(other)) for other in others) for others in wanted) if ready else 0
        self.progress("who reaches whom")
        self._await(asked, LOOKS * _CONNECT * (1 + many // BATCH) + _SLACK)
        full = [gpu.host for gpu, number in asked.items() if self._answers.get(number, {}).get("full")]
        if full:
            self.notes.append(f"{fold_hosts(full)}: {_FULL}")
        for gpu, number in asked.items():
            for host, failed in self._answers.get(number, {}).get("failed", {}).items():
                ports = next(self._ports(other) for other in ready if other.host == host)
                self._rows[gpu.host, host] = {"status": "error", "why": unreached(ports, failed), "round": 0}

    def _flows(self, pairs: list[tuple[Gpu, Gpu]]) -> None:
        asked: dict[Gpu, int] = {}
        ends = {}
        longest = 0.0
        for src, dst in pairs:
            if src.state != "ready" or dst.state != "ready" or (src.host, dst.host) in self._rows:
                continue
            often = max(self._stalls.get(src.host, 0), self._stalls.get(dst.host, 0)) >= _STALLS
            seconds = _LITTLE if often else _STALL
            longest = max(longest, seconds)
            told = {"do": "flow", "address": self._address(src, dst), "port": dst.port, "lasts": _LASTS}
            asked[src] = self._ask(src, {**told, "seconds": seconds})
            ends[src] = dst
        self._await(asked, 3 * longest + _SLACK)
        for src, number in asked.items():
            dst = ends[src]
            row = self._answers.get(number) or {"status": "hang", "why": "no answer came of the one that measures"}
            if row["status"] == "hang":
                for end in (src, dst):
                    self._stalls[end.host] = self._stalls.get(end.host, 0) + 1
            self._rows[src.host, dst.host] = {**row, "round": self._round}

    def _again(self, ready: list[Gpu]) -> None:
        """Measure the late, lossy and slow ones once more, each alone: hosts that are busy have such, too."""
        from mldebug.cluster.pairs._ping_judge import any_mark

        places = {gpu.host: gpu for gpu in ready}
        for number in range(1, _TIMES + 1):
            evidence = self.evidence([gpu.host for gpu in self.gpus])
            names = evidence["gpus"]
            ends = _ends(evidence, names)
            bad = [pair for pair, marked in zip(ends, any_mark(evidence), strict=True) if marked]
            for place, (src, dst) in enumerate(bad[:_MOST_AGAIN], 1):
                self.progress(f"once more, alone ({number} of {_TIMES}): {place} of {len(bad)}")
                before = self._rows.pop((src, dst))
                self._flows([(places[src], places[dst])])
                after = self._rows.setdefault((src, dst), before)
                if after["status"] == "ok":  # the better of both in each
                    for key, best in (("gbps", max), ("latency_us", min), ("connect_us", min), ("lost", min)):
                        after[key] = best(before[key], after[key])

    def _ask(self, gpu: Gpu, message: Message) -> int:
        self._count += 1
        if gpu.agent is not None:
            self._send(gpu.agent, {"t": "task", "local": 0, "id": self._count, "address": "-", **message})
        return self._count

    def _await(self, asked: Mapping[Gpu, int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = [gpu for gpu, number in asked.items() if number not in self._answers and gpu.state == "ready"]
            if not left:
                return
            self._turn()
        for gpu in left:
            why = f"its process {gpu.pid} was stopped (SIGSTOP)" if gpu.process in ("T", "t") else "it does not answer"
            self._gone(gpu, "stopped", why)

    def _address(self, gpu: Gpu, other: Gpu) -> str:
        assert gpu.agent is not None and other.agent is not None
        return address_for(gpu.agent, other.agent)

    def _ports(self, gpu: Gpu) -> list[int]:
        return [int(port) for port in self._facts[gpu.host]["ports"]]

    def _said(self, gpu: Gpu, message: Message) -> None:
        if message["t"] == "answer":
            self._answers[message["id"]] = message
            return
        if message["t"] == "ready":
            self._facts[gpu.host] = message
        super()._said(gpu, message)


def _ends(evidence: PairsEvidence, names: list[str]) -> list[tuple[str, str]]:
    return [(names[src], names[dst]) for src, dst in zip(evidence["src"], evidence["dst"], strict=True)]


def wrong_name(facts: Message) -> str:
    """Why others would be told a wrong address of a host, or ""."""
    for key, value in facts["wanted"].items():
        names = [name.lstrip("=^") for name in str(value).split(",")]
        if value.startswith("^"):
            continue
        exact = value.startswith("=") or key.startswith("GLOO")
        if not any(card == name if exact else card.startswith(name) for card in facts["cards"] for name in names):
            return f"{key}={value} is none of its interfaces {', '.join(facts['cards'])}"
        if all(name == "lo" for name in names):
            return f"{key}={value} is the loopback, which no other host reaches"
    if facts["wanted"] or not facts["leads_to"]:
        return "" if facts["wanted"] else f"its own name {facts['name']} leads nowhere: gloo and others resolve it"
    if all(address.startswith("127.") or address == "::1" for address in facts["leads_to"]):
        return (
            f"its own name {facts['name']} leads to {facts['leads_to'][0]} there, and gloo and others would tell that "
            "to other hosts: mend /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
    return ""


def unreached(ports: list[int], failed: Mapping[str, str]) -> str:
    """Which ports of a host cannot be reached, in words."""
    kinds = " or ".join(sorted(set(failed.values())))
    if len(failed) == len(ports):
        return f"no connection: {kinds}"
    bad = sorted(map(int, failed))
    where = f"port {bad[0]}" if len(bad) == 1 else f"ports between {bad[0]} and {bad[-1]} ({len(bad)} tried)"
    return f"{where} {kinds}, {len(ports) - len(bad)} others fine"


def _absent(host: str, told: str) -> str:
    """Why a host did not come: what ssh said, and what its port says."""
    addresses = resolve(host)
    if not addresses:
        return told or "its name cannot be resolved here"
    place = (addresses[0], _SSH)
    sock = connects([place], 2.0)[place]
    if isinstance(sock, str):
        return f"{told + '; ' if told else ''}its port {_SSH} at {addresses[0]}: {sock}"
    with contextlib.suppress(OSError), sock:
        sock.settimeout(2.0)
        if sock.recv(4):
            more = "its sshd answers and the login goes no further: do full-size packets arrive (MTU)?"
            return f"{told}; {more}" if told.endswith("status 255") else told or f"{more}, or what it starts hangs"
    return f"its kernel takes connections, and its sshd says nothing: it is frozen or starved ({addresses[0]})"
