"""The benchmark from the first step to the last; what it found is in `evidence` at any time, plain JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from mldebug.cluster.collectives._coordinator import Coordinator, Trouble
from mldebug.cluster.collectives._options import Options
from mldebug.cluster.collectives._table import COLLECTIVES, Collective, dtype_name, size_text, sizes_of, width_of
from mldebug.cluster.dist._wire import Message

SCHEMA = 1
_GRAPH_BELOW = 16 << 20  # bytes: what a launch costs is no matter from here on
_ITERS, _MOST_ITERS = 20, 200
_STEADY, _SECONDS = 0.03, 1.5  # of one measurement, at least and at most, where the number of calls is not given
_LAST = {"cpu": 16 << 20, "gpu": 16 << 30}

Evidence = dict[str, Any]


def new_evidence(options: Options) -> Evidence:
    return {
        "schema": SCHEMA, "asked": options.asked(), "world": 0, "hosts": [], "gpu": "", "backend": "", "torch": "",
        "nccl": "", "ranks": [], "rows": [], "objects": {}, "stability": {}, "notes": [], "ended": "", "why": "",
        "culprits": [], "seconds": 0.0, "unsaved": "",
    }  # fmt: skip


class Run:
    """`measure()` fills `evidence`; `tell()` is called after each row. What ends it early is noted and not raised,
    but for KeyboardInterrupt and SystemExit."""

    def __init__(
        self,
        options: Options,
        coordinator: Coordinator,
        tell: Callable[[Evidence], None],
        progress: Callable[[str], None],
    ) -> None:
        self.options, self.coordinator = options, coordinator
        self.tell, self.progress = tell, progress
        self.evidence = new_evidence(options)
        self.direct = self.graphs = False
        self.kind = "cpu"
        self.turn = 0
        self.began = time.monotonic()

    def measure(self, hosts: list[str]) -> None:
        try:
            self.progress("waiting for the ranks")
            self.coordinator.gather(hosts)
            self._init()
            if self.options.objects:
                self._objects()
            else:
                self._sweep()
            self._probe()
            self.evidence["ended"] = "finished"
        except Trouble as exc:
            self.evidence.update(ended=exc.kind, why=exc.why, culprits=exc.ranks)
        except KeyboardInterrupt:
            self.evidence.update(ended="interrupted", why="interrupted by Ctrl-C")
            raise
        except SystemExit:
            self.evidence.update(ended="interrupted", why="ended by SIGTERM")
            raise
        finally:
            self.evidence["seconds"] = round(time.monotonic() - self.began, 2)
            self.progress("")

    def _init(self) -> None:
        ranks = self.coordinator.ranks
        first = ranks[0].facts
        self.evidence.update(
            world=len(ranks), hosts=list(dict.fromkeys(rank.host for rank in ranks)), gpu=first["name"],
            backend=first["backend"], torch=first["torch"], nccl=first["nccl"],
            ranks=[
                {"rank": one.number, "host": one.host, "local": one.local, "pid": one.pid, "device": one.facts["name"]}
                for one in ranks
            ],
        )  # fmt: skip
        if self.options.root >= len(ranks):
            raise Trouble("error", f"root is {self.options.root}, and there are {len(ranks)} ranks", [])
        self.kind = "cpu" if first["backend"] == "gloo" else "gpu"
        self.graphs = first["backend"] == "nccl"
        self.progress("the ranks find each other")
        port = self.coordinator.step("store", only=0)[0]["port"]
        answers = self._all("init", port=port, timeout=self.options.timeout, seconds=20.0)
        for rank, answer in zip(self.evidence["ranks"], answers, strict=True):
            rank["routes"] = answer["routes"]
        if first["backend"] == "nccl" and not self.options.objects:
            self._init_nccl()
        self.free = [int(answer["free"]) for answer in self._all("free")]
        self.evidence["start_seconds"] = round(time.monotonic() - self.began, 2)

    def _init_nccl(self) -> None:
        """torch.distributed reduces and broadcasts in place; out of place these are calls of NCCL itself."""
        if self.options.in_place_only or not any(
            COLLECTIVES[name].by_nccl("out_of_place") for name in self.options.collectives
        ):
            return
        try:
            self._able("nccl", seconds=10.0)
            self.direct = True
        except _Unable as exc:
            self.evidence["notes"].append(
                f"NCCL cannot be called without torch, so reductions are in place only: {exc.why}"
            )

    def _all(self, do: str, seconds: float = 0.0, **told: Any) -> list[Message]:
        """A step that all ranks have to do, or the run is over."""
        answers = self.coordinator.step(do, seconds, **told)
        for number, answer in enumerate(answers):
            if answer["t"] == "failed":
                raise Trouble("memory" if answer["oom"] else "error", f"rank {number}: {answer['why']}", [number])
        return answers

    # The sweep

    def _sweep(self) -> None:
        options = self.options
        last = options.last or max(options.first, _LAST[self.kind])
        sizes = (
            [options.stability] if options.stability else sizes_of(options.first, last, options.factor, options.step)
        )
        for dtype in map(dtype_name, options.dtypes):
            kinds = [COLLECTIVES[name] for name in options.collectives]
            fitting = self._allocate(sizes, dtype, any("out_of_place" in self._places(kind) for kind in kinds))
            for kind in kinds:
                self._sizes(kind, dtype, fitting)

    def _sizes(self, kind: Collective, dtype: str, sizes: list[int]) -> None:
        if kind.reduces and self.options.op == "avg" and self.kind == "cpu" and dtype.startswith(("int", "uint")):
            self.evidence["notes"].append(f"{kind.name} of {dtype} is not possible here: gloo averages no integers")
            return
        for size in sizes:
            sent, received = kind.counts(size, width_of(dtype), self.evidence["world"])
            if not sent or not received:
                continue
            row: Evidence = {
                "collective": kind.name, "dtype": dtype, "op": self.options.op if kind.reduces else "none",
                "root": self.options.root if kind.rooted else -1, "bytes": max(sent, received) * width_of(dtype),
                "count": min(sent, received) // (self.evidence["world"] if kind.split == "both" else 1), "chosen": {},
            }  # fmt: skip
            self.progress(f"{kind.name} {dtype} {size_text(size)}")
            try:
                for place in self._places(kind):
                    row[place] = self._cell(row, kind, place, size)
            except _Unable as exc:
                self.evidence["notes"].append(f"{kind.name} of {dtype} is not possible here: {exc.why}")
                return
            finally:  # what was measured of it counts, however it went on
                if "out_of_place" in row or "in_place" in row:
                    self.evidence["rows"].append(row)
                    self.evidence["seconds"] = round(time.monotonic() - self.began, 2)
                    self.tell(self.evidence)

    def _places(self, kind: Collective) -> list[str]:
        places = [place for place in kind.places if place == "in_place" or not self.options.in_place_only]
        if kind.name in ("all_reduce", "reduce", "broadcast") and not self.direct:
            return ["in_place"]
        return places or list(kind.places)

    def _allocate(self, sizes: list[int], dtype: str, both: bool) -> list[int]:
        """Buffers for the largest of these sizes that fits; that and those below it."""
        share = min(self.free) // (2 if both else 1)
        fitting = [size for size in sizes if size <= share]
        while fitting:
            answers = self.coordinator.step(
                "allocate",
                seconds=5.0,
                dtype=dtype,
                bytes=fitting[-1],
                wanted=[both, True],
            )
            failed = [number for number, answer in enumerate(answers) if answer["t"] == "failed"]
            if not failed:
                break
            if not all(answers[number]["oom"] for number in failed):
                raise Trouble("error", f"rank {failed[0]}: {answers[failed[0]]['why']}", failed)
            fitting.pop()
        if len(fitting) < len(sizes):
            least = self.free.index(min(self.free))
            most = size_text(fitting[-1]) if fitting else "nothing"
            self.evidence["notes"].append(
                f"the largest size is {most} and not {size_text(sizes[-1])}: rank {least} has "
                f"{size_text(self.free[least])} of memory free, and {'two buffers' if both else 'a buffer'} to fill"
            )
        if not fitting:
            raise Trouble("memory", f"there is no memory for {size_text(sizes[0])}", [])
        return fitting

    def _cell(self, row: Evidence, kind: Collective, place: str, size: int) -> Evidence:
        """One measurement: warm up, time, check."""
        options = self.options
        told = {
            "collective": kind.name, "dtype": row["dtype"], "op": options.op, "root": options.root, "bytes": size,
            "place": place, "mode": self._mode(size),
        }  # fmt: skip
        warm = self._able("warm", warm=options.warmup, **told)
        once = max(answer["seconds"] for answer in warm)
        if warm[0]["chosen"]:
            row["chosen"] = warm[0]["chosen"]
        mode = told["mode"]
        iters = options.iters or _iters(once, mode)
        if options.stability:
            mode = told["mode"] = "barrier"
            iters = options.iters or max(5, min(100, int(10 / max(once, 1e-6))))
        launches = options.launches if mode == "graph" else 1
        expected = once * (iters + 1) * launches
        try:
            answers = self._able("time", expected, iters=iters, launches=launches, **told)
        except _Unable as exc:
            if mode != "graph" or options.mode == "graph":
                raise
            self.graphs = False
            self.evidence["notes"].append(f"no graph could be captured, so calls are queued: {exc.why}")
            mode = told["mode"] = "queued"
            answers = self._able("time", expected, iters=iters, launches=1, **told)
        cell = figures(kind, row["bytes"], [answer["seconds"] for answer in answers])
        cell.update(mode=self._mode_name(mode), iters=iters, launches=launches if mode == "graph" else 1)
        cell["calls"] = "nccl" if self.direct and kind.by_nccl(place) else "torch"
        if options.stability:
            each = [max(seconds) for seconds in zip(*(answer["each"] for answer in answers), strict=True)]
            factor = kind.factor(len(answers))
            self.evidence["stability"] = {"bytes": row["bytes"], "us": [round(1e6 * one, 2) for one in each],
                "busbw": [round(row["bytes"] * factor / one / 1e9, 3) for one in each]}  # fmt: skip
        cell["wrong"] = self._check(told, once) if options.check else None
        return cell

    def _check(self, told: Message, once: float) -> int:
        wrong = 0
        by_rank = [0] * self.evidence["world"]
        for _ in range(self.options.check):
            self.turn += 1
            answers = self._able("check", once, turn=self.turn % 1000, **told)
            by_rank = [had + answer["wrong"] for had, answer in zip(by_rank, answers, strict=True)]
            wrong += sum(answer["wrong"] for answer in answers)
        if wrong:
            bad = [number for number, count in enumerate(by_rank) if count]
            self.evidence["culprits"] = sorted({*self.evidence["culprits"], *bad})
        return wrong

    def _able(self, do: str, seconds: float = 0.0, **told: Any) -> list[Message]:
        """As `step()`; _Unable where all ranks alike said that they cannot."""
        answers = self.coordinator.step(do, seconds, **told)
        failed = [number for number, answer in enumerate(answers) if answer["t"] == "failed"]
        if len(failed) == len(answers) and not any(answer["oom"] for answer in answers):
            raise _Unable(answers[0]["why"])
        if failed:
            full = answers[failed[0]]["oom"]
            raise Trouble("memory" if full else "error", f"rank {failed[0]}: {answers[failed[0]]['why']}", failed)
        return answers

    def _mode(self, size: int) -> str:
        if self.options.mode != "auto":
            return self.options.mode if self.options.mode != "graph" or self.graphs else "queued"
        return "graph" if self.graphs and size < _GRAPH_BELOW else "queued"

    def _mode_name(self, mode: str) -> str:
        return "in turn" if mode == "queued" and self.kind == "cpu" else mode

    def _objects(self) -> None:
        self.progress("objects against tensors")
        answers = self._all("objects", seconds=0.003 * self.options.objects, iters=self.options.objects)
        names = answers[0]["seconds"]
        self.evidence["objects"] = {
            "iters": self.options.objects,
            "us": {name: [round(1e6 * answer["seconds"][name], 3) for answer in answers] for name in names},
        }
        if wrong := [number for number, answer in enumerate(answers) if answer["wrong"]]:
            raise Trouble("error", "all_gather_object returned something else than was sent", wrong)
        self.tell(self.evidence)

    def _probe(self) -> None:
        self.progress("each rank by itself")
        for rank, answer in zip(self.evidence["ranks"], self._all("probe", iters=20), strict=True):
            rank["launch_us"] = round(answer["launch_us"], 2)
            rank["copy_gbps"] = round(answer["copy_gbps"], 1)


def _iters(once: float, mode: str) -> int:
    """How many calls: 20, more where that is over in a moment, fewer where it takes long."""
    least = _ITERS if mode == "graph" else max(_ITERS, min(_MOST_ITERS, int(_STEADY / max(once, 1e-6))))
    return max(2, min(least, int(_SECONDS / max(once, 1e-6))))


class _Unable(Exception):
    """All ranks said that this cannot be done, and are fit for what comes next."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def figures(kind: Collective, nbytes: int, seconds: list[float]) -> Evidence:
    """Time in microseconds (the mean over ranks, as nccl-tests has it), algbw and busbw in GBps, and the ranks."""
    mean = statistics.fmean(seconds)
    algbw = nbytes / mean / 1e9
    return {
        "us": 1e6 * mean, "algbw": algbw, "busbw": algbw * kind.factor(len(seconds)),
        "min_us": 1e6 * min(seconds), "max_us": 1e6 * max(seconds), "by_rank": [round(1e6 * one, 3) for one in seconds],
    }  # fmt: skip
