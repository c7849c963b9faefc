"""What is left of a trace after a process died in whatever way: its last line."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mldebug.tracing._files import END
from mldebug.tracing._ring_read import RingReader, read_ring

# Writes numbered lines for ever. Before each line its number goes to a page that outlives the process too, and after
# it as well: so what must be in the trace is known to the line.
_WRITER = """
    import itertools, mmap, os, sys, threading, time
    from mldebug.tracing._files import TraceFile
    from mldebug.tracing._ring import Ring, TIME
    folder, kind = sys.argv[1:3]
    fd = os.open(folder + "/seen", os.O_RDWR | os.O_CREAT); os.truncate(fd, 4096)
    seen = memoryview(mmap.mmap(fd, 4096)).cast("Q")
    if kind == "ring":
        ring = Ring(folder, 1 << 20); thread = ring.thread("MainThread")
        refs = [ring.define(b"line %d" % n) for n in range(1000)]
        slots, last, head, mask, now = ring.slots, ring.last, ring.head, ring.mask, time.monotonic_ns
        def write(n):
            slots[n & mask] = last[thread] = (now() << 12 & TIME) | thread << 22 | refs[n % 1000]
            head[0] = n
    else:
        file = TraceFile(folder, rotate=20_000, keep=1000, compress=kind == "gz")
        def write(n):
            file.write(b"line %d\\n" % n)
    print("ready", flush=True)
    for n in itertools.count():
        seen[0] = n + 1
        write(n)
        seen[1] = n + 1
"""


def _start(folder: Path, kind: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", textwrap.dedent(_WRITER), str(folder), kind]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("kind", ["txt", "gz", "ring"])
def test_the_last_line_is_there_after_a_sigkill_at_any_moment(tmp_path: Path, kind: str) -> None:
    moments = random.Random(20260301)
    for number in range(34):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = _start(folder, kind)
        time.sleep(moments.random() * 0.08)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen = (folder / "seen").read_bytes()
        begun, done = (int.from_bytes(seen[at : at + 8], "little") for at in (0, 8))
        numbers = _ring_numbers(folder) if kind == "ring" else _text_numbers(folder)
        assert numbers[-1] in ((done - 1) % _lap(kind), (begun - 1) % _lap(kind)), (number, done, begun)
        assert all((a + 1) % _lap(kind) == b for a, b in itertools.pairwise(numbers)), number
        if kind != "ring":
            assert numbers[0] == 0
        shutil.rmtree(folder)


def _lap(kind: str) -> int:
    return 1000 if kind == "ring" else 1 << 60


def _ring_numbers(folder: Path) -> list[int]:
    (path,) = folder.glob("*.ring")
    return [int(text.split()[-1]) for text in list(read_ring(path))[1:]]


def _text_numbers(folder: Path) -> list[int]:
    from mldebug.tracing._tail_find import find_traces
    from mldebug.tracing._tail_read import Place, stripped_blocks

    (trace,) = find_traces(folder).ranks.values()
    text = b"".join(block for _, block in stripped_blocks(trace, Place(0, 0, 0)))
    return [int(row.split()[1]) for row in text.splitlines()]


@pytest.mark.parametrize("end", ["os._exit(3)", "ctypes.string_at(0)", "os.abort()"])
@pytest.mark.parametrize("kind", ["txt", "ring"])
def test_the_last_line_is_there_after_other_ends(tmp_path: Path, kind: str, end: str) -> None:
    code = f"""
        import ctypes, os, sys, time
        from mldebug.tracing._files import TraceFile
        from mldebug.tracing._ring import Ring, TIME
        if {kind!r} == "txt":
            TraceFile(sys.argv[1]).write(b"the last line\\n")
        else:
            ring = Ring(sys.argv[1], 1 << 20)
            ring.slots[0] = ring.last[0] = (time.monotonic_ns() << 12 & TIME) | ring.define(b"the last line")
            ring.head[0] = 0
        {end}
    """
    status = _python(code, str(tmp_path))
    assert status.returncode != 0
    (path,) = (path for path in tmp_path.iterdir() if path.suffix == f".{kind}")
    lines = list(read_ring(path)) if kind == "ring" else path.read_bytes().splitlines()
    assert lines[-1].endswith(b"the last line") and not lines[-1].startswith(END)


def test_a_file_that_may_not_grow_ends_the_trace_and_not_the_job(tmp_path: Path) -> None:
    """With SIGXFSZ at its default, which kills, and not ignored as Python has it."""
    code = """
        import resource, signal, sys
        from mldebug.tracing._files import TraceFile
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        file = TraceFile(sys.argv[1])
        for n in range(20_000):
            file.write(b"a line of some forty characters, %6d\\n" % n)
        file.close()
        print("the job went on")
    """
    done = _python(code, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "the job went on\n")
    assert done.stderr.count("mldebug: stopped writing") == 1 and "ulimit -f" in done.stderr
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().endswith(b"\n") and path.stat().st_size > 200_000


def test_a_ring_that_may_not_have_its_size_is_not_made(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from mldebug.tracing._ring import Ring
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try:
            Ring(sys.argv[1], 1 << 20)
        except OSError:
            print("without")
    """
    done = _python(code, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "without\n") and "no ring of 1 MiB" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("mount is not permitted")
    try:
        code = """
            import os, sys, time
            from mldebug.tracing._files import TraceFile
            from mldebug.tracing._ring import Ring, TIME
            file, ring = TraceFile(sys.argv[1]), Ring(sys.argv[1], 1 << 20)
            for n in range(60_000):
                file.write(b"a line of some forty characters, %6d\\n" % n)
            assert file.stopped
            for n in range(200_000):  # the ring has its blocks: no SIGBUS
                ring.slots[n & ring.mask] = ring.last[0] = (time.monotonic_ns() << 12 & TIME) | ring.value(b"%d" % n)
                ring.head[0] = n
            try:
                Ring(sys.argv[1], 1 << 20)
            except OSError:
                print("no second ring")
        """
        done = _python(code, str(disk))
        assert (done.returncode, done.stdout) == (0, "no second ring\n"), done.stderr
        assert done.stderr.count("mldebug: stopped writing") == 1 and "no space left" in done.stderr
        assert len(list(disk.iterdir())) == 2
        (path,) = disk.glob("*.ring")
        assert list(read_ring(path))[-1].endswith(b" 199999")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("rotate", [None, 20_000])
