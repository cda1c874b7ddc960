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
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "bench"))
from torch_train import ResNet20  # noqa: E402

LOSS_TOLERANCE = 1e-4
MOMENTUM, DECAY = 0.9, 5e-4
# Batch, channels, side and learning rate, as in ten_steps.c. The residual networks have small rates: with larger ones
# ten steps of training are chaotic, and PyTorch in float32 and in float64 come apart by percents too.
SHAPES = {"resnet20": (32, 3, 32, 0.001), "resnet18": (32, 3, 64, 0.0001), "cnn": (32, 1, 28, 0.02),
          "mlp": (32, 1, 28, 0.02)}
# Ours may be so many times as far from float64 as PyTorch's float32 is: Winograd convolutions have about 6 times the
# rounding error of direct ones. Below FLOOR all is rounding.
FACTOR, FLOOR = 30, 3e-6


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        for i in range(1, 5):
            setattr(self, f"layer{i}", nn.Sequential(BasicBlock(widths[i - 1], widths[i], 1 if i == 1 else 2),
                                                     BasicBlock(widths[i], widths[i], 1)))
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Cnn(nn.Module):
    def __init__(self, channels, side, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (side // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mlp(state):
    """Sizes come from the checkpoint: the names are those of a Sequential of Linear and ReLU."""
    layers = [nn.Flatten()] if not any(k.startswith("0.") for k in state) else []
    sizes = sorted((int(k.split(".")[0]), v.shape) for k, v in state.items() if k.endswith("weight"))
    for n, (_, shape) in enumerate(sizes):
        layers += ([nn.ReLU()] if n else []) + [nn.Linear(shape[1], shape[0])]
    net = nn.Sequential(*layers)
    return net if isinstance(layers[0], nn.Flatten) else Flat(net)


class Flat(nn.Module):
    """Flattens before a Sequential whose names it keeps."""
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(1))

    def load_state_dict(self, state, **kw):
        return self.inner.load_state_dict(state, **kw)

    def state_dict(self, **kw):
        return self.inner.state_dict(**kw)


def build(model, state):
    _, channels, side, _ = SHAPES[model]
    if model == "resnet20":
        return ResNet20(channels, 10)
    if model == "resnet18":
        return ResNet18(channels, 10)
    return Cnn(channels, side, 10) if model == "cnn" else mlp(state)


def train(model, initial, batches, dtype):
    """Losses of the steps, and the state after them."""
    net = build(model, initial)
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
