#!/usr/bin/python3
"""torch_steps.py TEN_STEPS MODEL: runs ten_steps and does the same ten steps in PyTorch from the same initial
checkpoint on the same batches, once in float32 and once in float64 as the judge of both. Losses must agree within 1e-4
relative, and be about as near to the judge's as PyTorch's float32 is."""
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "bench"))
import torch_models  # noqa: E402

LOSS_TOLERANCE = 1e-4
MOMENTUM, DECAY = 0.9, 5e-4
# Batch, channels, side and learning rate, as in ten_steps.c. The residual networks have small rates: with larger ones
# ten steps of training are chaotic, and PyTorch in float32 and in float64 come apart by percents too.
SHAPES = {"resnet20": (32, 3, 32, 0.001), "resnet18": (32, 3, 48, 0.0001), "cnn": (32, 1, 28, 0.02),
          "mlp": (32, 1, 28, 0.02)}
# Ours may be so many times as far from float64 as PyTorch's float32 is: Winograd convolutions have about 6 times the
# rounding error of direct ones. Below FLOOR all is rounding.
FACTOR, FLOOR = 30, 3e-6


def build(model):
    _, channels, side, _ = SHAPES[model]
    return torch_models.build(model, channels, side, 10)


def train(model, initial, batches, dtype):
    """Losses of the steps, and the state after them."""
    net = build(model)
    net.load_state_dict(initial, strict=True)
    assert list(net.state_dict()) == list(initial), "names or their order differ"
    net = net.to(dtype)
    sgd = torch.optim.SGD(net.parameters(), lr=SHAPES[model][3], momentum=MOMENTUM, weight_decay=DECAY)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(net(x.to(dtype)), y)
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def read_batches(raw, shape):
    batch, channels, side, _ = shape
    elements, at = batch * channels * side * side, 0
    while at < len(raw):
        x = torch.from_numpy(np.frombuffer(raw, np.float32, elements, at).reshape(batch, channels, side, side).copy())
        at += 4 * elements
        yield x, torch.from_numpy(np.frombuffer(raw, np.int64, batch, at).copy())
        at += 8 * batch


def distance(state, other):
    return sum(((other[k].double() - v.double()) ** 2).sum().item() for k, v in state.items()
               if v.is_floating_point()) ** 0.5


def main():
    program, model = sys.argv[1:3]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([program, model, work], check=True, timeout=300)
        initial = torch.load(os.path.join(work, "initial.pth"))
        final = torch.load(os.path.join(work, "final.pth"))
        with open(os.path.join(work, "losses.txt"), encoding="utf-8") as f:
            ours = [float(line) for line in f]
        with open(os.path.join(work, "batches.bin"), "rb") as f:
            batches = list(read_batches(f.read(), SHAPES[model]))
    assert len(ours) == len(batches) == 10
    theirs, their_state = train(model, initial, batches, torch.float32)
    judge, judge_state = train(model, initial, batches, torch.float64)
    off = [abs(a - b) / abs(b) for a, b in zip(ours, theirs)]
    for step, (a, b, j) in enumerate(zip(ours, theirs, judge), 1):
        print(f"step {step:2d}: muster {a:.7f}  torch {b:.7f}  float64 {j:.7f}  {off[step - 1]:.1e}")
    moved = distance(initial, judge_state)
    mine, its = distance(final, judge_state) / moved, distance(their_state, judge_state) / moved
    print(f"{model}: losses within {max(off):.1e} relative; weights and buffers end {mine:.1e} of their way from float64's, "
          f"torch's {its:.1e}")
    assert max(off) < LOSS_TOLERANCE, "losses differ"
    assert mine < FACTOR * its + FLOOR and mine < 0.01, "weights differ"
    return 0


if __name__ == "__main__":
    sys.exit(main())
