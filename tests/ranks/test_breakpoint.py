"""breakpoint_on with real terminals and real torchrun."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from .rank_kit import PROGRAMS, Typist, below, finish, forked, start, torchrun

HELD = PROGRAMS / "held.py"


def test_torchrun_that_sends_output_to_files(tmp_path) -> None:
    command = forked(torchrun("--redirects", "3", "--log-dir", tmp_path, HELD, "1", ranks=2))
    with Typist(command) as typist:
        typist.expect(r"look around")
        typist.expect(r"\(Pdb rank 1\)")
        typist.type("p secret\nc\n")
        assert typist.end() == 0
    assert "1001" in typist.text
    assert sorted(map(len, map(losses, (one.read_text() for one in tmp_path.rglob("stdout.log"))))) == [1, 1]


def test_ctrl_c_under_torchrun_ends_all() -> None:
    with Typist(forked(torchrun(HELD, "1", ranks=2))) as typist:
        typist.expect(r"\(Pdb rank 1\)")
        typist.expect("rank 0 waits", anywhere=True)
        ranks = [one for one in below(typist.pid) if one != typist.pid]
        begin = time.monotonic()
        typist.type("\x03")
        assert typist.end() != 0
        assert time.monotonic() - begin < 20  # torchrun kills what does not end in 30
    assert not any(os.path.exists(f"/proc/{one}") for one in ranks)


def losses(text: str) -> list[str]:
    return re.findall(r"rank \d losses (\[[^\]]*\])", text)


def test_one_rank_is_held_and_all_finish_with_the_same_losses() -> None:
    with Typist(forked(torchrun(HELD, "2"))) as typist:
        typist.expect(r"look around")
        typist.expect(r"held\.py\(\d+\)step\(\)")
        typist.expect(r"\(Pdb rank 2\)")
        typist.type("p secret, number\n")
        typist.expect(r"\(2001, 1\)")
        typist.type("p __name__, dist.get_rank()\n")
        typist.expect(r"\('__main__', 2\)")
        typist.type("n\nn\n")
        typist.expect(r"loss\.backward\(\)")
        assert losses(typist.text) == []
        for other in (0, 1, 3):
            assert len(re.findall(rf"rank {other} waits at held\.py step:\d+: rank 2 \(host", typist.text)) == 1
        typist.type("c\n")
        assert typist.end() == 0
    found = losses(typist.text)
    assert len(found) == 4 and len(set(found)) == 1


def launched(size: int, *args: str, out: str = "-") -> list[str]:
    return [sys.executable, str(PROGRAMS / "launch.py"), str(size), out, str(PROGRAMS / "walk.py"), *args]


class TestCommands:
    """By a small launcher whose ranks are sessions of their own, as torchrun's are. No torch is loaded."""

    def test_continue(self) -> None:
        with Typist(launched(3, "1")) as typist:
            typist.expect(r"\(Pdb rank 1\)")
            typist.type("p secret\n")
            typist.expect("1001")
            typist.type("c\n")
            assert typist.end() == 0
        assert sorted(re.findall(r"rank \d total (\d+ tracer \w+)", typist.text)) == [
            "13 tracer None", "3013 tracer None", "6013 tracer None"
        ]  # fmt: skip

    @pytest.mark.parametrize("typed", ["q\n", "\x04", "n\nq\n", "import os; os.getpid()\nexit\n"])
    def test_quit_ends_the_job_with_one_line_each(self, typed: str) -> None:
        with Typist(launched(3, "1")) as typist:
            typist.expect(r"\(Pdb rank 1\)")
            typist.type(typed)
            assert typist.end() == 1
        assert "statuses [1, 1, 1]" in typist.text
        assert "Traceback" not in typist.text and "caught" not in typist.text and "total" not in typist.text
        for other in (0, 2):
            assert len(re.findall(rf"rank {other} ends, as rank 1 \(host .*\) was told to quit", typist.text)) == 1

    def test_ctrl_c_at_the_prompt_ends_the_job(self) -> None:
        with Typist(launched(2, "0")) as typist:
            typist.expect(r"\(Pdb rank 0\)")
            typist.expect(r"rank 1 waits", anywhere=True)
            typist.type("\x03")
            assert typist.end() != 0
        assert re.search(r"statuses \[1, -?\d+\]", typist.text), typist.text

    def test_ranks_of_a_list_are_held_one_after_the_other(self) -> None:
        with Typist(launched(3, "2,0")) as typist:
            typist.expect(r"\(Pdb rank 2\)")
            typist.type("p secret\n")
            typist.expect("2001")
            assert "(Pdb rank 0)" not in typist.text
            typist.type("c\n")
            typist.expect(r"\(Pdb rank 0\)")
            assert "total" not in typist.text
            typist.type("c\n")
            assert typist.end() == 0
        assert typist.text.count("total") == 3

    def test_release_lets_the_others_go_on_while_one_steps(self) -> None:
        with Typist(launched(2, "0")) as typist:
            typist.expect(r"\(Pdb rank 0\)")
            typist.type("n\n")
            typist.expect(r"\(Pdb rank 0\)")
            time.sleep(0.5)
            assert "rank 1 total" not in typist.text
            typist.type("release\n")
            typist.expect("rank 1 total 3013")
            typist.type("n\n")
            typist.expect("return secret")
            typist.type("c\n")
            assert typist.end() == 0

    def test_the_program_may_end_while_somebody_steps(self) -> None:
        with Typist(launched(2, "0")) as typist:
            typist.expect(r"\(Pdb rank 0\)")
            typist.type("r\n" + "n\n" * 30)
            typist.expect("rank 1 total 3013")
            assert typist.end() == 0
        assert typist.text.rindex("rank 1 total") > typist.text.rindex("--Return--")
        assert "threading.py" not in typist.text

    def test_output_that_goes_to_files_leaves_the_terminal_to_pdb(self, tmp_path) -> None:
        with Typist(launched(2, "1", out=str(tmp_path))) as typist:
            typist.expect(r"\(Pdb rank 1\)")
            typist.type("p secret\n")
            typist.expect("1001")
            typist.type("print('to', 'me')\n")
            typist.expect(r"\n(\(Pdb rank 1\) )?to me")
            typist.type("c\n")
            assert typist.end() == 0
        assert (tmp_path / "1").read_text() == "rank 1 total 3013 tracer None\n"
        assert (tmp_path / "0").read_text() == "rank 0 total 13 tracer None\n"

    def test_a_job_in_the_background_leaves_the_terminal_alone(self) -> None:
        script = " ".join(launched(2, "1")) + " & wait $!"
        with Typist(["/bin/bash", "-m", "-c", script]) as typist:
            socket_path = typist.expect(r"nc -U (\S+?)`").group(1)
            typist.expect("rank 0 waits", anywhere=True)
            assert "(Pdb" not in typist.text
            answer = attach(socket_path, "p secret\nc\n")
            typist.expect("statuses .0, 0.")
        assert "1001" in answer


