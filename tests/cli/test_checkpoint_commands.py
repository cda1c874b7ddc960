#!/usr/bin/python3
"""The commands that look into checkpoints, with PyTorch as the oracle. test_checkpoint_commands.py CASE"""
import argparse
import collections
import json
import os
import re
import sys
import zipfile

import torch
from torch import nn

from cli_lib import Work
from torch_steps import torch_models


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


def inspect():
    """--globals, --strict, --key, roles, and names that try to write to the terminal."""
    net = small()
    with Looker() as w:
        plain, module = w.save(net.state_dict(), "plain.pt"), w.save({"net": net, "note": 1}, "module.pt")
        assert w.run("inspect", "--strict", plain).returncode == 0
        done = w.run("inspect", "--strict", module)
        assert done.returncode == 3 and "torch.nn.modules.linear.Linear" in done.stdout, done
        got = w.json("inspect", "--globals", "--strict", module, code=3)
        marks = {g["name"]: g["runs_code"] for g in got["all_globals"]}
        assert marks["torch.nn.modules.container.Sequential"] and not marks["torch._utils._rebuild_tensor_v2"], marks
        assert sorted(g for g in marks if marks[g]) == sorted(got["globals"]) and list(marks) == list(dict.fromkeys(marks))
        text = w.ok("inspect", "--globals", module)
        assert "runs code  torch.nn.modules.linear.Linear" in text and "data       collections.OrderedDict" in text, text
        # Inside arguments too: a function that is only an argument of another call.
        class Evil:
            def __reduce__(self):
                return (collections.OrderedDict, ([("x", os.system)],))
        got = w.json("inspect", w.save({"a": [Evil()], "w": torch.ones(1)}))["globals"]
        assert got == ["posix.system"], got

        both = w.save({"model": {"module." + k: v for k, v in net.state_dict().items()}, "ema": net.state_dict()}, "two.pt")
        got = w.json("inspect", "--key", "ema", both)
        assert [t["name"] for t in got["tensors"]] == ["ema." + k for k in net.state_dict()]
        assert [d["prefix"] for d in got["state_dicts"]] == ["module.", ""], got["state_dicts"]
        assert "--key" in w.ok("inspect", both) and '"module."' in w.ok("inspect", both)
        assert w.run("inspect", "--key", "nothing", both).returncode == 2

        custom = Custom()
        custom.inner[0].bias.requires_grad_(False)
        roles = {t["name"]: (t["role"], t["requires_grad"]) for t in w.json("inspect", w.save(custom))["tensors"]}
        want = {n: ("parameter", p.requires_grad) for n, p in custom.named_parameters()}
        want.update({n: ("buffer", False) for n, b in custom.named_buffers() if n in custom.state_dict()})
        assert roles == want, roles
        assert not any(t["role"] for t in w.json("inspect", plain)["tensors"])

        nasty = "\x1b[2J\x07\x9b31m\r\n"
        for command in (["inspect"], ["verify"], ["names"]):
            text = w.ok(*command, w.save({nasty: torch.tensor([float("nan")]), "w": torch.ones(1)}, "nasty.pt"))
            assert not set(text) & set("\x1b\x07\x9b\r"), repr(text)
        text = w.run("diff", "nasty.pt", "plain.pt").stdout
        assert not set(text) & set("\x1b\x07\x9b\r"), repr(text)
        assert w.json("inspect", os.path.join(w.path, "nasty.pt"))["tensors"][0]["name"] == nasty
    print("inspect: globals, strict, key, roles")


def compared(a, b, rtol, atol):
    """What torch says about two tensors: elements out of tolerance, largest absolute and relative difference, where."""
    a, b = a.double(), b.double()
    both = a.isnan() & b.isnan()
    off = torch.where((a == b) | both, torch.zeros_like(a), (a - b).abs())
    off = torch.where(off.isnan(), torch.full_like(a, float("inf")), off)
    size = torch.where(b.isnan(), torch.ones_like(b), b.abs())
    rel = torch.where(off == 0, torch.zeros_like(off), torch.where(off.isinf(), off, off / size))
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    at = off.flatten().argmax().item() if off.numel() and off.max() > 0 else None
    return (~close).sum().item(), off.max().item() if off.numel() else 0.0, rel.max().item() if rel.numel() else 0.0, at


