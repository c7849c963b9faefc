"""Memory and time of taking a few rows of a large Parquet set: it is made, read by `mldebug tiny-dataset`, and deleted.

    python tests/benchmarks/tiny_dataset_memory.py               # 5 GB, as shards and as one file with one row group
    python tests/benchmarks/tiny_dataset_memory.py --gb 1 --layout shards

The bars: 100 rows, first or random, within 500 MB of resident memory and 10 s, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESIDENT_MB, SECONDS = 500, 10
ROW_BYTES = 4000


def make_set(folder: Path, gigabytes: float, layout: str) -> int:
    """Rows of random text that no codec shrinks. Returns their number."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    pool = rng.integers(97, 123, 1 << 26, dtype=np.uint8)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("label", pa.int64())])
    rows, per_batch = int(gigabytes * 1e9 / ROW_BYTES), 10_000
    shards = {"shards": 50, "one": 1}[layout]
    per_shard = rows // shards
    for shard in range(shards):
        name = f"train-{shard:05d}-of-{shards:05d}.parquet"
        # One row group for all: larger than memory may be, and what pandas writes for up to a million rows.
        group = 20_000 if layout == "shards" else 1 << 30
        with pq.ParquetWriter(folder / name, schema, use_dictionary=False) as writer:
            made, waiting = 0, []
            while made < per_shard:
                count = min(per_batch, per_shard - made)
                starts = rng.integers(0, len(pool) - ROW_BYTES, count)
                data = np.concatenate([pool[start : start + ROW_BYTES] for start in starts])
                offsets = np.arange(count + 1, dtype=np.int32) * ROW_BYTES
                text = pa.StringArray.from_buffers(count, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data.tobytes()))
                ids = np.arange(count) + shard * per_shard + made
                batch = pa.record_batch([pa.array(ids), text, pa.array(ids * 10 // rows)], schema=schema)
                made += count
                if layout == "one":
                    writer.write_batch(batch, row_group_size=group)  # goes into the open row group
                    continue
                waiting.append(batch)
                if len(waiting) * per_batch >= group or made >= per_shard:
                    writer.write_table(pa.Table.from_batches(waiting), row_group_size=group)
                    waiting = []
    return per_shard * shards


def measure(arguments: list[str]) -> tuple[float, float, int]:
    """Seconds, peak resident megabytes and exit status of `mldebug` with these arguments."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "mldebug", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _pid, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return time.perf_counter() - begin, peak, process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=5.0)
    parser.add_argument("--layout", choices=("shards", "one"), action="append")
    parser.add_argument("--rows", choices=("first", "random", "stratified", "cover"), action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--make", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        print(make_set(Path(args.make), args.gb, args.layout[0]))
        return 0
    failed = False
    for layout in args.layout or ["shards", "one"]:
        folder = Path(tempfile.mkdtemp(prefix="tiny-dataset-memory-"))
        try:
            source = folder / "source"
            source.mkdir()
            # By another process: the peak of a child begins at what its parent holds when it forks.
            made = [sys.executable, __file__, "--make", str(source), "--gb", str(args.gb), "--layout", layout]
            count = int(subprocess.run(made, check=True, capture_output=True, text=True).stdout)
            size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
            for rows in args.rows or ["first", "random", "stratified", "cover"]:
                output = folder / f"tiny-{rows}"
                seconds, peak, status = measure(
                    ["tiny-dataset", str(source), "-n", "100", "--rows", rows, "-o", str(output)]
                )
                ok = status == 0 and (rows in ("stratified", "cover") or (peak <= RESIDENT_MB and seconds <= SECONDS))
                failed |= not ok
                facts = {"layout": layout, "gb": round(size, 2), "source_rows": count, "rows": rows, "ok": ok}
                facts |= {"seconds": round(seconds, 1), "peak_mb": round(peak), "status": status}
                print(json.dumps(facts) if args.json else "  ".join(f"{k} {v}" for k, v in facts.items()), flush=True)
        finally:
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
