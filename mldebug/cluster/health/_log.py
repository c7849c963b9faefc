"""The kernel log: Xid and SXid of the NVIDIA driver, links that the kernel found narrow, errors of the bus."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, ago, bad, by, fine, part, settle, unseen, warn
from mldebug.cluster.health._nvml import bus
from mldebug.cluster.health._pci import limited
from mldebug.cluster.health._root import NotVisible, Root

_TAIL = 8 << 20  # bytes of a log that are read
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),? *(.*)")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)?,? *(.*)", re.I)
_AER = re.compile(r"AER: .*\berror")
_FALLEN = re.compile(
    r"NVRM: GPU at PCI:([0-9a-fA-F:.]+): .*fallen off the bus|NVRM: GPU ([0-9a-fA-F:.]+): .*fallen off"
)
_BOOT = re.compile(r"kernel: (?:\[\s*0\.000000\] )?Linux version \d")
_DAY = 86400.0

_RESET, _DIAG = (
    "drain the node and reset the GPU; replace it if this comes again",
    "drain the node, run a hardware diagnosis (`dcgmi diag -r 3`)",
)
# Xid -> what it means, what to do. These are of the hardware, or end a job whatever it does.
HARD: dict[int, tuple[str, str]] = {
    46: ("the GPU stopped working", _RESET), 48: ("an uncorrectable memory error", _DIAG),
    54: ("auxiliary power is not connected", "check the power cables of the card"),
    62: ("a controller inside the GPU halted", _RESET), 64: ("a bad memory row could not be remapped", _DIAG),
    74: ("an NVLink error, on this GPU or at the other end of its link", "`nvidia-smi nvlink -e`; reset both ends"),
    79: ("the GPU has fallen off the bus", "reboot the node; check its power, heat and seat if it comes again"),
    92: ("very many corrected memory errors", _DIAG), 95: ("an uncontained memory error", _RESET),
    109: ("the GPU did not switch contexts in time", _RESET), 110: ("a security fault", _RESET),
    119: ("its system processor (GSP) does not answer", "reset the GPU; a newer driver if it comes again"),
    120: ("an error of its system processor (GSP)", "reset the GPU; a newer driver if it comes again"),
    136: ("training of a link failed", _RESET), 140: ("an unrecovered memory error", _RESET),
    143: ("the GPU failed to start", _RESET), 156: ("a part of the GPU was retired", _RESET),
    155: ("an NVLink went down by software", _RESET), 158: ("a fatal timeout of the GPU", _RESET),
    157: ("a part of the GPU could not be retired", _DIAG), 161: ("a memory channel could not be retired", _DIAG),
    167: ("a fatal timeout of PCIe", _RESET), 169: ("a controller inside the GPU halted", _RESET),
    171: ("an uncorrectable error of its memory", _DIAG), 172: ("an uncorrectable error of its caches", _DIAG),
    **{number: ("an NVLink error", "`nvidia-smi nvlink -e`; reset the GPU, reseat") for number in range(144, 151)},
}  # fmt: skip
# What the program, or the end of a job, brings about: the GPU is well.
SOFT: dict[int, str] = {
    13: "a fault of the program (illegal instruction or address)", 25: "a wrong command of the program",
    31: "the program reached outside of its memory", 43: "the program stopped after a fault of its own",
    44: "a fault while contexts were switched", 45: "a job was ended", 69: "a wrong command of the program",
    137: "the program reached outside of a peer's memory", 68: "a fault of video decoding",
    63: "a bad memory row was remapped, as it should be", 93: "its InfoROM was written too often",
    94: "a memory error that ended one job only; reset the GPU when it is free",
    106: "a test message", 107: "a test message", 121: "a corrected error of the link to the CPU",
    154: "the driver's advice after another Xid", 160: "a memory channel was retired",
}  # fmt: skip


def look(root: Root) -> dict[str, Any]:
    """What matters of the kernel log since the machine was started."""
    lines, source = read_log(root)
    uptime = _uptime(root)
    events = []
    for line in lines:
        seconds, text = line
        found = _event(text)
        if found is not None:
            age = None if seconds is None or uptime is None else max(0.0, uptime - seconds)
            events.append({**found, "age": age})
    return {"source": source, "events": events[-200:], "limited": limited([text for _, text in lines])[:50]}


def read_log(root: Root) -> tuple[list[tuple[float | None, str]], str]:
    """The lines of the kernel's own buffer with their seconds since the start, or those of a log file."""
    try:
        return _parse(_buffer(root)), "/dev/kmsg"
    except NotVisible as exc:
        first = str(exc)
    for path in _FILES:
        try:
            data = _end_of(root, path)
        except NotVisible:
            continue
        return _of_this_boot(data.decode("utf-8", "replace").splitlines()), path
    raise NotVisible(f"{first}, and no log file can be read")


def _of_this_boot(lines: list[str]) -> list[tuple[float | None, str]]:
    """The kernel's lines of a file: it may go back for weeks, and a reboot has cured what came before."""
    found: list[tuple[float | None, str]] = []
    for line in lines:
        if "kernel" in line:
            found = [] if _BOOT.search(line) else found
            found.append((_stamp(line), line))
    return found


