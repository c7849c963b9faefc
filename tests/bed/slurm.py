"""A real SLURM on the hosts of a bed: controller on the first host, slurmd and munged on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any

from tests.bed.bed import Bed

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge", "munge": "munge"}

# Without a cgroup plugin by name slurmd looks for systemd and ends; accounting and task plugins want more than a
# namespace has. The nodes may claim any number of CPUs.
_CONF = """\
ClusterName=bed
SlurmctldHost={front}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=30
KillWait=2
SchedulerParameters=sched_interval=1
NodeName={nodes} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_MUNGED = """
install -d -o munge -g munge -m 755 /run/munge
install -o munge -g munge -m 400 "$1" /run/munge/key
exec setpriv --reuid munge --regid munge --clear-groups /usr/sbin/munged --foreground --num-threads=2 \
    --socket=/run/munge/munge.socket.2 --key-file=/run/munge/key --log-file=/run/munge/log \
    --pid-file=/run/munge/pid --seed-file=/run/munge/seed
"""


def missing() -> str:
    """Why there can be no SLURM here, or ""."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = sorted({package for name, package in PROGRAMS.items() if shutil.which(name, path=search) is None})
    return f"not installed: apt-get install {' '.join(lacking)}" if lacking else ""


class Slurm:
    """Its processes end with the bed."""

    def __init__(self, bed: Bed, cpus: int = 4) -> None:
        self.bed = bed
        folder = bed.folder / "slurm"
        (folder / "state").mkdir(parents=True)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        nodes = ",".join(bed.hosts)
        (folder / "slurm.conf").write_text(_CONF.format(front=bed.hosts[0], folder=folder, nodes=nodes, cpus=cpus))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._log = (folder / "daemons.log").open("wb")
        daemon: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": self._log,
            "stderr": self._log,
            "env": self.env,
        }
        for host in bed.hosts:
            bed.start(host, "/bin/sh", "-c", _MUNGED, "sh", str(folder / "key"), **daemon)
        for host in bed.hosts:
            self._until(lambda host=host: bed.run(host, "munge", "-n").returncode == 0, f"munged on {host}")
        bed.start(bed.hosts[0], "slurmctld", "-D", **daemon)
        for host in bed.hosts:
            bed.start(host, "slurmd", "-D", "-N", host, **daemon)
        self._until(self._is_up, "SLURM")

    def run(self, *words: str, timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host."""
        return self.bed.run(self.bed.hosts[0], *words, timeout=timeout, env=self.env, **more)

    def close(self) -> None:
        self.run("scancel", "--user=root", "--full")
        self._log.close()

    def _is_up(self) -> bool:
        done = self.run("sinfo", "--noheader", "--Node", "--format=%T")
        return done.stdout.split() == ["idle"] * len(self.bed.hosts)

    def _until(self, answers: Any, what: str) -> None:
        for _ in range(1200):
            if answers():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{what} does not come up: see {self.bed.folder / 'slurm'}")
