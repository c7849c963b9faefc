"""What ranks must agree on before their first collective: only the differences, and who is the odd one out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mldebug.cluster.dist._evidence import Evidence


@dataclass(frozen=True)
class Difference:
    """`values` are pairs of a value and the ranks that have it, the most common first; `odd` are the others' ranks."""

    what: str
    level: str  # bad: it breaks collectives; warn: it may be meant
    values: tuple[tuple[str, tuple[int, ...]], ...]
    odd: tuple[int, ...]
    words: str
    hint: str = ""
    fatal: bool = False


def differences(evidence: Evidence) -> list[Difference]:
    """What is not the same on all ranks that have said it, the worst first."""
    ranks = {int(name): one for name, one in evidence["ranks"].items() if "torch" in one["facts"]}
    found = [*_plain(ranks), *_environment(ranks), *_links(ranks), *_clocks(ranks), *_master(ranks)]
    return sorted(found, key=lambda one: one.level != "bad")


def _one(what: str, level: str, told: dict[int, str], hint: str = "", fatal: bool = False) -> Difference | None:
    """A difference where ranks say different things; the odd ones are those who do not say what most do."""
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(told.items()):
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return None
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
    odd = sorted(rank for _, some in ordered[1:] for rank in some)
    value, most = told[odd[0]], ordered[0][0]
    words = f"{what} is {value or 'not there'}, and {most or 'not there'} on most ranks"
    return Difference(
        what, level, tuple((value, tuple(some)) for value, some in ordered), tuple(odd), words, hint, fatal
    )


_Read = Callable[[dict[str, Any]], str]


def _get(*path: str) -> _Read:
    def read(facts: dict[str, Any]) -> str:
        value: Any = facts
        for name in path:
            value = value.get(name, "") if isinstance(value, dict) else ""
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return read


_PLUGIN = "some ranks load another network plugin: one image for all, or NCCL_NET_PLUGIN=none"
_SAME = (
    ("backend", "bad", _get("backend"), "give --backend"),
    ("torch", "bad", _get("torch"), "one environment for all ranks"),
    ("CUDA", "bad", _get("cuda"), "one environment for all ranks"),
    ("NCCL", "bad", _get("nccl"), "ranks load different libraries: LD_LIBRARY_PATH, LD_PRELOAD, pip list | grep nccl"),
    ("NCCL plugins found", "bad", _get("plugins"), _PLUGIN),
    ("nccl.conf", "bad", _get("nccl_conf"), "/etc/nccl.conf and ~/.nccl.conf count as much as variables"),
    ("Python", "warn", _get("python"), ""),
    ("driver", "warn", _get("driver"), ""),
    ("kernel", "warn", _get("kernel"), ""),
    ("device", "warn", _get("device", "name"), ""),
    ("peermem", "warn", _get("peermem"), "modprobe nvidia-peermem: without it a host has no GPUDirect RDMA"),
    ("memlock", "warn", _get("memlock"), "ulimit -l in the rank itself, not in the login shell"),
)


def _plain(ranks: dict[int, Any]) -> Iterator[Difference]:
    for what, level, read, hint in _SAME:
        found = _one(what, level, {rank: read(one["facts"]) for rank, one in ranks.items()}, hint)
        if found is not None:
            yield found


# These say how to reach this host's own hardware, and may differ; of the rest NCCL wants one value for all.
_OF_A_HOST = (
    "_IFNAME",
    "_HCA",
    "NCCL_TOPO_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_GRAPH_",
    "NCCL_HOSTID",
)
_MILD = ("NCCL_DEBUG", "LD_", "PYTORCH_", "CUDA_LAUNCH", "MASTER_ADDR", "UCX_", "FI_", "GLOO_", "TORCH_")


def _environment(ranks: dict[int, Any]) -> Iterator[Difference]:
    names = sorted({name for one in ranks.values() for name in one["facts"].get("environment", {})})
    for name in names:
        told = {rank: one["facts"].get("environment", {}).get(name, "") for rank, one in ranks.items()}
        mild = name.startswith(_MILD) or any(word in name for word in _OF_A_HOST)
        found = _one(name, "warn" if mild else "bad", told, f"set {name} alike on all ranks, or nowhere")
        if found is not None:
            yield found


def _links(ranks: dict[int, Any]) -> Iterator[Difference]:
    """The MTU of the interface that each rank would use, and the InfiniBand ports."""

    def mtu(one: dict[str, Any]) -> str:
        address = (one["facts"].get("door") or [""])[0]
        found = [
            told.get("mtu", "") for told in one["facts"].get("interfaces", {}).values() if address in told["addresses"]
        ]
        return str(found[0]) if found else ""

    for what, read, hint in (
        ("MTU", mtu, "ip link set dev <interface> mtu <that of the others>"),
        ("InfiniBand ports", lambda one: _get("infiniband")(one["facts"]), "ibstat on the odd one"),
    ):
        told = {rank: read(one) for rank, one in ranks.items() if what != "MTU" or read(one)}
        found = _one(what, "warn", told, hint)
        if found is not None:
            yield found


def _clocks(ranks: dict[int, Any]) -> Iterator[Difference]:
    told = {rank: one["skew"] for rank, one in ranks.items() if one.get("skew") is not None}
    late = [rank for rank, skew in told.items() if abs(skew) > 2.0]
    if late:
        worst = max(late, key=lambda rank: abs(told[rank]))
        words = f"its clock is {abs(told[worst]):.0f} s {'ahead' if told[worst] > 0 else 'behind'}"
        values = tuple((f"{told[rank]:+.0f} s", (rank,)) for rank in late)
        yield Difference("time", "warn", values, tuple(late), words, "chronyc tracking; timedatectl")


def _master(ranks: dict[int, Any]) -> Iterator[Difference]:
    """What MASTER_ADDR means on the hosts other than that of rank 0, which often has itself as loopback."""
    home = ranks[0]["host"] if 0 in ranks else ""
    told = {rank: _get("master")(one["facts"]) for rank, one in ranks.items() if one["host"] != home}
    found = _one("address of MASTER_ADDR", "warn", told, "compare /etc/hosts and DNS of the hosts")
    if found is not None:
        yield found
