"""Which ranks cannot be connected to by others, by the connections that each of them tried."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mldebug.cluster._dist_evidence import Evidence
from mldebug.cluster._dist_net import allows, leads_nowhere


def unreachable(evidence: Evidence) -> list[tuple[int, str, str]]:
    """(rank, why, hint) for each rank to blame. A way that fails blames its end that has more ways that fail."""
    nowhere = {**dict(_nowhere(evidence)), **dict(_no_interface(evidence))}
    failed = [
        (int(name), link)
        for name, one in sorted(evidence["ranks"].items(), key=lambda item: int(item[0]))
        for link in one["reach"]
        if link[0] not in nowhere
    ]
    found = [(rank, why, hint) for rank, (why, hint) in sorted(nowhere.items())]
    while failed:
        sources = Counter(source for source, _ in failed)
        targets = Counter(link[0] for _, link in failed)
        source, ways_out = sources.most_common(1)[0]
        target, ways_in = targets.most_common(1)[0]
        blame_source = ways_out > ways_in
        mine = [(one, link) for one, link in failed if (one == source if blame_source else link[0] == target)]
        what = "does not get to others" if blame_source else "cannot be reached"
        found.append((source if blame_source else target, f"{what}: {_words(evidence, mine)}", _hint(mine[0][1])))
        failed = [one for one in failed if one not in mine]
    return found


def _nowhere(evidence: Evidence) -> list[tuple[int, tuple[str, str]]]:
    """Ranks that would tell other hosts an address that means these hosts themselves."""
    ranks = evidence["ranks"]
    if len({one["host"] for one in ranks.values()}) < 2:
        return []
    found = []
    for name, one in ranks.items():
        address = (one["facts"].get("door") or [""])[0]
        told = one["facts"].get("interfaces", {})
        interface = next((name for name, about in told.items() if address in about["addresses"]), "")
        if why := leads_nowhere(str(address), interface):
            found.append((int(name), (f"would tell other hosts {address}, {why}{_cause(one)}", _interface_hint(one))))
    return found


def _no_interface(evidence: Evidence) -> list[tuple[int, tuple[str, str]]]:
    """Ranks that were told to use an interface that they have not."""
    found = []
    for name, one in evidence["ranks"].items():
        there = {name: about["addresses"] for name, about in one["facts"].get("interfaces", {}).items()}
        setting, backend = _setting(one), str(one["facts"].get("backend", ""))
        value = one["facts"].get("environment", {}).get(setting, "")
        names = value.split(",") if setting.startswith("GLOO") else [value] if value else []
        fits = [any(allows(backend, word, other) and there[other] for other in there) for word in names if word]
        if there and not all(fits):
            why = f"{setting}={value}, and there is no such interface with an address"
            found.append((int(name), (f"{why}: there are {', '.join(sorted(there))}", _interface_hint(one))))
    return found


def _cause(one: dict[str, Any]) -> str:
    setting = _setting(one)
    if value := one["facts"].get("environment", {}).get(setting, ""):
        return f": {setting}={value}"
    names = one["facts"].get("hostname", {})
    own = {address for about in one["facts"].get("interfaces", {}).values() for address in about["addresses"]}
    found = names.get("addresses", [])
    if not found:
        return f": its name {names.get('name', '')} cannot be resolved"
    stranger = (
        "" if any(address in own or address.startswith("127.") for address in found) else ", which is not its own"
    )
    return f": its name {names.get('name', '')} resolves to {', '.join(found)} there{stranger} (/etc/hosts)"


def _interface_hint(one: dict[str, Any]) -> str:
    usable = [
        name
        for name, about in one["facts"].get("interfaces", {}).items()
        if any(not leads_nowhere(address, name) for address in about["addresses"])
    ]
    setting = _setting(one)
    return f"export {setting}={usable[0]} on {one['host']}" if usable else f"set {setting} to the interface to use"


def _setting(one: dict[str, Any]) -> str:
    return "NCCL_SOCKET_IFNAME" if one["facts"].get("backend") in ("nccl", "rccl") else "GLOO_SOCKET_IFNAME"


def _words(evidence: Evidence, failed: list[tuple[int, list[Any]]]) -> str:
    """`h1 -> h2:41234 filtered (timeout)`, and how many more."""
    source, (_, host, address, port, why) = failed[0]
    where = host if address == host else f"{host} ({address})"
    more = f", and {len(failed) - 1} more ways" if len(failed) > 1 else ""
    return f"{evidence['ranks'][str(source)]['host']} -> {where}:{port} {why}{more}"


def _hint(link: list[Any]) -> str:
    host, why = link[1], link[4]
    if why.startswith("filtered"):
        return f"open the ports 1024-65535 between the hosts: nft list ruleset, iptables -S, security groups of {host}"
    if why == "refused":
        return f"something on the way, or {host} itself, rejects it: nft list ruleset; or the address is another host's"
    return f"ip route get {link[2]}"
