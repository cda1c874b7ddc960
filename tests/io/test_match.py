"""Names that are missing, too many, of other shapes, or no tensors: after random edits of a state dict mu_load says what
PyTorch's load_state_dict says, strict or not."""
import os
import random
import re

import torch
from torch import nn

from io_lib import check, finish, own_folder, tool

os.chdir(own_folder())


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def edit(d, r):
    """One to four edits; the big weight stays, so that nothing of Muster's own rules about too little applies."""
    for _ in range(r.randint(1, 4)):
        name = r.choice([k for k in d if k != "4.weight"])
        kind = r.choice(["drop", "drop", "add", "value", "shape", "scalar", "type", "extra", "metadata"])
        if kind == "drop":
            del d[name]
        elif kind == "add":
            d[r.choice(["more.weight", "5.bias", "0.weights", "z"])] = torch.ones(r.randint(1, 3))
        elif kind == "value":
            d[r.choice(["epoch", "note", "none", "0.padding"])] = r.choice([3, "text", None, 0.5, [1, 2]])
        elif kind == "extra":
            d[r.choice(["0", "1"]) + "._extra_state"] = r.choice([{"a": 1}, 7])
        elif kind == "shape" and isinstance(d[name], torch.Tensor):
            d[name] = torch.ones(7, 2)
        elif kind == "scalar" and "1.num_batches_tracked" in d:
            d["1.num_batches_tracked"] = torch.tensor([5])
        elif kind == "type" and isinstance(d[name], torch.Tensor):
            d[name] = d[name].double()
        elif kind == "metadata" and hasattr(d, "_metadata"):
            del d._metadata


def names(text, what):
    section = re.search(r"^%s \(\d+\):\n((?:  .*\n)*)" % re.escape(what), text, re.M)
    return [line.strip().split(": ")[0] for line in section.group(1).splitlines()] if section else []


def random_edits():
    outcomes = set()
    for seed in range(60):
        r = random.Random(seed)
        d = small().state_dict()
        edit(d, r)
        # wrapped in all of them; _metadata too, as DataParallel and the like write it
        prefix = r.choice(["", "", "module.", "_orig_mod.", "module._orig_mod.model."])
        wrapped = type(d)((prefix + k, v) for k, v in d.items())
        if hasattr(d, "_metadata"):
            wrapped._metadata = type(d)((prefix + k if k else prefix[:-1], v) for k, v in d._metadata.items())
        torch.save(wrapped, "in.pt")
        for strict in (True, False):
            want, missing, unexpected = 0, [], []
            try:
                missing, unexpected = small().load_state_dict(d, strict=strict)
            except (RuntimeError, TypeError):
                want = 1
            t = tool("convert", "small", "in.pt", "out.pt", "strict" if strict else "loose")
            check(t.returncode == want, "seed %d strict %s: %d, torch %d: %s" % (seed, strict, t.returncode, want, t.stderr))
            outcomes.add((strict, want))
            if not strict and want == 0 and t.returncode == 0:
                got = names(t.stdout, "missing in the file")
                check(got == missing, "seed %d: missing %s, torch %s" % (seed, got, missing))
                got = sorted(names(t.stdout, "not in the model"))
                check(got == sorted(prefix + k for k in unexpected), "seed %d: unexpected %s, torch %s" % (seed, got, unexpected))
                mine, theirs = torch.load("out.pt"), small()
                theirs.load_state_dict(d, strict=False)
                check(all(torch.equal(mine[k], v) for k, v in theirs.state_dict().items() if k in d), "seed %d: values" % seed)
    check(outcomes == {(True, 0), (True, 1), (False, 0), (False, 1)}, "all outcomes were seen: %s" % outcomes)


random_edits()
finish()
