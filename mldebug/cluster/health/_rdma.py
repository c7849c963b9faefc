"""InfiniBand and RoCE: ports, rates, GIDs, and what has to be there for GPUs to use them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, by, fine, gpus, majority, part, settle, unseen, warn
from mldebug.cluster.health._root import NotVisible, Root

_CLASS = "/sys/class/infiniband"
_GIDS = 32  # entries of the table of a port that are read
_ERRORS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
           "port_xmit_discards", "excessive_buffer_overrun_errors")  # fmt: skip
_HW_ERRORS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "rx_icrc_encapsulated")
_NONE = re.compile(r"^(?:0000:){7}0000$|^fe80(?::0000){7}$")

Port = Mapping[str, Any]


def look(root: Root) -> dict[str, Any]:
    """Every port of every device, and which kernel modules are loaded."""
    ports = []
    devices = root.names(_CLASS) if root.exists(_CLASS) else []
    for device in devices:
        folder = f"{_CLASS}/{device}"
        about = {
            "device": device, "board": root.maybe(f"{folder}/board_id") or root.maybe(f"{folder}/hca_type") or "",
            "firmware": root.maybe(f"{folder}/fw_ver") or "", "numa": root.maybe(f"{folder}/device/numa_node") or "",
        }  # fmt: skip
        for number in root.names(f"{folder}/ports"):
            ports.append({**about, **_port(root, f"{folder}/ports/{number}", number)})
    return {
        "ports": ports,
        "peermem": {
            "nvidia_peermem": root.exists("/sys/module/nvidia_peermem"),
            "nv_peer_mem": root.exists("/sys/module/nv_peer_mem"),
            "efa_nv_peermem": root.exists("/sys/module/efa_nv_peermem"),
        },
        "dma_buf": _dma_buf(root),
    }


def _port(root: Root, folder: str, number: str) -> dict[str, Any]:
    rate = root.maybe(f"{folder}/rate") or ""
    port: dict[str, Any] = {
        "port": number, "state": (root.maybe(f"{folder}/state") or "").partition(": ")[2],
        "physical": (root.maybe(f"{folder}/phys_state") or "").partition(": ")[2],
        "rate": float(rate.split()[0]) if re.match(r"\d+(\.\d+)? ", rate) else 0.0,
        "lanes": rate.partition("(")[2].rstrip(")"),
        "layer": root.maybe(f"{folder}/link_layer") or "", "errors": {}, "gids": [],
    }  # fmt: skip
    for name in (*(f"counters/{one}" for one in _ERRORS), *(f"hw_counters/{one}" for one in _HW_ERRORS)):
        text = root.maybe(f"{folder}/{name}")
        if text is not None and text.isdecimal():
            port["errors"][name.partition("/")[2]] = int(text)
    for index in range(_GIDS):
        gid = root.maybe(f"{folder}/gids/{index}")
        if gid is None:
            break
        if not _NONE.match(gid):
            kind = root.maybe(f"{folder}/gid_attrs/types/{index}") or ""
            netdev = root.maybe(f"{folder}/gid_attrs/ndevs/{index}") or ""
            port["gids"].append([index, gid, kind, netdev])
    port["netdev"] = next((netdev for *_, netdev in port["gids"] if netdev), "")
    mtu = root.maybe(f"/sys/class/net/{port['netdev']}/mtu") if port["netdev"] else None
    if mtu is not None and mtu.isdecimal():
        port["mtu"] = int(mtu)
    return port


def _dma_buf(root: Root) -> str:
    """ "": it can be used; else why not. The kernel exports GPU memory since 5.12, the open driver offers it."""
    match = re.match(r"(\d+)\.(\d+)", root.kernel())
    if match and (int(match.group(1)), int(match.group(2))) < (5, 12):
        return f"kernel {root.kernel()} is older than 5.12"
    try:
        version = root.read("/proc/driver/nvidia/version")
    except NotVisible as exc:
        return str(exc)
    return "" if "Open Kernel Module" in version else "the driver is not the open kernel module"


def name(port: Port) -> str:
    return f"{port['device']} port {port['port']}"


def is_active(port: Port) -> bool:
    return port.get("state") == "ACTIVE"


def carries_jobs(node: Node) -> bool:
    """Whether jobs here would run over RDMA: there are GPUs, and InfiniBand, EFA or several ports of RoCE.

    One port of Ethernet that can do RDMA as well is what most virtual machines of a cloud have as their network.
    """
    ports = part(node, "rdma", "ports") or []
    has_gpus = bool(gpus(node) or part(node, "amd", "gpus"))
    return has_gpus and (len(ports) > 2 or any(port["layer"] != "Ethernet" for port in ports))


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node. Ports that are not cabled are common: siblings decide."""
    seen = part(node, "rdma") or {}
    if "why" in seen:
        yield unseen("RDMA ports", str(seen["why"]))
        return
    ports = seen.get("ports") or []
    if not ports:
        cards = [one for one in part(node, "pci", "devices") or [] if one["what"] == "rdma"]
        if cards:
            says = f"{len(cards)} InfiniBand cards are on the PCI bus, and there is no RDMA device"
            yield warn(
                "RDMA ports", says, "`modprobe mlx5_ib`, or give the container its devices: --device=/dev/infiniband"
            )
        else:
            yield fine("RDMA ports", "no InfiniBand or RoCE here")
        return
    yield from settle("RDMA ports", _ports(ports, carries_jobs(node)), _summary(ports))
    yield from settle("RDMA addresses", _gids(node, ports), "")
    yield from _memory_of_gpus(node, seen)
    yield from _files(node)


