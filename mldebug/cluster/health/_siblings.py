"""What has to be alike, in a node and over all nodes: the odd one out is named, and which value the others have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, by, fine, gpus, majority, many, part, warn
from mldebug.cluster.health._net import routable
from mldebug.cluster.health._rdma import is_active
from mldebug.cluster.health._software import settings, uniform

_SKEW_WARN, _SKEW_BAD = 2.0, 60.0  # seconds between the clocks of two nodes
_ON_ITS_WAY = 1.0  # seconds that an answer may take
# What makes a job hang, or fail at its start, where nodes differ in it.
_FATAL = ("NCCL", "net plugin", "loaded NCCL", "torch")
_OWN = re.compile(
    r"RANK|SLURM_NODEID|:missing$|VISIBLE_DEVICES|MASTER_PORT|SLURM_NNODES|^OMPI_|HOSTID|DEBUG_FILE|_SIZE$"
)


def judge(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Findings with their hosts. A single node is compared within itself."""
    yield from _vbios(nodes)
    if len(nodes) < 2:
        return
    yield from _links(nodes)
    yield from _counts(nodes)
    yield from _versions(nodes)
    yield from _variables(nodes)
    yield from _clocks(nodes)
    yield from _identities(nodes)
    yield from _worlds(nodes)


def at(finding: Finding, *hosts: str) -> Finding:
    return replace(finding, hosts=hosts)


def _host(node: Node) -> str:
    return str(node["host"])


def _vbios(nodes: Sequence[Node]) -> Iterator[Finding]:
    check, hint = "VBIOS", "update the odd ones with the vendor's firmware bundle, or use them in jobs of their own"
    everything = [(node, gpu) for node in nodes for gpu in gpus(node) if gpu.get("vbios")]
    alike = True
    for model, group in by(everything, lambda pair: pair[1].get("name")).items():
        versions = {(_host(node), gpu["index"]): gpu["vbios"] for node, gpu in group}
        known = sorted(set(versions.values()))
        usual, odd = majority(versions)
        alike = alike and len(known) == 1
        for host, index in odd:
            yield at(warn(check, f"{versions[host, index]}, most others have {usual}", hint, f"GPU {index}"), host)
        if usual is None and len(known) > 1:
            hosts = dict.fromkeys(host for host, _ in versions)
            yield at(warn(check, f"{model} has {', '.join(known)}, none of them in most", hint), *hosts)
    if everything and alike:
        hosts = dict.fromkeys(_host(node) for node, _ in everything)
        yield at(fine(check, f"one version for each model, {many(len(everything), 'GPU')}"), *hosts)


def _links(nodes: Sequence[Node]) -> Iterator[Finding]:
    """A whole node whose GPUs have fewer NVLinks than those of the others: inside of it they are all alike."""
    everything = [
        (node, gpu) for node in nodes for gpu in gpus(node) if gpu.get("links") and not (gpu.get("mig") or [0])[0]
    ]
    for _, group in by(everything, lambda pair: pair[1].get("name")).items():
        best = {_host(node): max(sum(gpu["links"]) for one, gpu in group if one is node) for node, _ in group}
        usual, odd = majority(best)
        for host in odd:
            if best[host] < usual:
                says = f"{best[host]} links are active on its GPUs, {usual} on those of most other nodes"
                yield at(bad("NVLink", says, "the fabric manager and the cables of this node; reboot it"), host)


def _gpu_count(node: Node) -> int:
    return len(gpus(node))


def _active(node: Node) -> list[Any]:
    return [port for port in part(node, "rdma", "ports") or [] if is_active(port)]


def _port_count(node: Node) -> int:
    return len(_active(node))


def _rate(node: Node) -> float:
    return max((port["rate"] for port in _active(node)), default=0.0)


def _mtu(node: Node) -> int:
    return min((port["mtu"] for port in _active(node) if "mtu" in port), default=0)


# What is counted -> check, unit, what to do.
_COUNTED: tuple[tuple[Callable[[Node], float], str, str, str], ...] = (
    (_gpu_count, "GPUs", "GPUs", "leave this node out until it has all of them"),
    (_port_count, "RDMA ports", "active RDMA ports", "leave this node out until it has all of them"),
    (_rate, "RDMA ports", "Gb/s at most", "check its cables and switch ports"),
    (_mtu, "RDMA MTU", "bytes", "the same MTU on every interface and switch port"),
)


