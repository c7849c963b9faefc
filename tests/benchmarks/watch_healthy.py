"""Healthy jobs under `mldebug watch`, which must raise no alarm: `python tests/benchmarks/watch_healthy.py [--quick]`.

`steady` is an ordinary job of 50 steps, run twenty times; each other one is slow in a way of its own, for longer than
an alarm needs, while the other ranks wait for it. Prints a line a run; exit status 0 where all were left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEAD = """
import os, subprocess, sys, threading, time
import torch, torch.distributed as dist
LONG = float(os.environ["LONG"])
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""
TAIL = """
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
# What rank 0 does (mostly) while the others are at the barrier behind it, for LONG seconds.
SLOW = {
    "cpu_python": """
    if rank == 0:
        end = time.time() + LONG
        while time.time() < end:
            sum(range(10000))
""",
    "sleeps_in_a_loop": """
    if rank == 0:
        for part in range(int(LONG * 2)):
            time.sleep(0.5)
""",
    "one_sleep": """
    if rank == 0:
        time.sleep(LONG)
""",
    "subprocess_sleeps": """
    if rank == 0:
        subprocess.run(["sleep", str(LONG)], check=True)
""",
    "subprocess_works": """
    if rank == 0:
        subprocess.run(["timeout", str(LONG), "sh", "-c", "while :; do :; done"], check=False)
""",
    "subprocess_output": """
    if rank == 0:
        script = f"for i in $(seq {int(LONG)}); do sleep 1; echo $i; done"
        subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True)
""",
    "download": """
    if rank == 0:
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        code = f"import socket, time\\nlink = socket.create_connection(('127.0.0.1', {port}))\\n"
        code += f"for i in range({int(LONG)}): time.sleep(1); link.send(b'x' * 1000)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        connection, _ = server.accept()
        got = 0
        while data := connection.recv(65536):
            got += len(data)
        child.wait()
""",
    "download_http": """
    if rank == 0:
        import http.server, urllib.request
        class Slow(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(int(LONG) * 1000))
                self.end_headers()
                for part in range(int(LONG)):
                    time.sleep(1)
                    self.wfile.write(b"x" * 1000)
            def log_message(self, *args):
                pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read()
""",
    "c_without_gil": """
    if rank == 0:
        import hashlib
        data = b"x" * (1 << 28)
        end = time.time() + LONG
        while time.time() < end:
            hashlib.sha256(data)
""",
    "thread_pool_sleeps": """
    if rank == 0:
        from concurrent.futures import ThreadPoolExecutor
        def fetch(number):
            for part in range(10):
                time.sleep(LONG / 20)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(fetch, range(4)))
""",
    "thread_works": """
    if rank == 0:
        def work():
            end = time.time() + LONG
            while time.time() < end:
                sum(range(1000))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
