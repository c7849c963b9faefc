"""The input side on a real GPU: copies, pinning, a script that trains, and the CPUs near the card."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mldebug.core.cpus import cpus
from mldebug.perf.loader._bench import dataloader_bench
from tests.perf.programs import loader_data as kit

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
MAIN = """
import sys
from mldebug import cli
cli.COMMANDS.setdefault("dataloader", ("mldebug.cli._dataloader", "", "measure"))
cli.COMMANDS.setdefault("numa", ("mldebug.cli._numa", "", "bind"))
sys.exit(cli.main())
"""


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_batches_are_copied_and_pinning_is_tried() -> None:
    torch.ones(1, device="cuda")  # CUDA runs before the workers are forked
    began = time.monotonic()
    report = dataloader_bench(kit.Big(), batch_size=16, num_workers=[0, 1, 2, 4], seconds=15)  # 64 MiB a batch
    print(report.text())
    assert time.monotonic() - began < 25
    copies = {(row.setting.pin_memory, row.setting.non_blocking) for row in report.rows if row.setting.num_workers}
    assert copies == {(False, False), (False, True), (True, False), (True, True)}
    assert "H100" in report.device or "H200" in report.device or report.device != "cpu"
    assert report.chosen is not None


def test_a_script_that_trains_on_the_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys, torch; sys.path.insert(0, {str(ROOT / 'tests' / 'perf' / 'programs')!r})\n"
        "from loader_data import Waits\n"
        "weight = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\n"
        "for batch in torch.utils.data.DataLoader(Waits(), batch_size=8, num_workers=1, pin_memory=True):\n"
        "    batch = batch.cuda(non_blocking=True)\n"
        "    for _ in range(20): weight = (weight @ weight).clamp(-1, 1)\n"
    )
    done = run("-c", MAIN, "dataloader", "--json", "--steps", "10", "--seconds", "12", "--", script)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    print(f"step {1e3 * report['step_seconds']:.1f} ms, chosen {report['chosen']}, waits {report['waits']}")
    # Twenty products of 8192^3 are 22 TFLOP: the step is the GPU's time, and not that of 20 launches.
    assert 0.018 < report["step_seconds"] < 0.2
    assert report["now"]["num_workers"] == 1 and report["chosen"]["num_workers"] >= 1


def test_a_rank_is_bound_beside_its_card() -> None:
    program = (
        "import os, torch\nfrom mldebug.perf.numa._bind import bind_numa\n"
        "report = bind_numa(memory='prefer')\nprint(report.json())\n"
        "print(sorted(os.sched_getaffinity(0)))\n"
        "one = torch.cuda.get_device_properties(0)\n"
        "print(f'{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0')\n"
    )
    done = run("-c", program, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    text, affinity, address = done.stdout.splitlines()
    report = json.loads(text)
    assert report["address"] == address
    assert json.loads(affinity) == sorted(cpus(report["cpus"]))
    if report["bound"]:
        near = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text()
        assert set(json.loads(affinity)) <= cpus(near)


def test_the_table() -> None:
    done = run("-c", MAIN, "numa")
    print(done.stdout)
    assert len(re.findall(r"^ +\d+ +\d+ +[0-9a-f]{4}:", done.stdout, re.M)) == torch.cuda.device_count(), done


def test_the_classic_table_of_pinning() -> None:
    tool = ROOT / "tools" / "pin-memory-non-block-bench.py"
    done = run(tool, "--step-seconds", "0.05", "--rounds", "1", "--num-workers", "2", "--batch-size", "50")
    print(done.stdout)
    assert len(re.findall(r"^pin_memory=.{5}, non_blocking=.{5}: average time: \d", done.stdout, re.M)) == 4, done
