"""The report of a dist-test for people: the culprit first, or one line for each host when all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mldebug.core.report import paint

if TYPE_CHECKING:
    from mldebug.cluster.dist._judge import Culprit
    from mldebug.cluster.dist._report import DistTestReport

_MOST = 8  # culprits and differences that are spelt out


def text(report: DistTestReport, color: bool) -> str:
    lines = list(_culprits(report))
    if report.ok:
        checks = sum(len(one["checks"]) for one in report.evidence["ranks"].values())
        said = f"{report.world} ranks, {report.backend}, {checks} checks in {report.seconds:.1f} s"
        lines.append(f"dist-test: all is well: {said.replace('1 ranks', '1 rank') if report.world == 1 else said}")
    elif not report.culprits:
        lines.append(f"dist-test: not finished: {report.ended}")
    lines += _differences(report)
    lines += _hosts(report)
    lines += [f"note: {note}" for note in _folded(report)]
    if report.verbose:
        lines += _ranks(report)
    joined = "\n".join(lines)
    return paint(joined) if color else joined


def _culprits(report: DistTestReport) -> Iterator[str]:
    for number, one in enumerate(report.culprits[:_MOST]):
        yield f"dist-test: {_who(one)}{one.reason}{f' [in {one.phase}]' if one.phase and one.rank is not None else ''}"
        if one.hint and (number == 0 or one.hint != report.culprits[number - 1].hint):
            yield f"hint: {one.hint}"
        if one.stack and number < 2:
            stack = one.stack.splitlines()
            told = [line for line in stack if "<frozen importlib" not in line] or stack  # which file, not how
            yield from (f"    {line}" for line in told[:6])
    if (rest := len(report.culprits) - _MOST) > 0:
        yield f"dist-test: and {rest} more"
    if report.waiting and report.culprits:
        yield f"waiting: {'rank' if len(report.waiting) == 1 else 'ranks'} {ranges(report.waiting)}"


def _who(one: Culprit) -> str:
    if one.rank is None:
        return ""
    about = ", ".join(filter(None, [one.gpu, f"pid {one.pid}" if one.pid else ""]))
    return f"rank {one.rank}{f' on {one.host}' if one.host else ''}{f' ({about})' if about else ''} "


def _differences(report: DistTestReport) -> Iterator[str]:
    """A table: what, and which ranks have which value; the ranks that do not say what most do are marked."""
    rows = [
        (one.what if number == 0 else "", f"{'*' if number else ' '} {ranges(ranks)}", value or "(not there)")
        for one in report.differences[: 2 * _MOST]
        for number, (value, ranks) in enumerate(one.values[:6])
    ]
    if rows:
        widths = [max(len(row[column]) for row in (*rows, ("differs", "  ranks", ""))) for column in (0, 1)]
        yield f"{'differs':<{widths[0]}}  {'  ranks':<{widths[1]}}  value (* the odd ones)"
        for what, ranks, value in rows:
            yield f"{what:<{widths[0]}}  {ranks:<{widths[1]}}  {value[:100]}"


def _hosts(report: DistTestReport) -> Iterator[str]:
    hosts: dict[str, list[dict[str, Any]]] = {}
    for _, one in sorted(report.evidence.get("ranks", {}).items(), key=lambda item: int(item[0])):
        hosts.setdefault(one["host"], []).append(one)
    for host, ranks in hosts.items():
        numbers = ranges([one["rank"] for one in ranks])
        phases = Counter("fine" if one["done"] else f"in {one['phase']}" for one in ranks)
        how = ", ".join(name if len(phases) == 1 else f"{count} {name}" for name, count in phases.most_common(3))
        yield f"  {host}: {'rank' if len(ranks) == 1 else 'ranks'} {numbers}: {how}{_about(ranks)}"


def _about(ranks: list[dict[str, Any]]) -> str:
    facts = ranks[0]["facts"]
    if "torch" not in facts:
        return ""
    device = Counter(one["facts"].get("device", {}).get("name", "") for one in ranks).most_common(1)[0][0]
    words = [device, f"torch {facts['torch']}"]
    words += [
        f"{name} {facts[key]}"
        for name, key in (("CUDA", "cuda"), ("driver", "driver"), ("NCCL", "nccl"))
        if facts.get(key)
    ]
    memory = [one["checks"]["memory"]["bytes"] for one in ranks if "bytes" in one["checks"].get("memory", {})]
    if memory and facts.get("device", {}).get("kind") != "cpu":
        words.append(f"{min(memory) / 2**30:.0f} GiB tested")
    rates = [one["checks"]["copy"]["to_GBps"] for one in ranks if "to_GBps" in one["checks"].get("copy", {})]
    if rates:
        words.append(
            f"copies {min(rates):.0f} GBps"
            if min(rates) == max(rates)
            else f"copies {min(rates):.0f} to {max(rates):.0f} GBps"
        )
    return "; " + ", ".join(word for word in words if word)


def _folded(report: DistTestReport) -> Iterator[str]:
    """What was left out for the same reason, on one line."""
    reasons: dict[str, list[str]] = {}
    for note in report.notes:
        kind, _, rest = note.partition(": ")
        check, _, why = rest.partition(": ")
        if kind == "left out" and why:
            reasons.setdefault(why, []).append(check)
        else:
            yield note
    for why, checks in reasons.items():
        yield f"left out, as {report.backend} lacks it: {', '.join(checks)} ({why})"


def _ranks(report: DistTestReport) -> Iterator[str]:
    """Topology and NUMA of each rank."""
    for name, one in sorted(report.evidence.get("ranks", {}).items(), key=lambda item: int(item[0])):
        device, facts = one["facts"].get("device", {}), one["facts"]
        door = facts.get("door") or ["?", 0]
        words = [f"pid {one['pid']}", f"address {door[0]}", f"CPUs {ranges(facts.get('cpus', []))}"]
        if device.get("pci"):
            words += [f"{device['kind']}:{device['index']} {device['uuid']} at {device['pci']}"]
            words += [f"NUMA node {device['numa_node'] or '?'}, its CPUs {device['local_cpulist'] or '?'}"]
        words += [f"{key} {value}" for key, value in facts.get("topology", {}).items()]
        yield f"    rank {name}: {'; '.join(words)}"


def ranges(numbers: Any) -> str:
    """`0-3, 7`"""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
