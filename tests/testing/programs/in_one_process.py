"""Tests that use the plugin without ranks: test_plugin.py runs them by a pytest of its own."""

import logging
import os
import random
import subprocess
import sys
import time

import pytest

from mldebug.testing import captured, require_gpus

drawn = []


def test_the_plugin_loads_no_torch():
    assert "torch" not in sys.modules and "numpy" not in sys.modules


@pytest.mark.slow
def test_slow():
    pass


@require_gpus(64)
def test_many_gpus():
    raise AssertionError("there are not that many")


@pytest.fixture(scope="module", autouse=True)
def for_all():
    os.environ["OF_THE_MODULE"] = "1"
    yield
    assert os.environ.pop("OF_THE_MODULE") == "1"


def test_spoils(tmp_path):
    drawn.append(random.random())
    os.environ.update(SPOILT="1", HOME="/nowhere")
    del os.environ["PATH"]
    os.chdir(tmp_path)
    sys.path.insert(0, "/nowhere")


def test_finds_all_as_it_was(request):
    assert "SPOILT" not in os.environ and os.environ["HOME"] != "/nowhere" and os.environ["PATH"]
    assert os.getcwd() == str(request.config.rootpath) and sys.path[0] != "/nowhere"
    assert os.environ["OF_THE_MODULE"] == "1" and [random.random()] == drawn


def test_fails(tmp_path):
    (tmp_path / "left.txt").write_text("x")
    assert not tmp_path


attempts = []


@pytest.mark.flaky(reruns=2)
def test_flaky(tmp_path):
    attempts.append(tmp_path)
    assert len(attempts) == 3, f"attempt {len(attempts)}"
    assert len(set(attempts)) == 3


def test_captured(capfd):
    logger = logging.getLogger("quiet.library")
    logger.propagate = False
    level = logger.level
    with captured(log="quiet.library") as seen:
        print("one", end="\r")
        print("two\nthree\r\n", end="")
        sys.stdout.flush()
        subprocess.run(
            [sys.executable, "-c", "import sys; print('child'); print('error', file=sys.stderr)"], check=True
        )
        logger.debug("told")
    assert (seen.out, seen.err) == ("two\nthree\nchild\n", "error\n")
    assert seen.log == "DEBUG quiet.library: told\n" and (logger.handlers, logger.level) == ([], level)
    assert capfd.readouterr().out == "one\rtwo\nthree\r\nchild\n"
    with pytest.raises(ZeroDivisionError), captured(replay=False) as seen:
        print("before")
        1 / 0  # noqa: B018
    assert seen.out == "before\n" and capfd.readouterr() == ("", "")


def test_a_program(run_python):
    done = run_python("import sys; print(sys.argv[1], input())", "word", input="typed\n")
    assert (done.returncode, done.stdout) == (0, "word typed\n")


def test_a_program_that_hangs(run_python):
    began = time.monotonic()
    try:
        run_python("import os, time\nos.system('sleep 250 &')\nprint('here', flush=True)\ntime.sleep(250)", timeout=2)
    finally:
        assert time.monotonic() - began < 60
