"""Runs the nodes of `emulate`, and leaves nothing of them behind. A program of its own, of the standard library alone.

It reads what is to run as one line of JSON from a pipe, and ends everything when that pipe closes: the process that
started it may be killed at any time. Where namespaces are allowed the first process of a pid namespace runs the nodes,
so that the kernel ends the nodes with it; elsewhere it adopts their orphans and looks for them in /proc.

    python _emulate_guard.py CONTROL_FD STATUS_FD
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_PDEATHSIG, _SUBREAPER = 1, 36
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SEARCH = "/usr/sbin:/sbin:/usr/bin:/bin"


class Refused(Exception):
    """Namespaces cannot be had here; the message says why."""


def main(control: int, status: int) -> int:
    spec = json.loads(_first_line(control))
    why = spec["plain"]
    if not why:
        why = _in_namespaces(spec, control, status)
        if why is None:
            return 0
    _prctl(_SUBREAPER, 1)
    _say(status, {"event": "way", "namespaces": False, "why": why})
    nodes = {}
    for number, node in enumerate(spec["nodes"]):
        pid = os.fork()
        if pid == 0:
            _become({**node, "command": node["plain_command"], "env": node["plain_env"]})
        nodes[pid] = number
    _Watch(spec, control, status, nodes, namespaces=False).run()
    return 0


# With namespaces


def _in_namespaces(spec: dict[str, Any], control: int, status: int) -> str | None:
    """Run all there, in a process of its own. The reason where that cannot be, and nothing has run."""
    reason, tell = os.pipe()
    outer = os.fork()
    if outer == 0:
        os.close(reason)
        _outer(spec, control, status, tell)
    os.close(tell)
    why = b""
    while data := os.read(reason, 4096):
        why += data
    os.close(reason)
    os.waitpid(outer, 0)
    return why.decode("utf-8", "replace") or None


def _outer(spec: dict[str, Any], control: int, status: int, tell: int) -> NoReturn:
    """Leave the namespaces of the machine; what is forked then is the first process of the new pid namespace."""
    code = 0
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        try:
            _unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET)
        except OSError as exc:
            raise Refused(f"namespaces are not allowed ({(exc.strerror or str(exc)).lower()})") from exc
        first = os.fork()
        if first:
            os.close(tell)
            os.waitpid(first, 0)
            os._exit(0)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        nodes = _make_nodes(spec)
        os.close(tell)
        tell = -1
        _say(status, {"event": "way", "namespaces": True, "why": ""})
        _Watch(spec, control, status, nodes, namespaces=True).run()
    except (Refused, OSError) as exc:
        code = 1
        if tell >= 0:
            os.write(tell, str(exc).encode())
    finally:
        os._exit(code)


def _make_nodes(spec: dict[str, Any]) -> dict[int, int]:
    """The processes of the nodes, each in a network of its own on one switch, ready to run; pid -> number."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", 0)
    _ip("link add br0 type bridge\nlink set br0 up\nlink set lo up\n")
    waiting = []
    for number, node in enumerate(spec["nodes"]):
        ready, tell = os.pipe()
        wait, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in (ready, go):
                os.close(fd)
            _in_node(spec, node, tell, wait)
        for fd in (tell, wait):
            os.close(fd)
        waiting.append((pid, number, ready, go))
    for pid, number, ready, go in waiting:
        _expect(ready, b"unshared")
        _ip(f"link add v{number} type veth peer name eth0 netns {pid}\nlink set v{number} master br0 up\n")
        os.write(go, b"1")
    for _pid, _number, ready, _go in waiting:
        _expect(ready, b"made")
    for _pid, _number, ready, go in waiting:  # now that all are there, none runs before the others can be reached
        os.write(go, b"1")
        os.close(go)
        os.close(ready)
    return {pid: number for pid, number, _ready, _go in waiting}


