"""`muster convert`: round trips through all formats, bit for bit, against PyTorch and for every file of ../shared/cases;
types, names, ties, versions; what is left out is named and what cannot be written is refused before anything is."""
import collections
import os
import re
import sys

import torch
from torch import nn

from io_lib import check, finish, inspect, own_folder, raw, run, MUSTER, SHARED

os.chdir(own_folder())
CASES = os.path.join(SHARED, "cases")
ENDS = {"torch": ".pt", "legacy": ".legacy", "safetensors": ".safetensors"}


def convert(a, b, *flags):
    return run(MUSTER, "convert", a, b, "--force", *flags)


def good(a, b, *flags):
    r = convert(a, b, *flags)
    check(r.returncode == 0, "convert %s %s %s: %s" % (a, b, " ".join(flags), r.stderr))
    return r.stdout


def refused(code, words, a, b, *flags):
    if os.path.exists(b):
        os.remove(b)
    r = convert(a, b, *flags)
    check(r.returncode == code and words in r.stderr and not os.path.exists(b) and r.stderr.count("\n") == 1,
          "%s: exit %d, %s" % (words, r.returncode, r.stderr))


def bits(path, below=""):
    """{name: (dtype, shape, hash)} and the groups of tied names, of the tensors below a path."""
    out, ties = {}, collections.defaultdict(set)
    for t in inspect(path)["tensors"]:
        name = re.sub(r"<[^>]*>", "", t["name"])
        if below and not re.match(re.escape(below) + r"(\.|\[|$)", name):
            continue
        name = name[len(below):].lstrip(".") or below.rsplit(".", 1)[-1] or "tensor"
        out[name] = (t["dtype"], tuple(t["shape"]), t["sha256"])
        ties[t["tied_to"] or t["name"]].add(name)
    return out, sorted(sorted(g) for g in ties.values() if len(g) > 1)


def same_bits(a, b, what):
    bad = [(n, a.get(n), b.get(n)) for n in set(a) | set(b) if a.get(n) != b.get(n)]
    check(not bad, "%s: %s" % (what, bad[:2]))


# -- every file of the cases -----------------------------------------------------------------------------------------

WHY_NOT = ("no state dict in the file", "is sparse", "on the meta device", "quantised, which safetensors", "complex128", "subclass")


def cases():
    files = []
    for folder in ("real", "gen"):
        for at, _, names in os.walk(os.path.join(CASES, folder)):
            files += [os.path.join(at, n) for n in names if not n.endswith((".tsv", ".md", ".json", ".txt"))]
    os.mkdir("again")
    trips = tensors = 0
    no = collections.Counter()
    for path in sorted(files):
        if run(MUSTER, "inspect", path).returncode != 0:
            no["not readable"] += 1
            continue
        r = convert(path, "a.pt")
        keys = [None]
        if "several state dicts" in r.stderr:
            keys = re.findall(r'"([^"]*)" \(\d+ tensor', r.stderr)
        for key in keys:
            flags = ["--key", key] if key is not None else []
            r = convert(path, "a.pt", *flags)
            if r.returncode != 0:
                why = [w for w in WHY_NOT if w in r.stderr]
                check(len(why) == 1, "%s: %s" % (path, r.stderr))
                no[why[0] if why else "?"] += 1
                continue
            source = bits("a.pt")
            stored, groups = source
            whole = whole_dict(path, key, stored)
            same_bits({n: whole.get(n) for n in stored}, stored, path + " to zip")
            check(stored == whole or "bare" in r.stdout, path + ": all tensors: %s" % (set(whole) - set(stored)))
            r = convert("a.pt", "b.safetensors")
            if r.returncode != 0:
                why = [w for w in WHY_NOT if w in r.stderr]
                check(len(why) == 1, "%s to safetensors: %s" % (path, r.stderr))
                no["safetensors: " + (why[0] if why else "?")] += 1
            else:
                same_bits(bits("b.safetensors")[0], stored, path + " to safetensors")
                good("b.safetensors", "c.pt")
                again, ties = bits("c.pt")
                same_bits(again, stored, path + " to safetensors and back")
                check(ties == groups, "%s: ties %s, %s before" % (path, ties, groups))
                trips += 1
            good("a.pt", "d.legacy", "--to", "legacy")
            check(bits("d.legacy") == source, path + " to legacy")
            good("d.legacy", "again/a.pt")
            check(open("again/a.pt", "rb").read() == open("a.pt", "rb").read(), path + ": zip, legacy, zip")
            tensors += len(stored)
    print("cases: %d files, %d state dicts with %d tensors went through safetensors and back; not converted: %s" %
          (len(files), trips, tensors, dict(no)))
    check(trips >= 80, "enough files")