def test_a_folder_that_is_deleted_while_it_is_written(tmp_path: Path, rotate: int | None) -> None:
    folder = tmp_path / "traces"
    code = f"""
        import os, shutil, sys
        from mldebug.tracing._files import TraceFile
        file = TraceFile(sys.argv[1], rotate={rotate}, compress=True)
        for n in range(5000):
            file.write(b"a line of some forty characters, %6d\\n" % n)
            while n == 2000 and os.path.exists(sys.argv[1]):  # again where a file came or went in the meantime
                shutil.rmtree(sys.argv[1], ignore_errors=True)
        file.close()
    """
    done = _python(code, str(folder))
    assert done.returncode == 0
    assert done.stderr.count("mldebug:") == (0 if rotate is None else 1)
    assert not folder.exists()


def test_a_program_that_closes_all_descriptors(tmp_path: Path) -> None:
    """As a daemon does; and what it opens then is not written into."""
    code = """
        import os, sys
        from mldebug.tracing._files import TraceFile
        file = TraceFile(sys.argv[1] + "/traces")
        file.write(b"before\\n")
        os.closerange(3, 4096)
        own = [open(f"{sys.argv[1]}/own{n}", "w") for n in range(20)]
        file.write(b"after\\n")
        file.close()
    """
    assert _python(code, str(tmp_path)).returncode == 0
    (path,) = (tmp_path / "traces").iterdir()
    assert path.read_bytes().splitlines()[1:3] == [b"before", b"after"]
    assert all((tmp_path / f"own{n}").read_bytes() == b"" for n in range(20))


def test_children_have_files_of_their_own(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        from mldebug.tracing._files import TraceFile
        from mldebug.tracing._ring import Ring, TIME
        file, ring = TraceFile(sys.argv[1], rotate=10_000, compress=True), Ring(sys.argv[1], 16 << 20)
        def write(n, text):
            file.write(text + b"\\n")
            ring.slots[n & ring.mask] = ring.last[0] = (time.monotonic_ns() << 12 & TIME) | ring.define(text)
            ring.head[0] = n
        write(0, b"parent before")
        child = os.fork()
        if child == 0:
            file.after_fork()
            assert ring.after_fork()
            for n in range(1000):
                write(n, b"child %d" % n)
            os._exit(0)
        os.waitpid(child, 0)
        write(1, b"parent after")
        print(child)
    """
    done = _python(code, str(tmp_path))
    child = int(done.stdout)
    texts = {path.name: path.read_bytes() for path in tmp_path.glob("*.txt")}
    (own,) = (text for name, text in texts.items() if str(child) not in name)
    assert own.splitlines()[1:] == [b"parent before", b"parent after"]
    ours = [text for name, text in texts.items() if str(child) in name]
    assert all(b" parent=" in text.splitlines()[0] for text in ours)
    rings = {path.name: path for path in tmp_path.glob("*.ring")}
    (ring,) = (path for name, path in rings.items() if str(child) in name)
    assert len(list(read_ring(ring))) == 1001 and ring.stat().st_size < 4 << 20
    (ring,) = (path for name, path in rings.items() if str(child) not in name)
    assert [text.split()[-1] for text in list(read_ring(ring))[1:]] == [b"before", b"after"]


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    code = """
        import sys
        from mldebug.core.errors import UsageError
        from mldebug.tracing._files import TraceFile
        try:
            TraceFile(sys.argv[1])
        except UsageError as exc:
            print(exc.message)
    """
    (tmp_path / "locked").mkdir(mode=0o555)
    program = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "locked")]
    if os.geteuid() == 0:  # without root's right to write anywhere
        program = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *program]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert "cannot write traces to" in done.stdout and "permission denied" in done.stdout, done


def test_what_is_no_ring_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace-a-0-1.ring"
    for data in (b"", b"x", b"\0" * 200_000, b"mldebug trace ring 1\n".ljust(24, b"\0")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"trace-a-0-1.ring"):
            RingReader(path)


def _python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", textwrap.dedent(code), *words]
    return subprocess.run(program, check=False, capture_output=True, text=True, timeout=120)
