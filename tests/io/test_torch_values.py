"""What a PyTorch pickle can hold beside plain tensors, against torch and numpy: quantised tensors with their scales, NumPy
arrays and scalars, every storage class, locations, Parameters of old, subclasses, sparse and meta tensors, TorchScript's
constants; and, by hand, what this torch cannot write: tensors of version 3, opcodes of protocols 0 and 1."""
import hashlib
import os
import struct
import sys
import zipfile

import numpy
import torch
from torch import nn

from hostile_files import Pickle, legacy, torch_zip
from io_lib import check, finish, inspect, own_folder, raw, rezip, run, same, tool, MUSTER

torch.manual_seed(2)
os.chdir(own_folder())


def digest(data):
    return hashlib.sha256(data).hexdigest()


def row(got, kind, name):
    rows = [t for t in got[kind] if t["name"] == name] if got else []
    return rows[0] if len(rows) == 1 else {}


def quantised():
    x = torch.randn(4, 3, 2)
    scales = torch.tensor([0.1, 0.25, 0.031], dtype=torch.float64)
    o = {"tensor": torch.quantize_per_tensor(x, 0.05, 10, torch.quint8), "signed": torch.quantize_per_tensor(x, 0.5, -3, torch.qint8),
         "wide": torch.quantize_per_tensor(x, 1e-6, 0, torch.qint32),
         "channel": torch.quantize_per_channel(x, scales, torch.tensor([1, 0, -7]), 1, torch.qint8),
         "floats": torch.quantize_per_channel(x, scales.float(), torch.tensor([0.5, 1.25, -7.75]), 1, torch.quint8),
         "turned": torch.quantize_per_tensor(x, 0.05, 10, torch.quint8).permute(1, 0, 2)}
    for zipped in (True, False):
        torch.save(o, "q.pt", _use_new_zipfile_serialization=zipped)
        same("q.pt", o, "quantised")
        for name, t in o.items():
            r = tool("quantization", "q.pt", name)
            if t.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
                numbers = zip(t.q_per_channel_scales().double().tolist(), t.q_per_channel_zero_points().double().tolist())
                axis = t.q_per_channel_axis()
            else:
                numbers, axis = [(t.q_scale(), t.q_zero_point())], -1
            scheme = str(t.qscheme()).replace("torch.", "").replace("_float_qparams", "")  # which torch does not write
            want = "%s %d %s\n" % (scheme, axis, " ".join("%.17g:%.17g" % p for p in numbers))
            check(r.stdout == want, "%s: %r, not %r %s" % (name, r.stdout, want, r.stderr))


def arrays():
    kinds = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1", "c8", "c16", "u2", "u4", "u8"]
    base = numpy.arange(24).reshape(2, 3, 4)
    o = {}
    for k in kinds:
        o[k] = (base % 2).astype(k) if k == "b1" else base.astype(k)
        o[k + ".scalar"] = o[k][1, 2, 3]
        o[k + ".big"] = o[k].astype(">" + k)
        o[k + ".fortran"] = numpy.asfortranarray(o[k])
        o[k + ".step"] = o[k][:, ::2]
    o.update({"empty": numpy.zeros((0, 3)), "zero-dim": numpy.array(2.5), "nan": numpy.array([numpy.nan, -0.0, numpy.inf]),
              "strided": base.astype("f4").T, "tied": base})
    o["again"] = o["tied"]
    o["objects"] = numpy.array([numpy.ones(2), None, {"x": numpy.zeros(1)}], dtype=object)
    texts = {"text": numpy.array(["a", "bc"]), "when": numpy.datetime64("2020-01-01"), "records": numpy.zeros(2, "i4,f4")}
    for zipped in (True, False):
        for protocol in (2, 3, 4, 5):
            torch.save({"a": o, "other": texts, "t": torch.ones(2)}, "n.pt", pickle_protocol=protocol,
                       _use_new_zipfile_serialization=zipped)
            got = inspect("n.pt")
            want = {}
            for name, x in o.items():
                x = numpy.asarray(x)
                if name == "objects":
                    want.update({"a.objects[0]": x[0], "a.objects[2].x": x[2]["x"]})
                else:
                    want["a." + name] = x
            mine = {t["name"]: (t["dtype"], t["shape"], t["sha256"]) for t in got["arrays"]} if got else {}
            theirs = {n: (str(x.dtype.newbyteorder("=")), list(x.shape),
                          digest(numpy.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes())) for n, x in want.items()}
            check(mine == theirs, "arrays, protocol %d: %s" % (protocol, [(k, mine.get(k), v) for k, v in theirs.items()
                                                                          if mine.get(k) != v][:3] or set(mine) - set(theirs)))
            check(row(got, "arrays", "a.again").get("tied_to") == "a.tied", "an array twice is tied")
            check(got and len(got["tensors"]) == 1, "arrays are not tensors")
            check(got and not [g for g in got["globals"] if not g.startswith("numpy")], "globals: %s" % (got and got["globals"]))


