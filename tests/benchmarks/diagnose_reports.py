"""How many small troubles diagnose() names rightly, how often it alarms on healthy programs, and what a repro shows.

    python tests/benchmarks/diagnose_reports.py [--own-loop]

Prints one JSON line: troubles named (operation or event, module, step, phase) of all, false alarms of all healthy
programs, and for how many of the events with an operation repro.py, run by itself, gives the bad result again.
With --own-loop the recorder watches the same steps in a plain loop, where it looks at modules, losses, gradients and
weights: troubles whose phase, module and kind it says, of how many of these it knows the operation, and those of which
it says nothing or something else (what only single operations show; gradients that no optimizer takes). Status 1 for a
false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mldebug import DebugUnderflowOverflow, diagnose
from tests.numerics import cases_arithmetic, cases_ops_more, cases_reports, cases_values  # noqa: F401
from tests.numerics.cases import TROUBLES
from tests.numerics.cases_healthy import HEALTHY
from tests.numerics.cases_ops import OP_HEALTHY, OP_TROUBLES

_KEYS = ("step", "phase", "module", "kind", "role", "param", "sample", "micro_batch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own-loop", action="store_true")
    own_loop = parser.parse_args().own_loop
    warnings.simplefilter("ignore")
    if own_loop:
        return _own_loop()
    troubles, healthy = {**TROUBLES, **OP_TROUBLES}, {**HEALTHY, **OP_HEALTHY}
    wrong, alarms, programs, shown = [], [], 0, 0
    for name, case in troubles.items():
        with tempfile.TemporaryDirectory() as folder:
            event = _run(case, dump_dir=folder)
            wrong += [] if event is not None and _agrees(event, case.expect or {}) else [name]
            for program in Path(folder).glob("*/repro.py"):
                programs += 1
                shown += _shows(program)
    for name, case in healthy.items():
        alarms += [] if _run(case) is None else [name]
    found = {
        "named": len(troubles) - len(wrong), "of": len(troubles), "wrong": wrong, "false_alarms": len(alarms),
        "healthy": len(healthy), "alarms": alarms, "programs": programs, "that_show_it": shown,
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(found))
    return 1 if wrong or alarms or shown < programs else 0


def _own_loop() -> int:
    troubles, healthy = {**TROUBLES, **OP_TROUBLES}, {**HEALTHY, **OP_HEALTHY}
    silent, wrong, operations = [], [], 0
    for name, case in troubles.items():
        event, expect = _watched(case), case.expect or {}
        if event is None:
            silent.append(name)
        elif not _agrees(event, {key: value for key, value in expect.items() if key in ("phase", "module", "kind")}):
            wrong.append(name)
        else:
            operations += bool(expect.get("op")) and str(event.op).startswith(expect["op"])
    alarms = [name for name, case in healthy.items() if _watched(case) is not None]
    right = len(troubles) - len(silent) - len(wrong)
    found = {
        "right": right, "of": len(troubles), "with_operation": operations, "silent": silent, "wrong": wrong,
        "false_alarms": len(alarms), "healthy": len(healthy), "alarms": alarms, "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(found))
    return 1 if alarms else 0


def _watched(case: Any) -> Any:
    """The event of a plain loop."""
    torch.manual_seed(0)
    model, step = case.make()
    recorder = DebugUnderflowOverflow(model, on_event="warn")
    recorder.quiet()
    with recorder:
        for i in range(case.steps):
            step(i)
    return recorder.report.event


def _run(case: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model, step = case.make()
    return diagnose(model, step, steps=case.steps, **options).event


def _agrees(event: Any, expect: dict[str, Any]) -> bool:
    wanted = {key: expect[key] for key in _KEYS if key in expect}
    right = all(getattr(event, key) in (want if isinstance(want, tuple) else (want,)) for key, want in wanted.items())
    names = expect.get("op") or ""
    return right and str(event.op).startswith(names) if names else right


def _shows(program: Path) -> bool:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(program))
        except SystemExit as end:
            return bool(end.code)
    return False


if __name__ == "__main__":
    sys.exit(main())
