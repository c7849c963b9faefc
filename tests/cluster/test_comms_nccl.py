"""How NCCL is called without torch: against a library that refuses wrong arguments."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mldebug.cluster.collectives import _nccl

SOURCE = Path(__file__).parent / "programs" / "fake_nccl.c"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_calls_have_the_arguments_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnccl_fake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(SOURCE)], check=True)
    monkeypatch.setattr(_nccl, "_loaded", lambda: ctypes.CDLL(str(library)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    nccl = _nccl.Nccl(0, 2, lambda identity: identity or b"")
    source, target = torch.arange(8.0), torch.zeros(8)
    nccl.call("all_reduce", source, target, "sum", 0)()
    assert torch.equal(source, target)
    nccl.call("reduce", source, target, "max", 1)()
    nccl.call("broadcast", source, target, "sum", 1)()
    with pytest.raises(RuntimeError, match="NCCL: it refuses"):
        nccl.call("all_reduce", source, target, "max", 0)()
    with pytest.raises(RuntimeError, match="the identity is wrong"):
        _nccl.Nccl(0, 3, lambda identity: identity or b"")


def test_no_library_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch has loaded one")
    with pytest.raises(OSError, match="no NCCL library"):
        _nccl._loaded()
