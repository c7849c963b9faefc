"""A short load on idle GPUs, by a process that can be ended: only then links and clocks show what they can."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mldebug.cluster.health._finding import Node, gpus, median, part
from mldebug.cluster.health._nvml import handles_by_uuid, sample

SECONDS = 3.0  # of load
_START = 60.0  # seconds until torch is imported and the GPUs are ready
_AFTER = 10.0  # seconds that the load may take longer than it should
_EVERY = 0.1
_HELD = 1 << 30  # bytes of memory that an idle GPU may have in use

# Not the folder where it happens to start: it may hold modules with the names of others.
_PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if p)]
from mldebug.cluster.health._load import work
work(float(sys.argv[2]))
"""


def look(nvml: Any, node: Node, seconds: float = SECONDS, deadline: float = _START) -> dict[str, Any]:
    """What each GPU does under load: {"gpus": {uuid: facts}}, and "why" for those that were left alone."""
    idle = [gpu for gpu in gpus(node) if is_idle(gpu)]
    busy = [gpu for gpu in gpus(node) if not is_idle(gpu)]
    why = f"GPU {', '.join(str(gpu['index']) for gpu in busy)} in use: left alone" if busy else ""
    if not idle:
        return {"gpus": {}, "why": why or str(part(node, "gpu", "why") or "there is no GPU")}
    child = _start(idle, seconds)
    try:
        found, failure = _follow(nvml, child, {str(gpu["uuid"]) for gpu in idle}, seconds, deadline)
    finally:
        _end(child)
    return {"gpus": found, "seconds": seconds, **({"why": failure or why} if failure or why else {})}


def is_idle(gpu: Any) -> bool:
    """Nobody computes on it; a GPU of a job is never touched."""
    return (
        "uuid" in gpu
        and not gpu.get("processes")
        and gpu.get("memory", {}).get("used", 0) < _HELD
        and not (gpu.get("mig") or [0])[0]
    )


def _start(idle: list[Any], seconds: float) -> subprocess.Popen[bytes]:
    folder = str(Path(__file__).resolve().parent.parent.parent)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(str(gpu["uuid"]) for gpu in idle)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, folder, str(seconds)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=env, start_new_session=True,
    )  # fmt: skip


def _follow(
    nvml: Any, child: subprocess.Popen[bytes], wanted: set[str], seconds: float, deadline: float
) -> tuple[dict[str, Any], str]:
    lines: list[dict[str, Any]] = []
    complaint: list[bytes] = []

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))

    def listen() -> None:
        assert child.stderr is not None
        complaint.append(child.stderr.read()[-2000:])

    readers = [threading.Thread(target=one, daemon=True) for one in (read, listen)]
    for one in readers:
        one.start()
    limit = time.monotonic() + deadline
    while not lines and child.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    taken: dict[str, list[dict[str, Any]]] = {uuid: [] for uuid in wanted}
    handles = {uuid: handle for uuid, handle in handles_by_uuid(nvml).items() if uuid in wanted} if lines else {}
    limit = time.monotonic() + seconds + _AFTER
    while child.poll() is None and time.monotonic() < limit:
        for uuid, handle in handles.items():
            taken[uuid].append(sample(nvml, handle))
        time.sleep(_EVERY)
    hung = child.poll() is None
    if not hung:  # one that hangs may hold its pipes open
        for one in readers:
            one.join(2)
    return _found(lines, taken), _failure(child, lines, complaint, hung)


def _failure(child: subprocess.Popen[bytes], lines: list[dict[str, Any]], complaint: list[bytes], hung: bool) -> str:
    said = b"".join(complaint).decode("utf-8", "replace").strip().splitlines()
    if hung:
        return "the load did not end in time: a GPU hangs" if lines else "torch and CUDA did not start in time"
    if any(line.get("ready") == 0 for line in lines):
        return "torch here sees no CUDA device"
    troubles = [str(line["error"]) for line in lines if "error" in line]
    if troubles:
        return f"the load failed: {troubles[0]}"
    return f"the load failed: {said[-1][:200] if said else f'status {child.returncode}'}" if child.returncode else ""


def _found(lines: list[dict[str, Any]], taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    done = {line["uuid"]: line for line in lines if "uuid" in line}
    found = {}
    for uuid, samples in taken.items():
        if uuid not in done or not samples:
            continue
        facts: dict[str, Any] = {key: done[uuid][key] for key in ("h2d_gbps", "tflops") if key in done[uuid]}
        for fact in ("pcie_gen", "pcie_width"):
            values = [one[fact] for one in samples if fact in one]
            if values:
                facts[fact] = max(values)
        clocks = [one["sm_clock"] for one in samples if "sm_clock" in one]
        if clocks:
            facts["sm_clock"] = median(clocks[len(clocks) // 3 :])  # the first ones are those of its way up
        bits = [one["throttle"] for one in samples if "throttle" in one]
        # A reason that holds for a quarter of the time is one; a single look at the wrong moment is not.
        facts["throttle"] = sum(1 << bit for bit in range(12) if sum(one >> bit & 1 for one in bits) * 4 > len(bits))
        found[uuid] = facts
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be ended
        child.wait(2)


def work(seconds: float) -> None:
    """In the child: copies from pinned memory and matmuls on every GPU, and what each of them reached."""
    import torch

    count = torch.cuda.device_count()
    ready = threading.Barrier(count + 1)
    lock = threading.Lock()

    def say(row: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()

    def one(index: int) -> None:
        try:
            say(_exercise(torch, index, seconds, ready))
        except Exception as exc:
            ready.abort()
            say({"device": index, "error": f"GPU {index}: {type(exc).__name__}: {str(exc)[:150]}"})

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait()
        say({"ready": count})
    for thread in threads:
        thread.join()


def _exercise(torch: Any, index: int, seconds: float, ready: threading.Barrier) -> dict[str, Any]:
    """Copies and matmuls on streams of their own, at the same time; both are timed by events of the GPU."""
    device = torch.device("cuda", index)
    size, width = 64 << 20, 4096
    with torch.cuda.device(device):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        b, c = torch.randn_like(a), torch.empty_like(a)
        torch.mm(a, b, out=c)
        copying, computing = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        ready.wait(60)
        copies = products = 0
        copied = computed = 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
            with torch.cuda.stream(copying):
                times[0][0].record()
                for _ in range(8):
                    there.copy_(host, non_blocking=True)
                times[0][1].record()
            with torch.cuda.stream(computing):
                times[1][0].record()
                for _ in range(40):
                    torch.mm(a, b, out=c)
                times[1][1].record()
            torch.cuda.synchronize()
            copied += times[0][0].elapsed_time(times[0][1]) / 1000
            computed += times[1][0].elapsed_time(times[1][1]) / 1000
            copies, products = copies + 8, products + 40
        properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    return {
        "device": index, "uuid": uuid if uuid.startswith("GPU-") else f"GPU-{uuid}",
        "h2d_gbps": round(copies * size / copied / 1e9, 2),
        "tflops": round(2 * width**3 * products / computed / 1e12, 1),
    }  # fmt: skip
