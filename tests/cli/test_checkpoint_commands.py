#!/usr/bin/python3
"""The commands that look into checkpoints, with PyTorch as the oracle. test_checkpoint_commands.py CASE"""
import argparse
import collections
import json
import os
import sys

import torch
from torch import nn

from cli_lib import Work


class Looker(Work):
    """A folder of its own, with PyTorch's files written into it."""
    def save(self, o, name="x.pt", **options):
        path = os.path.join(self.path, name)
        torch.save(o, path, **options)
        return path

    def json(self, *args, code=0):
        done = self.run(*args, "--json")
        assert done.returncode == code, f"{args}: exit {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(net, kind=torch.optim.Adam):
    o = kind(net.parameters(), lr=0.1)
    net(torch.randn(5, 3)).sum().backward()
    o.step()
    return o


def candidates():
    """Which parts of a file count as the state dict."""
    net = small()
    state = net.state_dict()
    n = len(state)
    extra = collections.OrderedDict(state, **{"2._extra_state": {"amax": torch.ones(3)}, "0._extra_state": None})
    table = [  # an object, and (path, count) of its candidates
        (state, [("", n)]),
        (dict(state), [("", n)]),
        ({"state_dict": state, "epoch": 3, "best_acc1": torch.tensor(91.5)}, [("state_dict", n)]),
        ({"model": state, "optimizer": trained(net).state_dict(), "rng": torch.get_rng_state()}, [("model", n)]),
        ({"model": state, "ema": state}, [("model", n), ("ema", n)]),
        ({"G": state, "opt_G": trained(net).state_dict(), "D": state}, [("G", n), ("D", n)]),
        ({"model": state, "mean": torch.zeros(3), "std": torch.ones(3)}, [("model", n)]),
        ({"a": {"b": {"params": state, "lr": 0.1}}}, [("a.b.params", n)]),
        ({"hyper": argparse.Namespace(w=torch.ones(2)), "net": state}, [("net", n)]),
        ({"callbacks": {"Checkpoint": {"best_k_models": {"e1": torch.tensor(1.0)}, "score": torch.tensor(2.0)}},
          "state_dict": state, "optimizer_states": [trained(net).state_dict()]}, [("state_dict", n)]),
        ({"optimizer": {"state": {0: {"buf": torch.ones(3)}}}, "net": state}, [("net", n)]),
        (extra, [("", n + 1)]),
        (net, [("", n)]),
        ({"model": net, "ema": None, "optimizer": trained(net)}, [("model", n)]),
        ([state, 3], [("[0]", n)]),
        ({"epoch": 1, "name": "x", "lr": 0.5, "w": torch.ones(3)}, [("", 1)]),
        ({"steps": torch.tensor(3), "seen": torch.tensor([1, 2])}, [("", 2)]),
        ([torch.ones(2), torch.ones(3)], [("", 2)]),
        (torch.ones(2), [("", 1)]),
        ({"shadow": [torch.ones(2)], "decay": 0.9}, [("", 1)]),
        (trained(net).state_dict(), []),
        ({"epoch": 3}, []),
    ]
    with Looker() as w:
        for o, want in table:
            for options in ({}, {"_use_new_zipfile_serialization": False}):
                got = w.json("inspect", w.save(o, **options))["state_dicts"]
                assert [(d["path"], d["tensors"]) for d in got] == want, f"{want}: {got}"
        got = w.json("inspect", w.save(Custom()))
        module = {t["name"]: t for t in got["tensors"]}
        assert got["state_dicts"] == [{"path": "", "tensors": len(Custom().state_dict()), "prefix": ""}]
        assert list(module) == list(Custom().state_dict())
        torch.jit.save(torch.jit.script(net), os.path.join(w.path, "s.pt"))
        got = w.json("inspect", os.path.join(w.path, "s.pt"))["state_dicts"]
        assert got == [{"path": "", "tensors": n, "prefix": ""}], got
    print("%d objects, both formats" % len(table))


if __name__ == "__main__":
    torch.manual_seed(1)
    {"candidates": candidates}[sys.argv[1]]()
