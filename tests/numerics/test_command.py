"""`mldebug overflow [options] -- script.py`: status, documents, hints."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def overflow(run_python: Callable[..., Done]) -> Callable[..., Done]:
    """As a shell starts it."""
    return _overflow(run_python)


@pytest.fixture
def forked(run_torch: Callable[..., Done]) -> Callable[..., Done]:
    """The same where torch is loaded already."""
    return _overflow(run_torch)


def _overflow(run_program: Callable[..., Done]) -> Callable[..., Done]:
    def run(*args: str, cwd: Path | None = None) -> Done:
        env = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        return run_program("-m", "mldebug", "overflow", *args, timeout=110, env=env, cwd=cwd)

    return run


def program(name: str) -> str:
    return str(PROGRAMS / name)


def test_overflow_is_found_without_an_edit_of_the_script(overflow: Callable[..., Done]) -> None:
    done = overflow("--", program("overflow_loop.py"), "--lr", "3")
    assert done.returncode == 1, done.stderr
    assert "arguments: ['--lr', '3']" in done.stdout
    assert "step 1 done" in done.stdout and "step 2 done" not in done.stdout
    text = done.stdout + done.stderr
    assert "Detected inf/nan during batch_number=2" in text
    assert "blocks.1.wo Linear" in text
    assert "Traceback" not in done.stderr or "NumericsError" in done.stderr


def test_json_is_the_only_thing_on_stdout(overflow: Callable[..., Done]) -> None:
    done = overflow("--json", "--", program("overflow_loop.py"))
    assert done.returncode == 1
    data = json.loads(done.stdout)
    event = data["event"]
    assert (event["step"], event["module"], event["kind"]) == (2, "blocks.1.wo", "inf")
    assert event["phase"] == "forward" and event["role"] == "output" and event["benign"] is False
    assert isinstance(data["schema"], int)
    assert "step 1 done" in done.stderr, "the program's own output goes to stderr"


def test_healthy_script(forked: Callable[..., Done], run_torch: Callable[..., Done]) -> None:
    plain = run_torch(PROGRAMS / "healthy_loop.py", "a", "-b")
    done = forked("--", program("healthy_loop.py"), "a", "-b")
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout.splitlines() for line in plain.stdout.splitlines())
    done = forked("--json", "--", program("healthy_loop.py"), "a", "-b")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["event"] is None
    assert all(line in done.stderr.splitlines() for line in plain.stdout.splitlines())


def test_the_status_of_the_script_passes_through(forked: Callable[..., Done]) -> None:
    assert forked("--", program("exits_three.py")).returncode == 3
    done = forked("--json", "--", program("exits_three.py"))
    assert done.returncode == 3
    assert json.loads(done.stdout)["event"] is None


def test_a_script_that_raises(forked: Callable[..., Done]) -> None:
    done = forked("--", program("raises.py"))
    assert done.returncode == 1
    assert "RuntimeError: the data set is gone" in done.stderr
    assert 'raise RuntimeError("the data set is gone")' in done.stderr


def test_a_module_in_place_of_a_script(overflow: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text((PROGRAMS / "overflow_loop.py").read_text())
    done = overflow("--json", "--", "-m", "train_it", "x", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["event"]["module"] == "blocks.1.wo"
    assert "arguments: ['x']" in done.stderr


@pytest.mark.parametrize("option", ["--max-frames", "--max_frames"])
def test_options_in_both_spellings_and_lines_go_to_the_output_file(
    forked: Callable[..., Done], tmp_path: Path, option: str
) -> None:
    path = tmp_path / "frames.jsonl"
    done = forked(option, "2", "--output", str(path), "--", program("overflow_loop.py"))
    assert done.returncode == 1
    assert "Last 2 forward frames:" in done.stdout + done.stderr
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
    assert "blocks.1.wo" in path.read_text()


def test_exclude_and_include(forked: Callable[..., Done]) -> None:
    done = forked("--json", "--exclude", "blocks.1.wo", "--", program("overflow_loop.py"))
    assert json.loads(done.stdout)["event"]["module"] == "blocks.1"
    done = forked("--json", "--include", "blocks.0*", "--", program("overflow_loop.py"))
    assert done.returncode in (0, 1)
    event = json.loads(done.stdout)["event"]
    assert event is None or not event["module"].startswith("blocks.1")


def test_trace_and_abort(forked: Callable[..., Done]) -> None:
    done = forked("--trace-batch-nums", "1", "--abort-after-batch-num", "1", "--", program("overflow_loop.py"))
    assert done.returncode != 0
    assert "*** Starting batch number=1 ***" in done.stdout + done.stderr
    assert "step 2 done" not in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("--",),
        (),
        ("--", "no_such_script.py"),
        ("--check", "sometimes", "--", "x.py"),
        ("--no-such-option", "--", "x.py"),
    ],
    ids=["nothing", "bare", "missing script", "bad value", "bad option"],
)
def test_wrong_usage(overflow: Callable[..., Done], args: tuple[str, ...]) -> None:
    done = overflow(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("mldebug: ")
    assert "hint: " in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_trainer_of_transformers(forked: Callable[..., Done]) -> None:
    done = forked("--json", "--", program("hf_trainer.py"), "underflow_overflow")
    assert done.returncode == 1, done.stderr
    assert "Detected inf/nan" not in done.stderr, "the class behind the Trainer's own flag adds nothing"
    event = json.loads(done.stdout)["event"]
    assert event["step"] in (1, 2)
    assert event["module"] == "transformer.h.1.mlp.c_fc"
    assert event["kind"] == "inf"


def test_sigterm_has_the_report_and_ends_it_as_it_would(overflow: Callable[..., Done], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = overflow("--json", "--html", str(page), "--", program("ended_outside.py"), "sigterm")
    assert done.returncode == -signal.SIGTERM, done.stderr
    event = json.loads(done.stdout)["event"]
    assert (event["step"], event["role"], event["kind"]) == (3, "input", "nan")
    assert page.read_text().rstrip().endswith("</html>")


def test_each_rank_of_a_job_has_its_document(run_python: Callable[..., Done], tmp_path: Path) -> None:
    """Also the one inside a collective that the other has left, which has to be ended."""
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", tmp_path / "logs", "--redirects", "3", "-m", "mldebug", "overflow", "--json"),
        *("--html", tmp_path / "page.html", "--", program("ended_outside.py"), "collective"),
        timeout=110,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    for rank in range(2):
        (said,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        document = json.loads(said.read_text())
        assert (document["event"]["step"], document["event"]["rank"], document["rank"]) == (3, 1, rank)
        assert (tmp_path / f"page.rank{rank}.html").read_text().rstrip().endswith("</html>")
    (told,) = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert told.read_text().count("rank 0 ends here: 5 s after rank 1 saw the event") == 1
