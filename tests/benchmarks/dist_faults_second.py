"""Plant faults in hosts made of namespaces, one at a time, and see whom dist-test names, and after how long.

    sudo python tests/benchmarks/dist_faults_second.py [--only WORD] [--timeout 15]

Real ranks with gloo, started as a launcher would start them (RANK, WORLD_SIZE, MASTER_ADDR) or by --hosts over ssh. The
first culprit of the first report has to be right. "seconds" count from the fault, or from the start if it was there
before. Exit status 1 if a fault was named wrong or late, or if something was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bed import bed as beds  # noqa: E402
from tests.bed.bed import Bed  # noqa: E402

HOSTS = 3
LONG = ",".join(["8M"] * 80)  # enough for a fault to come while collectives run
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI", "DIST_"))},
    "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "h1", "MASTER_PORT": "29500",
}  # fmt: skip
# What a rank's Python loads before anything else, to be another machine than it is.
SITES = {
    "clock": "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n",
    "no torch": (
        "import sys\nclass Broken:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n            raise ImportError('libcudart.so.13: cannot open it')\n"
        "sys.meta_path.insert(0, Broken())\n"
    ),
    "slow disk": (
        "import sys, time\nclass Slow:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n            time.sleep(600)\n"
        "sys.meta_path.insert(0, Slow())\n"
    ),
    "other torch": (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Other:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch.version':\n"
        "            found = PathFinder.find_spec(name, path)\n"
        "            load = found.loader.exec_module\n"
        "            def loads(module):\n"
        "                load(module)\n"
        "                module.__version__ = '2.1.0+cu118'\n"
        "            found.loader.exec_module = loads\n"
        "            return found\n"
        "sys.meta_path.insert(0, Other())\n"
    ),
}  # fmt: skip

Env = Callable[[int, str], dict[str, str]]  # what a rank on a host has in its environment besides


@dataclass
class Plant:
    """`host` or `rank` is who is to be named first, `word` a part of the reason; `ok`: nobody, the test goes well."""

    name: str
    host: str = ""
    rank: int | None = None
    word: str = ""
    env: Env = lambda rank, host: {}
    before: Callable[[Bed], Any] = lambda bed: None
    during: Callable[[Bed], Any] | None = None
    undo: Callable[[Bed], Any] = lambda bed: None
    ranks: int = 1  # on each host
    skip: tuple[int, ...] = ()  # ranks that never start
    words: tuple[str, ...] = ("--bytes", "4,64K,1M")
    shell: Env = lambda rank, host: {}  # "": what the shell that starts a rank does first
    ssh: bool = False
    ok: bool = False
    silent: tuple[str, ...] = ()  # hosts that cannot say anything any more
    unheard: tuple[str, ...] = ()  # hosts from which no word comes through, though they are alive
    others: tuple[str, ...] = field(default=())  # also right: the other end of a path


def on(host: str, **env: str) -> Env:
    return lambda rank, here: env if here == host else {}


def site(host: str, what: str) -> Env:
    return lambda rank, here: {"PYTHONPATH": f"{FOLDER}/{what.replace(' ', '-')}:{ROOT}"} if here == host else {}


def nft(host: str, chain: str, rule: str) -> Callable[[Bed], Any]:
    rules = f"table inet filter {{\nchain c {{\ntype filter hook {chain} priority 0\n{rule}\n}}\n}}\n"
    return lambda bed: must(bed.run(host, "nft", rules))


def flush(host: str) -> Callable[[Bed], Any]:
    return lambda bed: must(bed.run(host, "nft", "flush ruleset"))


def must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"{done.args[-3:]}: {done.stderr}")


def hosts_file(host: str, text: str) -> Callable[[Bed], Any]:
    def plant(bed: Bed) -> None:
        path = Path(FOLDER, "other-hosts")
        path.write_text(text)
        must(bed.run(host, "mount", "--bind", str(path), "/etc/hosts"))

    return plant


def kill(host: str, text: str, number: int, most: int = 9) -> Callable[[Bed], Any]:
    """Send a signal to processes of a host whose command line has this text."""

    def plant(bed: Bed) -> None:
        done = bed.run(host, "ps", "-eo", "pid,args")
        lines = [line for line in done.stdout.splitlines() if text in line and "ps -eo" not in line]
        for line in lines[:most]:
            bed.run(host, "kill", f"-{number}", line.split()[0])

    return plant


def memory_group(host: str, limit: int) -> Env:
    group = f"/sys/fs/cgroup/memory/mldebug-bench-{os.getpid()}"

    def joins(rank: int, here: str) -> dict[str, str]:
        if here != host:
            return {}
        os.makedirs(group, exist_ok=True)
        Path(group, "memory.limit_in_bytes").write_text(str(limit))
        return {"": f"echo $$ >{group}/cgroup.procs"}

    return joins


def end_group(bed: Bed) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(f"/sys/fs/cgroup/memory/mldebug-bench-{os.getpid()}")


def tbf(host: str, rate: str) -> Callable[[Bed], Any]:
    words = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "50ms")
    return lambda bed: must(bed.run(host, *words))


FOLDER = ""
NAMES = "127.0.0.1 localhost\n10.99.0.1 h1\n"

PLANTS = [
    Plant("a third of the packets that h2 sends is lost", "h2", 1, before=nft(
        "h2", "output", "tcp dport != 22 tcp sport != 22 numgen random mod 100 < 30 drop"),
        undo=flush("h2"), words=("--bytes", "4,64K,8M")),
    Plant("h3 sends at 400 kbit/s", "h3", 2, "256 KiB", before=tbf("h3", "400kbit"), words=("--bytes", "4,64K,1M,8M"),
          undo=lambda bed: must(bed.run("h3", "tc", "qdisc", "del", "dev", "eth0", "root"))),
    Plant("GLOO_SOCKET_IFNAME of h2 is not there", "h2", 1, "GLOO_SOCKET_IFNAME=ib0",
          env=on("h2", GLOO_SOCKET_IFNAME="ib0")),
    Plant("the name of h3 leads to h2", "h3", 2, "resolves to 10.99.0.2", before=hosts_file(
        "h3", NAMES + "10.99.0.2 h2\n10.99.0.2 h3\n"), undo=lambda bed: must(bed.run("h3", "umount", "/etc/hosts"))),
    Plant("another torch on h3", "h3", 2, "torch is 2.1.0", env=site("h3", "other torch")),
    Plant("another WORLD_SIZE on h3", "h3", 2, "it was told of 4 ranks", env=on("h3", WORLD_SIZE="4")),
    Plant("RANK 1 twice", rank=1, word="already taken", env=on("h3", RANK="1"), others=("h2", "h3")),
    Plant("rank 7 of 12 never starts", "h2", 7, "never reported", ranks=4, skip=(7,)),
    Plant("little memory on h2", "h2", 1, "SIGKILL", shell=memory_group("h2", 120 << 20), undo=end_group),
    Plant("no address space on h2", "h2", 1, "alloc", shell=lambda rank, host: (
        {"": "ulimit -v 700000"} if host == "h2" else {}), words=("--bytes", "64M")),
    Plant("the clock of h2 is an hour off", "h2", 1, "3600 s ahead", env=site("h2", "clock"), ok=True),
    Plant("the host of rank 0 freezes", rank=0, word="h1", during=lambda bed: bed.freeze("h1"),
          undo=lambda bed: bed.thaw("h1"), words=("--bytes", LONG), silent=("h1",)),
    Plant("h3 loses its power", "h3", 2, "nothing was heard", during=lambda bed: bed.crash("h3"),
          words=("--bytes", LONG), silent=("h3",)),
    Plant("h2 is unplugged", "h2", 1, "nothing was heard", during=lambda bed: bed.blackhole("h2"),
          undo=lambda bed: bed.join("h2"), words=("--bytes", LONG), unheard=("h2",)),
    Plant("MASTER_ADDR of h2 is nobody", "h2", 1, "=h9), cannot be resolved", env=on("h2", MASTER_ADDR="h9")),
    Plant("a rank of h2 breaks", "h2", 1, "SIGSEGV", during=kill("h2", "dist._rank", signal.SIGSEGV),
          words=("--bytes", LONG)),
    Plant("a rank of h3 is ended from outside", "h3", 2, "connection", during=kill(
        "h3", "mldebug dist-test", signal.SIGKILL), words=("--bytes", LONG)),
    Plant("a rank of h3 is told to end", "h3", 2, "connection", during=kill(
        "h3", "mldebug dist-test", signal.SIGTERM), words=("--bytes", LONG)),
    Plant("torch cannot be loaded on h2", "h2", 1, "libcudart", env=site("h2", "no torch")),
    Plant("torch does not come off the disk of h2", "h2", 1, "did not get on", env=site("h2", "slow disk"),
          words=("--bytes", "4", "--start-timeout", "15")),
    Plant("no sshd on h3", "h3", 2, "no rank could be started", before=kill("h3", "sshd -D", signal.SIGKILL),
          ssh=True, undo=lambda bed: bed.start("h3", "/usr/sbin/sshd", "-D", "-e", "-f", f"{bed.folder}/h3.sshd")),
    Plant("the shell of h2 says hello and leaves", "h2", 1, "", ssh=True, env=on("h2", LEAVE="1")),
    Plant("large packets to h3 vanish", "h3", None, "do not come through", before=nft(
        "h3", "input", "meta length > 1200 drop"), undo=flush("h3"), words=("--bytes", "4,1M"), others=("h1", "h2")),
    Plant("h3 takes no new connections of h2", "h3", None, "filtered", before=nft(
        "h3", "input", "ip saddr 10.99.0.2 tcp dport 32768-60999 ct state new drop"), undo=flush("h3"), others=("h2",)),
    Plant("h2 rejects what comes to high ports", "h2", 1, "refused", before=nft(
        "h2", "input", "tcp dport 32768-60999 ct state new reject with tcp reset"), undo=flush("h2")),
    Plant("h2 may not go to the collector", rank=0, word="(seen by rank 1 on h2)", before=nft(
        "h2", "output", "tcp dport 21000-28999 drop"), undo=flush("h2")),
    Plant("NCCL_ALGO on h3 only", "h3", 2, "NCCL_ALGO", env=on("h3", NCCL_ALGO="Ring")),
    Plant("a debugger holds a rank of h1", "h1", 0, "stopped", during=kill("h1", "dist._rank", signal.SIGSTOP),
          words=("--bytes", LONG)),
    Plant("all is well", ok=True),
]  # fmt: skip


def launch(bed: Bed, plant: Plant, timeout: float) -> dict[str, subprocess.Popen[bytes]]:
    """Each rank, or the one launcher, by its host and rank."""
    words = ["dist-test", "--backend", "gloo", "--json", "--timeout", f"{timeout:g}", *plant.words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    if plant.ssh:
        python = Path(FOLDER, "python")
        python.write_text(
            f"#!/bin/sh\necho Welcome to $(hostname)\n"
            f"test $(hostname) = h2 && test -e {FOLDER}/leave && exit 0\n"
            f'PYTHONPATH={ROOT} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        Path(FOLDER, "leave").unlink(missing_ok=True)
        if plant.env(1, "h2"):
            Path(FOLDER, "leave").touch()
        words += ["--hosts", ",".join(bed.hosts), "--nproc", str(plant.ranks), "--ssh-config", bed.ssh_config,
                  "--remote-python", str(python)]  # fmt: skip
        env = {name: value for name, value in ENV.items() if not name.startswith("MASTER")}
        return {"h1 0": bed.start("h1", sys.executable, "-m", "mldebug", *words, env=env, **pipes)}
    found = {}
    for number, host in enumerate(bed.hosts):
        for local in range(plant.ranks):
            rank = number * plant.ranks + local
            if rank in plant.skip:
                continue
            env = {
                **ENV, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(HOSTS * plant.ranks),
                "LOCAL_WORLD_SIZE": str(plant.ranks), **plant.env(rank, host),
            }  # fmt: skip
            first = plant.shell(rank, host).get("", ":")
            command = ["/bin/sh", "-c", f'{first}; exec "$@"', "sh", sys.executable, "-m", "mldebug", *words]
            found[f"{host} {rank}"] = bed.start(host, *command, env=env, **pipes)
    return found


def answers(started: dict[str, subprocess.Popen[bytes]], limit: float) -> Iterator[tuple[str, float, int, str, str]]:
    """(host and rank, when, status, stdout, stderr) of each as it ends."""
    import threading

    ended: list[tuple[str, float, int, str, str]] = []

    def wait(name: str, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ValueError):
            out, err = process.communicate()
            ended.append((name, time.monotonic(), process.returncode, out.decode(), err.decode(errors="replace")))

    for name, process in started.items():
        threading.Thread(target=wait, args=(name, process), daemon=True).start()
    deadline, shown = time.monotonic() + limit, 0
    while shown < len(started) and time.monotonic() < deadline:
        while shown < len(ended):
            yield ended[shown]
            shown += 1
        time.sleep(0.05)


def try_one(bed: Bed, plant: Plant, timeout: float) -> tuple[bool, str]:
    plant.before(bed)
    began = time.monotonic()
    first: tuple[float, dict[str, Any]] | None = None
    statuses, lines, documents = {}, [], 0
    try:
        started = launch(bed, plant, timeout)
        if plant.during is not None:
            time.sleep(6.0)
            plant.during(bed)
            began = time.monotonic()
        mine = {name: one for name, one in started.items() if name.split()[0] not in plant.silent}
        for name, when, status, out, err in answers(mine, 4 * timeout + 30):
            statuses[name] = status
            lines += [line for line in err.splitlines() if line.startswith("mldebug:")]
            for line in out.splitlines() if name.split()[0] not in plant.unheard else ():
                if line.startswith("{"):
                    documents += 1
                    if first is None:
                        first = (when - began, json.loads(line))
    finally:
        plant.undo(bed)
    late = [name for name in mine if name not in statuses]
    for one in started.values():
        one.kill()
        one.wait()
    left = leftovers(bed, plant)
    if first is None:
        return False, f"no document; {lines[:2]} {statuses}"
    seconds, document = first
    culprit = (document["culprits"] or [{"rank": None, "host": "", "reason": "nobody"}])[0]
    if plant.ok:
        right = document["ok"] and (not plant.word or plant.word in json.dumps(document["differences"]))
        right = right and all(status == 0 for status in statuses.values())
    else:
        right = not document["ok"] and plant.word in culprit["reason"] and plant.rank in (None, culprit["rank"])
        right = right and (not plant.host or culprit["host"] in (plant.host, *plant.others))
        right = right and all(status == 1 or status >= 128 for status in statuses.values() if status >= 0)
    right = right and seconds < 30 + (6 if plant.ok else 0) and not late and not left
    said = f"rank {culprit['rank']} {culprit['host']}: {culprit['reason'][:110]}"
    more = "".join(f"; {what}: {value}" for what, value in (("late", late), ("left", left)) if value)
    odd = {name: status for name, status in statuses.items() if status not in (0, 1)}
    return bool(right), f"{seconds:5.1f} s  {said}{more}{f'; status {odd}' if odd else ''}; {documents} documents"


def leftovers(bed: Bed, plant: Plant) -> list[str]:
    found: list[str] = []
    for _ in range(60):
        found = [
            f"{host}: {line[:60]}" for host in bed.hosts if host not in plant.silent or host == "h1"
            for word in ("cluster.dist", "mldebug dist-test") for line in bed.processes(host, word)
        ]  # fmt: skip
        if not found:
            break
        time.sleep(0.1)
    return found


def main() -> int:
    global FOLDER
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="faults with this word in their name")
    parser.add_argument("--timeout", type=float, default=15.0)
    args = parser.parse_args()
    if why := beds.missing():
        print(why, file=sys.stderr)
        return 2
    plants = [one for one in PLANTS if args.only in one.name]
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = folder
        for name, text in SITES.items():
            place = Path(folder, name.replace(" ", "-"))
            place.mkdir()
            (place / "sitecustomize.py").write_text(text)
        bed: Bed | None = None
        for number, plant in enumerate(plants):
            if bed is None:
                bed = Bed(HOSTS, Path(folder, f"bed{number}"))
                bed.__enter__()
            try:
                right, said = try_one(bed, plant, args.timeout)
            finally:
                if plant.silent or sys.exc_info()[0] is not None:  # a host is gone
                    bed.__exit__()
                    bed = None
            good += right
            print(f"{'right' if right else 'WRONG'}  {plant.name:<48} {said}", flush=True)
        if bed is not None:
            bed.__exit__()
    print(f"{good} of {len(plants)} right the first time, within 30 s, exit status 1, nothing left behind")
    return 0 if good == len(plants) else 1


if __name__ == "__main__":
    sys.exit(main())
