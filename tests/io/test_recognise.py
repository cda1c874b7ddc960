"""Files are known by their content: what is read, whatever its name, and one helpful line for each kind that is not;
checkpoints in several files with an index."""
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile

import numpy
import torch

from io_lib import check, described, finish, inspect, own_folder, raw, rezip, run, tool, MUSTER
from st_files import stored

os.chdir(own_folder())


def write(name, data):
    with open(name, "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)
    return name


def refused(name, *want, code=1):
    r = run(MUSTER, "inspect", "--hash", name)
    line = r.stderr.strip()
    check(r.returncode == code and all(w in line for w in want) and name in line and "\n" not in line,
          "%s: exit %d: %s" % (name, r.returncode, line))


def zipped(name, *members):
    with zipfile.ZipFile(name, "w") as z:
        for m in members:
            z.writestr(m, b"x")
    return name


def tar(name, *members):
    with tarfile.open(name, "w") as t:
        for m in members:
            i = tarfile.TarInfo(m)
            i.size = 700
            t.addfile(i, io.BytesIO(b"\x80" * 700))
    return name


def others():
    state = {"a": torch.arange(300.0)}
    refused(write("lfs.pt", "version https://git-lfs.github.com/spec/v1\noid sha256:0123abcd\nsize 4321\n"), "Git LFS pointer",
            "4321 bytes", "sha256:0123abcd", "git lfs pull")
    refused(write("lfs2.pt", "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer")
    for i, page in enumerate(("<!DOCTYPE html>\n<html>", "<html><body>", "\n  <HTML>", "\ufeff<!doctype html>")):
        refused(write("page%d.pt" % i, page), "HTML")
    refused(write("error.xml", '<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'), "XML")
    refused(write("config.json", '{"architectures": ["Bert"]}'), "JSON", "no weight_map", "architectures")
    refused(write("empty.pt", b""), "empty")
    refused(write("text.pt", "import torch\nprint(1)\n"), "a text of 22 bytes", "import torch")
    refused(write("noise.pt", bytes(range(255, 100, -1))), "begins with bytes ff fe fd fc", "155 bytes")
    refused(write("noise.pt", b"\x01" * 3), "only 3 bytes")

    numpy.savez("arrays.npz", a=numpy.ones(3))
    refused("arrays.npz", "npz")
    numpy.save("array.npy", numpy.ones(3))
    refused("array.npy", ".npy")
    refused(zipped("x.pt2", "x/archive_format", "x/models/model.json"), "torch.export")
    refused(zipped("x2.pt2", "x/models/model.json", "x/data/weights/w0"), "torch.export")
    refused(zipped("old.pt2", "serialized_exported_program.json", "version"), "torch.export")
    refused(zipped("p.pt", "p/.data/extern_modules", "p/m/m.pkl"), "torch.package")
    refused(zipped("m.keras", "metadata.json", "model.weights.h5"), "Keras")
    refused(zipped("d.docx", "[Content_Types].xml", "word/document.xml"), "document")
    refused(zipped("j.jar", "META-INF/MANIFEST.MF", "A.class"), "Java")
    refused(zipped("c.zip", "readme", "run/model.pth"), "'run/model.pth'", "unpack")
    refused(zipped("o.zip", "one", "two", "three", "four"), "4 members", "'one', 'two', 'three', ...")
    refused(zipped("e.zip"), "empty zip")
    refused(write("m.gguf", b"GGUF\3\0\0\0" + b"\0" * 16), "GGUF")
    refused(write("m.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 16), "HDF5")
    for i, start in enumerate((b"\x08\x07\x12\x07pytorch", b"\x08\x0a\x3a\x05graph", b"\x08\x08\x42\x02\x10\x11")):
        refused(write("m%d.onnx" % i, start + b"\0" * 20), "ONNX")
    refused(write("m.tflite", b"\x1c\0\0\0TFL3" + b"\0" * 20), "TensorFlow Lite")
    refused(write("old.pt", b"PYTORCH1" + b"\0" * 20), "2018")
    for name, start in (("gzip", b"\x1f\x8b\x08"), ("xz", b"\xfd7zXZ\0"), ("zstd", b"(\xb5/\xfd"), ("bzip2", b"BZh9"),
                        ("lz4", b"\x04\x22\x4d\x18")):
        refused(write("m." + name, start + b"\0" * 20), "compressed by " + name)

    for protocol in range(6):
        refused(write("b%d.pkl" % protocol, pickle.dumps({"a": [1, 2]}, protocol)), "bare pickle", "torch.save")
    refused(write("t.pkl", pickle.dumps(state)), "bare pickle", "tensors of PyTorch")
    refused(write("n.pkl", pickle.dumps({"a": numpy.ones(3)})), "bare pickle", "NumPy")
    refused(tar("legacy.pt", "storages", "tensors", "pickle"), "legacy tar")
    refused(tar("legacy2.pt", "sys_info", "pickle", "tensors", "storages"), "legacy tar")
    refused(tar("other.tar", "storages", "pickle"), "unpack")

    torch.save(state, "whole.pt")
    torch.save(state, "whole_legacy.pt", _use_new_zipfile_serialization=False)
    write("whole.st", stored({"a": ("F32", [300], raw(state["a"]))}))
    for name in "whole.pt", "whole_legacy.pt", "whole.st":
        data = open(name, "rb").read()
        for at in (len(data) // 2, len(data) - 1):
            cut = write("cut", data[:at])
            refused(cut, str(at))
        check([t["sha256"] for t in inspect(write("no_name", data))["tensors"]] == [described(state)[0]["sha256"]], name)
    with zipfile.ZipFile("ts.pt", "w") as z:  # newer TorchScript archives have their version in .data alone
        with zipfile.ZipFile("whole.pt") as w:
            z.writestr("r/data.pkl", w.read("whole/data.pkl"))
            z.writestr("r/constants.pkl", b"\x80\x02).")
            z.writestr("r/.data/version", b"4\n")
            z.writestr("r/data/0", w.read("whole/data/0"))
    got = inspect("ts.pt")
    check(got is not None and got["format"] == "torchscript" and len(got["tensors"]) == 1, "version in .data alone")


def folders():
    os.mkdir("f")
    refused("f", "is a directory", "no checkpoint", code=2)
    write("f/config.json", "{}")
    write("f/b.pt", "x")
    refused("f", "is a directory", "its checkpoint is f/b.pt", code=2)
    for name in "e.pt", "a.bin", "d.safetensors", "c.ckpt":
        write("f/" + name, "x")
    refused("f/", "is a directory", "it has 5 checkpoints: a.bin, b.pt, c.ckpt, ...", code=2)
    write("f/model.safetensors.index.json", "{}")
    refused("f/", "its checkpoint is f/model.safetensors.index.json", code=2)
    write("f/pytorch_model.bin.index.json", "{}")
    refused("f", "2 checkpoints: model.safetensors.index.json, pytorch_model.bin.index.json", code=2)


def st(state, metadata=None):
    names = {torch.float32: "F32", torch.int64: "I64"}
    return stored({k: (names[v.dtype], list(v.shape), raw(v)) for k, v in state.items()}, metadata)


def index(weight_map, name="s/model.safetensors.index.json", **more):
    return write(name, json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))


def sharded():
    torch.manual_seed(2)
    os.mkdir("s")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                              torch.nn.Flatten(), torch.nn.Linear(144, 5))
    state = {k: v.contiguous() for k, v in net.state_dict().items()}
    names = list(state)
    first, second = {k: state[k] for k in names[::2]}, {k: state[k] for k in names[1::2]}
    want = [{k: d[k] for k in ("name", "dtype", "shape", "sha256")} for d in described(state)]
    kinds = {"safetensors": lambda s: st(s)}

    def saved(s, **options):
        f = io.BytesIO()
        torch.save(s, f, **options)
        return f.getvalue()
    kinds["zip"] = saved
    kinds["legacy"] = lambda s: saved(s, _use_new_zipfile_serialization=False)
    for one, other, named in (("safetensors", "safetensors", "sharded safetensors"), ("zip", "zip", "sharded torch"),
                              ("legacy", "zip", "sharded torch"), ("safetensors", "legacy", "sharded torch")):
        write("s/a", kinds[one](first))
        write("s/b", kinds[other](second))
        path = index({k: "a" if k in first else "b" for k in names})
        got = inspect(path)
        mine = got and [{k: t[k] for k in ("name", "dtype", "shape", "sha256")} for t in got["tensors"]]
        check(mine == want and got["format"] == named and got["globals"] == [], "%s and %s" % (one, other))
        r = tool("convert", "small", path, "out.pt")
        out = torch.load("out.pt") if r.returncode == 0 else {}
        check(all(torch.equal(out[k], state[k]) for k in names), "loads from %s and %s: %s" % (one, other, r.stderr))

    whole = {k: "a" if k in first else "b" for k in names}
    write("s/a", st(first))
    write("s/b", st(second))
    os.mkdir("t")
    os.symlink("../s/a", "t/a")
    os.symlink("../s/b", "t/b")
    check(inspect(index(whole, "t/x.json")) is not None, "shards may be links")
    check(inspect(shutil.copy("t/x.json", "any_name")) is None, "not beside its shards")
    os.chdir("s")
    check(len(inspect("model.safetensors.index.json")["tensors"]) == len(names), "a path without a folder")
    os.chdir("..")

    part = {k: v for k, v in whole.items() if k != names[0]}
    r = run(MUSTER, "inspect", index(part))
    check(r.returncode == 0 and "1 tensor in the shards is not in the index" in r.stderr and names[0] in r.stderr and
          "'a'" not in r.stderr, "a tensor that is not in the index: " + r.stderr)
    check(len(inspect(index(part))["tensors"]) == len(names) - 1, "is left out")
    path = index(whole)
    refused(index({**whole, "ghost": "b"}), "'ghost'", "'b'", "is not there")
    refused(index({**whole, "aghost": "a"}), "'aghost'", "'a'")
    refused(index({**whole, names[0]: "b"}), "'%s'" % names[0], "'b'")
    refused(index({**whole, "x": "c.safetensors"}), "shard 'c.safetensors'", "is not there")
    refused(index({}), "weight_map is empty")
    for bad in "../a", "/etc/passwd", "s/a", "..", ".", "", "a\\b", "x" * 256:
        refused(index({**whole, "x": bad}), "'x'", "no file's name" if bad in ("..", ".", "", "x" * 256) else "outside its own folder")
    for bad in 1, None, ["a"], {"a": "b"}, True:
        refused(index({**whole, "x": bad}), "something other than a file's name for 'x'")
    refused(index({"x": "model.safetensors.index.json"}), "an index, where a shard")
    refused(index([1, 2]), "the weight map has '['")
    refused(write("s/i", '{"metadata":{"weight_map":{"x":"a"}}}'), "not at its top")
    refused(write("s/i", '{"weight_map":{"x":"a","x":"b"}}'), "'x' twice")
    refused(write("s/i", '{"weight_map":{"x":"a"},"weight_map":{"x":"b"}}'), "two weight maps")
    refused(write("s/i", '{"weight_map":{"x":"a\\u0000b"}}'), "a file's name")
    refused(write("s/i", '{"weight_map":{"x":"a"'), "the weight map ends")
    refused(write("s/i", '{"weight_map":{"x":"a"}}}'), "its end was expected")
    refused(write("s/i", '{"weight_map":{"x":"a"},"metadata":' + "[" * 100000 + "]" * 100000 + "}"), "depth")
    refused(write("s/i", json.dumps({"weight_map": {"t%d" % i: "f%d" % i for i in range(10001)}})), "10001 files")
    write("s/a", st(first))
    path = index(whole)
    r = run(MUSTER, "inspect", "--limit", "header=100", path)
    check(r.returncode == 1 and "more than the limit of 100" in r.stderr, "limit: " + r.stderr)
    data = open("s/b", "rb").read()
    write("s/b", data[:-1])
    r = run(MUSTER, "inspect", path)
    check(r.returncode == 1 and "s/b: the file ends early: it is %d bytes" % (len(data) - 1) in r.stderr, "a shard cut off")
    write("s/b", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    r = run(MUSTER, "inspect", path)
    check(r.returncode == 1 and "s/b: a Git LFS pointer" in r.stderr, "a shard that is a pointer")

    # Names that only __metadata__ has; and what would run code, from all shards.
    w, b = torch.randn(6, 6), torch.randn(6)
    write("s/a", st({"a.weight": w, "a.bias": b}, {"format": "pt", "b.weight": "a.weight"}))
    write("s/b", st({"b.bias": b}))
    path = index({"a.weight": "a", "a.bias": "a", "b.bias": "b"})
    got = inspect(path)
    check(got and [(t["name"], t["tied_to"]) for t in got["tensors"]][-1] == ("b.weight", "a.weight"), "tied in a shard")
    check(tool("convert", "tied", path, "out.pt").returncode == 0 and torch.equal(torch.load("out.pt")["b.weight"], w),
          "tied in a shard: loads")

    class Evil:
        def __init__(self, what):
            self.what = what

        def __reduce__(self):
            return (self.what, (0,))
    write("s/a", saved({"x": w, "e": Evil(os._exit)}))
    write("s/b", saved({"y": b, "e": Evil(os.abort)}))
    got = inspect(index({"x": "a", "y": "b"}))
    check(got and got["globals"] == ["posix._exit", "posix.abort"], "globals of all shards: %s" % (got and got["globals"]))


others()
folders()
sharded()
finish()
