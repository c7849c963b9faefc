"""What each emulated node is told: its environment, its GPUs, its address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mldebug.core.errors import UsageError

_NETWORK = "10.77.7"
_PORT = 29500
# A node is a fresh machine: what an outer launcher told this process is not for its ranks.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
          "ROLE_NAME", "ROLE_WORLD_SIZE")  # fmt: skip
_TORCHRUN = ("torchrun", "torch.distributed.run")
# Options of torchrun that take no value.
_FLAGS = ("-h", "--help", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank")


@dataclass(frozen=True)
class Node:
    """One node: with namespaces (`command`, `env`) and as plain processes (`plain_command`, `plain_env`)."""

    name: str
    address: str
    gpus: str
    command: list[str]
    env: dict[str, str]
    plain_command: list[str]
    plain_env: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """The nodes of a job. `plain` is the reason for going without namespaces, if that is settled already."""

    command: list[str]
    nodes: list[Node]
    plain: str
    about_gpus: str

    def words(self, namespaces: bool, why: str) -> str:
        """What the user should know about these nodes."""
        own = "each with a host name and a network of its own, and no way outside (--plain has one)"
        how = own if namespaces else f"plain processes: {why}"
        return f"{len(self.nodes)} nodes, {how}; {self.about_gpus}"


def plan(command: list[str], nodes: int, gpus_per_node: int, *, plain: bool, free_port: int) -> Plan:
    """The environment and command of each node."""
    found = shutil.which(command[0])
    if found is None:
        raise UsageError(f"cannot run {command[0]}: no such program", "is the environment active? try its full path")
    if nodes > 1 and _is_standalone(command):
        raise UsageError(
            "torchrun --standalone makes each node a job of its own, which would wait for the other nodes in vain",
            "leave --standalone out: torchrun is told of the other nodes",
        )
    gpus, about = share_gpus(_gpus(), nodes, gpus_per_node)
    why = "as --plain asks" if plain else "" if sys.platform == "linux" else "namespaces need Linux"
    made = []
    for number in range(nodes):
        name, address = f"node{number}", f"{_NETWORK}.{number + 1}"
        both = []
        for separate in (True, False):
            master, port = (f"{_NETWORK}.1", _PORT) if separate else ("127.0.0.1", free_port)
            words = _filled(command, {"node": number, "nodes": nodes, "master_addr": master, "master_port": port})
            both.append(
                (
                    words,
                    environment(command, number, nodes, master, port, address if separate else master, gpus[number]),
                )
            )
        (own, env), (plain_command, plain_env) = both
        for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            env[key] = "eth0"  # the only network there, whatever the machine's is called
        env["HOSTNAME"] = name
        made.append(Node(name, address, gpus[number] or "", own, env, plain_command, plain_env))
    return Plan(command, made, why, about)


def environment(
    command: list[str], number: int, nodes: int, master: str, port: int, address: str, gpus: str | None
) -> dict[str, str]:
    """The environment of a node's program."""
    env = {
        name: value for name, value in os.environ.items() if name not in _RANKS and not name.startswith("TORCHELASTIC_")
    }
    env.update(NNODES=str(nodes), NODE_RANK=str(number), MASTER_ADDR=master, MASTER_PORT=str(port))
    env["NCCL_HOSTID"] = f"node{number}"  # NCCL would see that the machine is one, and leave the network out
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    # What torchrun reads where its options say nothing.
    env.update(PET_NNODES=str(nodes), PET_LOCAL_ADDR=address, PET_MASTER_ADDR=master, PET_MASTER_PORT=str(port))
    options = [word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")]
    if not {"--master-addr", "--master-port"} & set(options):
        env.update(PET_RDZV_ENDPOINT=f"{master}:{port}", PET_RDZV_ID="emulated")
    if "--rdzv-backend" in options and "--node-rank" not in options:
        env.pop("PET_NODE_RANK", None)  # such a rendezvous numbers the nodes by itself, and warns of another number
    else:
        env["PET_NODE_RANK"] = str(number)
    return env


def share_gpus(real: list[str] | None, nodes: int, per_node: int) -> tuple[list[str | None], str]:
    """CUDA_VISIBLE_DEVICES of each node, and a sentence about them. `real` are the GPUs of this machine."""
    if not real:
        return [""] * nodes, "no GPU here, so CUDA_VISIBLE_DEVICES is empty"
    if len(real) >= nodes * per_node:
        parts = [",".join(real[number * per_node : (number + 1) * per_node]) for number in range(nodes)]
        return list(parts), f"GPUs {' | '.join(parts) if per_node else 'none'}"
    shared = ",".join(real[:per_node])
    short = "" if len(real) >= per_node else f", and local ranks from {len(real)} on find none"
    return (
        [shared] * nodes,
        f"{len(real)} GPU{'s' if len(real) > 1 else ''} for {nodes} x {per_node}: all nodes share {shared}{short}",
    )


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def _is_standalone(command: list[str]) -> bool:
    """Whether torchrun itself is given --standalone: the script's own options are no concern of ours."""
    launchers = [at for at, word in enumerate(command) if word.rpartition("/")[2] in _TORCHRUN]
    words = iter(command[launchers[0] + 1 :] if launchers else [])
    for word in words:
        if not word.startswith("-"):
            return False  # the script
        if word == "--standalone":
            return True
        if "=" not in word and word.replace("_", "-") not in _FLAGS:
            next(words, None)  # the value of that option
    return False


def _filled(command: list[str], values: Mapping[str, object]) -> list[str]:
    """The command with `{node}` and the like filled in; other braces stay."""
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace("{" + name + "}", str(value))
        words.append(word)
    return words
