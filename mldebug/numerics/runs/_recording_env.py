"""What a run depends on besides its code and weights: versions, device, switches, random state."""

from __future__ import annotations

import platform
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Versions, the device and the switches of torch that change numbers, as plain JSON."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "accelerate", "triton", "flash_attn"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "?"))
    found["machine"] = platform.machine()
    found["cuda"] = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found["tf32 in matmuls"] = torch.backends.cuda.matmul.allow_tf32
        found["tf32 in cudnn"] = torch.backends.cudnn.allow_tf32
        matmul = torch.backends.cuda.matmul
        found["reduced precision sums in bf16"] = str(matmul.allow_bf16_reduced_precision_reduction)
        found["reduced precision sums in fp16"] = str(matmul.allow_fp16_reduced_precision_reduction)
        found["flash attention"] = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    found["float32 matmul precision"] = torch.get_float32_matmul_precision()
    found["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    return found


def random_state() -> int:
    """A checksum of the states of torch's generators: two runs with the same one draw the same numbers."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    if is_initialized() and not torch.cuda.is_current_stream_capturing():
        state = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), state)
    return state
