#!/usr/bin/python3
"""Writes what all contestants of a workload train on: FOLDER/batch.pth (x, y) and FOLDER/weights.pth, a state dict.

    torch_inputs.py FOLDER MODEL CHANNELS SIDE CLASSES IMAGES [--cifar-stem] [--data DIR]

Images are random numbers of variance 1, or with --data the first of an IDX folder, normalised as torch_train.py does."""
import argparse
import os

import torch

from torch_models import build


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("folder")
    p.add_argument("model")
    for name in ["channels", "side", "classes", "images"]:
        p.add_argument(name, type=int)
    p.add_argument("--cifar-stem", action="store_true")
    p.add_argument("--data")
    o = p.parse_args()
    torch.manual_seed(1)
    if o.data:
        from torch_train import load, prepare
        images, labels = load(o.data, "train", 0)
        x, y = prepare(images[:o.images], argparse.Namespace(channels_last=False)), labels[:o.images]
    else:
        x, y = torch.randn(o.images, o.channels, o.side, o.side), torch.randint(o.classes, (o.images,))
    torch.save({"x": x.clone(), "y": y.clone()}, os.path.join(o.folder, "batch.pth"))
    net = build(o.model, o.channels, o.side, o.classes, o.cifar_stem)
    torch.save(net.state_dict(), os.path.join(o.folder, "weights.pth"))


main()
