"""Seeds for the targets that read checkpoints: FOLDER/pickle, FOLDER/zip, FOLDER/legacy, FOLDER/safetensors, FOLDER/index and
FOLDER/checkpoint, from
Python's pickle and zipfile, from PyTorch where it is there, and from the case files in CASES where they are there."""
import collections
import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile

MOST_BYTES = 65536


def values():
    deep = []
    for i in range(50):
        deep = [deep, i]
    cycle = {}
    cycle["self"] = cycle
    yield {"a": 1, "b": [1.5, None, True, -1, 2**31, 2**63, -2**200], "c": ("x", b"y", "\u20ac\U0001f600")}
    yield collections.OrderedDict([("w", (1, 2, 3)), ("v", {1, 2}), ("u", frozenset([4])), ("t", bytearray(b"z"))])
    yield [deep, cycle, 1 + 2j, range(3), slice(1, 2), Exception("no"), int, print]
    yield ["s" * 300, b"b" * 300] * 2 + list(range(1100))


def zips():
    for name, method in ("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED):
        f = io.BytesIO()
        with zipfile.ZipFile(f, "w", method) as z:
            z.writestr("r/data.pkl", pickle.dumps({"a": [1, 2]}, 2))
            z.writestr("r/data/0", bytes(range(256)) * 2)
            z.writestr("r/data/1", b"")
            with z.open(zipfile.ZipInfo("r/version"), "w", force_zip64=True) as member:
                member.write(b"3\n")
        yield name, f.getvalue()


def after_head(data):
    """What fuzz_legacy takes: a legacy stream without its first three pickles."""
    f = io.BytesIO(data)
    for _ in range(3):
        pickle.load(f)
    return f.read()


def with_torch(put):
    import torch

    state = collections.OrderedDict()
    for i, dtype in enumerate([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]):
        state["layer%d.weight" % i] = torch.zeros(3, 2).to(dtype)
    state["view"] = torch.arange(12.0).reshape(3, 4)[1:, ::2]
    state["tied"] = state["layer0.weight"]
    training = {"epoch": 3, "state_dict": state, "note": "text", "parameter": torch.nn.Parameter(torch.ones(2))}
    for name, value in ("state", state), ("training", training), ("module", torch.nn.Linear(2, 2)):
        for legacy in False, True:
            f = io.BytesIO()
            torch.save(value, f, _use_new_zipfile_serialization=not legacy)
            put("checkpoint", name + ("_legacy" if legacy else "_zip"), f.getvalue())


def training(put):
    """For fuzz_training, whose model and groups these are."""
    import torch

    for kind, settings in ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.1}):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        parameters = list(net.parameters())
        optimizer = getattr(torch.optim, kind)([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.2}], **settings)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        ids = {"state": {n + 2**46: s for n, s in state["state"].items()},
               "param_groups": [dict(g, params=[n + 2**46 for n in g["params"]]) for g in state["param_groups"]]}
        for form, value in (("plain", {"model": net.state_dict(), "optimizer": state, "epoch": 3}),
                            ("ids", {"state_dict": net.state_dict(), "optimizer_states": [ids], "global_step": 7})):
            for legacy in False, True:
                f = io.BytesIO()
                torch.save(value, f, _use_new_zipfile_serialization=not legacy)
                put("training", "%s_%s_%s" % (kind, form, "legacy" if legacy else "zip"), f.getvalue())


def safetensors(put, folder):
    """What fuzz_safetensors and fuzz_index take: two bytes of length, that much JSON, and what follows it."""
    def sized(text, rest):
        return struct.pack("<H", len(text)) + text + rest

    def entry(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    some = json.dumps({"__metadata__": {"format": "pt", "tied": "a"}, "a": entry("F32", [2, 3], 0, 24),
                       "b": entry("BF16", [], 24, 26), "c": entry("I64", [0], 26, 26), "d\u20ac": entry("F4", [4], 26, 28),
                       "e": entry("F6_E2M3", [4], 28, 31), "f": entry("BOOL", [1], 31, 32)}).encode()
    put("safetensors", "some", sized(some, bytes(range(32))))
    put("safetensors", "none", sized(b" {} ", b""))
    put("checkpoint", "some.safetensors", struct.pack("<Q", len(some)) + some + bytes(32))
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        with open(os.path.join(folder, name), "rb") as f:
            data = f.read()
        n = int.from_bytes(data[:8], "little")
        if len(data) <= MOST_BYTES and n <= len(data) - 8:
            put("safetensors", name, sized(data[8:8 + n], data[8 + n:]))
            put("checkpoint", name, data)

    shards = {"safetensors": struct.pack("<Q", len(some)) + some + bytes(32), "nothing": b""}
    for kind in "zip", "legacy":
        f = io.BytesIO()
        try:
            import torch
            torch.save({k: torch.ones(2) for k in "abc"}, f, _use_new_zipfile_serialization=kind == "zip")
            shards[kind] = f.getvalue()
        except ImportError:
            pass
    for kind, shard in shards.items():
        for part, names in ("all", "abc"), ("more", ["a", "ghost"]), ("few", "a"):
            index = {"metadata": {"total_size": 1}, "weight_map": {k: "100" for k in names}}
            put("index", kind + "_" + part, sized(json.dumps(index).encode(), shard))
    put("index", "two", sized(b'{"weight_map":{"a":"100","b":"99"}}', shards["safetensors"]))
    put("index", "itself", sized(b'{"weight_map":{"a":"100"}}', b'{"weight_map":{"a":"100"}}'))
    put("index", "outside", sized(b'{"weight_map":{"a":"../x","a":1}}', b""))


def main():
    root, cases = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""

    def put(kind, name, data):
        with open(os.path.join(root, kind, name), "wb") as f:
            f.write(data)

    for kind in "pickle", "zip", "legacy", "safetensors", "index", "checkpoint", "training":
        shutil.rmtree(os.path.join(root, kind), ignore_errors=True)
        os.makedirs(os.path.join(root, kind))
    for i, value in enumerate(values()):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            put("pickle", "value%d_%d" % (i, protocol), pickle.dumps(value, protocol))
    try:
        with_torch(put)
        training(put)
    except ImportError as e:
        print("no seeds from PyTorch:", e)
    for part in "gen", "bad":
        folder = os.path.join(cases, part)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.getsize(path) <= MOST_BYTES:
                with open(path, "rb") as f:
                    put("checkpoint", part + "_" + name, f.read())
    for name, data in zips():
        for verified in b"\0", b"\1":
            put("zip", name + verified.hex(), verified + data)
    safetensors(put, os.path.join(cases, "bad_st"))
    for name in os.listdir(os.path.join(root, "checkpoint")):
        with open(os.path.join(root, "checkpoint", name), "rb") as f:
            data = f.read()
        if data[:2] == b"PK":
            put("zip", name, b"\1" + data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                for member in z.namelist():
                    if member.endswith("data.pkl"):
                        put("pickle", name, z.read(member))
        except Exception:  # bad on purpose, or legacy: that begins with a bare pickle
            put("pickle", name, data)
            try:
                put("legacy", name, after_head(data))
            except Exception:  # not even that
                pass


main()