""",
    "process_pool": """
    if rank == 0:
        import multiprocessing
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.map(time.sleep, [LONG / 4] * 8)
""",
    "checkpoint": """
    if rank == 0:
        path = os.path.join(os.environ["TMPDIR"], "checkpoint.pt")
        end = time.time() + LONG
        state = {str(number): torch.ones(1 << 22) for number in range(8)}
        while time.time() < end:
            with open(path, "wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        os.unlink(path)
""",
    "slow_loader": """
    from torch.utils.data import DataLoader, Dataset
    class Slow(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            time.sleep(LONG / 4 if rank == 1 else 0.01)
            return torch.ones(4)
    for batch in DataLoader(Slow(), batch_size=1, num_workers=2):
        dist.all_reduce(batch)
""",
    "loader_reads_slowly": """
    from torch.utils.data import DataLoader, Dataset
    class Slow(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            script = f"for i in $(seq {int(LONG / 2)}); do sleep 1; echo $i; done"
            pipe = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
            pipe.stdout.read() if rank == 1 else pipe.kill()
            pipe.wait()
            return torch.ones(4)
    for batch in DataLoader(Slow(), batch_size=1, num_workers=2):
        dist.all_reduce(batch)
""",
    "compile": """
    if rank == 0:
        layers = [torch.nn.Sequential(torch.nn.Linear(64 + i, 65 + i), torch.nn.GELU()) for i in range(24)]
        torch.compile(torch.nn.Sequential(*layers))(torch.ones(3, 64)).sum().backward()
""",
    "evaluation": """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    model(torch.ones(2, 512)).sum().backward()
    if rank == 0:
        end = time.time() + LONG
        with torch.no_grad():
            while time.time() < end:
                model.module(torch.ones(256, 512))
""",
    "tokenizer": """
    if rank == 0:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        texts = [" ".join(f"w{(i * j) % 9973}" for j in range(400)) for i in range(400)]
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
        end = time.time() + LONG
        while time.time() < end:
            tokenizer.encode_batch(texts)
""",
    "first_step": """
    for step in range(3):
        if step == 0:
            end = time.time() + LONG
            while time.time() < end:
                torch.ones(300, 300) @ torch.ones(300, 300)
        dist.all_reduce(torch.ones(4))
""",
    "accumulation": """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(3):
        for micro in range(int(LONG)):
            with model.no_sync():
                model(torch.ones(2, 64)).sum().backward()
            time.sleep(0.3 + 0.1 * rank)
        model(torch.ones(2, 64)).sum().backward()
""",
    "leaves_early": """
    group = dist.new_group([0, 1])
    if rank == 2:
        dist.destroy_process_group()
        return
    if rank == 0:
        end = time.time() + LONG
        while time.time() < end:
            sum(range(10000))
    dist.barrier(group=group)
    os._exit(0)
""",
    "store_wait": """
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for part in range(int(LONG)):
            time.sleep(1)
        store.set("done", "1")
    store.wait(["done"])
""",
    "file_lock": """
    import fcntl
    with open(os.path.join(os.environ["TMPDIR"], "lock"), "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not os.path.exists(os.path.join(os.environ["TMPDIR"], "cache")):
            for part in range(int(LONG)):
                time.sleep(1)
            open(os.path.join(os.environ["TMPDIR"], "cache"), "w").close()
""",
    "waits_for_a_file_that_grows": """
    path = os.path.join(os.environ["TMPDIR"], "parts")
    if rank == 0:
        for part in range(int(LONG)):
            time.sleep(1)
            with open(path, "a") as stream:
                stream.write("x")
""",
    "thread_downloads": """
    if rank == 0:
        from concurrent.futures import ThreadPoolExecutor
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        code = f"import socket, time\\nlink = socket.create_connection(('127.0.0.1', {port}))\\n"
        code += f"for i in range({int(LONG)}): time.sleep(1); link.send(b'x' * 1000)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        connection, _ = server.accept()
        def fetch():
            return connection.makefile("rb").read()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fetch).result()
        child.wait()
""",
    "asyncio_download": """
    if rank == 0:
        import asyncio
        async def serve(reader, writer):
            for part in range(int(LONG)):
                await asyncio.sleep(1)
                writer.write(b"x" * 1000)
                await writer.drain()
            writer.close()
        async def fetch():
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await reader.read()
        asyncio.run(fetch())
""",
    "queue_of_a_producer": """
    if rank == 0:
        import queue
        items = queue.Queue()
        def produce():
            for part in range(4):
                time.sleep(LONG / 4)
                items.put(part)
        threading.Thread(target=produce, daemon=True).start()
        for part in range(4):
            items.get()
""",
    "fork_pool": """
    if rank == 0:
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(time.sleep, [LONG / 4] * 8)
""",
    "datasets_map": """
    if rank == 0:
        import datasets
        def slow(row):
            time.sleep(LONG / 8)
            return row
        datasets.Dataset.from_dict({"number": list(range(16))}).map(slow, num_proc=2)
""",
    "pipeline": """
    if rank == 0:
        end = time.time() + LONG
        while time.time() < end:
            sum(range(10000))
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(torch.ones(4), 0)
        dist.send(torch.ones(4), 2)
    else:
        dist.recv(torch.ones(4), 1)
""",
    "polls_for_a_rank_that_works": """
    path = os.path.join(os.environ["TMPDIR"], "cache")
    if rank == 0:
        end = time.time() + LONG
        while time.time() < end:
            sum(range(10000))
        open(path, "w").close()
    if rank == 1:
        while not os.path.exists(path):
            time.sleep(0.5)
""",
    "all_sleep": """
    time.sleep(LONG)
""",
    "retries": """
    if rank == 0:
        for attempt in range(4):
            try:
                raise OSError("not there yet")
            except OSError:
                time.sleep(LONG / 4)
""",
    "big_reduce": """
    tensor = torch.ones(1 << 25)
    for step in range(int(LONG)):
        dist.all_reduce(tensor)
""",
}
STEADY = """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        optimizer.zero_grad()
        time.sleep(0.4)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
"""
ELASTIC = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(60):
    time.sleep(0.3)
    dist.all_reduce(torch.ones(4))
    if step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        sys.exit(3)
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run")
FORKED = str(Path(__file__).parents[1] / "forked.py")
QUICK = ("sleeps_in_a_loop", "download", "subprocess_sleeps")


def run(name: str, program: str, timeout: float, ranks: int, launch: Sequence[str]) -> tuple[str, float]:
    """What was wrong with the run ("" if nothing), and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(program, encoding="utf-8")
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(ranks)]
        watch = [sys.executable, "-m", "mldebug", "watch", "--timeout", str(timeout), "--on-hang", "spy,kill", "--json"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "LONG": str(2.6 * timeout)}
        began = time.monotonic()
        done = subprocess.run(
            [*watch, "--", sys.executable, *launch, *where, str(path)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    try:
        document = json.loads(done.stdout)
    except ValueError:
        return f"no JSON: {done.stderr[-400:]}", seconds
    verdict = document["verdict"]
    if verdict["hung"]:
        return f"ALARM {verdict['kind']}: {verdict['text']}", seconds
    if done.returncode:
        return f"status {done.returncode}: {re.sub(r'^[WE][0-9].*$', '', done.stderr, flags=re.M)[-600:]}", seconds
    if "a look at the job failed" in done.stderr:
        return done.stderr[-600:], seconds
    if document["watch"]["looks"] < 2:
        return "too short: watch looked less than twice", seconds
    return "", seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=8.0, help="of watch (default: 8)")
    parser.add_argument("--only", default="", metavar="REGEX", help="only jobs whose name matches")
    parser.add_argument("--times", type=int, default=20, help="runs of the steady job (default: 20)")
    parser.add_argument("--quick", action="store_true", help="three jobs of two ranks at once, which torchrun forks")
    args = parser.parse_args()
    timeout = 8.0 if args.quick else args.timeout  # a busy machine takes seconds to start a program
    launch = (FORKED, *TORCHRUN) if args.quick else TORCHRUN
    jobs = [(name, HEAD + body + TAIL, launch) for name, body in SLOW.items() if not args.quick or name in QUICK]
    if not args.quick:
        jobs += [("elastic_restart", ELASTIC, (*launch, "--max-restarts", "1"))]
        jobs += [(f"steady_{number}", HEAD + STEADY + TAIL, launch) for number in range(args.times)]
    jobs = [job for job in jobs if re.search(args.only, job[0])]
    wrong = 0
    with ThreadPoolExecutor(len(QUICK) if args.quick else 1) as pool:  # these do nothing but wait
        ranks = 2 if args.quick else 3
        runs = [(name, pool.submit(run, name, program, timeout, ranks, launch)) for name, program, launch in jobs]
        for name, one in runs:
            trouble, seconds = one.result()
            wrong += bool(trouble)
            print(f"{'WRONG' if trouble else 'ok   '} {name:28} {seconds:5.1f} s  {trouble}", flush=True)
    print(f"{len(jobs) - wrong} of {len(jobs)} left alone")
    return 1 if wrong or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
