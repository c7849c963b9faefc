"""doctor(): is this machine, or this cluster, fit to train on? What can be seen without running anything heavy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mldebug.cluster.health import (
    _amd,
    _clocks,
    _container,
    _cpus,
    _gpu,
    _limits,
    _load,
    _log,
    _net,
    _nvlink,
    _nvml,
    _pci,
    _ranks,
    _rdma,
    _siblings,
    _software,
    _watch,
)
from mldebug.cluster.health._finding import Finding, Node, bad, unseen
from mldebug.cluster.health._remote import INTERRUPTED, MARK, collect_remote
from mldebug.cluster.health._report import DoctorReport, gather
from mldebug.cluster.health._root import NotVisible, Root, within
from mldebug.core.cpus import cpus
from mldebug.core.errors import UsageError

T = TypeVar("T")

_NVML_SECONDS = 20.0  # without persistence the driver takes some seconds for each GPU
_JUDGES: tuple[tuple[str, Callable[[Node], Iterator[Finding]]], ...] = (
    ("GPUs", _gpu.judge),
    ("clocks", _clocks.judge),
    ("NVLink", _nvlink.judge),
    ("PCIe", _pci.judge),
    ("Xid", _log.judge),
    ("AMD GPUs", _amd.judge),
    ("RDMA ports", _rdma.judge),
    ("limits", _limits.judge),
    ("CPUs", _cpus.judge),
    ("container", _container.judge),
    ("ranks", _ranks.judge),
    ("variables", _software.judge),
    ("watch", _watch.judge),
)


def doctor(
    evidence: Mapping[str, Any] | None = None,
    *,
    watch: float | None = None,
    load: bool = False,
    hosts: str | Sequence[str] | None = None,
    slurm: str | None = None,
    **remote: Any,
) -> DoctorReport:
    """Look at this node, at `hosts`, or at the nodes of a `slurm` job: what is bad, doubtful, well, or not visible.

    Nothing heavy is run: GPUs are asked through NVML, the rest is read from /sys and /proc. `watch` seconds are spent
    to see which error counters grow. `load` puts a few seconds of copies and matmuls on GPUs that nobody uses, as
    PCIe links and clocks can be judged only then. `evidence` of `collect_doctor` is judged as it is. `remote` are
    `timeout` (seconds), `python`, `ssh`, `fanout` and `progress`.

        report = doctor(hosts="node[001-512]"); print(report.text())
    """
    if evidence is None:
        evidence = collect_doctor(watch=watch, load=load, hosts=hosts, slurm=slurm, **remote)
    return DoctorReport(judge_doctor(evidence), evidence)


def collect_doctor(
    *,
    watch: float | None = None,
    load: bool = False,
    hosts: str | Sequence[str] | None = None,
    slurm: str | None = None,
    timeout: float | None = None,
    root: Root | None = None,
    nvml: Any = None,
    **remote: Any,
) -> dict[str, Any]:
    """The evidence that `judge_doctor` judges, as plain JSON: one entry of "nodes" for each node.

    `root` and `nvml` are for tests: a Root with another prefix, and a module that answers as pynvml does.

        evidence = collect_doctor(); json.dump(evidence, open("node1.json", "w"))
    """
    if watch is not None and not 0 < watch < 1e6:
        raise UsageError(f"watch is {watch}: it is a number of seconds", "for example 10")
    if hosts is None and slurm is None:
        node = look(root or Root(), nvml, watch=watch, load=load)
        notes = [INTERRUPTED] if node.get("watch", {}).get("interrupted") else []
        return {"schema": 1, "kind": "doctor", "nodes": [node], "failed": [], "notes": notes}
    words = [*(["--watch", f"{watch:g}"] if watch is not None else []), *(["--load"] if load else [])]
    seconds = timeout if timeout is not None else 30.0 + (watch or 0.0) + (30.0 if load else 0.0)
    return collect_remote(hosts=hosts, slurm=slurm, words=words, timeout=seconds, **remote)


def look(root: Root, nvml: Any = None, *, watch: float | None = None, load: bool = False) -> dict[str, Any]:
    """The evidence of one node. A part that cannot be read has its reason under "why", and never ends the rest."""
    failure: dict[str, Any] = {}
    ours = nvml is None
    if ours:
        nvml, failure = _open_nvml()
    node = _look(root, nvml, failure)
    if load:
        seen = _try(lambda: _load.look(nvml, node)) if nvml is not None else {"why": failure.get("why", "")}
        node["load"] = {"gpus": {}, **seen}
    if watch is not None:
        node = _watched(lambda: _look(root, nvml, failure), node, watch)
    if ours and nvml is not None and "why" not in node["gpu"]:  # one that hangs is not waited for
        _try(lambda: {"": nvml.nvmlShutdown()})
    return node


def _watched(again: Callable[[], dict[str, Any]], node: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The evidence after some seconds, with what grew meanwhile. Ctrl-C makes the window shorter."""
    before = again() if "load" in node else node  # its load is no window
    began, cut = time.monotonic(), False
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        cut = True
    after = again()
    watch = _try(lambda: {"grew": _watch.grown(before, after), "counters": len(_watch.counters(after))})
    watch.update(seconds=round(time.monotonic() - began, 1), **({"interrupted": True} if cut else {}))
    return {**after, **({"load": node["load"]} if "load" in node else {}), "watch": watch}


