"""hung network -: the packets that come to one rank are dropped."""

import ctypes
import os
import socket
import struct

import torch
import torch.distributed as dist


def blackhole():
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    prog = struct.pack("HL", 1, ctypes.addressof(drop))
    for fd in os.listdir("/proc/self/fd"):
        try:
            s = socket.socket(fileno=os.dup(int(fd)))
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.getpeername():
                s.setsockopt(socket.SOL_SOCKET, 26, prog)
            s.close()
        except OSError:
            pass


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(8):
        if step == 4 and rank == 2:
            blackhole()
        dist.all_reduce(torch.ones(1024))


main()
