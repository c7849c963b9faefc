"""What holds for each of the classic scripts: it is there, it is short, it begins without an installation."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Run = Callable[..., "subprocess.CompletedProcess[str]"]

CALLED = {  # run as a program: the options that it had
    "torch-distributed-gpu-test.py": (),
    "all_reduce_bench.py": (
        "--local_rank", "--num_iterations", "--num_warmup_iterations", "--payload_size_in_gib", "--profile_stability",
    ),
    "mamf-finder.py": (
        "--m", "--m_range", "--n", "--n_range", "--k", "--k_range", "--num_iterations", "--num_warmup_iterations",
        "--cuda_device", "--output_file", "--notes", "--verbose", "--no-verbose", "--dtype",
    ),
    "torch-dist-mem-usage.py": (),
    "swiglu-maf-bench.py": (),
    "num-workers-bench.py": (),
    "pin-memory-non-block-bench.py": (),
    "activation-memory-per-layer.py": (),
    "all_gather_object_vs_all_reduce.py": (),
    "all_gather_object_vs_all_gather.py": (),
}  # fmt: skip
IMPORTED = {  # imported by a program beside which it lies, or from PYTHONPATH: the names that it had
    "NicerTrace": ("NicerTrace", "Tee", "main"),
    "printflock": ("printflock",),
    "underflow_overflow": (
        "DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max", "ExplicitEnum", "DebugOption",
    ),
    "main_process_first": (
        "get_local_rank", "get_global_rank", "is_local_fs", "path_to_fs_type", "is_main_process_by_path",
        "is_local_main_process", "is_global_main_process", "main_process_by_path_first", "global_main_process_first",
        "local_main_process_first",
    ),
}  # fmt: skip
OTHERS = ("multi-gpu-non-interleaved-print.py", "numa-set.sh")


def test_all_are_there_and_short() -> None:
    scripts = {path.name: len(path.read_text().splitlines()) for path in TOOLS.iterdir() if path.is_file()}
    assert set(scripts) == {*CALLED, *OTHERS, *(f"{name}.py" for name in IMPORTED)}
    assert {name: lines for name, lines in scripts.items() if lines > 60} == {}
    assert [name for name in (*CALLED, *OTHERS) if not os.access(TOOLS / name, os.X_OK)] == []


HELP = """
import contextlib, io, runpy, sys
for tool in sys.argv[1:]:
    sys.argv = [tool, "--help"]
    print("###", tool)
    with contextlib.suppress(SystemExit):
        runpy.run_path(tool, run_name="__main__")
"""


def test_each_takes_the_options_that_it_had(run_python: Run) -> None:
    done = run_python(HELP, *(TOOLS / name for name in (*CALLED, "NicerTrace.py")), timeout=110)
    assert done.returncode == 0, done.stderr
    helps = {part.split()[0].rpartition("/")[2]: part.split() for part in done.stdout.split("###")[1:]}
    missing = {
        name: [option for option in options if not {option, f"[{option}", f"{option},"} & set(helps[name])]
        for name, options in CALLED.items()
    }
    assert missing == {name: [] for name in CALLED}
    assert "*** Starting" not in done.stdout  # NicerTrace.py only says what it is
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and not line.startswith("###")] == []


WRONG = [
    (["activation-memory-per-layer.py", "--batch", "0"], "activation-memory-per-layer: argument --batch: '0' is not"),
    (["activation-memory-per-layer.py", "llama", "--device", "cud"], "no kind of device is named 'cud'"),
    (["torch-dist-mem-usage.py", "--backend", "glo"], "torch-dist-mem-usage: "),
    (["num-workers-bench.py", "--step-seconds", "-1"], "num-workers-bench: argument --step-seconds: '-1' is not"),
    (["pin-memory-non-block-bench.py", "--rnds", "1"], "pin-memory-non-block-bench: unrecognized arguments: --rnds"),
    (["swiglu-maf-bench.py", "--dtype", "bf17", "--cpu"], "swiglu-maf-bench: there is no matmul in 'bf17'"),
    (["torch-distributed-gpu-test.py", "--backend", "glo"], "torch-distributed-gpu-test: argument --backend: invalid"),
    (["mamf-finder.py", "--m", "8", "--n", "8", "--k", "8", "--dtype", "bf17"], "mamf-finder: there is no matmul in"),
    (["all_reduce_bench.py", "--backend", "glo"], "all_reduce_bench: there is no backend 'glo'"),
]
ONE_AFTER_ANOTHER = """
import contextlib, io, json, os, runpy, sys
folder, seen = sys.argv[1], []
for tool, *words in json.loads(sys.argv[2]):
    sys.argv = [os.path.join(folder, tool), *words]
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exc:
            seen.append((exc.code, err.getvalue()))
print(json.dumps(seen))
"""


def test_wrong_usage_is_two_lines_and_status_2(run_python: Run) -> None:
    done = run_python(ONE_AFTER_ANOTHER, TOOLS, json.dumps([words for words, _ in WRONG]), timeout=110)
    assert done.returncode == 0, done.stderr
    for (words, message), (status, err) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert (status, message in err, "\nhint: " in err, len(err.splitlines())) == (2, True, True, 2), (words, err)


def test_those_that_are_imported_say_how_when_they_are_run(run_python: Run) -> None:
    for name in ("printflock", "underflow_overflow"):
        done = run_python(TOOLS / f"{name}.py")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"\n    from {name} import " in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_each_has_the_names_that_it_had(run_python: Run) -> None:
    lines = [f"from {module} import {', '.join(names)}" for module, names in IMPORTED.items()]
    done = run_python("\n".join(lines), env={"PYTHONPATH": str(TOOLS)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["printflock", "main_process_first"])
def test_those_for_any_program_load_no_torch(run_python: Run, name: str) -> None:
    done = run_python(f"import {name}, sys; print('torch' in sys.modules)", env={"PYTHONPATH": str(TOOLS)})
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("name", ["main_process_first.py", "multi-gpu-non-interleaved-print.py"])
def test_a_program_for_ranks_says_how_to_start_it(run_python: Run, name: str) -> None:
    done = run_python(TOOLS / name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("run it so: torchrun --nproc") and done.stderr.endswith(f"{name}\n")
