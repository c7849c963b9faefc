"""PCI: the GPUs and network cards of this node, the bridges above them, and who translates what they send."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from mldebug.cluster.health._finding import (
    Finding,
    Node,
    bad,
    by,
    fine,
    gpus,
    hidden,
    majority,
    many,
    part,
    settle,
    unseen,
    warn,
)
from mldebug.cluster.health._root import NotVisible, Root

_DEVICES = "/sys/bus/pci/devices"
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")  # VGA, 3D, processing accelerator
_KINDS = {"0x0207": "rdma", "0x0200": "net", "0x0680": "bridge"}
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ACS = 0x000D  # the extended capability Access Control Services
_REDIRECT = 0x4 | 0x8  # of its control register: requests and completions between peers go up to the root
_LIMITED = re.compile(
    r"(?:pci|nvidia|mlx5_core)\s+(\S+): (\S+ Gb/s) available PCIe bandwidth, limited by (.+?) at (\S+)"
)

NVIDIA, AMD = "0x10de", "0x1002"


def look(root: Root) -> dict[str, Any]:
    """GPUs, InfiniBand cards and NVSwitches of sysfs, with the bridges above them."""
    devices, bridges = [], {}
    for address in root.names(_DEVICES):
        folder = f"{_DEVICES}/{address}"
        kind = (root.maybe(f"{folder}/class") or "")[:6]
        vendor = root.maybe(f"{folder}/vendor") or ""
        what = "gpu" if kind in _GPU_CLASSES and vendor in (NVIDIA, AMD) else _KINDS.get(kind, "")
        if not what or (what == "bridge" and vendor != NVIDIA):
            continue
        above = _above(root, address)
        devices.append({"address": address, "what": what, "vendor": vendor, "above": above, **_device(root, address)})
        if what in ("gpu", "rdma"):
            bridges.update({one: _device(root, one) | _acs(root, one) for one in above if one not in bridges})
    return {
        "devices": devices,
        "bridges": bridges,
        "iommus": root.names("/sys/class/iommu") if root.exists("/sys/class/iommu") else [],
        "cmdline": [word for word in (root.maybe("/proc/cmdline") or "").split() if "iommu" in word or "acs" in word],
        "virtual": _virtual(root),
    }


def _device(root: Root, address: str) -> dict[str, Any]:
    folder = f"{_DEVICES}/{address}"
    found: dict[str, Any] = {}
    for fact, name in (
        ("device", "device"), ("speed", "current_link_speed"), ("width", "current_link_width"),
        ("max_speed", "max_link_speed"), ("max_width", "max_link_width"), ("numa", "numa_node"),
        ("cpus", "local_cpulist"),
    ):  # fmt: skip
        text = root.maybe(f"{folder}/{name}")
        if text is not None:
            found[fact] = text
    for fact, link in (("driver", "driver"), ("group", "iommu_group")):
        try:
            found[fact] = root.real(f"{folder}/{link}").rpartition("/")[2]
        except NotVisible:
            continue
    if "group" in found:
        found["iommu"] = root.maybe(f"/sys/kernel/iommu_groups/{found['group']}/type") or "not told"
    return found


def _above(root: Root, address: str) -> list[str]:
    """The bridges between a device and the root, the nearest first."""
    try:
        places = root.real(f"{_DEVICES}/{address}").split("/")
    except NotVisible:
        return []
    return [place for place in reversed(places[:-1]) if _ADDRESS.fullmatch(place)]


def _acs(root: Root, address: str) -> dict[str, Any]:
    """The control register of ACS: {"acs": number}, or why it cannot be read."""
    try:
        data = root.data(f"{_DEVICES}/{address}/config", 4096)
    except NotVisible as exc:
        return {"acs_why": str(exc)}
    if len(data) <= 256:
        return {"acs_why": "only root may read the whole configuration space"}
    place, left = 256, 96
    while place >= 256 and place + 8 <= len(data) and left:
        (head,) = struct.unpack_from("<I", data, place)
        if head & 0xFFFF == _ACS:
            return {"acs": struct.unpack_from("<H", data, place + 6)[0]}
        place, left = head >> 20 & 0xFFC, left - 1
    return {"acs": 0}


def _virtual(root: Root) -> str:
    """Which virtual machine this is, or ""."""
    product = " ".join(
        filter(None, (root.maybe(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")))
    )
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", root.maybe("/proc/cpuinfo") or "", re.M)
    if flags or root.exists("/sys/hypervisor/uuid"):
        return f"a virtual machine ({product})" if product else "a virtual machine"
    return ""


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    yield from _links(node)
    yield from _slots(node)
    yield from _redirects(node)


def _links(node: Node) -> Iterator[Finding]:
    """The links of idle GPUs are not judged by their generation: it falls to save power, and comes back under load."""
    check, found = "PCIe link", gpus(node)
    if not found:
        return
    if part(node, "load", "gpus"):
        yield from settle(
            check, _under_load(node), f"full generation and width under load on {many(len(found), 'GPU')}"
        )
        return
    told = [gpu for gpu in found if "pcie_width" in gpu]
    if not told:
        yield from hidden(check, found, "pcie_width")
        return
    troubles = []
    for _, alike in by(told, lambda gpu: gpu.get("name")).items():
        _, odd = majority({gpu["index"]: gpu["pcie_width"] for gpu in alike})
        for gpu in alike:
            if gpu["index"] in odd and gpu["pcie_width"] < gpu.get("pcie_max_width", 0):
                says = f"its link has x{gpu['pcie_width']} of x{gpu['pcie_max_width']}, unlike its siblings"
                troubles.append(
                    warn(check, says, "`mldebug doctor --load` makes sure; reseat the card or riser", _gpu(gpu))
                )
    slow = [gpu for gpu in told if gpu.get("pcie_gen", 9) < gpu.get("pcie_max_gen", 0)]
    idle = (
        f"; {len(slow)} of {len(told)} are below their generation, as idle GPUs are: --load judges it" if slow else ""
    )
    yield from settle(check, troubles, f"widths are alike{idle}")


def _under_load(node: Node) -> Iterator[Finding]:
    for gpu in gpus(node):
        if gpu.get("c2c"):  # copies go over NVLink-C2C, and its PCIe link stays idle
            continue
        seen = part(node, "load", "gpus", str(gpu.get("uuid"))) or {}
        for fact, most, sign, name in (
            ("pcie_gen", "pcie_max_gen", "Gen", "generation"), ("pcie_width", "pcie_max_width", "x", "width"),
        ):  # fmt: skip
            if fact in seen and most in gpu and seen[fact] < gpu[most]:
                yield bad(
                    "PCIe link", f"{sign}{seen[fact]} under load, and {sign}{gpu[most]} is its {name}",
                    "reseat the card, riser or cable; look for PCIe errors (AER) in the kernel log", _gpu(gpu),
                )  # fmt: skip


def _slots(node: Node) -> Iterator[Finding]:
    """A port above a GPU that has fewer lanes than the GPU."""
    check = "PCIe slot"
    devices = {one["address"]: one for one in part(node, "pci", "devices") or []}
    bridges = part(node, "pci", "bridges") or {}
    widths = {}
    for gpu in gpus(node):
        above = devices.get(gpu.get("bus"), {}).get("above") or []
        port = bridges.get(above[0], {}) if above else {}
        if str(port.get("max_width", "")).isdecimal() and 0 < int(port["max_width"]) < 255:
            widths[gpu["index"]] = (gpu, int(port["max_width"]), above[0])
    troubles = []
    usual, odd = majority({index: width for index, (_, width, _) in widths.items()})
    for index, (gpu, width, port) in widths.items():
        most = gpu.get("pcie_max_width", 0)
        own = devices.get(gpu.get("bus"), {}).get("max_width", "")
        most = max(most, int(own) if own.isdecimal() else 0)
        if width < most:
            says = f"the GPU has x{most}, and the port above it ({port}) has x{width}"
            if index in odd and usual > width:
                troubles.append(bad(check, f"{says}, where its siblings have x{usual}", _MOVE, _gpu(gpu)))
            else:
                troubles.append(warn(check, says, _MOVE, _gpu(gpu)))
    gens = {gpu["index"]: gpu["pcie_max_gen"] for gpu in gpus(node) if "pcie_max_gen" in gpu}
    usual, odd = majority(gens)
    for index in odd:
        if gens[index] < usual:
            says = f"it and its slot can do Gen{gens[index]}, its siblings Gen{usual}"
            troubles.append(bad(check, says, "the BIOS may limit this slot; compare the risers", f"GPU {index}"))
    if widths or troubles:
        yield from settle(check, troubles, "no port above a GPU is narrower than the GPU")
    ours = {address for address, one in devices.items() if one["what"] in ("gpu", "rdma")}
    for address, bandwidth, link, port in part(node, "log", "limited") or []:
        if address not in ours or link.startswith("2.5 GT/s"):  # so a link stands at boot, as it does when idle
            continue
        yield warn(check, f"the kernel saw {bandwidth}, limited by {link} at {port}", _MOVE, _named(node, address))


_MOVE = "move the card to a full slot, or check bifurcation in the BIOS"


def limited(lines: list[str]) -> list[list[str]]:
    """What the kernel logs at boot of devices that are faster than the port above them."""
    found = {match.groups() for line in lines if (match := _LIMITED.search(line))}
    return [list(row) for row in sorted(found)]


def _redirects(node: Node) -> Iterator[Finding]:
    """ACS and IOMMU: traffic between peers that is sent up to the root hangs, is slow, or is damaged."""
    check = "ACS/IOMMU"
    pci = part(node, "pci") or {}
    found = gpus(node)
    if len(found) < 2 and not (found and any(one["what"] == "rdma" for one in pci.get("devices") or [])):
        return
    if pci.get("virtual"):
        says = f"this is {pci['virtual']}: its host decides on ACS and IOMMU"
        yield unseen(check, says)
        return
    devices = {one["address"]: one for one in pci.get("devices") or []}
    ours = [devices[gpu["bus"]] for gpu in found if gpu.get("bus") in devices]
    if not ours:
        yield unseen(check, str(pci.get("why") or "sysfs does not show the GPUs"))
        return
    over_pci = [
        (one, other) for one, other, path, link, _ in part(node, "gpu", "peers") or [] if path == 0 and link != 0
    ]
    types = {str(one.get("iommu", "")) for one in ours}
    translated = sorted(one for one in types if one.startswith("DMA"))
    bridges = {
        name: one for name, one in (pci.get("bridges") or {}).items() if any(name in dev["above"] for dev in ours)
    }
    redirecting = sorted(name for name, one in bridges.items() if one.get("acs", 0) & _REDIRECT)
    blind = next((one["acs_why"] for one in bridges.values() if "acs_why" in one), "")
    shown = f"{', '.join(redirecting[:3])}{' ...' if len(redirecting) > 3 else ''}"
    if over_pci and (translated or redirecting):
        pairs = f"{many(len(over_pci), 'pair')} of GPUs reach each other over PCIe"
        why = [f"ACS redirects it at {shown}"] if redirecting else []
        why += [f"the IOMMU translates it (type {translated[0]})"] if translated else []
        say = bad if translated else warn
        yield say(check, f"{pairs}, and {' and '.join(why)}: such jobs hang or get wrong data", _PASS)
    elif redirecting:
        yield warn(
            check, f"ACS redirects traffic between GPUs and network cards at {shown}: GPUDirect RDMA is slow", _PASS
        )
    elif translated:
        yield warn(check, f"the IOMMU translates what GPUs send (type {translated[0]})", _PASS)
    elif blind:
        yield unseen(check, f"ACS: {blind}", "run as root")
    else:
        yield fine(check, "no redirection above the GPUs, and no translation")


_PASS = "boot with iommu=pt (or off), and `setpci -s BRIDGE ECAP_ACS+6.w=0` on each bridge, or turn ACS off in the BIOS"


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"GPU {gpu['index']}"


def _named(node: Node, address: str) -> str:
    return next((_gpu(gpu) for gpu in gpus(node) if gpu.get("bus") == address), address)
