"""Why a node gave no answer, and what to do: from the exit status and the complaints of ssh, srun and kubectl."""

from __future__ import annotations

import re

from mldebug.core.launch import Ending
from mldebug.hang._remote_gather import Trouble

# What the client says -> status, reason, fix. {host} and {python} are filled in; the first that is found counts.
_SSH = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "failed",
     "its host key has changed: if the machine was installed anew, `ssh-keygen -R {host}`"),
    (r"Host key verification failed", "failed",
     "its host key is not known here: `ssh {host}` once, or --ssh-option StrictHostKeyChecking=accept-new"),
    (r"Permission denied|Too many authentication failures|No supported authentication", "failed",
     "no permission to log in without a password: `ssh-add`, or `ssh-copy-id {host}`; `ssh -v {host} true` says more"),
    (r"Could not resolve hostname|Name or service not known|nodename nor servname", "unreachable",
     "there is no host of that name: check it with `getent hosts {host}`"),
    (r"Connection refused", "unreachable", "the machine is up and no sshd listens there: `ssh -v {host} true`"),
    (r"banner exchange|Connection to .* timed out|Timeout, server .* not responding|Connection reset|Broken pipe",
     "timeout", "the machine takes the connection and does not answer: it is frozen, overloaded or out of memory"),
    (r"Connection timed out|Operation timed out|No route to host|Network is unreachable|Host is down", "unreachable",
     "the network does not reach it: `ping {host}`; is it powered on?"),
    (r"kex_exchange_identification|Connection closed by", "unreachable",
     "its sshd closed the connection: too many at once (MaxStartups), or a rule forbids it; try --fanout 8"),
    (r"Bad configuration option|Bad owner or permissions|Can't open user config", "failed",
     "ssh does not start: {said}"),
)  # fmt: skip
_SRUN = (
    (r"Invalid job id|already completed|Job/step already complet", "failed", "the job has ended"),
    (r"Access/permission denied|Unable to confirm allocation", "failed",
     "SLURM does not let you into this job: {said}; run this as the user of the job"),
    (r"Node failure on|Communication connection failure|Socket timed out|not responding|DOWN", "unreachable",
     "SLURM does not reach it: {said}; `scontrol show node {host}`"),
    (r"unrecognized option.*overlap", "failed", "this SLURM is older than 20.11 and has no --overlap: use --hosts"),
    (r"Requested nodes are busy|step creation temporarily disabled|Requested node configuration", "failed",
     "SLURM gives no step beside the job: {said}"),
)  # fmt: skip
_KUBECTL = (
    (r"Forbidden|forbidden:", "failed", "not allowed: {said}; your role needs `create` on pods/exec"),
    (r"container .* (not found|is not valid)|container not found", "failed", "{said}; name one with --container"),
    (r"not found", "failed", "it is gone: {said}"),
    (r"Unable to connect|connection refused|i/o timeout|no such host|TLS handshake", "unreachable",
     "the cluster or its node does not answer: {said}"),
    (r"[Uu]nauthorized|must be logged in", "failed", "the cluster does not know you: {said}; log in again"),
)  # fmt: skip
_TABLES = {"ssh": _SSH, "srun": _SRUN, "kubectl": _KUBECTL}

# What the far end says, whatever the way to it.
_FAR = (
    (r"No module named '?mldebug", "mldebug is not installed there for {python}: "
     "`{python} -m pip install mldebug-toolkit` there, or --remote-python PATH of a Python that has it"),
    (r"unrecognized arguments: --node|speaks layout", "another version of mldebug is there: install the same"),
    (r"No module named", "mldebug there lacks a package: {said}"),
    (r"(not found|No such file or directory|cannot execute|[Pp]ermission denied|Command not found|Unknown command|"
     r"no such file)", "{python} cannot be run there: --remote-python PATH of a Python that has mldebug ({said})"),
)  # fmt: skip


def why(ending: Ending, host: str, way: str, python: str, noise: bytes) -> Trouble:
    """The trouble of a host whose call has ended without its answer."""
    complaint = f"{ending.complaint}\n{noise.decode('utf-8', 'replace')}"
    mine = [line for line in complaint.splitlines() if host in line] or complaint.splitlines()
    facts = {"host": host, "python": python, "said": _said(mine)}
    if ending.how == "refused":
        return Trouble("failed", ending.complaint)
    local = way == "ssh" and ending.code == 255
    if ending.how == "timeout" or local or way != "ssh":
        for pattern, status, text in _TABLES[way]:
            if re.search(pattern, complaint):
                return Trouble(status, text.format(**facts))
    if ending.how == "timeout" and ending.seconds < 1:
        return Trouble("timeout", "it was not asked: no time was left; a longer --timeout or a larger --fanout helps")
    if ending.how == "timeout":
        reason = f"no answer within {ending.seconds:.0f} s: it is frozen, unreachable or overloaded"
        return Trouble("timeout", f"{reason}; `scontrol show node {host}`" if way == "srun" else reason)
    for pattern, text in _FAR:
        if re.search(pattern, complaint):
            return Trouble("failed", text.format(**facts), True)
    if way == "srun" and ending.code == 0:
        return Trouble("failed", "srun ended well and this node gave no answer: it crashed, or its task was lost")
    code = f"signal {-ending.code}" if ending.code is not None and ending.code < 0 else f"status {ending.code}"
    return Trouble("failed", f"{way} ended with {code} and no answer: {facts['said'] or 'it said nothing'}")


def _said(lines: list[str]) -> str:
    """The line that says most, of what may be a traceback: the last one."""
    words = [line.strip() for line in lines if line.strip()]
    text = words[-1] if words else ""
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:200]
