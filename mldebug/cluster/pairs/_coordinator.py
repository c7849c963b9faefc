"""Who is measured when, in a live pair matrix: rounds of tasks with a deadline each, and workers that are replaced.

It talks to what looks after the workers over plain sockets, and loads no torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from mldebug.cluster._hub import Agent, Hub, address_for, signal_name
from mldebug.cluster.dist._wire import Message
from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.cluster.pairs._noise import suspicious
from mldebug.cluster.pairs._parts import Gpu, Wanted
from mldebug.cluster.pairs._tasks import Task, evidence_of, tasks_of
from mldebug.core.hosts import fold_hosts

_GRACE = 1.5  # seconds after the first sign of a failure, in which its cause may show itself
_DEATHS = 3  # in a row, and a worker is not started again
_LEAST = 10.0  # seconds that a pair has in any case, within the timeout
_TIMES = 10  # and as often the time of the slowest pair that ended well
_SILENT = 5.0  # seconds; what looks after workers beats twice a second


class Coordinator(Hub):
    """`run()` measures all of it; `tasks`, `gpus` and `blame` are what came out, also after a Ctrl-C."""

    def __init__(
        self,
        wanted: Wanted,
        listener: socket.socket,
        failures: Callable[[], dict[str, str]] = dict,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(wanted.job, listener)
        self.wanted = wanted
        self.failures = failures  # hosts whose start failed, and why
        self.progress = progress or (lambda text: None)
        self.gpus: list[Gpu] = []
        self.tasks: list[Task] = []
        self.blame: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._tasks: dict[int, Task] = {}  # those under way
        self._slowest = 0.0
        self._round = 0

    def run(self) -> None:
        self._gather()
        self._await_workers()
        turns = tasks_of([gpu.name for gpu in self.gpus], self._hosts(), self.wanted.mode, self.wanted.sample)
        self.tasks = [task for turn in turns for task in turn]
        later: list[Task] = []
        for turn in turns:
            later += self._round_of(turn, f"round {self._round + 1} of {len(turns)}")
        while later:
            if not (turn := self._possible(later)):
                self._turn()
                self._late_workers()
                later = [task for task in later if not self._hopeless(task)]
                continue
            chosen = {task.id for task in turn}
            later = [task for task in later if task.id not in chosen]
            later += self._round_of(turn, f"again, round {self._round + 1}")
        for task in suspicious(self.tasks) if self.wanted.noisy else ():
            fresh = Task(len(self.tasks) + 1 + self._round, task.gpus, task.ends, task.nodes)
            self._round_of([fresh], "slow ones once more, alone")
            if fresh.status == "ok" and not any(fresh.wrong.values()):
                task.better(fresh)
            elif fresh.status:
                self.tasks.append(fresh)

    def evidence(self, names: list[str]) -> PairsEvidence:
        """What was measured until now."""
        return evidence_of(names, self.tasks, self.notes, self.blame)

    # Who is there

    def _gather(self) -> None:
        began = last = time.monotonic()
        came = 0
        while len(self.came) < self.wanted.agents:
            self._turn()
            now = time.monotonic()
            if len(self.came) > came:
                came, last = len(self.came), now
            self.progress(f"{came} of {self.wanted.agents} hosts are there")
            failed = self.failures()
            if came + len(failed) >= self.wanted.agents and failed:
                break
            # Nobody waits for the last one longer than for all others together and the timeout.
            if now - last > self.wanted.timeout and (came or now - began > self.wanted.start_timeout):
                break
        self._name_gpus()

    def _name_gpus(self) -> None:
        order = {name: number for number, name in enumerate(self.wanted.hosts)}
        self.came.sort(key=lambda agent: (agent.rank or 0, order.get(agent.name, 0)))
        boots: dict[str, str] = {}
        for agent in self.came:  # two machines may have the same name
            base, number = agent.name, 1
            while boots.setdefault(agent.name, agent.boot) != agent.boot:
                number += 1
                agent.name = f"{base}-{number}"
        failed = self.failures()
        locals_of = [sorted(agent.local) for agent in self.came]
        usual = max(locals_of, key=len, default=[0])
        for agent in self.came:
            if not agent.local:
                self.notes.append(f"{agent.name} has no accelerator, and nothing was measured there")
            self.gpus += [Gpu(f"{agent.name}:{local}", agent.name, local, agent) for local in agent.local]
        if self.wanted.hosts:
            for host in [host for host in self.wanted.hosts if host not in {agent.name for agent in self.came}]:
                why = failed.get(host, "nothing was heard from it")
                self.notes.append(f"{host} did not take part: {why}")
                for local in usual:
                    self.gpus.append(Gpu(f"{host}:{local}", host, local, None, "gone", why=why, lost="missing"))
                    self._blame(self.gpus[-1], "missing", why)
        elif len(self.came) < self.wanted.agents:
            ranks = {agent.rank for agent in self.came}
            absent = [str(rank) for rank in range(self.wanted.agents) if rank not in ranks]
            for rank in absent:
                why = "it never reported"
                self.gpus.append(Gpu(f"rank{rank}:0", f"rank{rank}", 0, None, "gone", why=why, lost="missing"))
                self._blame(self.gpus[-1], "missing", why)
            self.notes.append(f"ranks that did not take part: {fold_hosts(absent)}")
        for agent in self.came:
            for message in agent.early:
                self._take(agent, message)

    def _await_workers(self) -> None:
        """Until all are ready, or gone, or late."""
        while waiting := [gpu for gpu in self.gpus if gpu.state == "loading"]:
            self._turn()
            self._late_workers()
            self.progress(f"{len(self.gpus) - len(waiting)} of {len(self.gpus)} workers are ready")

    def _late_workers(self) -> None:
        for gpu in self.gpus:
            if gpu.state == "loading" and gpu.agent is not None:
                limit = self.wanted.start_timeout if not gpu.agent.loaded else max(self.wanted.timeout, 60.0)
                if time.monotonic() - gpu.since > limit:
                    what = "its device" if gpu.agent.loaded else "torch"
                    self._gone(gpu, "start", f"it was not ready after {limit:g} s: {what} did not load")

    # Rounds

    def _round_of(self, turn: list[Task], title: str) -> list[Task]:
        """Measure these at once; those that cannot be now are returned."""
        self._round += 1
        later = []
        for task in turn:
            if self._hopeless(task):
                continue
            if all(self.gpus[gpu].state == "ready" for gpu in task.gpus):
                self._begin(task)
            else:
                later.append(task)
        while self._tasks:
            self._turn()
            for task in list(self._tasks.values()):
                self._check(task)
            done = sum(bool(task.status) for task in self.tasks)
            bad = sum(task.status not in ("", "ok") for task in self.tasks)
            self.progress(f"{title}, {done} of {len(self.tasks)} pairs" + (f", {bad} of them bad" if bad else ""))
        return later

    def _possible(self, later: list[Task]) -> list[Task]:
        """Those of `later` that can run now, with no GPU in two of them."""
        used: set[int] = set()
        chosen = []
        for task in later:
            if not used & set(task.gpus) and all(self.gpus[gpu].state == "ready" for gpu in task.gpus):
                chosen.append(task)
                used |= set(task.gpus)
        return chosen

    def _hopeless(self, task: Task) -> bool:
        """Whether one of its workers will not come any more; then it has its status."""
        lost = [self.gpus[gpu] for gpu in task.gpus if self.gpus[gpu].state == "gone"]
        if lost:
            dead = any(gpu.lost in ("dead", "start") for gpu in lost)
            task.close("dead" if dead else "missing", self._round, lost[0].why)
        return bool(lost)

    def _begin(self, task: Task) -> None:
        first = self.gpus[task.gpus[0]]
        self._tasks[task.id] = task
        task.begin(self._round)
        for member, number in enumerate(task.gpus):
            gpu = self.gpus[number]
            gpu.state = "busy"
            assert gpu.agent is not None and first.agent is not None
            self._send(
                gpu.agent,
                {
                    "t": "task", "local": gpu.local, "id": task.id, "member": member, "members": len(task.gpus),
                    "gpus": list(task.gpus), "mode": self.wanted.mode, "bytes": self.wanted.bytes,
                    "timeout": self.wanted.timeout, "address": address_for(gpu.agent, first.agent), "port": first.port,
                },
            )  # fmt: skip

    def _check(self, task: Task) -> None:
        """Whether a task is over, in whatever way."""
        now = time.monotonic()
        if len(task.free) == len(task.gpus):
            self._slowest = max(self._slowest, now - task.began)
            for number in task.gpus:
                self.gpus[number].deaths = self.gpus[number].hangs = 0
                self.gpus[number].state = "ready"
            self._finish(task, "ok")
        elif task.trouble and (now - task.trouble > _GRACE or len(task.ended) + len(task.failed) == len(task.gpus)):
            self._failed(task)
        elif now - task.began > self._limit():
            stopped = [gpu for gpu in map(self.gpus.__getitem__, task.gpus) if gpu.process in ("T", "t")]
            for gpu in stopped:
                self._blame(gpu, "stopped", f"its process {gpu.pid} was stopped (SIGSTOP)", task)
            why = f"it did not end within {now - task.began:.1f} s"
            for number in task.gpus:
                gpu = self.gpus[number]
                gpu.hangs += not stopped or gpu in stopped
                self._renew(gpu, why)
            self._finish(task, "hang", why)

    def _failed(self, task: Task) -> None:
        for number in task.gpus:
            gpu = self.gpus[number]
            if number in task.ended:
                gpu.deaths += 1
                self._blame(gpu, "dead", task.ended[number], task)
            self._renew(gpu, task.ended.get(number) or task.failed.get(number) or "its peer failed")
        why = next(iter([*task.ended.values(), *task.failed.values()]), "")
        self._finish(task, "dead" if task.ended else "error", why)

    def _finish(self, task: Task, status: str, why: str = "") -> None:
        del self._tasks[task.id]
        task.close(status, self._round, why)

    def _limit(self) -> float:
        """Seconds for a pair: what others needed says how long it takes."""
        usual = max(_LEAST, _TIMES * self._slowest) if self._slowest else self.wanted.timeout
        return min(self.wanted.timeout, usual)

    def _renew(self, gpu: Gpu, why: str) -> None:
        """Another process for this GPU, unless that has not helped before."""
        if gpu.state == "gone" or gpu.agent is None:
            return
        most = max(4, 2 * max(len(agent.local) for agent in self.came))
        if gpu.deaths >= _DEATHS:
            self._gone(gpu, "dead", f"its worker ended {gpu.deaths} times in a row: {why}")
        elif gpu.hangs >= most:
            self._gone(gpu, "hang", f"it hung {gpu.hangs} times in a row and was given up")
        else:
            gpu.state, gpu.since, gpu.process, gpu.why, gpu.past = "loading", time.monotonic(), "", "", gpu.pid
            self._send(gpu.agent, {"t": "renew", "local": gpu.local})

    def _gone(self, gpu: Gpu, what: str, why: str) -> None:
        gpu.state, gpu.why, gpu.lost = "gone", why, what
        self._blame(gpu, what, why)
        self.notes.append(f"{gpu.name}: {why}")

    def _blame(self, gpu: Gpu, what: str, why: str, task: Task | None = None) -> None:
        """What is known to be one end's fault, which the matrix alone would not tell."""
        pair = [self.gpus[number].name for number in task.gpus if self.gpus[number] is not gpu] if task else []
        self.blame.append({"gpu": gpu.name, "what": what, "why": why, "with": pair, "round": self._round})

    # What is heard

    def _take(self, agent: Agent, message: Message) -> None:
        kind = message.get("t")
        if self._greeted(agent, message, late=bool(self.gpus)):
            return
        if kind == "loaded":
            agent.loaded = True
            for gpu in self._of(agent):
                gpu.since = time.monotonic()
        elif kind == "beat":
            for gpu in self._of(agent):
                gpu.process = message["states"].get(str(gpu.local), "")
        elif not self.gpus:
            agent.early.append(message)
        else:
            for gpu in self._of(agent):
                if gpu.local == message.get("local"):
                    self._said(gpu, message)

    def _of(self, agent: Agent) -> Iterator[Gpu]:
        return (gpu for gpu in self.gpus if gpu.agent is agent)

    def _said(self, gpu: Gpu, message: Message) -> None:
        kind, number = message["t"], self.gpus.index(gpu)
        task = next((task for task in self._tasks.values() if number in task.gpus), None)
        if kind == "ready":
            if gpu.state == "loading":
                gpu.come(message)
        elif kind == "broken":
            gpu.why = message["why"]
        elif kind == "ended":
            if message["pid"] != gpu.past:
                self._ended(gpu, task, message["code"])
        elif task is not None and message.get("id") == task.id:
            task.take(number, message)

    def _ended(self, gpu: Gpu, task: Task | None, code: int) -> None:
        why = gpu.why or (f"its worker was killed by {signal_name(-code)}" if code < 0 else f"its worker left ({code})")
        if task is not None:
            task.end(self.gpus.index(gpu), why)
        elif gpu.state in ("ready", "loading"):
            gpu.deaths += 1
            if gpu.state == "ready":
                self._blame(gpu, "dead", why)
            self._renew(gpu, why)

    def _left(self, agent: Agent, why: str) -> None:
        why = f"{agent.name} {why}"
        for gpu in self._of(agent):
            if gpu.state != "gone":
                for task in self._tasks.values():
                    if self.gpus.index(gpu) in task.gpus:
                        task.end(self.gpus.index(gpu), why)
                self._gone(gpu, "dead", why)

    def _patience(self) -> float:
        return max(_SILENT, self._limit())

    def _hosts(self) -> list[list[int]]:
        """The GPUs of each host."""
        found: dict[str, list[int]] = {}
        for number, gpu in enumerate(self.gpus):
            found.setdefault(gpu.host, []).append(number)
        return list(found.values())
