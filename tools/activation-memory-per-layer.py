#!/usr/bin/env python
"""How many copies of its hidden states one layer of a model keeps for the
backward: the factor in copies * batch * sequence * hidden_size * bytes of dtype

    activation-memory-per-layer.py meta-llama/Llama-3.1-8B-Instruct llama

Prints `16.9 "model"` for each. Nothing is downloaded but the config, and no
memory is taken: it is measured on the meta device, with the attention of CUDA.
--device cpu or cuda measures a real forward of the whole model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import Parser, count
from mldebug.cli._tool import run_tool
from mldebug.core.errors import MldebugError, UsageError
from mldebug.perf.memory._activations import activation_memory


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["google/gemma-1.1-2b-it"])
    parser.add_argument("--batch", type=count, default=1, help="sequences in a batch")
    parser.add_argument("--seqlen", type=count, default=32384, help="tokens of a sequence")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--device", default="meta", help="meta (nothing is allocated), cpu or cuda")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    parser.add_argument("-v", "--verbose", action="store_true", help="the whole report")
    options = parser.parse_args()
    status = 0
    for model in options.models:
        try:
            report = activation_memory(
                model,
                batch=options.batch,
                sequence=options.seqlen,
                dtype=options.dtype,
                device=options.device,
                checkpointing=options.checkpointing,
            )
        except MldebugError as exc:
            print(f"{model}: {exc}", file=sys.stderr)
            status = max(status, 2 if isinstance(exc, UsageError) else 1)
            continue
        copies = "?" if report.copies is None else f"{report.copies:.1f}"
        print(report.text() if options.verbose else f'{copies} "{model}"', flush=True)
    return status


if __name__ == "__main__":
    run_tool("activation-memory-per-layer", main)
