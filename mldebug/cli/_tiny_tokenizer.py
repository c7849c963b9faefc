"""`mldebug tiny-tokenizer SOURCE --vocab-size N -o DIR`: the same tokenizer with fewer tokens."""

from __future__ import annotations

import argparse
import shlex

from mldebug.cli._parser import Parser, add_common, count
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
examples:
  mldebug tiny-tokenizer path/to/model --vocab-size 600 -o tiny
  mldebug tiny-tokenizer tekken.json --drop-unused-added -o tiny
  mldebug tiny-tokenizer path/to/model --from-scratch corpus.txt -o tiny

SOURCE is a folder, a file (tokenizer.json, vocab.json, vocab.txt, a
SentencePiece or tiktoken file, tekken.json) or the id of a hub repository.
DIR appears when it is complete; id_map.json in it maps old ids to new ones.
Exit status: 0 if every check passed, 1 if one failed, 2 for a size below the
floor."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the tokenizer: a folder, a file or a hub id")
    parser.add_argument(
        "--vocab-size", type=count, metavar="N", help="tokens of the result (default: 512, or the floor if more)"
    )
    parser.add_argument(
        "--drop-unused-added",
        action="store_true",
        help="let go of added tokens that no template, post-processor or config names",
    )
    parser.add_argument(
        "--from-scratch", metavar="FILE", help="learn the vocabulary from this text; the pipeline stays the source's"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the tokenizer's own Python code, if SOURCE has some"
    )
    parser.add_argument("--offline", action="store_true", help="look for a hub id in the cache only")
    parser.add_argument("--force", action="store_true", help="replace an earlier tiny tokenizer at DIR")
    add_common(parser, output="the new folder to write the tokenizer to", metavar="DIR")


def run(args: argparse.Namespace) -> int:
    if args.output is None:
        source = shlex.quote(args.source)
        raise UsageError("no folder to write the tokenizer to", f"mldebug tiny-tokenizer {source} -o DIR")
    from mldebug.tiny import tiny_tokenizer

    report = tiny_tokenizer(
        args.source,
        args.vocab_size,
        args.output,
        from_scratch=args.from_scratch,
        drop_unused_added=args.drop_unused_added,
        trust_remote_code=args.trust_remote_code,
        offline=True if args.offline else None,
        force=args.force,
    )
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return 0 if report.ok else 1
