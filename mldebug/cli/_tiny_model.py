"""`mldebug tiny-model SOURCE -o DIR`: a small model of the same architecture."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mldebug.cli._parser import Parser, add_common, count, whole
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
examples:
  mldebug tiny-model llama -o llama-tiny
  mldebug tiny-model path/to/model -o tiny --layers 2 --budget 1MB
  mldebug tiny-model gemma2 -o tiny --set sliding_window=8 --dtype bfloat16
  mldebug tiny-model --from-recipe tiny/mldebug_recipe.json -o again

SOURCE is a folder, a config.json, the id of a repository in the cache (or on
the hub, unless --offline), or a model type. A tokenizer and processor at SOURCE
are made to fit. The folder appears when it is complete; mldebug_recipe.json in
it rebuilds it byte for byte. Exit status 1 if a check failed."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="folder, config.json, repository id or model type")
    parser.add_argument("--layers", type=count, metavar="N", help="layers, as far as each kind of layer is kept")
    parser.add_argument("--hidden", type=count, metavar="N", help="width")
    parser.add_argument("--vocab", type=count, metavar="N", help="size of the vocabulary")
    parser.add_argument("--dtype", metavar="TYPE", help="float32, bfloat16 or float16 (default: the source's)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the weights (default: 0)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="set a field of the config; repeatable"
    )
    parser.add_argument(
        "--budget", metavar="SIZE", help="what the weights may take, such as 1MB; else the largest are named"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="shrink this tokenizer with the model")
    parser.add_argument(
        "--class", dest="model_class", metavar="NAME", help="the model's class, such as LlamaForCausalLM"
    )
    parser.add_argument("--from-recipe", metavar="FILE", help="rebuild what a mldebug_recipe.json names")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the source brings with it")
    parser.add_argument("--offline", action="store_true", help="never use the network")
    parser.add_argument("--force", action="store_true", help="replace an earlier tiny model at DIR")
    add_common(parser, output="the new folder; without it nothing is kept", metavar="DIR")


def run(args: argparse.Namespace) -> int:
    overrides = parse_settings(args.set)
    if args.from_recipe is not None:
        _alone(args)
    from mldebug.tiny import tiny_model

    report = tiny_model(
        args.source,
        args.output,
        layers=args.layers,
        hidden=args.hidden,
        vocab=args.vocab,
        dtype=args.dtype,
        seed=args.seed,
        set=overrides,
        budget=args.budget,
        tokenizer=args.tokenizer,
        trust_remote_code=args.trust_remote_code,
        offline=True if args.offline else None,
        model_class=args.model_class,
        from_recipe=args.from_recipe,
        force=args.force,
    )
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return 0 if report.ok else 1


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`a.b=c` as a.b -> c. Values are JSON where they can be, else text; None, True and False may be written as here.

    parse_settings(["text_config.num_hidden_layers=2"])  # {"text_config.num_hidden_layers": 2}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {pair}: there is no NAME=VALUE in it", "--set num_key_value_heads=1")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _alone(args: argparse.Namespace) -> None:
    """A recipe says all about what it makes."""
    given = [
        name
        for name in ("source", "layers", "hidden", "vocab", "dtype", "set", "tokenizer", "model_class")
        if getattr(args, name)
    ]
    if args.seed:
        given.append("seed")
    if given:
        named = ", ".join(
            "SOURCE" if name == "source" else f"--{name.replace('model_class', 'class')}" for name in given
        )
        raise UsageError(
            f"--from-recipe is given with {named}", "the recipe holds these: leave them out, or build from SOURCE anew"
        )
