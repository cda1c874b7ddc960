"""Networks of the zoo against PyTorch: names and order of the state dict, printing, logits in evaluation and training
mode, loss, gradients, running statistics, with the same weights.

    zoo_oracle.py ZOO_DUMP MODEL SIDE CHANNELS CLASSES BATCH [reference] [checkpoint=PATTERN]

With checkpoint= the modules that match run as checkpointed segments on either side, in both of PyTorch's forms.
"""
import copy
import fnmatch
import os
import struct
import subprocess
import sys

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

failures = 0


def complain(text):
    global failures
    failures += 1
    print("FAILED:", text)


def read_records(data):
    records, at = [], 0
    types = {"f": (numpy.float32, 4), "i": (numpy.int64, 8), "c": (numpy.uint8, 1)}
    while at < len(data):
        end = data.index(b"\0", at)
        name, kind, ndim = data[at:end].decode(), chr(data[end + 1]), data[end + 2]
        at = end + 3
        dims = struct.unpack("<%dq" % ndim, data[at:at + 8 * ndim])
        at += 8 * ndim
        dtype, size = types[kind]
        count = int(numpy.prod(dims, dtype=numpy.int64))
        value = numpy.frombuffer(data[at:at + count * size], dtype).reshape(dims)
        at += count * size
        records.append((name, value.tobytes().decode() if kind == "c" else torch.from_numpy(value.copy())))
    return records