def number(x):
    return float(x)


def diff():
    """Numbers as torch computes them, across formats and types; names, keys, prefixes; exit codes."""
    torch.manual_seed(4)
    base = {"f32": torch.randn(5, 7), "f64": torch.randn(3, dtype=torch.float64), "f16": torch.randn(9).half(),
            "bf16": torch.randn(6, 2).bfloat16(), "i64": torch.randint(-2**62, 2**62, (4,)), "u8": torch.arange(5).byte(),
            "bool": torch.tensor([True, False]), "scalar": torch.tensor(3.0), "none": torch.zeros(0, 3),
            "nan": torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0, float("nan")]),
            "zero": torch.tensor([0.0, -0.0, 0.0]), "view": torch.randn(6, 4).t()}
    other = {k: v.clone() for k, v in base.items()}
    other["f32"][3, 2] += 0.5
    other["f32"][1] *= 1 + 1e-6
    other["f64"] *= 1 + 1e-12
    other["f16"][4] = 0
    other["bf16"] = other["bf16"].float() + 1e-3
    other["i64"][2] += 1
    other["u8"][1] = 200
    other["bool"][1] = True
    other["nan"] = torch.tensor([float("nan"), 1.0, float("inf"), float("inf"), 1e-3, float("nan")])
    other["zero"] = torch.tensor([-0.0, 0.0, 1e-30])
    with Looker() as w:
        a = w.save(base, "a.pt")
        legacy = w.save(base, "a.legacy.pt", _use_new_zipfile_serialization=False)
        b = w.save(other, "b.pt")
        assert w.run("diff", a, legacy).returncode == 0
        got = w.json("diff", a, legacy)
        assert got["same"] and got["equal"] == len(base) and got["max_abs"] == 0
        checked = 0
        for rtol, atol in ((0, 0), (1e-5, 1e-8), (0.1, 0.01)):
            for x, y, first, second in ((a, b, base, other), (b, a, other, base)):
                got = w.json("diff", x, y, "--rtol", rtol, "--atol", atol, code=1)
                assert [t["name"] for t in got["tensors"]] == list(first)
                for t in got["tensors"]:
                    n, most, rel, at = compared(first[t["name"]], second[t["name"]], rtol, atol)
                    if t["name"] == "i64":  # torch's doubles cannot see a difference of 1 up there
                        n, most, rel, at = int(rtol == 0), 1.0, 1 / abs(int(second["i64"][2])), 2
                    assert t["differ"] == n and t["status"] == ("differ" if n else "equal"), (t, n)
                    assert number(t["max_abs"]) == most, (t, most)
                    assert abs(number(t["max_rel"]) - rel) <= 1e-15 * rel or number(t["max_rel"]) == rel, (t, rel)
                    shape = second[t["name"]].shape
                    flat = None
                    if t["at"] or (t["differ"] and not shape):
                        flat = 0
                        for i, d in zip(t["at"], shape):
                            flat = flat * d + i
                    assert flat == at, (t, at)
                    checked += 1
                assert got["other_dtypes"] == 1 and got["differ"] == sum(t["status"] == "differ" for t in got["tensors"])
        same = {"x": torch.arange(6.0)}
        f64, bf16 = w.save({"x": same["x"].double()}, "f64.pt"), w.save({"x": same["x"].bfloat16()}, "bf16.pt")
        assert w.run("diff", f64, bf16).returncode == 0 and w.run("diff", f64, bf16, "--dtypes").returncode == 1
        c = torch.randn(4, dtype=torch.complex64)
        e = c.clone()
        e[1] += 3 + 4j
        got = w.json("diff", w.save({"c": c}, "c.pt"), w.save({"c": e}, "e.pt"), code=1)["tensors"][0]
        assert abs(got["max_abs"] - 5) < 1e-5 and got["at"] == [1] and got["differ"] == 1, got

        # Shapes, missing names, keys, prefixes, rules.
        net = small()
        state = net.state_dict()
        more = dict(state, extra=torch.ones(2))
        more["2.weight"] = torch.ones(3, 4)
        got = w.json("diff", w.save(state, "s.pt"), w.save({"model": {"module." + k: v for k, v in more.items()},
                                                            "optimizer": trained(small()).state_dict()}, "m.pt"), code=1)
        assert got["b"]["prefix_removed"] == "module." and got["b"]["key"] == "model" and got["a"]["prefix_removed"] == ""
        assert got["only_in_b"] == ["module.extra"] and got["only_in_a"] == [] and got["other_shapes"] == 1
        assert got["equal"] == len(state) - 1, got
        sparse = w.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, "sparse.pt")
        got = w.json("diff", sparse, sparse, code=1)
        assert got["incomparable"] == 1 and got["equal"] == 1, got
        assert {t["name"]: (t["status"], "sparse" in (t.get("why") or "")) for t in got["tensors"]}["s"] == \
            ("incomparable", True), got
        # Both begin with a prefix; only one of the two is in the way. Prefixes may be long.
        inner, outer = "model.", "module." * 40
        w.save({inner + k: v for k, v in state.items()}, "inner.pt")
        w.save({outer + inner + k: v for k, v in state.items()}, "outer.pt")
        for pair in ("inner.pt", "outer.pt"), ("outer.pt", "inner.pt"):
            got = w.json("diff", "../" + pair[0], "../" + pair[1])
            removed = {pair[0]: got["a"]["prefix_removed"], pair[1]: got["b"]["prefix_removed"]}
            assert removed == {"inner.pt": "", "outer.pt": outer} and got["equal"] == len(state), got
        state = {k: v.clone() for k, v in state.items()}
        w.save({"G": state, "D": state}, "two.pt")
        done = w.run("diff", "../two.pt", "../s.pt")
        assert done.returncode == 2 and '"G" (9 tensors)' in done.stderr and "--key" in done.stderr, done.stderr
        assert w.run("diff", "../two.pt", "../two.pt", "--key", "G").returncode == 0
        assert w.run("diff", "../two.pt", "../two.pt", "--key-a", "G", "--key-b", "D").returncode == 0
        assert w.run("diff", "../two.pt", "../two.pt", "--key", "").returncode == 0
        w.save({k.replace("0.", "first."): v for k, v in state.items()}, "r.pt")
        assert w.run("diff", "../r.pt", "../two.pt", "--key-b", "G").returncode == 1
        assert w.run("diff", "../r.pt", "../two.pt", "--key-b", "G", "--rename", "^first\\.=0.").returncode == 0
        for bad in (["../r.pt"], ["../r.pt", "../nowhere.pt"], ["../r.pt", "../r.pt", "--rename", "("],
                    ["../r.pt", "../r.pt", "../r.pt"], ["../r.pt", "../r.pt", "--rtol", "x"]):
            assert w.run("diff", *bad).returncode == 2, bad
        text = w.run("diff", a, b).stdout
        assert "max abs" in text and "12 tensors compared" in text, text
    print("diff: %d tensors as torch has them" % checked)


