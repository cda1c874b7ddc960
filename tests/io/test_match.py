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


# How a file may have other names, and the rules that give the model's.
RENAMINGS = {
    "none": (lambda k: k, []),
    "one module": (lambda k: re.sub(r"^1\.", "norm.", k), [r"(^|\.)norm\.=\11."]),
    "deeper": (lambda k: re.sub(r"^1\.", "stem.bn.", k), [r"stem\.bn\.=1."]),
    "all": (lambda k: "enc." + k, [r"enc\.="]),
    # the batch norm has the path that the convolution has in the model, and the other way round
    "exchanged": (lambda k: re.sub(r"^[01]\.", lambda m: {"0.": "1.", "1.": "0."}[m.group()], k),
                  [r"(^|\.)0\.=\1x.", r"(^|\.)1\.=\10.", r"(^|\.)x\.=\11."]),
}


def versions_under_renaming():
    """A batch norm's num_batches_tracked may be missing if the file's _metadata says that its version had none; that is
    looked up by the file's name of the module, whatever rules and prefixes make of it."""
    outcomes = set()
    norm = [k for k in small().state_dict() if k.startswith("1.")]
    for what, (name, rules) in RENAMINGS.items():
        for version in (None, 1, 2, "no metadata"):
            for prefix in ("", "module."):
                for dropped in ([], ["1.num_batches_tracked"], ["1.num_batches_tracked", "1.weight"], norm):
                    d = small().state_dict()
                    for k in dropped:
                        del d[k]
                    if version == "no metadata":
                        del d._metadata
                    elif version is None:
                        del d._metadata["1"]
                    else:
                        d._metadata["1"] = {"version": version}
                    renamed = type(d)((prefix + name(k), v) for k, v in d.items())
                    if hasattr(d, "_metadata"):
                        renamed._metadata = type(d)(((prefix + name(k + "."))[:-1] if k else "", v)
                                                    for k, v in d._metadata.items())
                    torch.save(renamed, "in.pt")
                    want = small().load_state_dict(d, strict=False).missing_keys
                    outcomes.add((len(dropped), len(want)))
                    case = "%s, version %s, prefix '%s', without %s" % (what, version, prefix, dropped)
                    t = tool("convert", "small", "in.pt", "out.pt", "loose", "-", *rules)
                    check(t.returncode == 0 and names(t.stdout, "missing in the file") == want,
                          "%s: torch misses %s: %s%s" % (case, want, t.stdout, t.stderr))
                    t = tool("convert", "small", "in.pt", "out.pt", "strict", "-", *rules)
                    check(t.returncode == (1 if want else 0), "%s, strict: torch misses %s: %s" % (case, want, t.stderr))
    check(outcomes == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (5, 4), (5, 5)}, "all outcomes were seen: %s" % outcomes)


def unused_rules():
    """A rule that matched no name is warned of, also when it matched some in a dict that was not taken."""
    d = small().state_dict()
    torch.save({"good": {k.replace("4.", "fc."): v for k, v in d.items()},
                "bad": {"teacher.p": torch.ones(3), "teacher.q": torch.ones(3)}}, "in.pt")
    rules = ["^teacher=student", "^fc=4", "gamma=weight"]
    t = tool("convert", "small", "in.pt", "out.pt", "strict", "-", *rules)
    check(t.returncode == 0, "unused rules: " + t.stderr)
    warned = re.findall(r"rename '(.*)' matched no name", t.stderr)
    check(warned == [rules[0], rules[2]], "unused rules: warned of %s: %s" % (warned, t.stderr))


random_edits()
unused_rules()
versions_under_renaming()
finish()