def _counts(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Nodes with less than most others; of two the one with less, as a doubt."""
    for count, check, unit, hint in _COUNTED:
        counts = {_host(node): count(node) for node in nodes}
        usual, odd = majority(counts)
        sure = usual is not None
        if not sure:
            usual = max(counts.values())
            odd = [host for host, value in counts.items() if value < usual]
        for host in odd:
            if count in (_rate, _mtu) and not (counts[host] and usual):
                continue  # it has none, which is said already
            less = counts[host] < usual or count is _mtu
            says = f"{counts[host]:g} {unit}, {'most other nodes have' if sure else 'others have'} {usual:g}"
            yield at((bad if sure and less else warn)(check, says, hint), host)


def _versions(nodes: Sequence[Node]) -> Iterator[Finding]:
    told = {_host(node): uniform(node) for node in nodes}
    alike = []
    for name in dict.fromkeys(name for row in told.values() for name in row):
        values = {host: row.get(name, "") for host, row in told.items()}
        running = [host for host, value in values.items() if value] if name == "loaded NCCL" else list(values)
        values = {host: values[host] for host in running}  # only nodes with ranks have loaded one
        if len(set(values.values())) < 2:
            alike += [name] if any(values.values()) else []
            continue
        say = bad if name in _FATAL else warn
        usual, odd = majority(values)
        hint = "the same image or environment on all nodes; until then leave the odd ones out"
        if usual is None:
            for value, hosts in by(values, values.__getitem__).items():
                yield at(say(name, f"{value or 'none'}, and others have something else", hint), *hosts)
        for value, hosts in by(odd, values.__getitem__).items():
            yield at(say(name, f"{value or 'none'}, most nodes have {usual or 'none'}", hint), *hosts)
    if alike:
        yield at(fine("versions", f"the same on all nodes: {', '.join(alike)}"), *told)


def _variables(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Settings that differ: of files, of ranks, and of the environments of what was started on each node."""
    hint = "set it for all ranks alike: export it in the launch script, or in /etc/nccl.conf"
    told = {_host(node): settings(node) for node in nodes}
    for name in sorted({name for row in told.values() for name in row if not _OWN.search(name)}):
        values = {host: row.get(name, "") for host, row in told.items()}
        usual, odd = majority(values)
        for host in odd:
            says = f"{name} is {values[host] or 'not set'}, on most nodes {usual or 'not set'}"
            yield at(warn("variables", says, hint), host)


def _clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """The clock of a node when it sent its answer, beside the time when that came: it is on its way for a moment."""
    known = [node for node in nodes if part(node, "clock")]
    well = len(known) == len(nodes)
    for node in known:
        ahead = node["clock"]["sent"] - node["clock"]["answered"]
        skew = ahead if ahead > 0 else max(0.0, -ahead - _ON_ITS_WAY)
        if skew > _SKEW_WARN:
            well = False
            say = bad if skew > _SKEW_BAD else warn
            says = f"{skew:.0f} s {'ahead' if ahead > 0 else 'behind'} of the node that asked"
            yield at(say("clock", says, "`timedatectl`, `chronyc tracking`: start its time service"), _host(node))
    if well:
        yield at(fine("clock", f"all within {_SKEW_WARN:g} s"), *map(_host, nodes))


def _identities(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Cloned machines: the same GPU, address or name at two places."""
    pairs = [(gpu["uuid"], _host(node)) for node in nodes for gpu in gpus(node) if gpu.get("uuid")]
    for uuid, hosts in _shared(pairs):
        says = f"{uuid} is on {len(hosts)} nodes: they are the same machine, or clones"
        yield at(bad("duplicate GPU", says, "name each node once"), *hosts)
    for address, hosts in _shared([(address, _host(node)) for node in nodes for address in routable(node)]):
        says = f"{address} is an address of {len(hosts)} nodes"
        yield at(bad("host name", says, "give each node its own address"), *hosts)
    for name, hosts in _shared([(part(node, "net", "own", "name") or _host(node), _host(node)) for node in nodes]):
        hint = "NCCL_HOSTID=... for each of them, or real host names"
        yield at(warn("host name", f"{len(hosts)} nodes call themselves {name}", hint), *hosts)


def _shared(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """What more than one host has, and which."""
    for what, group in by(pairs, lambda pair: pair[0]).items():
        hosts = list(dict.fromkeys(host for _, host in group))
        if len(hosts) > 1:
            yield what, hosts


def _worlds(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Jobs that never became one: each node a world of its own, or two nodes that are both the first."""
    masters = {_host(node): part(node, "net", "master") for node in nodes}
    found = {host: tuple(one["addresses"]) for host, one in masters.items() if one and one.get("addresses")}
    usual, odd = majority(found)
    for host in odd:
        says = f"{masters[host]['name']} is {found[host][0]} here and {usual[0]} on most nodes"
        yield at(bad("MASTER_ADDR", says, "correct /etc/hosts or DNS there"), host)
    starts: dict[Any, list[Node]] = {}
    for node in nodes:
        for rank in part(node, "ranks", "found") or []:
            if rank["rank"] == 0:
                starts.setdefault(rank["job"], []).append(node)
    for job, group in starts.items():
        hosts = list(dict.fromkeys(map(_host, group)))
        if len(hosts) < 2:
            continue
        ranks = [rank for node in group for rank in part(node, "ranks", "found") if rank["job"] == job]
        sizes = ", ".join(map(str, sorted({rank["world"] for rank in ranks})))
        says = f"rank 0 of job {job or 'without a name'} runs on {len(hosts)} nodes (world size {sizes})"
        # Several jobs of one node each look the same, where no step of SLURM and no address says that it is one.
        told = [rank.get("told", {}) for rank in ranks]
        one = any("SLURM_STEP_ID" in words for words in told)
        one = one or any(not re.match(r"localhost|127\.|::1|$", words.get("MASTER_ADDR", "")) for words in told)
        says += f": {'' if one else 'if this is one job, '}each node has a world of its own"
        yield at((bad if one else warn)("world", says, _ONE_MASTER), *hosts)


_ONE_MASTER = "one MASTER_ADDR for all nodes, the address of the first, and --node-rank or --rdzv-endpoint"
