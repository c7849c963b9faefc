"""What `mldebug spy` costs for a job of thousands of ranks, each of whose nodes answers as recorded.

    python tests/benchmarks/spy_scale.py

Prints seconds and peak memory of
  merge      one tree of 10,000 ranks x 40 frames                                   (bar: 0.2 s of a core)
  parse      the answers of 1,250 nodes x 8 ranks, from lines to evidence and tree  (bar: 2 s of a core, 200 MB)
  transport  4,096 hosts with a rank each: ssh clients, gateways, parsing, verdict  (bar: the job is judged right)
and exits with 1 when a bar is missed. Each part runs in a process of its own, for its memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS, FRAMES, PER_NODE, HOSTS = 10_000, 40, 8, 4_096
LATE = 7  # the rank that saves alone

# Stands in for ssh: says what the host, and the hosts below a gateway, would say.
FAKE_SSH = """\
#!{python} -SE
import base64, json, shlex, sys
words = sys.argv[1:]
host, command = words[words.index("--") + 1 :]
request = json.loads(base64.urlsafe_b64decode(shlex.split(command)[-1]))
for name in [host, *request.get("below", {{"hosts": []}})["hosts"]]:
    with open("{folder}/" + name, "rb") as stream:
        sys.stdout.buffer.write(stream.read())
"""
# The same for hosts that are asked one by one; a shell starts faster.
FAKE_SSH_FLAT = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
exec cat "{folder}/$2"
"""


def evidence(first: int, count: int, world: int) -> Any:
    """Ranks that wait in all_reduce, but for one that saves; 40 frames, two samples, a watchdog thread."""
    ranks = []
    for rank in range(first, first + count):
        frames = _frames(rank, rank == LATE)
        other = [{"name": f"watch_{depth}", "file": "/job/watch.py", "line": depth + 5} for depth in range(6)]
        threads = [
            {"name": "MainThread", "tid": 1000 + rank, "active": False, "gil": False, "frames": frames, "ticks": 50},
            {"name": "Thread-1", "tid": 90000 + rank, "active": False, "gil": False, "frames": other, "ticks": 3},
        ]
        samples = [
            {"time": 1e9 + 0.5 * look, "state": "S", "ticks": 100, "threads": threads, "wchan": "futex_do_wait"}
            for look in (0, 1)
        ]
        ranks.append({
            "rank": rank, "local_rank": rank - first, "world_size": world, "pid": 4000 + rank, "host": "n",
            "start": 1e9 - 500.0, "job": "n1:29500", "command": "/venv/bin/python -u /job/train.py --config c.yaml",
            "status": "ok", "state": "S", "samples": samples, "children": [], "locks": [],
        })  # fmt: skip
    host = {"host": "n", "status": "ok"}
    return {"schema": 1, "time": 1e9, "hosts": [host], "ranks": ranks, "notes": [], "source": _source()}


def _frames(rank: int, late: bool) -> list[dict[str, Any]]:
    torch = "/venv/lib/python3.11/site-packages/torch"
    address = f"0x7f{rank:010x}"
    group = {"name": "group", "repr": f"<torch._C._distributed_c10d.ProcessGroup at {address}>", "arg": True}
    tensors = {"name": "args", "repr": f"(<Tensor at {address}>)", "arg": False}
    numbers = [{"name": "rank", "repr": str(rank), "arg": True}, {"name": "step", "repr": "311", "arg": False}]
    call = [
        {"name": "all_reduce", "file": f"{torch}/distributed/distributed_c10d.py", "line": 3252, "locals": [group]},
        {"name": "wrapper", "file": f"{torch}/distributed/c10d_logger.py", "line": 83, "locals": [tensors]},
    ]
    line = 41 if late else 57
    top = [{"name": "save", "file": "/job/train.py", "line": 12, "locals": numbers}] if late else call
    own = [
        {"name": f"layer_{depth}", "file": "/job/model.py", "line": 10 * depth, "locals": numbers[: 1 + depth % 2]}
        for depth in range(4)
    ]
    frames = [*top, *own]
    frames += [
        {"name": f"forward_{depth}", "file": f"{torch}/nn/modules/module.py", "line": 1000 + depth}
        for depth in range(FRAMES - len(frames) - 2)
    ]
    frames += [{"name": "main", "file": "/job/train.py", "line": line, "locals": numbers}]
    return [*frames, {"name": "<module>", "file": "/job/train.py", "line": 90}]


def _source() -> dict[str, Any]:
    guards = ["for step in range(steps)"]
    steps = [{"line": line, "what": f"call f{line}", "guards": guards} for line in range(30, 60)]
    places = [f"/job/train.py:{line}" for line in (12, 41, 57, 90)] + [
        f"/job/model.py:{10 * depth}" for depth in range(4)
    ]
    return {place: {"text": f"work({place[-2:]!r})", "guards": guards, "steps": steps} for place in places}


