"""Which model types tiny_model can make small, by stage and cause.

    python tests/benchmarks/tiny_coverage.py [TYPE ...] [--output FILE] [--limit 60] [--again STAGE] [--skip-full]
        [--update]

Every model type of transformers, from its default config, in a process of its own that is forked from one which has
torch and transformers loaded. Stages: `full` (does the default config build at full size, on the meta device), `build`,
`size` (under 1 MB), `reload` (saved and loaded again bit-equal, ties included), `forward` (with example inputs) and
`backward`. Results are lines of JSON in --output, written as they come; a run that was stopped goes on where it was.
--again does the types anew that failed at a stage.

Failures must be listed in tiny_expected.json with a reason, and what is listed must fail: either is status 1, as is a
bar that is missed. --update writes the list, keeping the reasons that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

STAGES = ("build", "size", "reload", "forward", "backward")
BARS = {"build": 0.99, "size": 0.90, "reload": 0.98, "forward": 0.92, "backward": 0.90}
MEDIAN_SECONDS = 0.6
MEGABYTE = 1_000_000
EXPECTED = Path(__file__).with_name("tiny_expected.json")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    types = options.types or all_types()
    done = {row["type"]: row for row in read(options.output) if row["type"] in set(types)}
    todo = [name for name in types if name not in done or failed_at(done[name], options.again)]
    warm()
    with open(options.output, "a", encoding="utf-8") as stream:
        for number, name in enumerate(todo, 1):
            row = in_worker(name, options.limit, options.upto, skip_full=options.skip_full)
            if options.skip_full and "full" in done.get(name, {}):
                row["full"] = done[name]["full"]
            done[name] = row
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            if sys.stderr.isatty() or options.verbose:
                print(f"{number}/{len(todo)} {name}: {summary(row)}", file=sys.stderr, flush=True)
    rows = [done[name] for name in types if name in done]
    if options.update:
        update(rows)
    print(table(rows))
    trouble = compare(rows) + ([] if options.types else missed(rows))
    print("\n".join(trouble) or "as expected")
    return 1 if trouble else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="sweep all model types")
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--output", type=Path, default=Path("tiny_coverage.jsonl"))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each type")
    parser.add_argument("--again", choices=("full", "all", *STAGES), help="do types anew that failed at this stage")
    parser.add_argument("--upto", choices=STAGES, default=STAGES[-1], help="leave out the stages after this one")
    parser.add_argument("--skip-full", action="store_true", help="leave out the build at full size")
    parser.add_argument("--update", action="store_true", help=f"write {EXPECTED.name}")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args(argv)


def all_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the line that a stopped run left half written
            rows.append(json.loads(line))
    return rows


def failed_at(row: dict[str, Any], stage: str | None) -> bool:
    return stage == "all" or (stage is not None and row.get(stage, {}).get("ok") is False)


# --- workers


def warm() -> None:
    import torch
    import transformers
    from transformers.models.auto import modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    from transformers import BertModel, CLIPModel, LlamaForCausalLM, WhisperForConditionalGeneration  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def in_worker(name: str, limit: float, upto: str = STAGES[-1], *, skip_full: bool = False) -> dict[str, Any]:
    """What became of one type. Lines come through a pipe, so that a stage that hangs or dies leaves those before it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def send(part: dict[str, Any]) -> None:
            os.write(writer, json.dumps(part).encode() + b"\n")

        try:
            stages(name, send, upto, skip_full)
        finally:
            os._exit(0)
    os.close(writer)
    data, deadline, timed_out = b"", time.monotonic() + limit, False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            timed_out = True
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    row: dict[str, Any] = {"type": name}
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            row.update(json.loads(line))
    order = STAGES if skip_full else (STAGES[0], "full", *STAGES[1:])
    reached = next((stage for stage in order if stage not in row), None)
    if reached is not None and not row.pop("ended", False):
        why = f"more than {limit:g} s" if timed_out else f"the process died: signal {os.WTERMSIG(status)}"
        row[reached] = {"ok": False, "why": why}
    row.pop("ended", None)
    return row


