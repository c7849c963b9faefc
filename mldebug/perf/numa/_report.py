"""What binding did, and the table of all GPUs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from mldebug.core.report import Report


@dataclass(frozen=True)
class NumaReport(Report):
    """Where a rank may run now. `ok` is no `trouble`.

        report = bind_numa(); print(report.cpus, report.why)

    - `cpus`, `before`: the CPUs that it may use now and could before, as "0-31,64-95"; `count` of them now; `mask` is
      `cpus` in hexadecimal, as srun takes it
    - `bound`: whether anything was changed; `why`: the reason either way
    - `trouble`: near CPUs exist and cannot be used, or cannot be told; a machine where all CPUs are equally near is no
      trouble; `hint`: what to do then
    - `gpu`: number of the GPU as nvidia-smi has it, None without one; `address`: its PCI address; `node`: its NUMA
      node, None where it is not known
    - `rank`, `local_rank`, `host`: who; `memory`: what was done about the memory of the process, in words
    """

    host: str
    rank: int
    local_rank: int
    gpu: int | None  # its number where nothing is masked, as nvidia-smi has it
    address: str
    node: int | None
    before: str
    cpus: str
    count: int
    mask: str
    bound: bool
    trouble: bool
    why: str
    memory: str
    notes: tuple[str, ...]
    hint: str

    @property
    def ok(self) -> bool:
        return not self.trouble

    def text(self, color: bool = False, width: int = 80) -> str:
        who = f"mldebug numa: rank {self.rank} on {self.host}"
        if self.bound:
            lines = [f"{who}: CPUs {self.cpus} ({self.count}), {self.why}", f"  mask {self.mask}, was {self.before}"]
        else:
            lines = [f"{who}: CPUs left as they were, {self.cpus} ({self.count}): {self.why}"]
        lines += [f"  {note}" for note in (self.memory, *self.notes) if note]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(_wrapped(line, width) for line in lines)


@dataclass(frozen=True)
class NumaRow:
    """One GPU of the table. `usable` are the CPUs that a rank on it would be bound to; `changes` says whether that is
    less than what this process may use; `local_rank` is None for a GPU that this process does not see."""

    gpu: int
    local_rank: int | None
    address: str
    name: str
    node: int | None
    near: str
    usable: str
    mask: str
    changes: bool
    trouble: bool
    why: str


@dataclass(frozen=True)
class NumaTable(Report):
    """All GPUs of a machine and the CPUs near each; `cpu_bind` is the option for srun, "" where it would bind nothing.

    Its masks are those of the GPUs that this process sees, in their order: local task i uses GPU i.
    """

    host: str
    allowed: str
    nodes: dict[int, str]
    rows: tuple[NumaRow, ...]
    masks: tuple[str, ...]
    cpu_bind: str
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not any(row.trouble for row in self.rows)

    def text(self, color: bool = False, width: int = 80) -> str:
        nodes = len(self.nodes)
        count = f"{nodes} NUMA node{'s' * (nodes != 1)}" if nodes else "NUMA nodes not shown"
        lines = [
            f"{self.host}: {len(self.rows)} GPU{'s' * (len(self.rows) != 1)}, {count}; CPUs allowed {self.allowed}"
        ]
        if self.rows:
            table = [("rank", "GPU", "address", "node", "near", "to bind to")]
            for row in self.rows:
                rank = "-" if row.local_rank is None else str(row.local_rank)
                node = "?" if row.node is None else str(row.node)
                usable = row.usable if row.changes else "left as it is"
                table.append((rank, str(row.gpu), row.address, node, row.near or "?", usable))
            widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
            for line in table:
                cells = (f"{cell:<{size}}" for cell, size in zip(line, widths, strict=True))
                lines.append("  " + "  ".join(cells).rstrip())
        reasons: dict[str, list[str]] = {}
        for row in self.rows:
            if row.trouble or not row.changes:
                reasons.setdefault(row.why, []).append(str(row.gpu))
        notes = [f"  GPU {','.join(numbers)}: {why}" for why, numbers in reasons.items()]
        lines += [_wrapped(note, width) for note in (*notes, *(f"  {note}" for note in self.notes))]
        if self.cpu_bind:
            lines += ["srun, on whole nodes, one task for each GPU:", f"  --cpu-bind={self.cpu_bind}"]
        return "\n".join(lines)


def _wrapped(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