def verify():
    """Counts, checksums of members that are no tensors, what is odd, what is broken."""
    with Looker() as w:
        odd = {"w": torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]), "h": torch.tensor([float("nan")]).half(),
               "d": torch.tensor([float("inf")], dtype=torch.float64), "c": torch.tensor([complex(1, float("nan"))]),
               "i": torch.arange(3), "big": torch.tensor([3e38])}
        odd["tied"] = odd["i"]
        path = w.save(odd)
        got = w.json("verify", path)
        assert got["ok"] and got["error"] is None and got["tensors"] == 7 and got["tied"] == 1 and got["elements"] == 14, got
        assert {t["name"]: (t["nan"], t["inf"]) for t in got["not_finite"]} == \
            {"w": (1, 2), "h": (1, 0), "d": (0, 1), "c": (1, 0)}, got
        with zipfile.ZipFile(path) as z:
            assert got["members"] == got["checksums"] == len(z.namelist())
            assert got["storages"] == 6 and got["storage_bytes"] == sum(
                i.file_size for i in z.infolist() if "/data/" in i.filename), got
        assert got["file_bytes"] == os.path.getsize(path) and got["trailing_bytes"] == got["unreferenced"] == 0
        assert w.run("verify", path).returncode == 0 and w.run("verify", "--finite", path).returncode == 1
        assert w.run("verify", "--finite", w.save(small().state_dict())).returncode == 0
        assert w.json("verify", "--no-checksum", path)["checksums"] == 0
        # A tensor that cannot be read is counted, and not taken for a damaged file.
        got = w.json("verify", w.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, "sparse.pt"))
        assert got["ok"] and got["without_data"] == 1 and got["tensors"] == 2 and got["elements"] == 2, got
        legacy = w.save(odd, "l.pt", _use_new_zipfile_serialization=False)
        with open(legacy, "ab") as f:
            f.write(b"12345")
        got = w.json("verify", legacy)
        assert got["ok"] and got["trailing_bytes"] == 5 and got["members"] == 0 and got["warnings"], got

        # A storage that nothing refers to, and a changed byte in each member: inspect does not look at all of them.
        state = small().state_dict()
        path = w.save(state, "z.pt")
        with zipfile.ZipFile(path) as z, zipfile.ZipFile(os.path.join(w.path, "u.pt"), "w") as u:
            for i in z.infolist():
                u.writestr(i.filename, z.read(i.filename))
            root = i.filename.split("/")[0]
            u.writestr(root + "/data/99", b"x" * 24)
            u.writestr(root + "/extra/readme", b"hello there")
        got = w.json("verify", os.path.join(w.path, "u.pt"))
        assert got["ok"] and got["unreferenced"] == 1 and got["unreferenced_bytes"] == 24, got
        with open(os.path.join(w.path, "u.pt"), "rb") as f:
            whole = f.read()
        broken = 0
        with zipfile.ZipFile(os.path.join(w.path, "u.pt")) as z:
            for i in z.infolist():
                at = whole.index(z.read(i.filename), i.header_offset + 30 + len(i.filename))
                with open(os.path.join(w.path, "broken.pt"), "wb") as f:
                    f.write(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
                got = w.json("verify", os.path.join(w.path, "broken.pt"), code=1)
                assert not got["ok"] and i.filename in got["error"], (i.filename, got["error"])
                broken += 1
        for n in range(0, len(whole), 97):
            with open(os.path.join(w.path, "cut.pt"), "wb") as f:
                f.write(whole[:n])
            assert w.run("verify", os.path.join(w.path, "cut.pt")).returncode == 1, n
        assert w.run("verify", os.path.join(w.path, "nowhere.pt")).returncode == 2
    print("verify: %d members broken" % broken)


def counted(model):
    """What DDP counts: torch/nn/parallel/distributed.py, _build_params_for_reducer."""
    names, seen = [], set()
    for path, m in model.named_modules():
        for n, p in m.named_parameters(recurse=False):
            if p.requires_grad and p not in seen:
                seen.add(p)
                names.append(path + "." + n if path else n)
    return names


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.TransformerEncoderLayer(4, 2, 8)
        self.rnn = nn.LSTM(4, 4, 2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def names():
    """Indices as DDP counts them, from state dicts and pickled modules."""
    with Looker() as w:
        def check(model, *flags):
            got = None
            for name, o in (("s.pt", model.state_dict()), ("w.pt", {"epoch": 1, "model": model.state_dict()}),
                            ("m.pt", model)):
                got = w.json("names", w.save(o, name), *(flags if o is not model else ()))
                mine = [p["name"] for p in got["parameters"]]
                want = counted(model)
                assert mine == want, (name, [(x, y) for x, y in zip(mine, want) if x != y][:3], len(mine), len(want))
                assert [p["index"] for p in got["parameters"]] == list(range(len(want))) and got["count"] == len(want)
                assert [tuple(p["shape"]) for p in got["parameters"]] == \
                    [tuple(model.get_parameter(n).shape) for n in want]
            return got

        check(small())
        check(Tied())
        custom = Custom()
        check(custom, "--buffers", "^table$", "--frozen", "^scale$")
        net = torch_models.ResNet18(3, 1000)
        check(net)
        for n, p in net.named_parameters():
            p.requires_grad_(not n.startswith(("conv1", "bn1", "layer1")))
        frozen = ("--frozen", "^(conv1|bn1|layer1)\\.")
        check(net, *frozen)

        # The message itself, from a run of DDP.
        want = counted(net)
        path = w.save(net.state_dict())
        message = ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.\n"
                   "Parameter indices which did not receive grad for rank 0: 2 30 5\n In addition, you can set the "
                   "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print out information")
        for text in (message, "2,30,5", "2 30 5", "[2, 30, 5]"):
            got = w.json("names", path, "--indices", text, *frozen)["parameters"]
            assert [(p["index"], p["name"]) for p in got] == [(i, want[i]) for i in (2, 30, 5)], (text, got)
        assert want[30] in w.ok("names", path, "--indices", "30", *frozen)
        done = w.run("names", path, "--indices", "62")
        assert done.returncode == 1 and "62" in done.stderr, done
        for bad in (["--indices", "x"], ["--indices", "1,y"], ["--frozen", "("], ["--indices", "9" * 30], ["--indices", ""]):
            assert w.run("names", path, *bad).returncode == 2, bad

        # What cannot be told, and what an optimiser in the file says.
        got = w.json("names", w.save(custom.state_dict()))
        assert [p["name"] for p in got["parameters"] if p["doubtful"]] == ["scale", "table"] and got["doubts"], got
        model = small()
        got = w.json("names", w.save({"model": model.state_dict(), "optimizer": trained(model).state_dict()}))
        assert got["optimizer_count"] == got["count"] == 6 and got["doubts"] == [], got
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.1).state_dict()
        done = w.run("names", w.save({"model": model.state_dict(), "optimizer": sgd}))
        assert done.returncode == 0 and "2 parameters, 6 are counted" in done.stderr, done.stderr
        with open(os.path.join(w.path, "x.safetensors"), "wb") as f:
            head = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
            f.write(len(head).to_bytes(8, "little") + head + bytes(4))
        done = w.run("names", os.path.join(w.path, "x.safetensors"))
        assert done.returncode == 2 and "registration" in done.stderr and "named_parameters" in done.stderr, done
    print("names: as DDP counts")


