"""The network of the host: which interface NCCL and gloo take, and what the host's own name leads to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, gpus, part, settle, unseen, warn
from mldebug.cluster.health._root import NotVisible, Root

_INNER = re.compile(r"^(docker|veth|virbr|br-|cni|flannel|cali|lxc|lxd|podman|kube|tunl|dummy|vmnet|nodelocaldns)")


def look(root: Root) -> dict[str, Any]:
    """Interfaces with their addresses, this host's names, and MASTER_ADDR where it is set."""
    found: dict[str, Any] = {"unseen": {}, "interfaces": []}
    try:
        addresses = root.addresses()
    except NotVisible as exc:
        addresses = {}
        found["unseen"]["interfaces"] = str(exc)
    for device, address in _sixes(root):
        addresses.setdefault(device, []).append(address)
    for device, known in addresses.items():
        folder = f"/sys/class/net/{device}"
        speed = root.maybe(f"{folder}/speed") or ""
        found["interfaces"].append({
            "name": device, "addresses": known, "state": root.maybe(f"{folder}/operstate") or "unknown",
            "mtu": int(root.maybe(f"{folder}/mtu") or 0), "speed": int(speed) if speed.isdecimal() else 0,
            "physical": root.exists(f"{folder}/device"),
        })  # fmt: skip
    names = {"own": root.host()}
    master = root.environ().get("MASTER_ADDR")
    if master:
        names["master"] = master
    for whose, name in names.items():
        try:
            found[whose] = {"name": name, "addresses": root.resolve(name)}
        except NotVisible as exc:
            found[whose] = {"name": name, "why": str(exc)}
    return found


