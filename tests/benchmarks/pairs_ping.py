"""How long `mldebug pairs --ping` takes over hosts in namespaces of this machine (root).

    python tests/benchmarks/pairs_ping.py [--hosts 16]

Prints one JSON line: hosts, pairs that were measured, wall seconds with the start over ssh, and the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bed import bed as beds

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=16)
    args = parser.parse_args()
    if why := beds.missing():
        print(f"no hosts: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, beds.Bed(args.hosts, Path(folder) / "bed") as bed:
        words = ("pairs", "--ping", "--hosts", ",".join(bed.hosts), "--ssh-config", bed.ssh_config, "--json")
        began = time.monotonic()
        done = bed.run(
            "h1", sys.executable, "-m", "mldebug", *words, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        seconds = time.monotonic() - began
    if not done.stdout:
        print(done.stderr, file=sys.stderr)
        return 1
    told = json.loads(done.stdout)
    line = {"hosts": args.hosts, "pairs": told["pairs"], "seconds": round(seconds, 1), **told["verdict"]}
    line.pop("findings")
    print(json.dumps(line))
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
