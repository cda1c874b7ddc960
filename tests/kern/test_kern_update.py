"""Optimiser updates against torch.optim: 50 steps of random gradients, every option. Run by ctest."""
import subprocess
import sys

import torch

TOOL = sys.argv[1]
N, STEPS = 1003, 50


def ours(command, scalars, flag, weights, gradients):
    text = f"{command} {N} {STEPS} " + " ".join(repr(s) for s in scalars) + f" {int(flag)}\n"
    for row in [weights] + gradients:
        text += " ".join(float(v).hex() for v in row) + "\n"
    out = subprocess.run([TOOL], input=text, capture_output=True, text=True, check=True).stdout
    return torch.tensor([float.fromhex(v) for v in out.split()], dtype=torch.float32)


def theirs(make, weights, gradients):
    p = torch.nn.Parameter(weights.clone())
    optimizer = make([p])
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def check(name, a, b, start):
    # Relative to the weight and to how far it moved, and to 0.01: a weight may cross zero, and PyTorch fuses some
    # multiplications and additions where we, for equal bits on all CPUs, do not.
    error = ((a - b).abs() / (b.abs() + (b - start).abs() + 1e-2)).max().item()
    print(f"{name}: {error:.2e}")
    return error <= 1e-6 and not torch.equal(a, start)


def main():
    torch.manual_seed(3)
    weights = torch.randn(N)
    gradients = [torch.randn(N) for _ in range(STEPS)]
    good = True
    for momentum, dampening, decay, nesterov in [(0, 0, 0, False), (0, 0, 0.01, False), (0.9, 0, 0, False),
                                                 (0.9, 0.1, 0.001, False), (0.9, 0, 5e-4, True)]:
        lr = 0.01
        a = ours("sgd", [lr, momentum, dampening, decay], nesterov, weights, gradients)
        b = theirs(lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay,
                                             nesterov=nesterov), weights, gradients)
        good &= check(f"sgd momentum {momentum} dampening {dampening} decay {decay} nesterov {nesterov}", a, b, weights)
    for beta1, beta2, eps, decay, decoupled in [(0.9, 0.999, 1e-8, 0, False), (0.9, 0.999, 1e-8, 0.01, False),
                                                (0.8, 0.99, 1e-6, 0.1, True), (0.9, 0.999, 1e-8, 0.01, True)]:
        lr = 0.002
        a = ours("adam", [lr, beta1, beta2, eps, decay], decoupled, weights, gradients)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        b = theirs(lambda p: kind(p, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay), weights, gradients)
        good &= check(f"adam {beta1} {beta2} {eps} decay {decay} decoupled {decoupled}", a, b, weights)
    return 0 if good else 1


sys.exit(main())
