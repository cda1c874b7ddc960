"""Optimisers and schedules against torch.optim: the same initial values and gradients (absent ones too), 50 steps.

    optim_oracle.py OPTIM_DUMP
"""
import subprocess
import sys

import numpy
import torch

SHAPES = [(33, 7), (33,), (5, 33), (5,)]
STEPS = 50
failures = 0


def f32(x):
    """The double that Muster's float option stands for."""
    return float(numpy.float32(x))


def sgd(lr, groups=None, **options):
    def make(params):
        return torch.optim.SGD(groups(params) if groups else params, lr=f32(lr),
                               **{k: f32(v) if isinstance(v, float) else v for k, v in options.items()})
    return make


def adam(kind, lr, groups=None, betas=(0.9, 0.999), **options):
    def make(params):
        return kind(groups(params) if groups else params, lr=f32(lr), betas=tuple(map(f32, betas)),
                    **{k: f32(v) for k, v in options.items()})
    return make


def groups(lr, decay):
    # "*.bias" without decay; "2.*" with ten times the rate; the last match counts.
    def cut(p):
        return [{"params": [p[0]], "weight_decay": f32(decay)}, {"params": [p[1]], "weight_decay": 0.0},
                {"params": [p[2], p[3]], "lr": f32(lr) * 10, "weight_decay": f32(decay)}]
    return cut


CASES = {
    "sgd": sgd(0.1),
    "sgd_decay": sgd(0.1, weight_decay=0.05),
    "momentum": sgd(0.05, momentum=0.9),
    "dampening": sgd(0.05, momentum=0.8, dampening=0.3, weight_decay=0.01),
    "nesterov": sgd(0.02, momentum=0.9, nesterov=True, weight_decay=0.001),
    "adam": adam(torch.optim.Adam, 0.01),
    "adam_decay": adam(torch.optim.Adam, 0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "adamw": adam(torch.optim.AdamW, 0.01),
    "clip": sgd(0.05, momentum=0.9),
    "groups_sgd": sgd(0.05, groups(0.05, 0.1), momentum=0.9),
    "groups_adamw": adam(torch.optim.AdamW, 0.01, groups(0.01, 0.1)),
}


def run(dump, case):
    out = subprocess.run([dump, case], check=True, stdout=subprocess.PIPE, timeout=60).stdout
    data, at = numpy.frombuffer(out, numpy.float32), 0

    def take(shape):
        nonlocal at
        n = int(numpy.prod(shape, dtype=int))
        value = torch.from_numpy(data[at:at + n].copy()).reshape(shape)
        at += n
        return value

    params = [torch.nn.Parameter(take(s)) for s in SHAPES]
    optimizer = CASES[case](params)
    worst = 0
    for step in range(STEPS):
        if step == 30:
            for g in optimizer.param_groups:
                g["lr"] *= 0.5
        norm = take(()).item() if case == "clip" else None
        values = []
        for p, shape in zip(params, SHAPES):
            present = take(()).item()
            grad, value = take(shape), take(shape)
            p.grad = grad if present else None
            values.append(value)
        if norm is not None:
            theirs = torch.nn.utils.clip_grad_norm_(params, 2.0).item()
            worst = max(worst, abs(theirs - norm) / max(theirs, 1e-12))
        optimizer.step()
        for p, value in zip(params, values):
            worst = max(worst, ((p.detach() - value).abs().max() / p.detach().abs().max()).item())
    assert at == len(data), (at, len(data))
    return worst


def schedules(dump):
    data = numpy.frombuffer(subprocess.run([dump, "schedule"], check=True, stdout=subprocess.PIPE).stdout,
                            numpy.float32).reshape(5, 40)
    S = torch.optim.lr_scheduler

    def warm(o, n, then):
        up = S.LinearLR(o, start_factor=1 / n, end_factor=1.0, total_iters=n - 1)
        return S.SequentialLR(o, [up, then(o)], [n])

    makers = [
        lambda o: warm(o, 5, lambda o: S.LambdaLR(o, lambda t: 1.0)),
        lambda o: S.StepLR(o, 7, f32(0.3)),
        lambda o: warm(o, 5, lambda o: S.StepLR(o, 7, 0.1)),
        lambda o: S.CosineAnnealingLR(o, 40),
        lambda o: warm(o, 4, lambda o: S.CosineAnnealingLR(o, 36, f32(0.01))),
    ]
    worst = 0
    for row, maker in zip(data, makers):
        p = torch.nn.Parameter(torch.zeros(1))
        o = torch.optim.SGD([p], lr=0.5)
        scheduler = maker(o)
        for step in range(40):
            lr = o.param_groups[0]["lr"]
            worst = max(worst, abs(lr - row[step]) / 0.5)
            o.step()
            scheduler.step()
    return worst


for name in CASES:
    off = run(sys.argv[1], name)
    print("%-14s off by %.2g" % (name, off))
    if not off <= 1e-6:
        failures += 1
        print("FAILED:", name, "is off by more than 1e-6")
off = schedules(sys.argv[1])
print("schedules      off by %.2g" % off)
if not off <= 1e-6:
    failures += 1
    print("FAILED: schedules are off by more than 1e-6")
sys.exit(1 if failures else 0)
