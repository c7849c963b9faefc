"""Which CPUs and how much memory a process may use: lists of CPUs, affinity, and cgroups of both versions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mldebug.core.machine import NotVisible, Root

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number where there is none


def cpus(text: str) -> set[int]:
    """A list of CPUs such as "0-3,8"."""
    found: set[int] = set()
    for word in text.replace("\n", ",").split(","):
        first, _, last = word.strip().partition("-")
        if first.isdecimal():
            found.update(range(int(first), min(int(last) if last.isdecimal() else int(first), 65536) + 1))
    return found


def cpu_list(numbers: Iterable[int]) -> str:
    """The other way round."""
    words: list[list[int]] = []
    for number in sorted(numbers):
        if words and number == words[-1][1] + 1:
            words[-1][1] = number
        else:
            words.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in words)


def allowed(root: Root, pid: str) -> str:
    match = re.search(r"^Cpus_allowed_list:\s*(\S*)", root.read(f"/proc/{pid}/status"), re.M)
    if match is None:
        raise NotVisible(f"/proc/{pid}/status tells no CPUs")
    return match.group(1)


def cgroup_limits(root: Root) -> dict[str, Any]:
    """The tightest limits on the way from this process' cgroup up: {cpus, memory, used, killed, throttled, version}."""
    places = _places(root)
    if not places:
        raise NotVisible("no cgroup file system is mounted")
    found: dict[str, Any] = {"version": 2 if "unified" in places else 1}
    for kind, folders in places.items():
        for folder in folders:
            _tighten(found, _limits(root, kind, folder))
    return found


def _places(root: Root) -> dict[str, list[str]]:
    """For each controller the folders from this process' cgroup up to where the file system is mounted."""
    mounts: dict[str, tuple[str, str]] = {}  # controller -> root of the mount, mount point
    for line in root.read("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        words, more = fields.split(), rest.split()
        if len(words) < 5 or len(more) < 3:
            continue
        if more[0] == "cgroup2":
            mounts["unified"] = (words[3], words[4])
        elif more[0] == "cgroup":
            for name in set(more[2].split(",")) & {"cpu", "memory"}:
                mounts[name] = (words[3], words[4])
    found: dict[str, list[str]] = {}
    for line in root.read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(",") if number != "0" else ["unified"]:
            if name in mounts:
                top, point = mounts[name]
                # Seen from inside a container the path may be that of the host, and the mount its own part already.
                inside = path[len(top) :] if top != "/" and path.startswith(top) else path
                folders = _upwards(point, inside)
                found[name] = [one for one in folders if root.exists(one)] or [point]
    if "unified" in found and not root.exists(f"{mounts['unified'][1]}/cgroup.controllers"):
        del found["unified"]
    if "unified" in found and ("cpu" in found or "memory" in found):
        del found["unified"]  # both are mounted, and the old one has the controllers
    return found


def _upwards(point: str, inside: str) -> list[str]:
    words = [word for word in inside.split("/") if word and word != ".."]
    return ["/".join([point, *words[:count]]) for count in range(len(words), -1, -1)]


def _limits(root: Root, kind: str, folder: str) -> dict[str, float]:
    found: dict[str, float] = {}

    def number(name: str, fact: str) -> None:
        text = root.maybe(f"{folder}/{name}")
        if text is not None and text.lstrip("-").isdecimal() and 0 <= int(text) < _NO_LIMIT:
            found[fact] = int(text)

    if kind == "unified":
        quota = (root.maybe(f"{folder}/cpu.max") or "").split()
        if len(quota) == 2 and quota[0].isdecimal():
            found["cpus"] = int(quota[0]) / max(1, int(quota[1]))
        number("memory.max", "memory")
        number("memory.current", "used")
    elif kind == "cpu":
        text, period = root.maybe(f"{folder}/cpu.cfs_quota_us") or "-1", root.maybe(f"{folder}/cpu.cfs_period_us") or ""
        if text.isdecimal() and period.isdecimal():
            found["cpus"] = int(text) / max(1, int(period))
    else:
        number("memory.limit_in_bytes", "memory")
        number("memory.usage_in_bytes", "used")
    for name in ("memory.events", "memory.oom_control", "cpu.stat"):
        for key, value in re.findall(
            r"^(oom_kill|nr_throttled|nr_periods) (\d+)$", root.maybe(f"{folder}/{name}") or "", re.M
        ):
            found[key] = int(value)
    return found


def _tighten(found: dict[str, Any], here: dict[str, float]) -> None:
    if "cpus" in here and here["cpus"] < found.get("cpus", 1e9):
        found.update({key: here[key] for key in ("cpus", "nr_throttled", "nr_periods") if key in here})
    if "memory" in here and here["memory"] < found.get("memory", _NO_LIMIT):
        found.update({key: here[key] for key in ("memory", "used") if key in here})
    found["oom_kill"] = max(found.get("oom_kill", 0), here.get("oom_kill", 0))
