"""collect_remote(): the evidence of a job on other nodes, over ssh, by SLURM, or in pods.

Each node looks at its own ranks and sends them reduced. Within the deadline there is an answer or a reason for every
node; a part of a job is a result, and says which part is missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import UsageError
from mldebug.core.hosts import checked, parse_hosts
from mldebug.hang import _remote_ways as ways
from mldebug.hang._remote_gather import Gathering, Progress

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence

_RESERVE = 2.0  # seconds to end what is still running, and for the verdict


def collect_remote(
    *,
    hosts: str | Sequence[str] | None = None,
    slurm: str | None = None,
    pods: str | None = None,
    timeout: float = 30.0,
    python: str | None = None,
    ssh: Sequence[str] = (),
    fanout: int = 64,
    namespace: str | None = None,
    context: str | None = None,
    container: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Evidence:
    """Look at the ranks of a job on other nodes: one of `hosts` ("node[001-512]" or names), `slurm` (a job) or `pods`
    (a label selector). `options` are those of `collect`, for each node.

    `timeout` is for everything: a node that has not answered by then is in `hosts` of the evidence, with the reason.
    `python` is the interpreter that has mldebug there (default: the path of this one; `python3` in pods). `ssh` are
    words for the ssh client; more than `fanout` hosts are asked through gateways, hosts of the list that ask others.
    Ctrl-C ends the waiting and keeps what there is. Raises MldebugError where nothing can be asked at all.

        evidence = collect_remote(hosts="node[001-512]"); verdict = judge(evidence)
    """
    if sum(one is not None for one in (hosts, slurm, pods)) != 1:
        raise UsageError("give one of hosts, slurm and pods", "each of them says where the job runs")
    deadline = time.monotonic() + timeout - min(_RESERVE, timeout / 4)
    asked = ways.Asked(options, deadline, python or ("python3" if pods is not None else sys.executable), ssh, fanout)
    if hosts is not None:
        gathering = Gathering(parse_hosts(hosts) if isinstance(hosts, str) else checked(hosts), progress)
        with gathering.until_interrupted():
            ways.by_ssh(gathering, asked)
    elif slurm is not None:
        gathering = Gathering(ways.nodes_of_job(slurm, deadline), progress)
        with gathering.until_interrupted():
            ways.by_srun(gathering, asked, slurm)
    else:
        kubectl = ways.kubectl_options(namespace, context)
        running, others = ways.list_pods(str(pods), kubectl, container, deadline)
        gathering = Gathering([*running, *others], progress)
        for pod, trouble in others.items():
            gathering.fail(pod, trouble)
        with gathering.until_interrupted():
            ways.by_kubectl(gathering, asked, running, kubectl, container)
    return gathering.evidence()
