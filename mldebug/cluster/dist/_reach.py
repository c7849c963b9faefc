"""Which ranks cannot be connected to by others, by the connections that each of them tried."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mldebug.cluster.dist._evidence import Evidence
from mldebug.cluster.dist._net import allows, leads_nowhere
from mldebug.cluster.dist._probe import LARGE, SLOW


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
        mine: list[tuple[int, list[Any]]] = []
        rest: list[tuple[int, list[Any]]] = []
        for one, link in failed:
            mine_too = one == source if blame_source else link[0] == target
            (mine if mine_too else rest).append((one, link))
        what = "does not get to others" if blame_source else "cannot be reached"
        found.append((source if blame_source else target, f"{what}: {_words(evidence, mine)}", _hint(mine[0][1])))
        failed = rest
    return found


def slow_ways(evidence: Evidence) -> list[tuple[int, str, str]]:
    """(rank, why, hint) for ways to other hosts that are far slower than the others: loss of packets, or a limit.

    Each sender tried a few, twice if it had to, with data that take some milliseconds where all is well.
    """
    ways = [(int(name), way) for name, one in evidence["ranks"].items() for way in one.get("large", ())]
    times = sorted(way[4] for _, way in ways)
    usual = times[(len(times) - 1) // 2] if times else 0.0  # of two the faster one
    left = [(rank, way) for rank, way in ways if way[4] > max(SLOW, 20 * usual)]
    found = []
    while left:
        ends = Counter(end for rank, way in left for end in (rank, way[0]))
        worst = max(ends, key=lambda end: (ends[end], sum(rank == end for rank, _ in left), -end))
        mine = [(rank, way) for rank, way in left if worst in (rank, way[0])]
        source, (_, host, _, _, seconds) = max(mine, key=lambda one: one[1][4])
        way = f"{evidence['ranks'][str(source)]['host']} -> {host}"
        why = f"is slow to reach: {way}, {LARGE >> 10} KiB took {seconds:.1f} s, and {1000 * usual:.0f} ms as a rule"
        found.append((worst, why, "ip -s link on both: errors, drops; tc qdisc; ethtool: speed and duplex"))
        left = [(rank, way) for rank, way in left if worst not in (rank, way[0])]
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
    if "come through" in why:
        return f"is the MTU too large for the way? ping -M do -s 1472 {link[2]}; else loss or a limit: ip -s link"
    if why == "refused":
        return f"something on the way, or {host} itself, rejects it: nft list ruleset; or the address is another host's"
    return f"ip route get {link[2]}"