def documented():
    """Every key of every --json output is in docs/checkpoint-json.md, and every key there was seen."""
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "../../docs/checkpoint-json.md"), encoding="utf-8") as f:
        sections = re.split(r"^## ", f.read(), flags=re.M)[1:]
    pages = {s.split("\n")[0]: {k for row in re.findall(r"^\| (`.*?) \|", s, re.M) for k in re.findall(r"`([^`]+)`", row)}
             for s in sections}

    def keys(o, path=""):
        if isinstance(o, dict):
            for k, v in o.items():
                yield (path + "." + k).lstrip(".")
                yield from keys(v, path + "." + k)
        elif isinstance(o, list):
            for v in o:
                yield from keys(v, path + "[]")

    alike = [("arrays[]", "tensors[]"), ("storages[]", "tensors[]"), ("b.", "a.")]
    with Looker() as w:
        import numpy
        net = small()
        odd = w.save({"model": dict(net.state_dict(), bad=torch.tensor([float("nan")])), "array": numpy.ones(3),
                      "q": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2).int(), 0, torch.qint8),
                      "storage": torch.ones(2).storage()}, "odd.pt")
        changed = w.save({"model": dict(net.state_dict(), bad=torch.ones(2), more=torch.ones(1))}, "changed.pt")
        sparse = w.save({"model": dict(net.state_dict(), bad=torch.eye(2).to_sparse())}, "sparse.pt")
        runs = {"inspect": [["inspect", "--hash", "--globals", odd]],
                "diff": [["diff", odd, changed], ["diff", sparse, changed]],
                "verify": [["verify", odd]], "names": [["names", odd, "--key", "model"]]}
        for command, lines in runs.items():
            seen = set()
            for line in lines:
                for k in keys(w.json(*line, code=1 if command == "diff" else 0)):
                    for x, y in alike:
                        k = y + k[len(x):] if k.startswith(x) and not (x == "b." and command != "diff") else k
                    seen.add(k)
            wanted = pages[command]
            assert seen - wanted == set(), (command, "not documented:", sorted(seen - wanted))
            assert wanted - seen == set(), (command, "documented, not seen:", sorted(wanted - seen))
    print("documented: " + ", ".join("%s %d keys" % (c, len(pages[c])) for c in runs))


if __name__ == "__main__":
    torch.manual_seed(1)
    globals()[sys.argv[1]]()