def part_merge() -> dict[str, float]:
    from mldebug.hang._merge import merge_stacks

    common = [("/job/train.py", f"function_{depth}", depth) for depth in range(FRAMES)]
    places = [(*common[:-1], ("/job/train.py", f"end_{place}", place)) for place in range(24)]
    stacks = [(rank, list(places[rank % 24])) for rank in range(RANKS)]
    began = time.process_time()
    tree = merge_stacks(stacks)
    seconds = time.process_time() - began
    assert len(tree.ranks) == RANKS
    return {"merge, CPU seconds": seconds, "ok": seconds <= 0.2}


def part_parse(folder: str) -> dict[str, float]:
    from mldebug.hang._merge import merge_stacks
    from mldebug.hang._remote_frames import FrameReader
    from mldebug.hang._remote_gather import Gathering

    names = sorted(os.listdir(folder))
    size = 0
    began = time.process_time()
    gathering = Gathering(names)
    for name in names:
        data = Path(folder, name).read_bytes()
        size += len(data)
        FrameReader({name}.__contains__, gathering.take).feed(data)
    merged = gathering.evidence()
    parsed = time.process_time()
    stacks = []
    for rank in merged["ranks"]:
        frames = rank["samples"][-1]["threads"][0]["frames"]
        stacks.append((rank["rank"], [(frame["file"], frame["name"], frame["line"]) for frame in frames]))
    tree = merge_stacks(stacks)
    seconds = time.process_time() - began
    memory = _memory()
    assert len(tree.ranks) == RANKS, len(tree.ranks)
    judged = time.process_time()
    lines = _judged(merged)
    return {
        "sent MB": size / 1e6, "parse, CPU seconds": parsed - began, "parse and tree, CPU seconds": seconds,
        "peak MB": memory, "verdict, CPU seconds": time.process_time() - judged,
        "peak MB after the report": _memory(), "lines of text": lines,
        "ok": seconds <= 2 and memory <= 200 and lines < 60,
    }  # fmt: skip


def part_transport(folder: str, fanout: int) -> dict[str, float]:
    from mldebug.hang._remote import collect_remote

    began = time.perf_counter()
    merged = collect_remote(hosts=f"n[1-{HOSTS}]", timeout=300.0, fanout=fanout)
    gathered = time.perf_counter()
    silent = [host for host in merged["hosts"] if host["status"] != "ok"]
    assert not silent, silent[:2]
    assert len(merged["ranks"]) == HOSTS
    lines = _judged(merged)
    return {
        "gather seconds": gathered - began, "verdict and report seconds": time.perf_counter() - gathered,
        "peak MB": _memory(), "lines of text": lines, "ok": lines < 60,
    }  # fmt: skip


def _judged(merged: Any) -> int:
    from mldebug.hang import spy

    report = spy(merged)
    assert report.verdict.culprits == (LATE,), report.verdict
    return len(report.text().splitlines())


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def record(folder: Path, nodes: int, per_node: int) -> None:
    from mldebug.hang._remote_frames import pack
    from mldebug.hang._remote_wire import encode

    for number in range(nodes):
        document = encode(evidence(number * per_node, per_node, nodes * per_node), 100)
        document["id"] = f"machine {number}"
        (folder / f"n{number + 1}").write_bytes(b"".join(pack(f"n{number + 1}", document)))


def main() -> int:
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("few", "many", "tree", "flat"):
            (folder / part).mkdir()
        record(folder / "few", RANKS // PER_NODE, PER_NODE)
        record(folder / "many", HOSTS, 1)
        (folder / "tree" / "ssh").write_text(FAKE_SSH.format(python=sys.executable, folder=folder / "many"))
        (folder / "flat" / "ssh").write_text(FAKE_SSH_FLAT.format(folder=folder / "many"))
        for part in ("tree", "flat"):
            (folder / part / "ssh").chmod(0o755)
        for title, part, *words in _parts(folder):
            path = f"{folder / ('flat' if 'without' in title else 'tree')}:{os.environ['PATH']}"
            command = [sys.executable, __file__, part, *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "PATH": path}, check=False)
            if done.returncode:
                print(f"{title}: failed")
                return 1
            figures = json.loads(done.stdout)
            good = bool(figures.pop("ok")) and good
            print(title)
            for what, value in figures.items():
                print(f"  {what:<30}{value:>8.2f}")
    print("within the bars" if good else "a bar is missed")
    return 0 if good else 1


def _parts(folder: Path) -> Iterator[tuple[str, ...]]:
    yield f"{RANKS} ranks x {FRAMES} frames, tree alone", "merge"
    yield f"{RANKS // PER_NODE} nodes x {PER_NODE} ranks, from lines to one tree", "parse", str(folder / "few")
    yield f"{HOSTS} hosts through gateways", "transport", str(folder / "many"), "64"
    yield f"{HOSTS} hosts without gateways, as many at a time as may be", "transport", str(folder / "many"), str(HOSTS)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    if len(sys.argv) > 1:
        parts = {"merge": part_merge, "parse": part_parse, "transport": part_transport}
        print(json.dumps(parts[sys.argv[1]](*(int(word) if word.isdecimal() else word for word in sys.argv[2:]))))
        sys.exit(0)
    sys.exit(main())