def _buffer(root: Root) -> bytes:
    """Each read gives one record; a record that was overwritten meanwhile is EPIPE."""
    path = "/dev/kmsg"
    try:
        handle = os.open(root.path(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as exc:
        raise NotVisible(f"{path}: {(exc.strerror or '').lower()}") from exc
    parts, total = [], 0
    try:
        while total < 4 * _TAIL:
            try:
                part_ = os.read(handle, 8192)
            except BrokenPipeError:
                continue
            except BlockingIOError:
                break
            except OSError as exc:
                raise NotVisible(f"{path}: {(exc.strerror or '').lower()}") from exc
            if not part_:
                break
            parts.append(part_)
            total += len(part_)
    finally:
        os.close(handle)
    return b"".join(parts)


def _parse(data: bytes) -> list[tuple[float | None, str]]:
    """`6,339,5140900,-;text`: the third is microseconds since the start."""
    lines: list[tuple[float | None, str]] = []
    for line in data.decode("utf-8", "replace").splitlines():
        head, sign, text = line.partition(";")
        if not sign or line.startswith(" "):  # what belongs to the record before
            continue
        fields = head.split(",")
        lines.append((int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdecimal() else None, text))
    return lines


def _end_of(root: Root, path: str) -> bytes:
    try:
        with root.path(path).open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL))
            return stream.read(_TAIL)
    except OSError as exc:
        raise NotVisible(f"{path}: {(exc.strerror or '').lower()}") from exc


def _stamp(line: str) -> float | None:
    match = re.search(r"kernel: \[\s*(\d+\.\d+)\]", line)
    return float(match.group(1)) if match else None


def _uptime(root: Root) -> float | None:
    with contextlib.suppress(NotVisible, ValueError, IndexError):
        return float(root.read("/proc/uptime").split()[0])
    return None


def _event(text: str) -> dict[str, Any] | None:
    if match := _SXID.search(text):
        address, number, weight, rest = match.groups()
        return {
            "kind": "SXid",
            "bus": _pad(address),
            "number": int(number),
            "fatal": weight == "Fatal",
            "text": rest[:200],
        }
    if match := _XID.search(text):
        address, number, rest = match.groups()
        return {"kind": "Xid", "bus": _pad(address), "number": int(number), "text": rest[:200]}
    if match := _FALLEN.search(text):
        return {"kind": "Xid", "bus": _pad(match.group(1) or match.group(2)), "number": 79, "text": text[:200]}
    if _AER.search(text):
        places = re.findall(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text)  # the port, and then the device
        fatal = "Uncorrect" in text
        return {"kind": "AER", "bus": places[-1] if places else "", "number": 0, "fatal": fatal, "text": text[:200]}
    return None


def _pad(address: str) -> str:
    """The driver leaves the function out: "0000:3b:00" is "0000:3b:00.0"."""
    full = bus(address)
    return full if "." in full else f"{full}.0"


def judge(node: Node) -> Iterator[Finding]:
    """Xid and SXid of this node: those of the hardware are bad for a day, those of programs are told."""
    log, check = part(node, "log") or {}, "Xid"
    gpus = part(node, "gpu", "gpus") or []
    nvidia = gpus or any(one["what"] == "gpu" for one in part(node, "pci", "devices") or [])
    if log.get("why"):
        if nvidia:
            yield unseen(check, str(log["why"]), "run as root, or give the container /dev/kmsg and CAP_SYSLOG")
        return
    names = {gpu.get("bus"): f"GPU {gpu['index']}" for gpu in gpus}
    groups = by(log.get("events") or [], lambda event: (event["kind"], event["number"], event["bus"]))
    ours = {one["address"]: one for one in part(node, "pci", "devices") or [] if one["what"] in ("gpu", "rdma")}
    near = {*ours, *(bridge for one in ours.values() for bridge in one.get("above", ()))}
    found = [_judged(events, names.get(events[-1]["bus"], events[-1]["bus"]), near) for events in groups.values()]
    yield from (one for one in found if one.level == "ok")
    troubles = [one for one in found if one.level != "ok"]
    if nvidia or troubles:
        yield from settle(check, troubles, f"none of the hardware in {log.get('source', 'the kernel log')}")


def _judged(events: list[Any], place: str, near: set[str]) -> Finding:
    """What the same event, some number of times, says of a GPU, a switch or a port; `near` are GPUs and their ports."""
    last = events[-1]
    kind, number, text = last["kind"], last["number"], last["text"]
    count = f"{len(events)} times, last " if len(events) > 1 else ""
    age = f" ({count}{ago(last['age'])})" if last["age"] is not None else f" ({len(events)} times)"
    recent = last["age"] is None or last["age"] < _DAY
    grave, fatal = (bad if recent else warn), bool(last.get("fatal"))
    if kind == "AER":
        says = f"{'uncorrected' if fatal else 'corrected'} PCIe errors{age}"
        # Of other devices those that are not fatal are common: a request that one does not support is such an error.
        fatal = fatal and (last["bus"] in near or "(Fatal)" in text)
        return (grave if fatal else warn)("PCIe errors", says, "reseat the card, riser or cable", place)
    if kind == "SXid":
        says = f"SXid {number} of an NVSwitch, {'fatal' if fatal else 'not fatal'}: {text[:80]}{age}"
        return (grave if fatal else warn)("Xid", says, "drain the node; reset all GPUs with their switches", place)
    if number in HARD:
        means, hint = HARD[number]
        return grave("Xid", f"Xid {number}: {means}{age}", hint, place)
    if number == 154 and "None)" not in text.rpartition(" to ")[2]:
        asks = text.rpartition("(")[2].rstrip(") .") or "a reset"
        return grave("Xid", f"Xid 154: the driver asks for {asks}{age}", "do that before the next job", place)
    if number in SOFT:
        return fine("Xid", f"Xid {number}: {SOFT[number]}{age}", place)
    return warn("Xid", f"Xid {number}: {text[:80]}{age}", "look it up in NVIDIA's list of Xid errors", place)
