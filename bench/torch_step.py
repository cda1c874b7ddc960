#!/usr/bin/python3
"""The twin of `muster bench step --json` in PyTorch: the same flags as far as it has them, and the same keys.

    torch_step.py --model resnet18 --channels 3 --side 224 --batch 8 --classes 1000 --from WEIGHTS --batch-from BATCH
"""
import argparse
import json
import sys
import time

from torch_ranks import launch, launcher_bytes, peak_bytes, seconds_since_start, spread

DDP = {"default": {}, "bucket_view": {"gradient_as_bucket_view": True}, "static_graph": {"static_graph": True},
       "find_unused": {"find_unused_parameters": True}}


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", required=True)
    p.add_argument("--from", dest="source", required=True)
    p.add_argument("--batch-from", required=True)
    for name, default in [("channels", 3), ("side", 32), ("classes", 10), ("batch", 32), ("ranks", 1), ("threads", 1),
                          ("steps", 20), ("warmup", 3)]:
        p.add_argument("--" + name, type=int, default=default)
    for name, default in [("lr", 0.01), ("momentum", 0.9)]:
        p.add_argument("--" + name, type=float, default=default)
    p.add_argument("--ddp", choices=list(DDP), default="default")
    for name in ["cifar-stem", "no-ddp", "channels-last", "json"]:
        p.add_argument("--" + name, action="store_true")
    return p.parse_args()


def set_up(o, rank):
    import torch
    from torch_models import build
    layout = torch.channels_last if o.channels_last else torch.contiguous_format
    torch.set_num_threads(o.threads)
    net = build(o.model, o.channels, o.side, o.classes, o.cifar_stem)
    net.load_state_dict(torch.load(o.source))
    net = net.to(memory_format=layout)
    whole = torch.load(o.batch_from)
    x, y = (whole[k][rank * o.batch:(rank + 1) * o.batch].clone() for k in "xy")
    if o.ranks > 1:
        torch.distributed.init_process_group("gloo")
    if o.ranks > 1 and not o.no_ddp:
        net = torch.nn.parallel.DistributedDataParallel(net, **DDP[o.ddp])
    return net, torch.optim.SGD(net.parameters(), lr=o.lr, momentum=o.momentum), x.to(memory_format=layout), y


def measure(o, net, sgd, x, y):
    import torch
    seconds, losses, first = [], [], None
    if o.ranks > 1:
        torch.distributed.barrier()
    for step in range(o.warmup + o.steps):
        begun = time.monotonic()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        if step >= o.warmup:
            seconds.append(time.monotonic() - begun)
        if step == 0:
            first = seconds_since_start()
    return seconds, losses, first


def main():
    o = parse()
    rank = launch(o.ranks)
    seconds, losses, first = measure(o, *set_up(o, rank))
    mine = {"ms": [1e3 * s for s in seconds], "losses": losses, "first": first, "peak": peak_bytes()}
    every = [mine]
    if o.ranks > 1:
        import torch.distributed as dist
        every = [None] * o.ranks
        dist.all_gather_object(every, mine)
        dist.destroy_process_group()
    if rank != 0:
        return 0
    ms = spread([v for e in every for v in e["ms"]])
    mean = [sum(column) / o.ranks for column in zip(*(e["losses"] for e in every))]
    print(json.dumps({
        "model": o.model, "batch": o.batch, "ranks": o.ranks, "threads": o.threads, "steps": o.steps, "step_ms": ms,
        "step_ms_all": mine["ms"], "rank_ms": [spread(e["ms"])["median"] for e in every],
        "images_per_second": 1e3 * o.ranks * o.batch / ms["median"], "losses": mean, "loss_first": mean[0],
        "loss_last": mean[-1], "peak_rss_bytes": max(e["peak"] for e in every),
        "job_rss_bytes": launcher_bytes() + sum(e["peak"] for e in every),
        "seconds_to_first_step": max(e["first"] for e in every)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