def _sixes(root: Root) -> Iterator[tuple[str, str]]:
    for line in (root.maybe("/proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        if len(fields) >= 6 and re.fullmatch(r"[0-9a-f]{32}", fields[0]):
            yield fields[5], str(ipaddress.IPv6Address(bytes.fromhex(fields[0])))


def is_local(address: str) -> bool:
    """An address that no other host can reach."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return known.is_loopback or known.is_link_local or known.is_unspecified


def routable(node: Node) -> list[str]:
    """Addresses of this host that others may reach."""
    return [
        one
        for face in part(node, "net", "interfaces") or []
        if usable(face) and face["name"] != "lo" and not _INNER.match(face["name"])
        for one in face["addresses"]
    ]


def usable(face: Mapping[str, Any]) -> bool:
    return face["state"] in ("up", "unknown") and any(not is_local(one) for one in face["addresses"])


def judge(node: Node, several: bool = False) -> Iterator[Finding]:
    """Everything of this file, for one node; `several`: the job has more than one."""
    seen = part(node, "net") or {}
    if "why" in seen:
        yield unseen("network", str(seen["why"]))
        return
    several = several or _several(node)
    yield from _choice(node, seen, several)
    yield from _names(node, seen, several)


def _several(node: Node) -> bool:
    told = [rank.get("told", {}) for rank in part(node, "ranks", "found") or []]
    told.append(part(node, "software", "env") or {})
    for words in told:
        for more, one in (
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
            ("SLURM_NNODES", ""),
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ):
            most, least = words.get(more, ""), words.get(one, "1") if one else "1"
            if most.isdecimal() and least.isdecimal() and int(most) > int(least) and (not one or one in words):
                return True
    return False


def chosen(faces: list[Any], setting: str | None) -> list[str]:
    """The interfaces that NCCL considers, the first of them first: `eth,ib`, `=eth0` or `^docker0,lo`.

    Without a setting those of InfiniBand come first, then all but docker's and the loopback, and these at last.
    """
    faces = sorted(faces, key=lambda face: not any("." in address for address in face["addresses"]))  # IPv4 first
    names = [face["name"] for face in faces if face["addresses"] and face["state"] in ("up", "unknown")]
    if setting:
        text, without = setting.lstrip("^="), setting.startswith("^")
        exact = setting.lstrip("^").startswith("=")
        words = [word.strip() for word in text.lstrip("=").split(",") if word.strip()]

        def matches(name: str) -> bool:
            return any(name == word if exact else name.startswith(word) for word in words)

        return [name for name in names if matches(name) != without]
    first = [name for name in names if name.startswith("ib")]
    then = [name for name in names if not name.startswith(("docker", "lo"))]
    return first or then or names


def _choice(node: Node, seen: Any, several: bool) -> Iterator[Finding]:
    check, faces = "interface", seen.get("interfaces") or []
    env = part(node, "software", "env") or {}
    if not faces:
        yield unseen(check, seen.get("unseen", {}).get("interfaces", "there is none"))
        return
    good = [face["name"] for face in faces if usable(face) and not _INNER.match(face["name"])]
    troubles: list[Finding] = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        setting = env.get(variable)
        if setting is None and variable != "NCCL_SOCKET_IFNAME":
            continue
        if setting and variable == "GLOO_SOCKET_IFNAME":
            setting = f"={setting}"
        taken = chosen(faces, setting)
        said = f"{variable}={env[variable]}" if variable in env else "NCCL's own choice"
        advice = f"{variable}={good[0]}" if good else "give the host an address that others can reach"
        if not taken:
            say = bad if setting or several or gpus(node) else warn
            troubles.append(
                say(check, f"{said} matches no interface that is up ({', '.join(f['name'] for f in faces)})", advice)
            )
            continue
        face = next(one for one in faces if one["name"] == taken[0])
        inner = _INNER.match(taken[0]) or not usable(face)
        if inner and good:
            kind = "the loopback" if taken[0].startswith("lo") else "no way to other hosts"
            extra = (
                "; an exclusion of your own takes lo back in, write ^docker0,lo"
                if (setting or "").startswith("^") and taken[0] == "lo"
                else ""
            )
            say = bad if several and setting else warn
            troubles.append(
                say(check, f"{said} takes {taken[0]} ({', '.join(face['addresses'])}): {kind}", advice + extra)
            )
    taken = chosen(faces, env.get("NCCL_SOCKET_IFNAME"))
    shown = next(
        (
            f"{one['name']} ({one['addresses'][0]}, MTU {one['mtu']})"
            for one in faces
            if taken and one["name"] == taken[0]
        ),
        "",
    )
    others = len([one for one in good if one not in taken[:1]])
    yield from settle(check, troubles, f"NCCL takes {shown}" + (f"; {others} more could be taken" if others else ""))


def _names(node: Node, seen: Any, several: bool) -> Iterator[Finding]:
    """A host whose own name leads to the loopback tells others to connect to themselves."""
    check, say = "host name", bad if several else warn
    own = seen.get("own") or {}
    hint = "put its real address beside its name in /etc/hosts, or MASTER_ADDR=ADDRESS"
    troubles: list[Finding] = []
    if "why" in own:
        troubles.append(say(check, str(own["why"]), hint))
    elif own.get("addresses") and all(is_local(one) for one in own["addresses"]):
        reachable = routable(node)
        if reachable:
            says = (
                f"{own['name']} is {own['addresses'][0]}, where others cannot reach it; its address is {reachable[0]}"
            )
            troubles.append(say(check, says, hint))
    elif own.get("addresses") and routable(node) and not set(own["addresses"]) & set(_all(seen)):
        mine = ", ".join(routable(node)[:3])
        says = f"{own['name']} is {own['addresses'][0]}, which is no address of this host ({mine})"
        troubles.append(say(check, says, "correct /etc/hosts or DNS"))
    master = seen.get("master")
    if master and "why" in master:
        troubles.append(bad("MASTER_ADDR", str(master["why"]), "`getent hosts NAME` on every node"))
    elif master and several and all(is_local(one) for one in master["addresses"]):
        says = f"{master['name']} is {master['addresses'][0]}: every node meets only itself"
        troubles.append(bad("MASTER_ADDR", says, "the address of the first node, for all nodes the same"))
    shown = ", ".join((own.get("addresses") or ["no address"])[:3])
    yield from settle(check, troubles, f"{own.get('name', 'this host')} is {shown}")


def _all(seen: Any) -> list[str]:
    return [address for face in seen.get("interfaces") or [] for address in face["addresses"]]
