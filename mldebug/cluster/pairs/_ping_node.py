"""What runs on each host for `mldebug pairs --ping`: a single worker, and no torch."""

from __future__ import annotations

import sys

from mldebug.cluster.dist._wire import Message, Wire
from mldebug.cluster.pairs import _node, _ping_worker


class PingNode(_node.Node):
    def load(self) -> None:
        """Nothing: plain sockets carry all of it."""

    def _obey(self, message: Message) -> None:
        for peer in message.get("peers", []):
            peer[1] = peer[1] or self.place[0]  # it is where the coordinator was found
        super()._obey(message)

    def work(self, local: int, wire: Wire) -> None:
        _ping_worker.work(wire)


def main() -> int:
    return _node.main(PingNode, "pairs --ping")


if __name__ == "__main__":
    sys.exit(main())
