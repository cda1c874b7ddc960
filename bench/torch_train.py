#!/usr/bin/python3
"""The same training as `muster train`, in plain PyTorch with DistributedDataParallel over gloo: the other side of the
comparisons in README.md. Flags are those of `muster train`, data is idx:DIR, the network resnet20.

    bench/torch_train.py --data idx:DIR --ranks 2 --epochs 1 --save out.pth
"""
import argparse
import gzip
import json
import math
import os
import socket
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.stride, self.pad = stride, (cout - cin) // 2

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride != 1 or self.pad:  # option A: every second pixel, zeros for the new channels
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class ResNet20(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (cin, cout, stride) in enumerate([(16, 16, 1), (16, 32, 2), (32, 64, 2)], 1):
            setattr(self, f"layer{i}", nn.Sequential(*[Block(cin if j == 0 else cout, cout, stride if j == 0 else 1)
                                                       for j in range(3)]))
        self.linear = nn.Linear(64, classes)
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(m.weight)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def read_idx(path):
    with gzip.open(path + ".gz") if os.path.exists(path + ".gz") else open(path, "rb") as f:
        raw = f.read()
    ndim = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i:8 + 4 * i], "big") for i in range(ndim)]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy())


def load(folder, part, classes):
    x = read_idx(os.path.join(folder, f"{part}-images-idx3-ubyte"))
    y = read_idx(os.path.join(folder, f"{part}-labels-idx1-ubyte")).long()
    keep = y < classes if classes else slice(None)
    return x[keep].unsqueeze(1), y[keep]


def augment(x, crop, flip):
    """Random crop out of the padded image and random flip, each image its own: uint8 in, uint8 out."""
    n, _, h, w = x.shape
    if crop:
        x = F.pad(x, (crop,) * 4)
        rows = torch.randint(0, 2 * crop + 1, (n, 1)) + torch.arange(h)
        cols = torch.randint(0, 2 * crop + 1, (n, 1)) + torch.arange(w)
        x = x[torch.arange(n)[:, None, None], 0, rows[:, :, None], cols[:, None, :]].unsqueeze(1)
    if flip:
        mirrored = torch.rand(n) < 0.5
        x[mirrored] = x[mirrored].flip(3)
    return x


def lr_at(o, step, total):
    """mu_schedule_lr's cosine."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if o.schedule == "constant":
        return o.lr
    return o.lr * 0.5 * (1 + math.cos(math.pi * (step - o.warmup) / max(1, total - o.warmup)))


def prepare(x, o):
    x = (x.float() / 255 - 0.2860) / 0.3530
    return x.contiguous(memory_format=torch.channels_last) if o.channels_last else x


@torch.no_grad()
def evaluate(net, x, y, o, rank):
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for i in range(rank * o.batch, len(x), o.batch * o.ranks):
        labels = y[i:i + o.batch]
        logits = net(prepare(x[i:i + o.batch], o))
        sums += torch.tensor([(logits.argmax(1) == labels).sum().item(), len(labels),
                              F.cross_entropy(logits, labels, reduction="sum").item()])
    if o.ranks > 1:
        dist.all_reduce(sums)
    net.train()
    return sums


def build(o, outputs):
    torch.manual_seed(o.seed)
    net = ResNet20(1, outputs)
    if o.source:
        state = {k: v for k, v in torch.load(o.source, map_location="cpu").items() if not k.startswith("linear.")}
        net.load_state_dict(state, strict=False)
    return net.to(memory_format=torch.channels_last) if o.channels_last else net


def work(rank, o, port):
    torch.set_num_threads(max(1, o.threads))
    if o.ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=o.ranks)
    folder = o.data.split(":", 1)[1]
    x, y = load(folder, "train", o.classes)
    tx, ty = load(folder, "t10k", o.classes)
    net = build(o, o.head or int(y.max()) + 1)
    model = nn.parallel.DistributedDataParallel(net) if o.ranks > 1 else net
    sgd = torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    torch.manual_seed(1000 * o.seed + rank)
    per_rank = len(x) // o.ranks
    per_epoch = per_rank // o.batch if o.time else -(-per_rank // o.batch)
    total = o.epochs * per_epoch
    log = open(o.log, "w") if o.log and rank == 0 else None
    step, begin = 0, time.monotonic()
    for epoch in range(o.epochs):
        order = torch.from_numpy(np.random.RandomState(o.seed * 1000 + epoch).permutation(len(x)))[rank::o.ranks]
        for i in range(per_epoch):
            if o.steps and step >= o.steps:
                break
            pick = order[i * o.batch:(i + 1) * o.batch]
            xb = prepare(x[pick] if o.no_augment else augment(x[pick], o.crop, not o.no_flip), o)
            for g in sgd.param_groups:
                g["lr"] = lr_at(o, step, total)
            loss = F.cross_entropy(model(xb), y[pick])
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            step += 1
            if log:
                log.write(json.dumps({"step": step, "loss": loss.item(), "images": len(pick) * o.ranks,
                                      "seconds": time.monotonic() - begin, "cpu_seconds": time.process_time()}) + "\n")
        if not o.time and rank == 0:
            print(f"epoch {epoch + 1}/{o.epochs}  {time.monotonic() - begin:.0f} s", flush=True)
    if not o.time:
        correct, count, loss_sum = evaluate(net, tx, ty, o, rank).tolist()
        if rank == 0:
            print(f"test accuracy {100 * correct / count:.2f} % ({int(correct)} of {int(count)}), "
                  f"loss {loss_sum / count:.4f}", flush=True)
    if rank == 0 and o.save:
        torch.save(net.state_dict(), o.save)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--data", required=True)
    p.add_argument("--from", dest="source")
    p.add_argument("--save")
    p.add_argument("--log")
    for name, default in [("classes", 0), ("head", 0), ("ranks", 1), ("epochs", 1), ("steps", 0), ("batch", 64),
                          ("warmup", 0), ("seed", 0), ("crop", 3), ("threads", 1)]:
        p.add_argument("--" + name, type=int, default=default)
    for name, default in [("lr", 0.1), ("momentum", 0.9), ("weight-decay", 5e-4)]:
        p.add_argument("--" + name, type=float, default=default)
    p.add_argument("--schedule", choices=["constant", "cosine"], default="cosine")
    for name in ["no-augment", "no-flip", "channels-last", "time"]:
        p.add_argument("--" + name, action="store_true")
    o = p.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if o.ranks > 1:
        mp.spawn(work, (o, port), nprocs=o.ranks)
    else:
        work(0, o, port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