OTHERS = sorted(Path.home().glob(".pyenv/versions/3.1[0-3]*/bin/python"))
PYTHONS = [sys.executable, *(str(one) for one in OTHERS if not one.samefile(sys.executable))]


@pytest.mark.parametrize("python", PYTHONS)
def test_on_each_python(python: str) -> None:
    with Typist([python, *launched(2, "1")[1:]]) as typist:
        typist.expect(r"\(Pdb rank 1\)")
        typist.type("w\n")
        typist.expect(r"> \S*walk\.py\(\d+\)step\(\)")
        typist.type("s\nn\np secret\nc\n")
        assert typist.end() == 0
    assert "1011" in typist.text and len(re.findall(r"^rank \d total", typist.text, re.M)) == 2
    assert "mldebug/ranks/_breakpoint" not in typist.text
    with Typist([python, *launched(2, "1")[1:]]) as typist:
        typist.expect(r"\(Pdb rank 1\)")
        typist.type("q\n")
        assert typist.end() == 1
    assert "statuses [1, 1]" in typist.text and "Traceback" not in typist.text


def attach(path: str, text: str) -> str:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(30)
        one.connect(path)
        one.sendall(text.encode())
        found = b""
        while data := one.recv(65536):
            found += data
    return found.decode()


def numbered(size: int) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class TestWithoutATerminal:
    def path(self, process) -> str:
        for line in process.stderr:
            if match := re.search(r"nc -U (\S+?)`", line):
                return match.group(1)
        raise AssertionError("no socket was named")

    def test_a_socket_is_named_and_works(self) -> None:
        ranks = start([PROGRAMS / "walk.py", "1"], numbered(2))
        path = self.path(ranks[1])
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        assert attach(path, "p secret\nc\n").count("1001") == 1
        assert [one[0] for one in finish(ranks)] == [0, 0]
        assert not os.path.exists(os.path.dirname(path))

    def test_whoever_is_cut_off_can_come_again(self) -> None:
        ranks = start([PROGRAMS / "walk.py", "1"], numbered(2))
        path = self.path(ranks[1])
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(path)
            one.sendall(b"x = 5\n")
        assert "1001" in attach(path, "p secret\nc\n")
        assert [one[0] for one in finish(ranks)] == [0, 0]

    def test_our_own_client(self, run_python) -> None:
        ranks = start([PROGRAMS / "walk.py", "0"], numbered(2))
        done = run_python("-m", "mldebug.ranks._terminal", self.path(ranks[0]), input="p secret\nc\n")
        assert "(Pdb rank 0) 1\n" in done.stdout
        assert [one[0] for one in finish(ranks)] == [0, 0]

    def test_our_own_client_ends_with_the_debugger_while_stdin_is_open(self) -> None:
        ranks = start([PROGRAMS / "walk.py", "0"], numbered(2))
        with Typist([sys.executable, "-m", "mldebug.ranks._terminal", self.path(ranks[0])]) as typist:
            typist.expect(r"\(Pdb rank 0\)")
            typist.type("p secret * 7\n")
            typist.expect(r"\n7\b")
            typist.type("c\n")
            assert typist.end() == 0
        assert not re.search("Fatal|Error|Traceback", typist.text), typist.text
        assert [one[0] for one in finish(ranks)] == [0, 0]

    def test_the_others_end_when_the_held_rank_dies(self) -> None:
        ranks = start([PROGRAMS / "walk.py", "1"], numbered(2))
        self.path(ranks[1])
        time.sleep(0.5)
        os.kill(ranks[1].pid, signal.SIGKILL)
        ended = finish(ranks, 20)
        assert [one[0] for one in ended] == [1, -9]
        assert re.search(r"MldebugError: rank 1 \(host .*\) has ended .* while it was held", ended[0][2])

    def test_a_timeout_is_kept_if_asked_for(self) -> None:
        ranks = start([PROGRAMS / "walk.py", "1", "1.5"], numbered(2))
        path = self.path(ranks[1])
        status, _, err = finish(ranks[:1], 20)[0]
        assert ranks[1].poll() is None, ranks[1].communicate()
        assert status == 1 and re.search(r"has waited \d s .* is held in the debugger", err), err
        attach(path, "c\n")
        assert finish(ranks[1:])[0][0] == 0

    def test_a_condition_that_is_false_holds_nobody(self) -> None:
        ended = finish(start([PROGRAMS / "walk.py", "1", "60", "no"], numbered(3)))
        assert [one[0] for one in ended] == [0, 0, 0]
        assert "held" not in "".join(one[2] for one in ended)

    def test_a_rank_that_is_not_there(self) -> None:
        ended = finish(start([PROGRAMS / "walk.py", "7"], numbered(2)))
        assert "there is no rank 7 to hold: the job has 2" in ended[0][2]


def test_alone_it_is_plain_pdb() -> None:
    with Typist([sys.executable, str(PROGRAMS / "walk.py"), "0"]) as typist:
        typist.expect(r"\(Pdb\) ")
        typist.interrupt()
        typist.type("p secret\nc\n")
        assert typist.end() == 0
    assert "\n1\r\n" in typist.text and "rank 0 total 13" in typist.text


def test_a_tracer_that_was_there_goes_on() -> None:
    program = """
import sys
from mldebug.ranks import breakpoint_on
seen = []
def tracer(frame, event, arg):
    seen.append(frame.f_lineno)
    return tracer
def work():
    a = 1
    breakpoint_on(0)
    b = 2
    return 3
sys.settrace(tracer)
work()
after = len(seen)
work.__code__ and (lambda: 0)()
print("same", sys.gettrace() is tracer, "more", len(seen) > after)
sys.settrace(None)
"""
    with Typist([sys.executable, "-c", program]) as typist:
        typist.expect(r"\(Pdb\) ")
        typist.type("c\n")
        assert typist.end() == 0
    assert "same True more True" in typist.text