def stages(name: str, send: Any, upto: str, skip_full: bool) -> None:
    import torch

    from mldebug.core.errors import MldebugError
    from mldebug.tiny.model._build import build, config_of
    from mldebug.tiny.model._build_class import class_of
    from mldebug.tiny.model._checks import Subject, _reload
    from mldebug.tiny.model._forward import loss_of
    from mldebug.tiny.model._shrink import shrink
    from mldebug.tiny.model._source import resolve
    from mldebug.tiny.model.inputs._make import example_inputs

    def stage(stage_name: str, run: Any) -> bool:
        try:
            extra = run() or {}
        except Exception as exc:
            said = exc.message if isinstance(exc, MldebugError) else f"{type(exc).__name__}: {exc}"
            where = traceback.extract_tb(exc.__traceback__)[-1]
            send(
                {
                    stage_name: {
                        "ok": False,
                        "why": " ".join(said.split())[:400],
                        "at": f"{Path(where.filename).name}:{where.lineno}",
                    }
                }
            )
            return False
        send({stage_name: {"ok": True, **extra}})
        return True

    made: dict[str, Any] = {}
    begin = time.perf_counter()

    def do_build() -> dict[str, Any]:
        source = resolve(name)
        made["source"] = source.config
        built = build(shrink(source.config))
        made["built"] = built
        count = sum(parameter.numel() for parameter in built.model.parameters())
        return {"class": type(built.model).__name__, "params": count, "notes": [*built.notes, *built.shrunk.notes],
                "seconds": round(time.perf_counter() - begin, 3)}  # fmt: skip

    def do_full() -> None:
        source = made.get("source") or resolve(name).config
        with torch.device("meta"):
            class_of(source)._from_config(config_of(source))

    built = stage("build", do_build)
    if not skip_full:
        stage("full", do_full)
    if built:
        model = made["built"].model

        def do_size() -> dict[str, Any]:
            size = sum(tensor.numel() * tensor.element_size() for tensor in unique(model.state_dict()))
            if size >= MEGABYTE:
                largest = sorted(model.named_parameters(), key=lambda item: -item[1].numel())[:2]
                raise MldebugError(
                    f"{size / MEGABYTE:.2f} MB, " + ", ".join(f"{key} {tuple(value.shape)}" for key, value in largest)
                )
            return {"bytes": size}

        def do_reload() -> None:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                kept: list[Any] = []
                ok, why = _reload(Subject(model, Path(folder), made["source"], {}, torch.float32), kept)
            if not ok:
                raise MldebugError(why)

        def do_forward() -> None:
            made["inputs"] = example_inputs(model)
            made["outputs"] = model(**made["inputs"])

        def do_backward() -> None:
            loss = loss_of(made["outputs"])
            if loss is None:
                raise MldebugError("no output has a gradient")
            loss.backward()
            if all(parameter.grad is None for parameter in model.parameters()):
                raise MldebugError("no parameter got a gradient")

        for stage_name, run in zip(STAGES[1:], (do_size, do_reload, do_forward, do_backward), strict=True):
            wanted = STAGES.index(stage_name) <= STAGES.index(upto)
            if wanted and not stage(stage_name, run) and stage_name == "forward":
                break
    send({"ended": True})


def unique(state: dict[str, Any]) -> list[Any]:
    return list({(tensor.data_ptr(), tensor.numel()): tensor for tensor in state.values()}.values())


# --- what is said


def summary(row: dict[str, Any]) -> str:
    bad = [f"{stage}: {row[stage]['why']}" for stage in ("full", *STAGES) if row.get(stage, {}).get("ok") is False]
    return "; ".join(bad)[:300] or "ok"


def counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The types whose default config builds at full size: what the bars are of."""
    return [row for row in rows if row.get("full", {}).get("ok")]


def table(rows: list[dict[str, Any]]) -> str:
    base = counted(rows)
    lines = [
        f"{len(rows)} types, {len(base)} of them build at full size",
        f"{'stage':10}{'ok':>6}{'share':>9}{'bar':>7}   causes",
    ]
    for stage in STAGES:
        good = sum(row.get(stage, {}).get("ok") is True for row in base)
        causes = Counter(cause(row[stage]["why"]) for row in base if row.get(stage, {}).get("ok") is False)
        said = "; ".join(f"{count}x {text}" for text, count in causes.most_common(6))
        lines.append(f"{stage:10}{good:6}{good / max(1, len(base)):9.1%}{BARS[stage]:7.0%}   {said}")
    seconds = [row["build"]["seconds"] for row in base if row.get("build", {}).get("ok")]
    if seconds:
        lines.append(
            f"median {statistics.median(seconds):.2f} s after import, bar {MEDIAN_SECONDS}; most {max(seconds):.1f} s"
        )
    outside = Counter(cause(row["full"]["why"]) for row in rows if row.get("full", {}).get("ok") is False)
    lines.append("not at full size: " + "; ".join(f"{count}x {text}" for text, count in outside.most_common(12)))
    return "\n".join(lines)


def cause(why: str) -> str:
    """Like failures under one name: without numbers and names of fields."""
    import re

    return re.sub(r"\d[\d.,]*", "N", why.split(":", 1)[0] + ":" + why.split(":", 1)[1][:60] if ":" in why else why[:70])


def missed(rows: list[dict[str, Any]]) -> list[str]:
    base = counted(rows)
    lines = []
    for stage, bar in BARS.items():
        share = sum(row.get(stage, {}).get("ok") is True for row in base) / max(1, len(base))
        if share < bar:
            lines.append(f"bar missed: {stage} {share:.1%} of {bar:.0%}")
    seconds = [row["build"]["seconds"] for row in base if row.get("build", {}).get("ok")]
    if seconds and statistics.median(seconds) > MEDIAN_SECONDS:
        lines.append(f"bar missed: median {statistics.median(seconds):.2f} s of {MEDIAN_SECONDS} s")
    return lines


def failures(row: dict[str, Any]) -> dict[str, str]:
    """stage -> why, for what failed by itself: a stage that was not reached is no failure of its own."""
    return {stage: row[stage]["why"] for stage in STAGES if row.get(stage, {}).get("ok") is False}


def compare(rows: list[dict[str, Any]]) -> list[str]:
    """Failures that are not listed, and listed ones that passed."""
    listed = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    lines = []
    for row in rows:
        found, expected = failures(row), listed.get(row["type"], {})
        lines += [f"not listed: {row['type']} {stage}: {why}" for stage, why in found.items() if stage not in expected]
        lines += [f"listed, but passes: {row['type']} {stage}" for stage in expected if row.get(stage, {}).get("ok")]
    return lines


def update(rows: list[dict[str, Any]]) -> None:
    listed = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    for row in rows:
        found = failures(row)
        kept = {stage: listed.get(row["type"], {}).get(stage, why[:160]) for stage, why in found.items()}
        listed.pop(row["type"], None)
        if kept:
            listed[row["type"]] = kept
    EXPECTED.write_text(json.dumps(dict(sorted(listed.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
