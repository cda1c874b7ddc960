#!/usr/bin/python3
"""The other side of overhead.c in PyTorch: the same step, plain or under DistributedDataParallel over gloo.

    overhead_torch.py PARAMETERS FLOATS STEPS plain|default|find_unused|static_graph all|some
"""
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

WARM_UP = 5


class Many(nn.Module):
    def __init__(self, count, floats, some):
        super().__init__()
        for i in range(count):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(floats)))
        self.used = [p for i, p in enumerate(self.parameters()) if not some or i % 10 != 9]

    def forward(self, y):
        for p in self.used:
            y = y + p
        return y.sum()


def rank(number, port, count, floats, steps, kind, some):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    torch.manual_seed(0)
    bare = net = Many(count, floats, some)
    if kind != "plain":
        net = nn.parallel.DistributedDataParallel(bare, find_unused_parameters=kind == "find_unused",
                                                  static_graph=kind == "static_graph")
    wall, cpu = [], []
    zeros = torch.zeros(floats)
    for _ in range(WARM_UP + steps):
        w, p = time.monotonic(), time.process_time()
        net(zeros).backward()
        bare.zero_grad(set_to_none=True)
        wall.append(time.monotonic() - w)
        cpu.append(time.process_time() - p)
    if number == 0:
        print(f"{statistics.median(wall[WARM_UP:]):.9f} {statistics.median(cpu[WARM_UP:]):.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count, floats, steps, kind, which = sys.argv[1:]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(rank, (port, int(count), int(floats), int(steps), kind, which == "some"), nprocs=2)