def whole_dict(path, key, stored):
    """The source's tensors below the state dict: its path is what stands before the names in the source."""
    if key is not None:
        return bits(path, key)[0]
    every = bits(path)[0]
    if set(stored) == {"tensor"}:
        return {"tensor": v for v in every.values()}
    first = next(iter(stored))
    starts = [n[:len(n) - len(first)] for n in every if n.endswith(first)]
    starts = [p for p in starts if all(p + n in every for n in stored)]
    return {n[len(p):]: v for p in starts[:1] for n, v in every.items() if n.startswith(p)}


# -- against PyTorch -------------------------------------------------------------------------------------------------

def everything():
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
             torch.uint8, torch.bool, torch.complex64]
    d = collections.OrderedDict()
    torch.manual_seed(2)
    for k in kinds:
        t = torch.randn(3, 5, dtype=torch.complex128 if k.is_complex else torch.float64) * 50
        d[str(k)] = (t > 0) if k is torch.bool else t.abs().to(k) if k is torch.uint8 else t.to(k)
        d[str(k) + "_scalar"] = d[str(k)][1, 1].clone()
        d[str(k) + "_empty"] = d[str(k)][:0].clone()
    d["nan"] = torch.tensor([0x7fc00001, -1, 0x7f800001, 0x7f800000], dtype=torch.int32).view(torch.float32)
    d["tied"] = d["torch.float32"]
    base = torch.arange(24.).view(2, 3, 4)
    d["base"], d["permuted"], d["slice"], d["step"] = base, base.permute(2, 0, 1), base[1], base.view(-1)[1::5]
    d["expanded"] = torch.ones(3, 1).expand(3, 4)
    d["eight"] = torch.zeros(1, 1, 1, 1, 1, 1, 1, 2)
    d["nine"] = torch.ones(1, 1, 1, 1, 2, 1, 1, 1, 2)
    return d


def round_trips():
    d = everything()
    torch.save(d, "in.pt")
    for to in ("torch", "legacy"):
        text = good("in.pt", "out" + ENDS[to], "--to", to)
        got = torch.load("out" + ENDS[to], weights_only=False)
        check(list(got) == list(d) and all(raw(got[k]) == raw(d[k]) and got[k].dtype is d[k].dtype for k in d), to)
        check(got["tied"].data_ptr() == got["torch.float32"].data_ptr(), to + ": tied")
        check("tied: tied to torch.float32" in text and "own now: base, permuted, slice, step" in text, to + ": " + text)
    text = good("in.pt", "out.safetensors")
    good("out.safetensors", "back.legacy", "--to", "legacy")
    got = torch.load("back.legacy")
    check(set(got) == set(d) and all(raw(got[k]) == raw(d[k]) and got[k].dtype is d[k].dtype for k in d), "safetensors")
    check(got["tied"].data_ptr() == got["torch.float32"].data_ptr(), "tied after safetensors")
    torch.save({"z": torch.zeros(2, dtype=torch.complex128)}, "c128.pt")
    refused(1, "tensor 'z' is of complex128, which safetensors does not have", "c128.pt", "no.safetensors")
    q = {"t": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 5, torch.quint8),
         "i": torch.quantize_per_tensor(torch.randn(2), 0.3, 0, torch.qint32),
         "c": torch.quantize_per_channel(torch.randn(3, 4), torch.tensor([0.1, 0.25, 0.3]), torch.tensor([1, 0, -2]), 0, torch.qint8),
         "d": torch.quantize_per_channel(torch.randn(2, 3, 2), torch.rand(3) + 0.1, torch.arange(3), 1, torch.quint8)}
    torch.save(q, "q.pt")
    for to in ("torch", "legacy"):
        good("q.pt", "q2" + ENDS[to], "--to", to)
        got = torch.load("q2" + ENDS[to])
        for k in q:
            a, b = q[k], got[k]
            check(torch.equal(a.int_repr(), b.int_repr()) and a.qscheme() == b.qscheme() and torch.equal(a.dequantize(), b.dequantize()),
                  "quantised %s in %s" % (k, to))
    refused(1, "tensor 't' is quantised, which safetensors cannot hold", "q.pt", "no.safetensors")
    # onto itself
    before = bits("in.pt")
    good("in.pt", "in.pt", "--to", "legacy")
    check(bits("in.pt") == before and inspect("in.pt")["format"] == "torch legacy", "onto its own input")
    r = run(MUSTER, "convert", "in.pt", "in.pt")
    check(r.returncode == 2 and "--force" in r.stderr, "a file that is there is not replaced: " + r.stderr)


