"""`mldebug tiny-dataset SOURCE -n 100 -o DIR`: a few rows of any dataset; also its `unpack` and `pack`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mldebug.cli._parser import Parser, add_common, count, seconds, whole
from mldebug.core.errors import UsageError
from mldebug.core.report import Report, emit

EPILOG = """\
examples:
  mldebug tiny-dataset data/train.jsonl -n 100 -o tiny
  mldebug tiny-dataset "shards/*.parquet" -n 100 --rows random --seed 1 -o tiny
  mldebug tiny-dataset path/to/imagefolder -n 20 --rows cover -o tiny
  mldebug tiny-dataset unpack tiny -o records
  mldebug tiny-dataset pack records -n 10000 --unique -o synthetic

SOURCE is a file (JSON lines, JSON, CSV, Parquet, Arrow, text, a webdataset tar;
also compressed), a pattern, a folder of such files, an image or audio folder,
what save_to_disk wrote, or a hub id, which is streamed. DIR loads with
load_dataset("DIR"). `unpack` writes each record as a folder of files to edit,
and `pack` makes a dataset of such folders: `mldebug tiny-dataset pack --help`."""


class DatasetParser(Parser):
    """The parser of `tiny-dataset SOURCE`, which hands over where the first word is `pack` or `unpack`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args or [])
        if words[:1] in (["pack"], ["unpack"]):
            add, run = _OTHERS[words[0]]
            parser = Parser(prog=f"{self.prog} {words[0]}", description=_ABOUT[words[0]])
            add(parser)
            parsed = parser.parse_args(words[1:])
            parsed.call = run
            return parsed
        parsed = super().parse_args(words, namespace)
        parsed.call = _tiny_dataset
        return parsed


PARSER = DatasetParser

_ABOUT = {
    "unpack": "Write records as folders of files to edit: image.jpg, text.txt, text.null.",
    "pack": "Make a dataset of any length from folders of files, as `unpack` writes them.",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file, pattern or folder, or a hub id")
    parser.add_argument("-n", "--num-rows", type=count, required=True, metavar="N", help="rows of each split")
    _add_rows(parser, default="first")
    parser.add_argument("--split", action="append", metavar="NAME", help="only this split; repeatable")
    parser.add_argument("--config", metavar="NAME", help="which configuration of a source that has several")
    parser.add_argument("--side", type=count, default=32, metavar="PX", help="longest side of pictures (default: 32)")
    parser.add_argument(
        "--format", choices=("auto", "parquet", "tar"), default="auto", help="default: tar for tars, else Parquet"
    )
    parser.add_argument("--fill-missing", action="store_true", help="in tars, empty texts for members a sample lacks")
    _add_skip_bad(parser)
    limits = "(default: {}, and for first none)"
    parser.add_argument("--max-rows", type=count, metavar="N", help=f"rows to look at {limits.format('1,000,000')}")
    parser.add_argument("--max-bytes", metavar="SIZE", help=f"bytes to look at {limits.format('1 GiB')}")
    parser.add_argument("--max-seconds", type=seconds, metavar="S", help=f"time to look for {limits.format('30')}")
    parser.add_argument("--offline", action="store_true", help="take a hub id from the cache only")
    _add_output(parser)


def run(args: argparse.Namespace) -> int:
    if args.output is None:
        raise UsageError("no folder to write to", "give -o DIR")
    report: Report = args.call(args)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return 130 if getattr(report, "interrupted", False) else 0 if report.ok else 1


def _tiny_dataset(args: argparse.Namespace) -> Report:
    from mldebug.tiny import tiny_dataset

    limits = {name: getattr(args, name) for name in ("max_rows", "max_bytes", "max_seconds")}
    return tiny_dataset(
        args.source,
        args.num_rows,
        args.output,
        rows=args.rows,
        seed=args.seed,
        by=args.by,
        splits=args.split,
        config=args.config,
        side=args.side,
        format=args.format,
        fill_missing=args.fill_missing,
        skip_bad=args.skip_bad,
        offline=True if args.offline else None,
        force=args.force,
        progress=_to_stderr if sys.stderr is not None and sys.stderr.isatty() and not args.quiet else None,
        **{name: value for name, value in limits.items() if value is not None},
    )


def _to_stderr(text: str) -> None:
    """Over the line before it, and gone when the report is printed."""
    sys.stderr.write(f"\r{text}\x1b[K\r")
    sys.stderr.flush()


def _unpack_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what tiny-dataset takes")
    parser.add_argument("-n", "--num-rows", type=count, default=10, metavar="N", help="records (default: 10)")
    _add_rows(parser, default="cover")
    parser.add_argument("--split", metavar="NAME", help="which split (default: the first)")
    _add_skip_bad(parser)
    parser.add_argument("--config", metavar="NAME", help="which configuration of a source that has several")
    parser.add_argument("--offline", action="store_true", help="take a hub id from the cache only")
    parser.add_argument("--side", type=count, default=32, metavar="PX", help="longest side of pictures (default: 32)")
    _add_output(parser)


def _unpack(args: argparse.Namespace) -> Report:
    from mldebug.tiny import unpack

    return unpack(
        args.source,
        args.output,
        args.num_rows,
        rows=args.rows,
        seed=args.seed,
        by=args.by,
        split=args.split,
        config=args.config,
        side=args.side,
        skip_bad=args.skip_bad,
        offline=True if args.offline else None,
        force=args.force,
    )


def _pack_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="FOLDER", help="a folder with a folder for each record")
    parser.add_argument("-n", "--num-rows", type=count, metavar="N", help="rows (default: one for each record)")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--repeat", action="store_true", help="begin again after the last record (the default)")
    way.add_argument("--unique", action="store_true", help="change each record so that no two are equal")
    parser.add_argument("--split", default="train", metavar="NAME", help="the name of the split (default: train)")
    _add_output(parser)


def _pack(args: argparse.Namespace) -> Report:
    from mldebug.tiny import pack

    return pack(args.source, args.output, args.num_rows, unique=args.unique, split=args.split, force=args.force)


def _add_rows(parser: Parser, default: str) -> None:
    parser.add_argument(
        "--rows",
        choices=("first", "random", "stratified", "cover"),
        default=default,
        help=f"cover: each kind of oddity, such as empty, None, shortest, longest, each label (default: {default})",
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the choice (default: 0)")
    parser.add_argument("--by", metavar="COLUMN", help="the labels of stratified (default: the column of labels)")


def _add_skip_bad(parser: Parser) -> None:
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out rows that cannot be read and name them, in place of stopping"
    )


def _add_output(parser: Parser) -> None:
    add_common(parser, output="the new folder", metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace what an earlier call wrote to DIR")


_OTHERS: dict[str, tuple[Callable[[Parser], None], Callable[[argparse.Namespace], Report]]] = {
    "unpack": (_unpack_arguments, _unpack),
    "pack": (_pack_arguments, _pack),
}


__all__: Sequence[str] = ["EPILOG", "PARSER", "add_arguments", "run"]
