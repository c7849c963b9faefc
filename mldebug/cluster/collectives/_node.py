"""What looks after the ranks of one host: loads torch once, forks them, and reads the stack of one that hangs."""

from __future__ import annotations

import sys
import threading
from typing import Any

from mldebug.cluster.dist._wire import Message, Wire
from mldebug.cluster.pairs import _node as workers
from mldebug.core.errors import MldebugError
from mldebug.core.stacks import dump


class Node(workers.Node):
    """As for pairs, with other workers."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(told)
        self._stacks: list[Message] = []  # those that were read, and not yet sent

    def work(self, local: int, wire: Wire) -> None:
        from mldebug.cluster.collectives import _worker

        _worker.work(local, self.told["backend"], wire)

    def _obey(self, message: Message) -> None:
        if message["t"] == "stack":
            threading.Thread(target=self._read_stack, args=(int(message["local"]),), daemon=True).start()
        else:
            super()._obey(message)

    def _read_stack(self, local: int) -> None:
        """Where the rank stands, innermost call first."""
        frames: list[str] = []
        try:
            for thread in dump(self.children[local].pid, timeout=3.0).threads:
                if thread["name"] == "MainThread":
                    frames = [f"{frame['name']} ({frame['file']}:{frame['line']})" for frame in thread["frames"]]
        except (MldebugError, KeyError):  # no py-spy, no permission, or it has ended
            return
        self._stacks.append({"t": "stack", "local": local, "frames": frames})

    def _hear(self, child: workers._Child) -> None:
        super()._hear(child)
        while self._stacks:
            self.say(self._stacks.pop())


def main() -> int:
    return workers.main(Node, "comms")


if __name__ == "__main__":
    sys.exit(main())