# -- the definitions that are not in torchvision --------------------------------------------------------------------
class LambdaLayer(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class CifarBlock(nn.Module):
    def __init__(self, before, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != planes:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0))

    def _get_name(self):
        return "BasicBlock"

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    def __init__(self, depth, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        before = 16
        for stage, planes in enumerate((16, 32, 64)):
            blocks = []
            for i in range((depth - 2) // 6):
                blocks.append(CifarBlock(before, planes, 2 if stage > 0 and i == 0 else 1))
                before = planes
            setattr(self, "layer%d" % (stage + 1), nn.Sequential(*blocks))
        self.linear = nn.Linear(64, classes)

    def _get_name(self):
        return "ResNet"

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.avg_pool2d(x, x.size()[3])
        return self.linear(x.view(x.size(0), -1))


def make(model, side, channels, classes):
    """The network, and whether its names and text are to be compared."""
    if model in ("resnet18", "resnet34", "resnet50"):
        import torchvision
        net = getattr(torchvision.models, model)(num_classes=classes)
        if channels != 3:
            net.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        return net, True
    if model.startswith("resnet"):
        return CifarResNet(int(model[6:]), channels, classes), True
    if model == "cnn":
        return nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                             nn.Linear(64 * (side // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, classes)), False
    net = nn.Sequential(nn.Linear(channels * side * side, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                        nn.Linear(128, classes))
    net.forward = lambda x: nn.Sequential.forward(net, x.flatten(1))
    return net, True


def compare(name, got, want, tolerance):
    want = want.detach()
    if got.dtype == torch.int64:
        if not torch.equal(got, want):
            complain("%s: %s instead of %s" % (name, got, want))
        return
    if got.shape != want.shape:
        complain("%s: shape %s instead of %s" % (name, got.shape, want.shape))
        return
    scale = want.abs().max().item() + 1e-12
    worst = (got.double() - want).abs().max().item() / scale
    if not worst <= tolerance:
        complain("%s: off by %.3g of its largest element, %g is allowed" % (name, worst, tolerance))
    return worst


def check_public_names(model, net, names):
    """Names and order in files that people have."""
    shared = os.environ.get("MUSTER_SHARED", "")
    if model in ("resnet18", "resnet34", "resnet50"):
        path = os.path.join(shared, "cases/torchvision_0.14.1_state_dict_names.json")
        if os.path.exists(path):
            import json
            public = json.load(open(path))[model]
            if list(public) != names:
                complain("names differ from those of torchvision 0.14.1's %s" % model)
        else:
            print("skipped: names of torchvision's checkpoints are not at", path)
    if model == "resnet20":
        path = os.path.join(shared,
                            "cases/real/akamaster+pytorch_resnet_cifar10/pretrained_models/resnet20-12fca82f.th")
        if os.path.exists(path):
            public = torch.load(path, map_location="cpu")["state_dict"]
            strip = [n[len("module."):] if n.startswith("module.") else n for n in public]
            # The file is older than num_batches_tracked.
            tracked = any(n.endswith("num_batches_tracked") for n in strip)
            ours = [n for n in names if tracked or not n.endswith("num_batches_tracked")]
            if strip != ours:
                complain("names differ from those of the public resnet20 checkpoint")
            for name, value in zip(strip, public.values()):
                if net.conv1.in_channels == 3 and net.linear.out_features == 10 and value.shape != net.state_dict()[name].shape:
                    complain("%s has another shape in the public resnet20 checkpoint" % name)
        else:
            print("skipped: the public resnet20 checkpoint is not at", path)


def read_dump(arguments):
    records = read_records(subprocess.run(arguments, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    return records, dict(records)


def check_names(model, net, records, by_name, same_names):
    before = [(n[len("before "):], v) for n, v in records if n.startswith("before ")]
    reference = net.state_dict()
    names = [n for n, _ in before]
    if same_names:
        if names != list(reference):
            complain("state dict: %s instead of %s" % (names, list(reference)))
            sys.exit(1)
        if by_name["print"] != str(net):
            complain("printed:\n%s\ninstead of\n%s" % (by_name["print"], net))
        check_public_names(model, net, names)
    for (name, value), (theirs, want) in zip(before, reference.items()):
        if value.shape != want.shape or value.dtype != want.dtype:
            complain("%s is %s %s, %s in PyTorch" % (name, value.dtype, tuple(value.shape), tuple(want.shape)))
    net.load_state_dict({theirs: v for theirs, (_, v) in zip(reference, before)})


def check_values(net, records, by_name):
    """Everything but gradients; returns the worst error of those, and whose it is."""
    x, labels = by_name["input"].double(), by_name["labels"]
    net.eval()
    worst = {"eval": compare("logits, eval", by_name["eval"], net(x), 1e-4)}
    net.train()
    logits = net(x)
    worst["train"] = compare("logits, train", by_name["train"], logits, 1e-4)
    loss = F.cross_entropy(logits, labels)
    compare("loss", by_name["loss"], loss, 1e-5)
    net.zero_grad()
    loss.backward()
    # The same place on both sides: parameters in order.
    grads = [v for n, v in records if n.startswith("grad ")]
    if len(grads) != len(list(net.parameters())):
        complain("%d gradients" % len(grads))
    errors = {n: ((g.double() - p.grad).norm() / (p.grad.norm() + 1e-12)).item()
              for g, (n, p) in zip(grads, net.named_parameters())}
    after = [v for n, v in records if n.startswith("after ")]
    for got, (name, want) in zip(after, net.state_dict().items()):
        compare("after a step, " + name, got, want, 1e-4)
    net.eval()
    worst["eval after"] = compare("logits, eval after", by_name["eval after"], net(x), 1e-4)
    print({k: "%.2g" % v for k, v in worst.items() if v is not None}, "gradients %.2g" % max(errors.values()))
    return errors


def check_segments(net, pattern, records, by_name, allowed):
    """Gradients of PyTorch's checkpointing, before the step, against Muster's; and how often statistics were moved."""
    x, labels = by_name["input"].double(), by_name["labels"]
    grads = [v for n, v in records if n.startswith("grad ")]
    tracked = {v.item() for n, v in records if n.startswith("after ") and n.endswith("num_batches_tracked")}
    for reentrant in (True, False):
        other = copy.deepcopy(net).train()
        other.zero_grad()
        picked = []
        for name, module in other.named_modules():
            if fnmatch.fnmatch(name, pattern) and not any(name.startswith(p + ".") for p in picked):
                picked.append(name)
                module.forward = (lambda forward: lambda v: torch.utils.checkpoint.checkpoint(
                    forward, v, use_reentrant=reentrant))(module.forward)
        F.cross_entropy(other(x), labels).backward()
        errors = [((g.double() - p.grad).norm() / (p.grad.norm() + 1e-12)).item()
                  for g, p in zip(grads, other.parameters())]
        moved = {b.item() for n, b in other.named_buffers() if n.endswith("num_batches_tracked")}
        print("%d segments, use_reentrant=%s: gradients %.2g; batches counted %s in PyTorch, %s in Muster"
              % (len(picked), reentrant, max(errors), sorted(moved), sorted(tracked)))
        if not picked or len(errors) != len(grads):
            complain("nothing was compared")
        if max(errors) > allowed:
            complain("gradients differ from those with use_reentrant=%s" % reentrant)
    if tracked != {1}:
        complain("batches tracked: %s" % tracked)


def main():
    dump, model = sys.argv[1:3]
    side, channels, classes, _ = map(int, sys.argv[3:7])
    torch.set_num_threads(1)
    # A ReLU or maximum whose inputs round to the other side changes all gradients below it by about 1 %, in PyTorch's
    # float32 as well. The small networks get several batches, of which one must be free of that (a wrong gradient is
    # wrong in all); in the deep ones there is always such a place.
    deep = model in ("resnet34", "resnet50")
    for seed in range(1 if deep else 6):
        records, by_name = read_dump([dump] + sys.argv[2:] + ["seed=%d" % seed])
        net, same_names = make(model, side, channels, classes)
        check_names(model, net, records, by_name, same_names)
        net.double()  # so that what differs is Muster's rounding alone
        fresh = copy.deepcopy(net)
        errors = check_values(net, records, by_name)
        allowed = 0.15 if deep else 1e-4
        if max(errors.values()) <= allowed:
            for a in sys.argv[7:]:
                if a.startswith("checkpoint="):
                    check_segments(fresh, a[len("checkpoint="):], records, by_name, allowed)
            return
    for name, error in errors.items():
        if error > allowed:
            complain("gradient of %s: off by %.3g of its norm, %g is allowed" % (name, error, allowed))


main()
sys.exit(1 if failures else 0)