def types():
    torch.manual_seed(6)
    x = torch.cat([torch.randn(70000) * 10 ** torch.randint(-45, 39, (70000,)).float(),
                   torch.arange(2 ** 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float(),
                   (torch.arange(2 ** 16, dtype=torch.int32) * 65536 + 32768).view(torch.float32),
                   torch.tensor([0., -0., float("inf"), -float("inf"), float("nan"), 65519.99, 65520, 1e-45, 2 ** -25., 3e-8])])
    d = {"f32": x, "f64": torch.cat([x.double(), torch.randn(50000).double() * (1 + 2 ** -40)]), "f16": x.half(),
         "bf16": x.bfloat16(), "int": torch.arange(5), "bool": torch.tensor([True, False]), "c": torch.ones(2, dtype=torch.complex64)}
    torch.save(d, "t.pt")
    for name in ("float32", "float64", "float16", "bfloat16"):
        for to in ENDS:
            text = good("t.pt", "o" + ENDS[to], "--dtype", name, "--to", to)
            check("converted to %s: 3 tensors" % name in text, "report: " + text)
            if to == "safetensors":
                good("o" + ENDS[to], "o.pt")
            got = torch.load("o.pt" if to == "safetensors" else "o" + ENDS[to])
            for k, v in d.items():
                want = v.to(getattr(torch, name)) if k in ("f32", "f64", "f16", "bf16") else v
                nan = torch.isnan(want)
                check(got[k].dtype is want.dtype and torch.equal(torch.isnan(got[k]), nan) and
                      raw(torch.where(nan, torch.zeros_like(want), got[k])) == raw(torch.where(nan, torch.zeros_like(want), want)),
                      "%s to %s in %s" % (k, name, to))


def names():
    net = nn.Sequential(collections.OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4),
                                                deep=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    want = net.state_dict()
    torch.save({"state_dict": nn.DataParallel(net).state_dict(), "epoch": 3, "optimizer": {"state": {}, "param_groups": []},
                "best": 0.5, "args": None, "ema": [torch.ones(2)]}, "w.pt")
    text = good("w.pt", "o.pt", "--strip-prefix", "module.")
    got = torch.load("o.pt", weights_only=True)
    check(list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want), "module. removed")
    check(dict(got._metadata) == dict(want._metadata), "_metadata: %s, %s" % (dict(got._metadata), dict(want._metadata)))
    net.load_state_dict(got)
    for words in ("epoch (int)", "optimizer (dict)", "best (float)", "args (None)", "ema (list)", "1 tensor outside"):
        check(words in text, "left out: %s: %s" % (words, text))
    r = convert("w.pt", "o.pt", "--strip-prefix", "modle.")
    check(r.returncode == 0 and "warning: w.pt: no name begins with 'modle.'" in r.stderr, "a prefix that none has: " + r.stderr)
    check("warning" not in convert("w.pt", "o.pt", "--strip-prefix", "module.").stderr, "a prefix that all have")
    check("state_dict" not in text.split("renamed")[0], "what is kept is not left out: " + text)
    good("o.pt", "p.pt", "--prefix", "module.")
    got = torch.load("p.pt", weights_only=True)
    check(dict(got._metadata) == dict(nn.DataParallel(net).state_dict()._metadata), "module. added: %s" % dict(got._metadata))
    nn.DataParallel(net).load_state_dict(got)
    text = good("o.pt", "q.pt", "--rename", r"^deep\.([0-9]+)\.=tail\1.", "--rename", "conv=first", "--prefix", "a.")
    got = torch.load("q.pt", weights_only=True)
    check(list(got)[0] == "a.first.weight" and "a.tail1.running_mean" in got, "renamed: %s" % list(got))
    check(got._metadata["a.tail1"] == {"version": 2} and got._metadata["a.first"] == {"version": 1}, "renamed versions")
    check("renamed: conv.weight to a.first.weight" in text and "more" in text, "the report: " + text)
    refused(1, "'conv.bias' and 'bn.bias' would both become 'x.bias'", "o.pt", "no.pt", "--rename", "^(conv|bn)=x")
    refused(2, "no tensor below", "w.pt", "no.pt", "--key", "nothing")
    torch.save({"g": want, "d": {k: v for k, v in want.items()}}, "two.pt")
    refused(2, '"g" (14 tensors), "d" (14 tensors)', "two.pt", "no.pt")
    good("two.pt", "d.pt", "--key", "d")
    got = torch.load("d.pt")
    check(list(got) == list(want) and not hasattr(got, "_metadata"), "no versions where there were none")
    torch.save(net, "module.pt")
    text = good("module.pt", "m.pt")
    check(list(torch.load("m.pt")) == list(want) and "left out: the modules' classes" in text, "a pickled module: " + text)
    d = collections.OrderedDict(want)
    d["step"], d["more"] = 7, {"w": torch.ones(1), "n": 5, "nothing": {}}
    torch.save(d, "extra.pt")
    text = good("extra.pt", "x.pt")
    check("left out: step (int), more.n (int), more.nothing (dict)" in text, "values in it: " + text)
    torch.save(torch.ones(3), "bare.pt")
    good("bare.pt", "bare.safetensors")
    check(list(bits("bare.safetensors")[0]) == ["tensor"], "a bare tensor")


