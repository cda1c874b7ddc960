#!/usr/bin/python3
"""The twin of `muster bench allreduce --json` over gloo: all_reduce in place of float32 sums on 2 ranks.

    gloo_allreduce.py --ranks 2 BYTES:ITERATIONS...
"""
import argparse
import json
import sys
import time

from torch_ranks import launch, spread


def measure(count, iterations):
    import torch
    import torch.distributed as dist
    x = torch.ones(count)
    dist.all_reduce(x)
    if not bool((x == dist.get_world_size()).all()):
        raise SystemExit("gloo_allreduce.py: a wrong sum")
    x.zero_()  # sums of nothing but zeros do not grow
    us = []
    for i in range(iterations + iterations // 5 + 2):
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(x)
        us.append(1e6 * (time.monotonic() - begun))
    return us[-iterations:]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("sizes", nargs="+")
    o = p.parse_args()
    rank = launch(o.ranks)
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for size in o.sizes:
        count, iterations = map(int, size.split(":"))
        us = spread(measure(count // 4, iterations))
        rows.append({"bytes": count, "us": us, "algbw_gb_s": count / us["median"] / 1e3})
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"ranks": o.ranks, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
