"""How fast can this machine go, and how close is a job: matmul, memory, and the input side.

    from mldebug.perf import mamf
    print(mamf(dtype="bfloat16").text())

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.perf.loader._bench import dataloader_bench
    from mldebug.perf.loader._report import DataloaderReport
    from mldebug.perf.matmul._gpus import MamfAllReport, mamf_all_gpus
    from mldebug.perf.matmul._mamf import mamf
    from mldebug.perf.matmul._mfu import MfuReport, mfu
    from mldebug.perf.matmul._model import ModelShapes, model_shapes
    from mldebug.perf.matmul._report import MamfReport
    from mldebug.perf.matmul._swiglu import SwigluReport, best_swiglu
    from mldebug.perf.memory._activations import ActivationReport, activation_memory
    from mldebug.perf.memory._distributed import DistributedMemoryReport, distributed_memory
    from mldebug.perf.memory._memory_report import memory_report
    from mldebug.perf.memory._run_report import MemoryRunReport
    from mldebug.perf.memory._watch import memory_watch
    from mldebug.perf.numa._bind import bind_numa, numa_table
    from mldebug.perf.numa._report import NumaReport

__all__ = [
    "ActivationReport",
    "DataloaderReport",
    "DistributedMemoryReport",
    "MamfAllReport",
    "MamfReport",
    "MemoryRunReport",
    "MfuReport",
    "ModelShapes",
    "NumaReport",
    "SwigluReport",
    "activation_memory",
    "best_swiglu",
    "bind_numa",
    "dataloader_bench",
    "distributed_memory",
    "mamf",
    "mamf_all_gpus",
    "memory_report",
    "memory_watch",
    "mfu",
    "model_shapes",
    "numa_table",
]

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "ActivationReport": "mldebug.perf.memory._activations",
    "DataloaderReport": "mldebug.perf.loader._report",
    "DistributedMemoryReport": "mldebug.perf.memory._distributed",
    "MamfAllReport": "mldebug.perf.matmul._gpus",
    "MamfReport": "mldebug.perf.matmul._report",
    "MemoryRunReport": "mldebug.perf.memory._run_report",
    "MfuReport": "mldebug.perf.matmul._mfu",
    "ModelShapes": "mldebug.perf.matmul._model",
    "NumaReport": "mldebug.perf.numa._report",
    "SwigluReport": "mldebug.perf.matmul._swiglu",
    "activation_memory": "mldebug.perf.memory._activations",
    "best_swiglu": "mldebug.perf.matmul._swiglu",
    "bind_numa": "mldebug.perf.numa._bind",
    "dataloader_bench": "mldebug.perf.loader._bench",
    "distributed_memory": "mldebug.perf.memory._distributed",
    "mamf": "mldebug.perf.matmul._mamf",
    "mamf_all_gpus": "mldebug.perf.matmul._gpus",
    "memory_report": "mldebug.perf.memory._memory_report",
    "memory_watch": "mldebug.perf.memory._watch",
    "mfu": "mldebug.perf.matmul._mfu",
    "model_shapes": "mldebug.perf.matmul._model",
    "numa_table": "mldebug.perf.numa._bind",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