class Holder:
    """Something pickled whole, which inspect shows as <Holder>."""


def odd_names():
    """Names that look like inspect's marks of classes, empty ones, dots: all of them stay, in every format."""
    names = ["", ".", "..", "a.", "emb.<pad>", "emb.<unk>", "a<", ">b", "<c>", "x[0]", "tensor", "new\nline", 'q"\\', "a=b", "\u2603"]
    d = collections.OrderedDict((n, torch.full((2,), float(i))) for i, n in enumerate(names))
    torch.save(d, "odd.pt")
    for kind, end in ENDS.items():
        good("odd.pt", "odd1" + end, "--to", kind)
        for to, last in ENDS.items():
            good("odd1" + end, "odd2" + last, "--to", to)
            if to != "safetensors":
                got = torch.load("odd2" + last)
                check(set(got) == set(d) and all(torch.equal(got[n], d[n]) for n in d), "odd names by %s and %s: %s" % (kind, to, list(got)))
            r = run(MUSTER, "diff", "odd.pt", "odd2" + last)
            check(r.returncode == 0, "diff of odd names: " + r.stdout)
    holder = Holder()
    holder.net = {"weights": d, "epoch": 3}
    torch.save(holder, "held.pt")
    for key in ("net.weights", "<Holder>.net.weights", "<Holder>.net.weights."):
        good("held.pt", "odd3.pt", "--key", key)
        check(list(torch.load("odd3.pt")) == names, "odd names below %s: %s" % (key, list(torch.load("odd3.pt"))))
    torch.save({"net.<a>": {"w": torch.ones(2)}, "net.<b>": {"w": torch.zeros(2)}}, "keys.pt")
    for key in ("net.<a>", "net.<b>"):
        good("keys.pt", "odd3.pt", "--key", key)
        check(torch.load("odd3.pt")["w"][0].item() == (key == "net.<a>"), "a key that looks like a class: " + key)
    torch.save(torch.ones(2), "bare.pt")
    good("bare.pt", "odd3.pt")
    check(list(torch.load("odd3.pt")) == ["tensor"], "a bare tensor's name")


def unwritable():
    torch.save({"a": torch.ones(2), "s": torch.eye(3).to_sparse()}, "s.pt")
    torch.save({"a": torch.ones(2), "m": torch.empty(2, device="meta")}, "m.pt")
    for to in ENDS:
        refused(1, "tensor 's' is sparse", "s.pt", "no" + ENDS[to], "--to", to)
        refused(1, "tensor 'm' is on the meta device", "m.pt", "no" + ENDS[to], "--to", to)
    refused(2, "cannot open", "none.pt", "no.pt")
    torch.save({"__metadata__": torch.ones(2)}, "meta.pt")
    refused(2, "__metadata__", "meta.pt", "no.safetensors")
    # a checksum that is wrong is found while writing: nothing is left
    torch.save({"a": torch.arange(100.), "b": torch.ones(5)}, "crc.pt")
    data = bytearray(open("crc.pt", "rb").read())
    at = data.find(torch.arange(100.).numpy().tobytes())
    data[at + 50] ^= 1
    open("crc.pt", "wb").write(data)
    refused(1, "checksum", "crc.pt", "no.pt")
    check([f for f in os.listdir(".") if ".tmp." in f] == [], "no temporary files are left")


def memory():
    """A file of 256 MB in 64 tensors is converted in far less memory than it has."""
    torch.save({"t%d" % i: torch.full((1 << 20,), float(i)) for i in range(64)}, "big.pt")
    for to in ("safetensors", "torch", "legacy"):
        r = run("python3", "-c", "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)",
                MUSTER, "convert", "big.pt", "big.out", "--force", "--quiet", "--to", to, "--dtype", "float64")
        kilobytes, code = map(int, r.stdout.split()[-2:])
        print("256 MB of float32 to float64 as %s: %d MB at most" % (to, kilobytes // 1024))
        check(code == 0 and (kilobytes < 120000 or "asan" in MUSTER), "memory: %d kB" % kilobytes)
    os.remove("big.pt")
    os.remove("big.out")


if sys.argv[1] == "cases":
    if not os.path.isdir(CASES):
        print("skipped: no %s" % CASES)
        sys.exit(77)
    cases()
else:
    round_trips()
    types()
    names()
    odd_names()
    unwritable()
    memory()
finish()
