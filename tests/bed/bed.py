"""A few hosts on one machine: each with its own network, processes, host name and sshd, and faults on demand.

A host is one process in namespaces of its own (network, pid, uts, ipc, mount) which starts sshd and buries orphans; the
files are those of the machine. A switch in one more network namespace joins them, so nothing is added to the network of
the machine itself. Ending the processes removes everything. Needs root and a few programs: `missing()` says what is not
there, and tests skip with it.

    with Bed(3, folder) as bed:
        bed.run("h1", "ssh", "-F", bed.ssh_config, "h2", "hostname")
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NETWORK = "10.99.0"
PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "ps": "procps",
}
_FEW = 16  # hosts
_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CGROUPS = Path("/sys/fs/cgroup")
_NAME = "mldebug-bed-"
_NUMBERS = itertools.count()  # several beds may be up at once

# The first process of a host: what only it can do, and then burying what loses its parent.
_INIT = """
hostname "$1"
mount --make-rprivate / 2>/dev/null
mount -t tmpfs -o mode=755 none /run && mkdir -p /run/sshd
mount -t tmpfs -o mode=1777 none /dev/shm
mount --bind "$2/hosts" /etc/hosts
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip addr add "$3/24" dev eth0
ip link set eth0 up
/usr/sbin/sshd -D -e -f "$2/$1.sshd" &
trap : TERM INT HUP
while :; do wait -n 2>/dev/null || sleep 0.5; done
"""


def missing() -> str:
    """Why there can be no bed here, or ""."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "needs root"
    lacking = sorted({package for name, package in PROGRAMS.items() if shutil.which(name, path=_SEARCH) is None})
    if lacking:
        return f"not installed: apt-get install {' '.join(lacking)}"
    probe = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
    )
    return "" if probe.returncode == 0 else "this machine allows no namespaces"