def _in_node(spec: dict[str, Any], node: dict[str, Any], tell: int, wait: int) -> NoReturn:
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        _unshare(_NEWNET | _NEWUTS | _NEWNS | _NEWIPC)
        os.write(tell, b"unshared\n")
        if not os.read(wait, 1):
            os._exit(1)
        _sethostname(node["name"])
        address = f"{node['address']}/24"
        _ip(f"link set lo up\naddr add {address} dev eth0\nlink set eth0 up\n")
        _mount("none", "/dev/shm", "tmpfs", 0, b"mode=1777")
        hosts = "/dev/shm/.hosts"
        with open(hosts, "w") as out:
            known = [(other["address"], other["name"]) for other in spec["nodes"]]
            names = "".join(f"{address} {name}\n::ffff:{address} ip6-{name}\n" for address, name in known)
            out.write(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        _mount(hosts, "/etc/hosts", None, _MS_BIND)
        os.unlink(hosts)
        os.write(tell, b"made\n")
        if not os.read(wait, 1):
            os._exit(1)
    except (OSError, Refused) as exc:
        why = str(exc) if isinstance(exc, Refused) else f"namespaces are not allowed ({(exc.strerror or '').lower()})"
        os.write(tell, why.encode() + b"\n")
        os._exit(1)
    _become(node)


def _expect(ready: int, word: bytes) -> None:
    said = b""
    while not said.endswith(b"\n"):
        data = os.read(ready, 4096)
        if not data:
            break
        said += data
    if said.strip() != word:
        raise Refused(said.decode("utf-8", "replace").strip() or "a node ended before it began")


def _ip(commands: str) -> None:
    try:
        done = subprocess.run(
            ["ip", "-batch", "-"], input=commands, text=True, capture_output=True, check=False, env={"PATH": _SEARCH}
        )
    except OSError as exc:
        raise Refused("`ip` is not installed (apt-get install iproute2)") from exc
    if done.returncode:
        raise Refused(f"no virtual network can be made: {done.stderr.strip().splitlines()[0]}")


# The program of a node


def _become(node: dict[str, Any]) -> NoReturn:
    """Turn this process into the program of a node."""
    try:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.dup2(node["stdout"], 1)
        os.dup2(node["stderr"], 2)
        os.closerange(3, 4096)
        os.chdir(node["cwd"])
        os.execvpe(node["command"][0], node["command"], node["env"])
    except OSError as exc:
        os.write(2, f"mldebug: cannot run {node['command'][0]}: {(exc.strerror or str(exc)).lower()}\n".encode())
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


class _Watch:
    """Waits for the nodes, passes signals on, and ends what is left."""

    def __init__(
        self, spec: dict[str, Any], control: int, status: int, nodes: dict[int, int], namespaces: bool
    ) -> None:
        self._grace: float = spec["grace"]
        self._control = control
        self._status = status
        self._nodes = nodes  # those that run
        self._namespaces = namespaces
        self._steps: list[tuple[float, int]] = []  # when to send which signal

    def run(self) -> None:
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they come through the pipe
        while self._nodes:
            self._reap()
            if not self._nodes:
                break
            wait = max(0.0, self._steps[0][0] - time.monotonic()) if self._steps else None
            ready, _, _ = select.select([self._control, woken], [], [], wait)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            if self._control in ready and not self._obey():
                break
            while self._steps and time.monotonic() >= self._steps[0][0]:
                due = self._steps.pop(0)[1]
                if due == signal.SIGKILL:
                    self._nodes.clear()  # none is waited for any more
                else:
                    self._signal(due)
        self._kill_all()
        _say(self._status, {"event": "over"})

    def _obey(self) -> bool:
        """Do what the pipe says; False where everything is to end now."""
        data = os.read(self._control, 4096)
        for word in data.split():
            if word == b"kill":
                return False
            self._signal(int(word))
            now = time.monotonic()
            self._steps = self._steps or [(now + self._grace, signal.SIGTERM), (now + self._grace + 5, signal.SIGKILL)]
        return bool(data)

    def _signal(self, number: int) -> None:
        for pid in self._nodes:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._nodes:
                continue  # an orphan of some node
            code = os.waitstatus_to_exitcode(ended)
            code = 128 - code if code < 0 else code
            _say(self._status, {"event": "ended", "node": self._nodes.pop(pid), "status": code})
            if code and not self._steps:
                now = time.monotonic()
                self._steps = [(now + self._grace, signal.SIGTERM), (now + self._grace + 5, signal.SIGKILL)]

    def _kill_all(self) -> None:
        for _ in range(200):
            if self._namespaces:
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)  # as the first process of the namespace: all but this one
            else:
                for pid in _descendants(os.getpid()):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.02)


def _descendants(root: int) -> list[int]:
    """All that root has started and adopted, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: list[int] = []
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found += new
    return found


# What Python does not offer on all versions


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, value, 0, 0, 0)


def _unshare(flags: int) -> None:
    """Leave these namespaces; in a user namespace of its own where that takes rights that this process has not."""
    if sys.platform != "linux":
        raise OSError(38, "they need Linux")
    uid, gid = os.geteuid(), os.getegid()
    try:
        _checked(_libc().unshare(flags))
    except PermissionError:
        _checked(_libc().unshare(flags | _NEWUSER))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as out:
                out.write(text)


def _mount(source: str, target: str, kind: str | None, flags: int, data: bytes | None = None) -> None:
    result = _libc().mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, data)
    try:
        _checked(result)
    except OSError as exc:
        raise Refused(f"{target} cannot be mounted ({exc.strerror})") from exc


def _sethostname(name: str) -> None:
    _checked(_libc().sethostname(name.encode(), len(name)))


def _say(status: int, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(what).encode() + b"\n")


def _first_line(fd: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(fd, 1)
        if not more:
            raise SystemExit("the pipe closed before it said what to run")
        data += more
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
