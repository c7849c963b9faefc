"""A rank of dist-test, with a fault if DIST_FAULT names it: {"ranks": [2], "at": "all_reduce", "do": "stop"}."""

import json
import os
import signal
import sys
import time

from mldebug.cluster.dist import _rank
from mldebug.cluster.dist._facts import environment
from mldebug.cluster.dist._net import backend_address, interfaces
from mldebug.cluster.dist._probe import answer
from mldebug.cluster.dist._wire import listen, resolve

FAULT = json.loads(os.environ.get("DIST_FAULT", "{}"))
MINE = int(os.environ["RANK"]) in FAULT.get("ranks", ())
DO = FAULT.get("do", "") if MINE else ""


class Faulty(_rank.Rank):
    def phase(self, name):
        super().phase(name)
        if DO and name.startswith(FAULT.get("at", "?")):
            fail()


class Light(Faulty):
    """All that is said is as of a real rank; the collectives only wait for each other's phases."""

    def run(self):
        self.phase("import")
        told = self.await_message("config")
        self.config = told["config"]
        _rank._watch_parent(told, self.rank)
        self.phase("device")
        self.say({"t": "facts", "facts": {"device": {"kind": "cpu", "index": None, "name": "cpu", "uuid": ""}}})
        self.phase("facts")
        address = FAULT.get("address") if DO == "address" else None
        address = address or backend_address("gloo")
        try:
            listener = listen(address=address)
        except OSError:
            listener = listen()
        answer(listener)
        name = os.uname().nodename
        facts = {
            "backend": "gloo", "torch": "2", "cuda": "", "driver": "", "nccl": "", "python": "3", "store": 1,
            "interfaces": interfaces(), "hostname": {"name": name, "addresses": resolve(name)},
            "environment": environment(), "door": [address, listener.getsockname()[1]],
            "device": {"kind": "cpu", "index": None, "name": "cpu"},
        }  # fmt: skip
        if MINE:
            facts.update(FAULT.get("facts", {}))
        self.say({"t": "facts", "facts": facts})
        peers = self.meet("facts")["peers"]
        self.phase("reach")
        self.say({"t": "reach", **self._reach(peers)})
        self.meet("reach")
        for name in ("init", "all_reduce", "barrier"):
            self.phase(name)
            time.sleep(0.1)
        self.phase("end")
        self.meet("run")


def fail():
    if DO == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif DO == "stop-parent":
        os.kill(os.getppid(), signal.SIGSTOP)
    elif DO == "stop-all":
        for pid in [*family(os.getppid()), os.getpid()]:
            os.kill(pid, signal.SIGSTOP)
    elif DO == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif DO == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif DO == "exit":
        os._exit(3)
    elif DO == "raise":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    elif DO == "mark":
        with open(FAULT["mark"], "w", encoding="ascii"):
            time.sleep(600)
    elif DO == "wait":
        time.sleep(600)


def family(pid):
    """The process that looks after this rank, and its other children."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
        return [pid, *(int(word) for word in stream.read().split() if int(word) != os.getpid())]


def corrupt():
    """What this rank puts in has a wrong bit."""
    from mldebug.cluster.dist import _collectives

    part = _collectives.Collectives.part

    def wrong(self, rank, count, dtype, salt=0):
        values = part(self, rank, count, dtype, salt)
        if rank == self.rank:
            values[count // 2] += 1
        return values

    _collectives.Collectives.part = wrong


def patch():
    from mldebug.cluster.dist import _device, _facts

    device_facts, facts = _device.Device.facts, _facts.facts
    _device.Device.facts = lambda self: {**device_facts(self), **FAULT.get("device", {})}
    _facts.facts = lambda device: {**facts(device), **FAULT.get("facts", {})}
    if DO == "corrupt":
        corrupt()


if os.environ.get("DIST_LIGHT"):
    _rank.Rank = Light
else:
    _rank.Rank = Faulty
    if MINE:
        patch()
sys.exit(_rank.main())