def storages():
    o = {"typed": [torch.arange(n, dtype=d).storage() for n, d in ((3, torch.float32), (4, torch.int16), (0, torch.float64))],
         "cuda": torch.ones(2)}
    torch.save(o, "s.pt")
    got = inspect("s.pt")
    check(got and [(t["name"], t["dtype"], t["shape"]) for t in got["storages"]] ==
          [("typed[0]", "float32", [3]), ("typed[1]", "int16", [4]), ("typed[2]", "float64", [0])], "bare storages")
    check(row(got, "tensors", "cuda").get("location") == "cpu", "location: %s" % row(got, "tensors", "cuda"))
    rezip("s.pt", "c.pt", lambda n, d: d.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1") if n.endswith(".pkl") else d)
    check(row(inspect("c.pt"), "tensors", "cuda").get("location") == "cuda:1", "location cuda:1")


class Named(torch.Tensor):
    pass


def records():
    t = torch.randn(3, 4)
    named = t.clone().as_subclass(Named)
    named.label = "kept by torch, left out here"
    p = nn.Parameter(torch.randn(2, 5))
    o = {"named": named, "parameter": p, "list": nn.ParameterList([p, nn.Parameter(torch.ones(1))])}
    torch.save({"named": named, "parameter": p}, "r.pt")
    same("r.pt", {"named": t, "parameter": p}, "subclass with attributes, parameter")
    i = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(i, torch.tensor([3, 4, 5], dtype=torch.int16), (2, 3))
    csr = torch.randn(3, 4, dtype=torch.float64).to_sparse_csr()
    torch.save({"coo": sparse, "csr": csr, "meta": torch.empty(7, 3, dtype=torch.bfloat16, device="meta")}, "d.pt")
    got = inspect("d.pt")
    check(got and [(t["name"], t["dtype"], t["shape"], t["sha256"]) for t in got["tensors"]] ==
          [("coo", "int16", [2, 3], None), ("csr", "float64", [3, 4], None), ("meta", "bfloat16", [7, 3], None)],
          "sparse and meta: %s" % (got and got["tensors"]))
    conj = torch.randn(3, dtype=torch.complex64).conj()
    torch.save({"c": conj, "n": torch.randn(3, dtype=torch.complex64).conj().imag}, "f.pt")
    same("f.pt", torch.load("f.pt"), "conjugate and negative views")
    check("Named" in str(inspect("r.pt")["globals"]), "a subclass is listed")


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("b", torch.arange(4.))

    def forward(self, x):
        return self.fc(x) + torch.tensor([1.5, 2.5])


def scripts():
    m = torch.jit.trace(Constant(), torch.ones(1, 3))
    m.save("m.pt")
    state = m.state_dict()
    want = {n: (list(t.shape), digest(raw(t))) for n, t in state.items()}
    for name in ("m.pt", "v.pt"):
        if name == "v.pt":  # newer TorchScript has its version in .data only
            with zipfile.ZipFile("m.pt") as a, zipfile.ZipFile("v.pt", "w") as b:
                for i in a.infolist():
                    b.writestr(i.filename.replace("m/version", "m/.data/version"), a.read(i.filename))
        got = inspect(name)
        mine = {t["name"].split(">", 1)[-1].replace("<Linear>", "").lstrip("."): (t["shape"], t["sha256"]) for t in got["tensors"]} if got else {}
        check({n: mine.get(n) for n in want} == want, "%s: %s" % (name, mine))
        check(got and got["format"] == "torchscript", name)


def version3():
    """Types without a storage class: uint16 and its like, and 8-bit floats, over an untyped storage."""
    data = bytes(range(48))
    rows = {"uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "float32": 4, "bfloat16": 2}
    p = Pickle().dict()
    for dtype, size in rows.items():
        p.key(dtype).tensor_v3("0", 48, dtype, 1, (3,), (1,)).set()
    open("v3.pt", "wb").write(torch_zip(p.stop(), {"0": data}))
    got = inspect("v3.pt")
    for dtype, size in rows.items():
        t = row(got, "tensors", dtype)
        check((t.get("dtype"), t.get("shape"), t.get("sha256")) == (dtype, [3], digest(data[size:4 * size])), "v3 %s: %s" % (dtype, t))
    p = Pickle().dict().key("w").tensor_v3("0", 48, "uint64", 0, (7,), (1,)).set()
    open("v3.pt", "wb").write(torch_zip(p.stop(), {"0": data}))
    r = run(MUSTER, "inspect", "v3.pt")
    check(r.returncode == 1 and "tensor 'w': it reaches element 6" in r.stderr and "has 6" in r.stderr, r.stderr)


def old_forms():
    """What this torch reads but does not write, spelled out; torch is the judge of the first ones."""
    data = struct.pack("<6f", *range(6))
    def both(p, name):
        open(name, "wb").write(torch_zip(p.stop(), {"0": data}))
        same(name, torch.load(name), name)
    both(Pickle().dict().key("w").tensor("0", 6, 1, (2, 2), (3, 1), version=1).set(), "rebuild_tensor.pt")
    # INT LONG FLOAT STRING UNICODE PUT GET LIST DICT POP POP_MARK DUP, all in one
    p = Pickle().dict().raw(b"(S'a\\'\\x41\\n\\101'\nI12\nV\\u00e9\\U0001f600 x\nL123456789012345678901234567890L\n"
                            b"S'f'\nF1.5e3\nI01\nI00\nNK\x01dp7\n0S'z'\n(I-3\nN(K\x01K\x020I7\n1lp20\ng20\n0g7\n0")
    p.raw(b"s").key("w").tensor("0", 6, 0, (6,), (1,)).set()
    open("text.pt", "wb").write(torch_zip(p.stop(), {"0": data}))
    same("text.pt", {"w": torch.arange(6.)}, "opcodes of protocol 0")
    # keys with escapes name tensors
    p = Pickle().dict()
    for key in (b"S'a\\'\\x41\\t\\101\\q'\n", b"V\\u00e9\\U0001f600\xe9\\\\u0041\n", b"(lp9\n0S\"it's\"\n"):
        p.raw(key).tensor("0", 6, 0, (6,), (1,)).set()
    name = "escapes.pt"
    open(name, "wb").write(torch_zip(p.stop(), {"0": data}))
    keys = list(torch.load(name))
    got = inspect(name)
    check(got and [t["name"] for t in got["tensors"]] == keys, "escapes: %s, not %s" % (got and [t["name"] for t in got["tensors"]], keys))
    # Parameter by NEWOBJ and BUILD, as in 2017 and 2018
    p = Pickle().dict().key("w").glob("torch.nn.parameter", "Parameter").raw(b")\x81")
    p.raw(b"(").tensor("0", 6, 0, (2, 3), (3, 1)).raw(b"\x88}tb").set()
    open("p.pt", "wb").write(torch_zip(p.stop(), {"0": data}))
    got = inspect("p.pt")
    check(row(got, "tensors", "w").get("shape") == [2, 3] and row(got, "tensors", "w")["sha256"] == digest(data), "Parameter by BUILD")
    # INST and OBJ make records
    p = Pickle().dict().raw(b"S'i'\n(K\x01imy\nThing\n}S'w'\n").tensor("0", 6, 0, (6,), (1,)).raw(b"sbs")
    p.raw(b"S'o'\n(cmy\nOther\nK\x02o}S'v'\n").tensor("0", 6, 0, (6,), (1,)).raw(b"sbs")
    open("i.pt", "wb").write(torch_zip(p.stop(), {"0": data}))
    got = inspect("i.pt")
    check(got and [t["name"] for t in got["tensors"]] == ["i<Thing>.w", "o<Other>.v"] and got["globals"] == ["my.Other", "my.Thing"],
          "INST and OBJ: %s" % got)
    # _rebuild_device_tensor_from_numpy is a tensor
    t = numpy.arange(6, dtype="f4").reshape(2, 3)
    p = Pickle().dict().key("w").glob("torch._utils", "_rebuild_device_tensor_from_numpy").raw(b"(")
    p.array(t).glob("torch", "float32").key("xla:0").raw(b"\x89tR").set()
    open("x.pt", "wb").write(torch_zip(p.stop(), {}))
    got = inspect("x.pt")
    check(row(got, "tensors", "w").get("sha256") == digest(t.tobytes()) and row(got, "tensors", "w").get("location") == "xla:0",
          "device tensor: %s" % got)
    # a legacy file's views, and one that calls itself big-endian: the data are little-endian all the same
    def view(p):
        return p.key("w").tensor("0", 6, 1, (2,), (1,), view=("77", 2, 4)).set()
    for little in (True, False):
        open("l.pt", "wb").write(legacy(view(Pickle().dict()).stop(), [("0", 6, data)], little=little))
        same("l.pt", {"w": torch.arange(6.)[3:5]}, "legacy view, little_endian %s" % little)


def big_endian():
    o = {"f": torch.randn(5), "h": torch.randn(5).half(), "c": torch.randn(3, dtype=torch.complex128), "b": torch.tensor([True, False]),
         "i": torch.arange(4)}
    torch.save(o, "t.pt")
    size = {0: 4, 1: 2, 2: 8, 3: 1, 4: 8}
    def turn(name, data):
        if "/data/" not in name:
            return data
        n = size[int(name.rsplit("/", 1)[1])]
        return b"".join(data[i:i + n][::-1] for i in range(0, len(data), n))
    rezip("t.pt", "big.pt", turn)
    got, want = inspect("big.pt", "--big-endian"), inspect("t.pt")
    check(got and got["tensors"] == want["tensors"], "big-endian by flag")
    with zipfile.ZipFile("big.pt", "a") as z:
        z.writestr("t/byteorder", "big")
    got = inspect("big.pt")
    check(got and got["tensors"] == want["tensors"], "big-endian by its record")
    with zipfile.ZipFile("t.pt", "a") as z:
        z.writestr("t/byteorder", "little")
    got = inspect("t.pt", "--big-endian")
    check(got and got["tensors"] == want["tensors"], "the flag does not overrule the record")


for part in (quantised, arrays, storages, records, scripts, version3, old_forms, big_endian):
    part()
finish()