def _summary(ports: list[Port]) -> str:
    active = [port for port in ports if is_active(port)]
    rates = by(active, lambda port: (port["rate"], port["layer"]))
    words = [f"{len(group)} x {rate:g} Gb/s {layer}" for (rate, layer), group in rates.items()]
    return f"{len(active)} of {len(ports)} are active: {', '.join(words)}" if active else ""


def _ports(ports: list[Port], sure: bool) -> Iterator[Finding]:
    check = "RDMA ports"
    if not any(is_active(port) for port in ports):
        states = ", ".join(sorted({f"{port['state']}/{port['physical']}" for port in ports}))
        yield (bad if sure else warn)(check, f"none of {len(ports)} is active ({states})", _hint(ports[0]))
        return
    for (board, layer, number), group in by(ports, lambda one: (one["board"], one["layer"], one["port"])).items():
        active = [port for port in group if is_active(port)]
        for port in group:
            if not is_active(port) and (2 * len(active) > len(group) or port["state"] in ("INIT", "ARMED")):
                says = f"{port['state'] or 'no state'}, {port['physical']}"
                says += (
                    f"; {len(active)} of {len(group)} like it ({board or layer} port {number}) are active"
                    if active
                    else ""
                )
                yield bad(check, says, _hint(port), name(port))
        usual, odd = majority({name(port): port["rate"] for port in active})
        for port in active:
            if name(port) in odd and port["rate"] < usual:
                yield bad(
                    check, f"{port['rate']:g} Gb/s ({port['lanes']}), its siblings have {usual:g}",
                    "reseat the cable or transceiver, look at the switch port", name(port),
                )  # fmt: skip
            elif port["lanes"].startswith("1X ") and port["layer"] == "InfiniBand" and not odd:
                yield warn(
                    check, f"one lane only: {port['rate']:g} Gb/s ({port['lanes']})", "reseat the cable", name(port)
                )
        firmware, others = majority({name(port): port["firmware"] for port in group})
        for port in group:
            if name(port) in others:
                yield warn(
                    "RDMA firmware",
                    f"{port['firmware']}, its siblings have {firmware}",
                    "`mlxfwmanager` updates it",
                    name(port),
                )


def _hint(port: Port) -> str:
    if port["state"] in ("INIT", "ARMED"):
        return "no subnet manager has set it up: `sminfo`, and start opensm or the one of the switch"
    if port["physical"] == "Disabled":
        return "it is switched off: `ip link set DEV up`, or `ibportstate` enable"
    return "check its cable, transceiver and switch port; `ibstat`"


def _gids(node: Node, ports: list[Port]) -> Iterator[Finding]:
    """RoCE v2 over IPv4 is what NCCL looks for; and the MTU of the network card bounds that of RDMA."""
    roce = [port for port in ports if port["layer"] == "Ethernet" and is_active(port)]
    for port in roce:
        if not any("RoCE v2" in kind for _, _, kind, _ in port["gids"]):
            yield warn(
                "RDMA addresses",
                "it has no address for RoCE v2",
                f"give {port['netdev'] or 'its interface'} an IP address",
                name(port),
            )
    usual, odd = majority({name(port): port.get("mtu") for port in roce})
    for port in roce:
        if name(port) in odd and usual is not None:
            yield bad(
                "RDMA MTU",
                f"{port.get('mtu')}, its siblings have {usual}",
                f"`ip link set {port['netdev']} mtu {usual}`",
                name(port),
            )
    small = [port for port in roce if port.get("mtu", 9000) < 4200 and name(port) not in odd]
    if small:
        says = f"{small[0]['mtu']} on {len(small)} RoCE ports: RDMA sends 1024 bytes at a time"
        yield warn("RDMA MTU", says, "9000 on the interface and on its switch port, if all of the fabric has it")
    elif any(port["layer"] == "InfiniBand" for port in ports):
        yield unseen("RDMA MTU", "sysfs does not tell that of InfiniBand ports", "`ibv_devinfo | grep active_mtu`")


def _memory_of_gpus(node: Node, seen: Any) -> Iterator[Finding]:
    """Whether network cards can reach the memory of GPUs: by a kernel module or by dma-buf."""
    check = "GPUDirect RDMA"
    if not gpus(node):
        return
    loaded = [module for module, there in (seen.get("peermem") or {}).items() if there]
    if loaded:
        yield fine(check, f"{loaded[0]} is loaded")
    elif not seen.get("dma_buf"):
        yield fine(check, "dma-buf can be used (open driver, kernel 5.12 or newer)")
    elif part(node, "gpu", "peers") is not None:
        says = f"neither nvidia_peermem is loaded nor dma-buf usable: {seen['dma_buf']}"
        yield warn(check, says, "`modprobe nvidia_peermem`: without it all traffic goes through host memory")


def _files(node: Node) -> Iterator[Finding]:
    files = part(node, "container", "rdma_files")
    if files is not None and not any(one.startswith("uverbs") for one in files):
        hint = "docker: --device=/dev/infiniband --cap-add IPC_LOCK; Kubernetes: the RDMA device plugin"
        say = bad if carries_jobs(node) else warn
        yield say("RDMA files", "there is no /dev/infiniband/uverbs*: programs cannot use these ports", hint)
