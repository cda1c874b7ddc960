"""With current PyTorch and safetensors, where they are installed: what Muster writes, they read, bit for bit, and what
they write Muster converts. The interpreter that has them is MUSTER_TORCH_PYTHON, or python3 if that has both."""
import os
import subprocess
import sys

if len(sys.argv) == 1:
    probe = "import torch, safetensors.torch; v = torch.__version__.split('.'); assert (int(v[0]), int(v[1])) >= (2, 3), v"
    for python in filter(None, (os.environ.get("MUSTER_TORCH_PYTHON"), sys.executable, "python3")):
        try:
            if subprocess.run([python, "-c", probe], capture_output=True, timeout=200).returncode == 0:
                os.execvp(python, [python, __file__, "run"])
        except (OSError, subprocess.TimeoutExpired):
            pass
    print("skipped: no Python with current PyTorch and safetensors; MUSTER_TORCH_PYTHON names one")
    sys.exit(77)

import collections

import safetensors
import safetensors.torch
import torch
from torch import nn

from io_lib import check, finish, own_folder, run, tool, MUSTER

os.chdir(own_folder())
ENDS = {"torch": ".pt", "legacy": ".legacy", "safetensors": ".safetensors"}
print("torch %s, safetensors %s" % (torch.__version__, safetensors.__version__))


def raw(t):
    t = t.detach().resolve_conj().contiguous().clone()
    return bytes(t.flatten().view(torch.uint8).tolist()) if t.numel() > 0 else b""


def read(path):
    return safetensors.torch.load_file(path) if path.endswith(".safetensors") else torch.load(path)


def convert(a, b, *flags):
    r = run(MUSTER, "convert", a, b, "--force", *flags)
    check(r.returncode == 0, "convert %s %s: %s" % (a, b, r.stderr))


def same(got, want, what):
    check(set(got) == set(want), what + ": names")
    bad = [k for k in want if k in got and not (got[k].dtype is want[k].dtype and got[k].shape == want[k].shape and
                                                raw(got[k]) == raw(want[k]))]
    check(not bad, "%s: %s" % (what, bad))


def saved():
    """mu_save in all formats; safetensors byte for byte as its own library writes it."""
    for model in ("small", "resnet20", "cnn", "tied"):
        for to, end in ENDS.items():
            check(tool("save", model, model + end, "", to).returncode == 0, "save " + model + end)
        a, b = read(model + ".pt"), read(model + ".legacy")
        same(b, a, model)
        check(a._metadata == b._metadata, model + ": _metadata")
        c = read(model + ".safetensors")
        if model == "tied":
            c["b.weight"] = c["a.weight"]
        same(c, a, model + " as safetensors")
        if model != "tied":
            safetensors.torch.save_file(dict(a), "theirs.safetensors", metadata={"format": "pt"})
            check(open("theirs.safetensors", "rb").read() == open(model + ".safetensors", "rb").read(),
                  model + ": the bytes of safetensors' own writer")


def kinds():
    names = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
             "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
             "float8_e8m0fnu"]
    out = collections.OrderedDict()
    torch.manual_seed(3)
    for name in names:
        k = getattr(torch, name, None)
        if k is None:
            continue
        size = torch.empty((), dtype=k).element_size()
        data = torch.randint(0, 2 if name == "bool" else 256, (3, 5 * size), dtype=torch.uint8)
        t = data.view(k) if name != "bool" else data.bool()
        out[name], out[name + "_scalar"], out[name + "_empty"] = t, t[1, 1].clone(), t[:0].clone()
    out["nan"] = torch.tensor([0x7fc00001, -1, 0x7f800001, 0x7f800000], dtype=torch.int32).view(torch.float32)
    out["tied"] = out["float32"]
    out["permuted"] = torch.arange(24.).view(2, 3, 4).permute(2, 0, 1)
    return out


def round_trips():
    d = kinds()
    for zipped in (True, False):
        torch.save(d, "in.pt", _use_new_zipfile_serialization=zipped)
        for to, end in ENDS.items():
            convert("in.pt", "out" + end, "--to", to)
            got = read("out" + end)
            if to == "safetensors":
                got["tied"] = got["float32"]
            same(got, d, "torch to %s" % to)
            convert("out" + end, "back.pt")
            back = torch.load("back.pt")
            same(back, d, "and back from %s" % to)
            check(back["tied"].data_ptr() == back["float32"].data_ptr(), "tied after " + to)
    e = {k: v.contiguous() for k, v in d.items() if k != "tied"}
    safetensors.torch.save_file(e, "st.safetensors")
    for to, end in ENDS.items():
        convert("st.safetensors", "st2" + end, "--to", to)
        same(read("st2" + end), e, "safetensors' own to %s" % to)
    extra = {"c128": torch.randn(3, dtype=torch.complex128), "c32": torch.randn(3).to(torch.complex32)}
    torch.save(extra, "c.pt")
    for to in ("torch", "legacy"):
        convert("c.pt", "c2" + ENDS[to], "--to", to)
        same(read("c2" + ENDS[to]), extra, "complex128 and complex32 in " + to)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b.weight = self.a.weight


def tied_models():
    net, other = Tied(), Tied()
    torch.save(net.state_dict(), "net.pt")
    convert("net.pt", "net.safetensors")
    safetensors.torch.load_model(other, "net.safetensors")
    same(other.state_dict(), net.state_dict(), "load_model")
    safetensors.torch.save_model(net, "theirs.safetensors")
    with safetensors.safe_open("theirs.safetensors", "pt") as a, safetensors.safe_open("net.safetensors", "pt") as b:
        check(set(a.keys()) == set(b.keys()), "the names that save_model keeps")
        check({k: v for k, v in b.metadata().items() if k != "format"} ==
              {k: v for k, v in a.metadata().items() if k != "format"}, "and what it records of those it drops")
    convert("theirs.safetensors", "theirs.pt")
    got = torch.load("theirs.pt")
    same(got, net.state_dict(), "save_model's file")
    check(got["a.weight"].data_ptr() == got["b.weight"].data_ptr(), "is tied again")
    other.load_state_dict(got)


saved()
round_trips()
tied_models()
finish()