class Bed:
    def __init__(self, hosts: int, folder: Path) -> None:
        self.folder = folder
        self.hosts = [f"h{number}" for number in range(1, hosts + 1)]
        self.ssh_config = str(folder / "ssh_config")
        self._init: dict[str, int] = {}  # host -> number of its first process
        self._ours: list[subprocess.Popen[bytes]] = []
        self._groups: dict[str, Path] = {}
        self._name = f"{_NAME}{os.getpid()}-{next(_NUMBERS)}-"

    def __enter__(self) -> Bed:
        _remove_groups_of_the_dead()
        try:
            self._keys()
            self._switch_up()
            for number, host in enumerate(self.hosts, 1):
                self._boot(host, number)
            for host in self.hosts:
                self._await_ssh(host)
            self._meet()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            with contextlib.suppress(OSError):
                self.thaw(host)
        for pid in self._init.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # the kernel ends all the rest of a pid namespace with its first process
        for process in reversed(self._ours):
            process.kill()
            process.wait()
        for group in self._groups.values():
            _remove(group, patience=30)

    def command(self, host: str, *words: str) -> list[str]:
        """A command that runs `words` on a host. It ends with the process that starts it."""
        joins = f'echo $$ >"{self._groups[host]}/cgroup.procs"; ' if host in self._groups else ""
        inside = ["nsenter", "-t", str(self._init[host]), "-m", "-u", "-i", "-n", "-p", "--"]
        return ["/bin/sh", "-c", f'{joins}exec "$@"', "sh", *inside, "setpriv", "--pdeathsig", "KILL", *words]

    def run(self, host: str, *words: str, timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(host, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)

    def start(self, host: str, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a program on a host; it is ended with the bed."""
        process = subprocess.Popen(self.command(host, *words), **more)
        self._ours.append(process)
        return process

    def processes(self, host: str, text: str) -> list[str]:
        """The command lines on a host that have this text."""
        done = self.run(host, "ps", "-eo", "args")
        return [line for line in done.stdout.splitlines() if text in line and not line.startswith("ps ")]

    # Faults

    def freeze(self, host: str) -> None:
        """Nothing on the host runs any more, sshd neither; its kernel still takes connections."""
        group = self._groups[host]
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("FROZEN")
            while (group / "freezer.state").read_text().strip() != "FROZEN":
                time.sleep(0.01)
        else:
            (group / "cgroup.freeze").write_text("1")

    def thaw(self, host: str) -> None:
        group = self._groups.get(host)
        if group is not None and (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
        elif group is not None and (group / "cgroup.freeze").exists():
            (group / "cgroup.freeze").write_text("0")

    def blackhole(self, host: str) -> None:
        """The link stays up and nothing comes through."""
        self._on_switch("ip", "link", "set", f"v{host}", "nomaster")

    def join(self, host: str) -> None:
        self._on_switch("ip", "link", "set", f"v{host}", "master", "br0")

    def crash(self, host: str) -> None:
        """Power off: the peers get no word."""
        self._on_switch("ip", "link", "set", f"v{host}", "down")
        os.kill(self._init.pop(host), signal.SIGKILL)

    def can_freeze(self) -> bool:
        return bool(self._groups)

    def group(self, host: str) -> Path:
        return self._groups[host]

    # How it is made

    def _keys(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("login", *self.hosts):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / f"{name}.key")]
            subprocess.run(words, check=True)
        shutil.copy(folder / "login.key.pub", folder / "authorized")
        addresses = [f"{NETWORK}.{number} {host}" for number, host in enumerate(self.hosts, 1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        known = [f"{host} {(folder / f'{host}.key.pub').read_text().strip()}" for host in self.hosts]
        (folder / "known").write_text("\n".join([*known, ""]))
        Path(self.ssh_config).write_text(
            f"Host *\n User root\n IdentityFile {folder}/login.key\n IdentitiesOnly yes\n IdentityAgent none\n"
            f" UserKnownHostsFile {folder}/known\n GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n"
        )
        for number, host in enumerate(self.hosts, 1):
            (folder / f"{host}.sshd").write_text(
                f"ListenAddress {NETWORK}.{number}\nHostKey {folder}/{host}.key\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPermitRootLogin prohibit-password\n"
                "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 200\nUseDNS no\n"
            )

    def _switch_up(self) -> None:
        self._switch = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
        self._ours.append(self._switch)
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._switch.pid}/ns/net") == mine:
            time.sleep(0.01)
        self._on_switch("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        self._on_switch("ip", "link", "set", "br0", "up")

    def _on_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._switch.pid), "-n", *words], check=True)

    def _boot(self, host: str, number: int) -> None:
        group = self._group(host)
        joins = f'echo $$ >"{group}/cgroup.procs"; ' if group else ""
        init = ["/bin/bash", "-c", _INIT, "init", host, str(self.folder), f"{NETWORK}.{number}"]
        spaces = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount-proc",
            "--fork",
            "--kill-child",
        ]
        with (self.folder / f"{host}.log").open("wb") as log:
            shell = ["/bin/sh", "-c", f'{joins}exec "$@"', "sh"]
            outer = subprocess.Popen([*shell, *spaces, *init], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._ours.append(outer)
        for _ in range(6000):
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "bash":
                self._init[host] = int(children[0])
                break
            time.sleep(0.01)
        else:
            raise RuntimeError(f"{host} did not start: {(self.folder / f'{host}.log').read_text()}")
        peer = ["peer", "name", "eth0", "netns", children[0]]
        self._on_switch("ip", "link", "add", f"v{host}", "type", "veth", *peer)
        self._on_switch("ip", "link", "set", f"v{host}", "master", "br0", "up")

    def _meet(self) -> None:
        """All hosts share this kernel's table of neighbours, which has room for 1,024; permanent entries do not
        count. A few hosts find each other as real ones do."""
        if len(self.hosts) <= _FEW:
            return
        cards = {}
        for host in self.hosts:
            words = self.run(host, "ip", "link", "show", "eth0").stdout.split()  # /sys has those of the machine
            cards[host] = words[words.index("link/ether") + 1]
        for own in self.hosts:
            lines = [
                f"neigh replace {NETWORK}.{number} lladdr {cards[host]} dev eth0 nud permanent\n"
                for number, host in enumerate(self.hosts, 1)
                if host != own
            ]
            done = self.run(own, "ip", "-batch", "-", input="".join(lines))
            if done.returncode:
                raise RuntimeError(f"{own} does not take its neighbours: {done.stderr}")

    def _group(self, host: str) -> Path | None:
        """A cgroup of the host's own, with which it can be frozen."""
        for base in (_CGROUPS / "freezer", _CGROUPS):
            if (base / "cgroup.procs").exists():
                group = base / f"{self._name}{host}"
                with contextlib.suppress(OSError):
                    group.mkdir()
                    self._groups[host] = group
                    return group
        return None

    def _await_ssh(self, host: str) -> None:
        for _ in range(1200):
            done = self.run(host, "/bin/bash", "-c", f"exec 3<>/dev/tcp/{host}/22 && head -c 4 <&3")
            if done.stdout == "SSH-":
                return
            time.sleep(0.05)
        raise RuntimeError(f"the sshd of {host} does not answer: {(self.folder / f'{host}.log').read_text()}")


def _remove_groups_of_the_dead() -> None:
    """Those of beds whose process was killed: the kernel ended their hosts, and leaves the cgroups."""
    for base in (_CGROUPS / "freezer", _CGROUPS):
        for group in base.glob(f"{_NAME}*"):
            pid = group.name.removeprefix(_NAME).partition("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    (group / "freezer.state").write_text("THAWED")  # what is frozen cannot end
                _remove(group, patience=0.5)


def _remove(group: Path, patience: float) -> None:
    """A cgroup can be removed once the last of its processes has ended, which a busy machine takes its time for."""
    deadline = time.monotonic() + patience
    while group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