def _open_nvml() -> tuple[Any, dict[str, Any]]:
    try:
        return within(_NVML_SECONDS, _nvml.load_nvml, "NVML")
    except NotVisible as exc:
        return None, _hangs(exc)


def _hangs(exc: NotVisible) -> dict[str, Any]:
    return {"why": f"{exc}: the driver or a GPU hangs", "error": _nvml.HANGS}


def _look(root: Root, nvml: Any, failure: Mapping[str, Any]) -> dict[str, Any]:
    count = max(cpus(root.maybe("/sys/devices/system/cpu/possible") or "0-63"), default=63) + 1

    def ask_nvml() -> dict[str, Any]:
        if nvml is None:
            return {"gpus": [], **failure}
        try:
            return within(_NVML_SECONDS, lambda: _nvml.look(nvml, count), "NVML")
        except NotVisible as exc:
            return {"gpus": [], **_hangs(exc)}

    def ask_amd() -> dict[str, Any]:
        found = _amd.look(root)
        if not found["gpus"]:
            return found
        library, why = _amd.load_amdsmi()
        return _amd.look(root, library, why)

    seen = _try(ask_nvml)
    shown = len(seen.get("gpus") or [])
    return {
        "host": root.host(),
        "boot": root.maybe("/proc/sys/kernel/random/boot_id") or "",
        "time": root.now(),
        "gpu": seen,
        "pci": _try(lambda: _pci.look(root)),
        "log": _try(lambda: _log.look(root)),
        "amd": _try(ask_amd),
        "rdma": _try(lambda: _rdma.look(root)),
        "net": _try(lambda: _net.look(root)),
        "limits": _try(lambda: _limits.look(root)),
        "cpus": _try(lambda: _cpus.look(root)),
        "container": _try(lambda: _container.look(root, shown)),
        "ranks": _try(lambda: _ranks.look(root)),
        "software": _try(lambda: _software.look(root)),
    }


def _try(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except NotVisible as exc:
        return {"why": str(exc)}
    except Exception as exc:  # one part must not take the others with it
        return {"why": f"{type(exc).__name__}: {str(exc)[:200]}"}


def judge_doctor(evidence: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of an evidence, the bad ones first; nodes are compared with each other.

    findings = judge_doctor(load_doctor(["node1.json", "node2.json"]))
    """
    nodes = [node for node in evidence.get("nodes", ()) if isinstance(node, Mapping) and "host" in node]
    found: list[Finding] = []
    for one in evidence.get("failed", ()):
        if not isinstance(one, Mapping):
            continue
        trouble = bad("node", str(one.get("why", "no answer")), "nothing is known of it; leave it out, or look there")
        found.append(replace(trouble, hosts=(str(one.get("host", "?")),)))
    for node in nodes:
        for name, judge in _JUDGES:
            found += _judged(name, node, judge)
        found += _judged("network", node, lambda one: _net.judge(one, several=len(nodes) > 1))
    found += _judged("siblings", nodes, _siblings.judge)
    return gather(found)


def _judged(name: str, subject: T, judge: Callable[[T], Iterable[Finding]]) -> list[Finding]:
    """What a check finds. Evidence may be of another version, or damaged: that is said, and the others go on."""
    found: list[Finding] = []
    try:
        for one in judge(subject):
            found.append(one)
    except Exception as exc:
        found.append(unseen(name, f"its evidence cannot be judged ({type(exc).__name__}: {str(exc)[:100]})"))
    hosts = (str(subject["host"]),) if isinstance(subject, Mapping) else ()
    return [one if one.hosts else replace(one, hosts=hosts) for one in found]


def load_doctor(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """Evidence of files as one: what `-o` or `--json` wrote, also several documents in lines, one for each node.

    evidence = load_doctor(["node1.json", "others.jsonl"])
    """
    merged: dict[str, Any] = {"schema": 1, "kind": "doctor", "nodes": [], "failed": [], "notes": []}
    for path in paths:
        for document in _documents(os.fspath(path)):
            found = document.get("evidence", document)
            if isinstance(found, dict) and "host" in found and "nodes" not in found:
                found = {"nodes": [found]}
            if not isinstance(found, dict) or not isinstance(found.get("nodes"), list):
                raise UsageError(
                    f"{os.fspath(path)} holds no evidence of doctor", "`mldebug doctor -o FILE` writes such a file"
                )
            for name in ("nodes", "failed", "notes"):
                merged[name] += found[name] if isinstance(found.get(name), list) else []
    return merged


def _documents(path: str) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}: {str(getattr(exc, 'strerror', '') or 'it is not text').lower()}", "check the path"
        ) from exc
    whole = _parsed(text)
    rows = (
        [whole]
        if whole is not None
        else [_parsed(line.removeprefix(MARK)) for line in text.splitlines() if "{" in line]
    )
    found = [row for row in rows if row is not None]
    if not found:
        raise UsageError(f"{path} holds no JSON", "`mldebug doctor -o FILE` writes such a file")
    yield from found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
