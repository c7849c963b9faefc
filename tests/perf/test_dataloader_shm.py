"""`mldebug dataloader` where /dev/shm is smaller than a batch, as in a container of docker without --shm-size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mldebug.perf.loader._failure import LoaderFailure, raised

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]

DATA = """
import torch

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((50_000,), float(index))

def make():
    return Large()
"""


def test_no_workers_where_a_batch_does_not_fit(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount namespaces")
    (tmp_path / "data.py").write_text(DATA)
    command = 'mount -t tmpfs -o size=2M none /dev/shm && exec "$@"'
    bench = ("-m", "mldebug", "dataloader", "--seconds", "2", "--device", "cpu", "--step-seconds", "30", "data.py:make")
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", command, "sh", sys.executable, *bench], cwd=tmp_path, capture_output=True,
        text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "use DataLoader(..., num_workers=0)" in said, done.stdout + done.stderr
    assert "1 worker is not tried: batches that wait need" in said and "/dev/shm, and 2 MiB are free" in said
    assert "docker --shm-size" in said


def test_a_full_shm_is_no_fault_of_the_collate_fn() -> None:
    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    failure = raised(RuntimeError(text), [], stream=False)
    assert isinstance(failure, LoaderFailure) and failure.worker_signal == 7
    assert "does not fit into /dev/shm" in failure.message and "--shm-size" in str(failure.hint)
