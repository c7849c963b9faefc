"""doctor on a real GPU: NVML answers as the fake one does, nothing healthy is bad, and a load wakes the links up."""

from __future__ import annotations

import json
import time

import pytest
import torch

from mldebug.cluster import collect_doctor, doctor
from mldebug.cluster.health._nvml import _ASKED, load_nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_what_nvml_tells() -> None:
    began = time.monotonic()
    evidence = collect_doctor()
    took = time.monotonic() - began
    (node,) = evidence["nodes"]
    gpus = node["gpu"]["gpus"]
    print(f"{len(gpus)} GPUs in {took:.2f} s")
    for fact, why in sorted(gpus[0]["unseen"].items()):
        print(f"  {fact}: {why}")
    json.dumps(evidence, allow_nan=False)
    assert gpus and not [
        part for part, value in node.items() if isinstance(value, dict) and "Error" in str(value.get("why"))
    ]
    for gpu in gpus:
        assert "fatal" not in gpu
        assert {"name", "uuid", "bus", "pcie_gen", "pcie_max_gen", "memory", "power_limit", "throttle"} <= set(gpu)
        assert set(gpu["unseen"]) <= {fact for fact, _, _ in _ASKED} | {
            "affinity",
            "rows",
            "fabric",
            "links",
            "c2c",
            "processes",
        }
        # A function that this nvidia-ml-py does not have, or a call that it does not take, is a mistake of ours.
        assert not [why for why in gpu["unseen"].values() if "has no nvml" in why or "Error:" in why], gpu["unseen"]


def test_the_table() -> None:
    report = doctor()
    print(report.text(width=120))
    checks = {one.check for one in report.findings}
    assert {"GPUs", "PCIe link", "clocks", "power limit", "temperature", "NVLink", "ECC"} <= checks
    assert not [one for one in report.findings if "cannot be judged" in one.says]


def test_under_load() -> None:
    """The link is at its full generation and width, and the matmul is no slower than any GPU of these years."""
    report = doctor(load=True)
    (node,) = report.evidence["nodes"]
    print(json.dumps(node["load"], indent=1))
    print(report.text(width=120))
    assert node["load"]["gpus"], node["load"]
    for seen in node["load"]["gpus"].values():
        assert seen["h2d_gbps"] > 1 and seen["tflops"] > 5 and seen["sm_clock"] > 300
    assert not [one for one in report.findings if "cannot be judged" in one.says]


def test_a_gpu_that_is_used_is_left_alone() -> None:
    held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    (node,) = collect_doctor(load=True)["nodes"]
    library, _ = load_nvml()
    index = torch.cuda.current_device()
    assert library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByIndex(index)).used >= held.numel()
    uuid = library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(index))
    assert uuid not in node["load"]["gpus"] and "in use" in node["load"]["why"]


def test_watch() -> None:
    report = doctor(watch=1.0)
    (node,) = report.evidence["nodes"]
    assert node["watch"]["counters"] > 0 and 1.0 <= node["watch"]["seconds"] < 30
