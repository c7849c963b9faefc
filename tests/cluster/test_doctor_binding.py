"""doctor through the real nvidia-ml-py: a library of C that answers as libnvidia-ml.so does, built here."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# The functions that write one number, and their answers.
NUMBERS = {
    "MinorNumber": 0, "PersistenceMode": 1, "ComputeMode": 0, "CurrPcieLinkGeneration": 1, "CurrPcieLinkWidth": 16,
    "MaxPcieLinkGeneration": 5, "GpuMaxPcieLinkGeneration": 5, "MaxPcieLinkWidth": 16, "PcieReplayCounter": 3,
    "PowerUsage": 70000, "EnforcedPowerLimit": 700000, "PowerManagementDefaultLimit": 700000, "PerformanceState": 0,
}  # fmt: skip
SOURCE = """
#include <string.h>
#include <stdint.h>
typedef unsigned int u;
typedef unsigned long long ull;
typedef void *gpu;
static int devices[2];
struct process { u pid; ull used; u instance, compute; };
struct field { u id, scope; int64_t time, latency; u type, result; ull value; };
struct fabric { u version; char uuid[16]; u status, clique; unsigned char state; u health; };

int nvmlInitWithFlags(u flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "an error"; }
int nvmlSystemGetDriverVersion(char *text, u size) { strcpy(text, "570.86.15"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetCount_v2(u *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u index, gpu *handle) { *handle = &devices[index]; return 0; }
int nvmlDeviceGetName(gpu g, char *text, u size) { strcpy(text, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(gpu g, char *text, u size) { strcpy(text, g == devices ? "GPU-a" : "GPU-b"); return 0; }
int nvmlDeviceGetVbiosVersion(gpu g, char *text, u size) { strcpy(text, "96.00.89.00.01"); return 0; }
int nvmlDeviceGetVirtualizationMode(gpu g, ull *mode) { *mode = 0; return 0; }
int nvmlDeviceGetMigMode(gpu g, u *now, u *next) { *now = *next = 0; return 0; }
int nvmlDeviceGetEccMode(gpu g, u *now, u *next) { *now = *next = 1; return 0; }
int nvmlDeviceGetTotalEccErrors(gpu g, u type, u counter, ull *count) { *count = 10 * type + counter; return 0; }
int nvmlDeviceGetRemappedRows(gpu g, u *a, u *b, u *c, u *d) { *a = 1; *b = 2; *c = *d = 0; return 0; }
int nvmlDeviceGetRetiredPagesPendingStatus(gpu g, u *pending) { return 3; }
int nvmlDeviceGetClockInfo(gpu g, u type, u *clock) { *clock = 1000 + type; return 0; }
int nvmlDeviceGetMaxClockInfo(gpu g, u type, u *clock) { *clock = 2000 + type; return 0; }
int nvmlDeviceGetTemperature(gpu g, u sensor, u *degrees) { *degrees = 33; return 0; }
int nvmlDeviceGetTemperatureThreshold(gpu g, u which, u *degrees) { *degrees = 90 + which; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(gpu g, ull *bits) { *bits = 1; return 0; }
int nvmlDeviceGetCpuAffinity(gpu g, u count, unsigned long *words) {
    memset(words, 0, 8 * count);
    words[0] = 0xff;
    return 0;
}
int nvmlDeviceGetPciInfo_v3(gpu g, char *info) { memset(info, 0, 68); strcpy(info + 36, "00000000:3B:00.0"); return 0; }
int nvmlDeviceGetMemoryInfo(gpu g, ull *m) { m[0] = 80ull << 30; m[1] = 79ull << 30; m[2] = 1ull << 30; return 0; }
int nvmlDeviceGetRowRemapperHistogram(gpu g, u *banks) { memset(banks, 0, 20); banks[0] = 640; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(gpu g, u *count, struct process *found) {
    if (!found) { *count = 1; return 7; }
    *count = 1;
    found[0].pid = 77;
    found[0].used = 5;
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(gpu g, struct fabric *info) {
    if (info->version != 0x02000024) return 25; /* as a driver that is older than the library */
    info->state = 3; info->status = 0; info->health = 0x51aa;
    return 0;
}
int nvmlDeviceGetC2cModeInfoV(gpu g, u *info) { return 3; }
int nvmlDeviceGetNvLinkState(gpu g, u link, u *state) { if (link >= 4) return 2; *state = 1; return 0; }
int nvmlDeviceGetFieldValues(gpu g, int count, struct field *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].result = fields[i].id == 161 ? 0 : 3; /* replays only */
        fields[i].type = 3;
        fields[i].value = 100 + fields[i].scope;
    }
    return 0;
}
int nvmlDeviceGetP2PStatus(gpu a, gpu b, u which, u *status) { *status = 0; return which < 5 ? 0 : 2; }
int nvmlDeviceGetTopologyCommonAncestor(gpu a, gpu b, u *level) { *level = 20; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    numbers = "".join(
        f"int nvmlDeviceGet{name}(gpu g, u *n) {{ *n = {value}; return 0; }}\n" for name, value in NUMBERS.items()
    )
    (folder / "nvml.c").write_text(SOURCE + numbers)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
    subprocess.run(command, check=True, timeout=60)
    return folder


def test_every_call_goes_through_the_real_binding(
    library: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    pytest.importorskip("pynvml")
    program = "import json; from mldebug.cluster import collect_doctor; print(json.dumps(collect_doctor()))"
    done = run_python(program, env={"LD_LIBRARY_PATH": str(library)})
    (node,) = json.loads(done.stdout)["nodes"]
    seen = node["gpu"]
    assert (seen["driver"], seen["cuda"], seen["peers"]) == ("570.86.15", 12080, [[0, 1, 0, 0, 20]])
    first, second = seen["gpus"]
    assert second["uuid"] == "GPU-b"
    unsupported = "this GPU or driver does not support it"
    assert first.pop("unseen") == {"retired_pending": unsupported, "c2c": unsupported}
    assert first == {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-a", "minor": 0, "vbios": "96.00.89.00.01",
            "virtual": 0,
        "persistence": 1, "compute_mode": 0, "mig": [0, 0], "ecc_mode": [1, 1], "ecc_corrected": 0,
        "ecc_uncorrected": 10, "ecc_uncorrected_ever": 11, "remapped": [1, 2, 0, 0], "pcie_gen": 1, "pcie_width": 16,
        "pcie_max_gen": 5, "pcie_gpu_gen": 5, "pcie_max_width": 16, "pcie_replays": 3, "pstate": 0, "sm_clock": 1001,
        "sm_clock_max": 2001, "mem_clock": 1002, "mem_clock_max": 2002, "temperature": 33, "temperature_slow": 91,
        "power": 70000, "power_limit": 700000, "power_default": 700000, "throttle": 1, "affinity": "0-7",
        "bus": "0000:3b:00.0", "memory": {"total": 80 << 30, "used": 1 << 30}, "processes": [[77, 5]],
        "rows": {"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
        "fabric": {"state": 3, "status": 0, "health": 0x51AA}, "links": [1, 1, 1, 1],
        "link_errors": {f"link {link} replay": 100 + link for link in range(4)},
    }  # fmt: skip
