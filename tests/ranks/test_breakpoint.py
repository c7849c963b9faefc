"""breakpoint_on with real terminals and real torchrun."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time

import pytest

from .rank_kit import PROGRAMS, Typist, below, clean, finish, start, torchrun

HELD = PROGRAMS / "held.py"


def losses(text: str) -> list[str]:
    return re.findall(r"rank \d losses (\[[^\]]*\])", text)


def test_one_rank_is_held_and_all_finish_with_the_same_losses() -> None:
    with Typist(torchrun(HELD, "2")) as typist:
        typist.expect(r"look around")
        typist.expect(r"held\.py\(\d+\)step\(\)")
        typist.expect(r"\(Pdb rank 2\) ")
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
