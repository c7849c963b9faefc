"""The memory policy of this process: the system call, as libnuma may not be there."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

# Numbers of set_mempolicy, from the tables of the kernel (arch/*/kernel/syscalls, asm-generic/unistd.h).
_NUMBERS = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}
_MODES = {"prefer": 1, "bind": 2}  # MPOL_PREFERRED, MPOL_BIND of linux/mempolicy.h


def set_memory_policy(mode: str, node: int) -> str:
    """Take memory from `node` first ("prefer") or only ("bind"); what came of it, in words.

    Holds for this thread and for the threads and processes that it starts from now on.
    """
    number = _NUMBERS.get(platform.machine()) if os.name == "posix" else None
    if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return f"memory policy not set: no known system call on {platform.machine()}"
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    # One more than the bits: the kernel takes the last one away again.
    done = call(ctypes.c_long(number), ctypes.c_int(_MODES[mode]), mask, ctypes.c_ulong(64 * words + 1))
    if done == 0:
        return f"memory from node {node} {'only' if mode == 'bind' else 'first'}"
    code = ctypes.get_errno()
    causes = {
        errno.EPERM: "a container forbids it without CAP_SYS_NICE",
        errno.EINVAL: f"node {node} has no memory, or this cgroup may not use it",
        errno.ENOSYS: "the kernel has no NUMA support, or the sandbox no such call",
    }
    return f"memory policy not set: {os.strerror(code).lower()} ({causes.get(code, 'set_mempolicy failed')})"
