"""safetensors: every rule of the format with a file made here, judged by the reference library too where a Python has it
(MUSTER_TORCH_PYTHON, else this one); all types; ties; loading into models; time and memory of large headers; and
the files of ../shared/cases/bad_st where they are."""
import hashlib
import json
import os
import struct
import sys
import time

import torch

from io_lib import check, finish, inspect, own_folder, raw, run, tool, MUSTER, SHARED
from st_files import BITS, packed, rules, stored, tensor

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = own_folder()
os.chdir(FOLDER)
SANITIZED = "asan" in MUSTER or "tsan" in MUSTER


def write(name, data):
    with open(name, "wb") as f:
        f.write(data)
    return name


def reference(paths):
    """{path: accepted} by the reference library, None where it is not installed."""
    python = os.environ.get("MUSTER_TORCH_PYTHON") or sys.executable
    if run(python, "-c", "import safetensors, numpy").returncode != 0:
        print("the reference library is not here: its verdicts are not compared")
        return None
    r = run(python, os.path.join(HERE, "st_oracle.py"), *paths)
    return json.loads(r.stdout) if r.returncode == 0 else check(False, "the reference library runs: " + r.stderr[-300:])


def every_rule():
    table = list(rules())
    for i, (name, data, want, unlike) in enumerate(table):
        path = write("rule%d" % i, data)
        start = time.time()
        r = run(MUSTER, "inspect", "--hash", path)
        if want is None:
            check(r.returncode == 0, "%s: %s" % (name, r.stderr))
        else:
            line = r.stderr.strip()
            check(r.returncode == 1 and want in line and path in line and "\n" not in line, "%s: %s" % (name, line))
        check(time.time() - start < 5, name + ": in time")
    verdicts = reference(["rule%d" % i for i in range(len(table))])
    if verdicts is not None:
        for i, (name, data, want, unlike) in enumerate(table):
            check((verdicts["rule%d" % i] == (want is None)) != unlike,
                  "%s: the reference %s it" % (name, "takes" if verdicts["rule%d" % i] else "refuses"))
        print("the reference library agrees on %d files, and not on these, as meant: %s" %
              (sum(not t[3] for t in table), ", ".join(t[0] for t in table if t[3])))
    print("rules: %d files" % len(table))


def types():
    """The bytes of every type come out as they are; what Muster cannot compute with has a note."""
    names = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
             "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64",
             "I64": "int64", "U64": "uint64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
             "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
             "F4": "float4_e2m1fn_x2", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
    check(set(names) == set(BITS), "all types")
    torch.manual_seed(1)
    tensors = {}
    for d, bits in BITS.items():
        data = bytes(torch.randint(0, 2 if d == "BOOL" else 256, (3 * 4 * bits // 8,)).tolist())
        tensors["t." + d] = (d, [3, 4], data)
    tensors["u8"] = ("U8", [1], b"\7")  # all that follows is unaligned
    tensors["f64"] = ("F64", [2], struct.pack("<2d", 1.5, -2.5))
    tensors["scalar"] = ("I64", [], struct.pack("<q", -3))
    tensors["empty"] = ("F32", [2, 0, 3], b"")
    tensors["truth"] = ("BOOL", [3], b"\0\1\2")
    tensors["f4"] = ("F4", [2, 3], b"abc")
    got = inspect(write("types", stored(tensors, pad=False)))
    check(got is not None and got["format"] == "safetensors" and got["globals"] == [], "types")
    by_name = {t["name"]: t for t in got["tensors"]}
    check(list(by_name) == list(tensors), "in the header's order")
    for name, (d, shape, data) in tensors.items():
        t = by_name[name]
        data = b"\0\1\1" if name == "truth" else data
        odd = BITS[d] == 6 or name == "f4"
        check(t["sha256"] == hashlib.sha256(data).hexdigest(), name + ": bytes")
        check(t["dtype"] == names[d], name + ": " + t["dtype"])
        check(t["shape"] == ([len(data)] if odd else [3, 2] if d == "F4" else shape), "%s: %s" % (name, t["shape"]))
        exact = d not in ("U16", "U32", "U64") and not d.startswith(("F4", "F6_", "F8"))
        check((t["note"] is None) == exact, "%s: note %s" % (name, t["note"]))
        check(not odd or "of shape (%s)" % ", ".join(map(str, shape)) in t["note"], "%s: %s" % (name, t["note"]))


TO = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
      torch.int32: "I32"}


def of_state(state, convert=None):
    return {k: (TO[v.dtype], list(v.shape), raw(v)) for k, v in ((k, convert(v) if convert else v) for k, v in state.items())}


def loads():
    """Into a model: from every floating type as PyTorch converts, with prefixes, tied names, and errors that name."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                              torch.nn.Flatten(), torch.nn.Linear(144, 5))
    state = net.state_dict()
    for dtype in torch.float32, torch.float64, torch.float16, torch.bfloat16:
        def to(v):
            return v.to(dtype) if v.is_floating_point() else v.to(torch.int32)
        write("in", stored(of_state(state, to)))
        r = tool("convert", "small", "in", "out.pt")
        check(r.returncode == 0 and "safetensors" in r.stdout, "%s: %s" % (dtype, r.stderr))
        out = torch.load("out.pt")
        for k, v in state.items():
            check(torch.equal(out[k], to(v).to(v.dtype)), "%s from %s" % (k, dtype))
    write("in", stored({"module." + k: v for k, v in of_state(state).items()}))
    r = tool("convert", "small", "in", "out.pt")
    check("removed=module. " in r.stdout and torch.equal(torch.load("out.pt")["4.weight"], state["4.weight"]), "a prefix")
    f8 = {**of_state(state), "4.bias": ("F8_E4M3", [5], b"\0" * 5)}
    r = tool("convert", "small", write("in", stored(f8)), "no.pt")
    check(r.returncode == 1 and "'4.bias'" in r.stderr and "float8_e4m3fn" in r.stderr, "float8: " + r.stderr)
    r = tool("train", "sgd", 4, 0, write("in", stored(of_state(state))))
    check(r.returncode == 1 and "no training checkpoint" in r.stderr, "training from weights: " + r.stderr)

    w, b = torch.randn(6, 6), torch.randn(6)
    tied = of_state({"a.bias": b, "a.weight": w, "b.bias": b + 1})
    write("tied", stored(tied, {"format": "pt", "b.weight": "a.weight", "c": "nothing"}))
    got = inspect("tied")
    check([(t["name"], t["tied_to"]) for t in got["tensors"]] == [("a.bias", None), ("a.weight", None), ("b.bias", None),
                                                                 ("b.weight", "a.weight")], "ties are shown")
    check([t["location"] for t in got["tensors"]] == [""] * 4, "the format has no locations: %s" % got["tensors"])
    r = tool("convert", "tied", "tied", "out.pt")
    out = torch.load("out.pt") if r.returncode == 0 else {}
    check(r.returncode == 0 and torch.equal(out["b.weight"], w), "ties are loaded: " + r.stderr)
    write("tied", stored({"pt": tied["a.bias"]}, {"format": "pt"}))
    check(len(inspect("tied")["tensors"]) == 1, "a tensor called pt has no twin called format")


# A process begins with the peak of the one it was forked from, and this one has PyTorch in it: so a small Python forks.
MEASURE = """import os, subprocess, sys, time
start = time.time()
p = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(p.pid, 0)
print(time.time() - start, usage.ru_maxrss * 1024, status)"""


def measured(*args):
    """(seconds, peak bytes, exit status)."""
    seconds, peak, status = run(sys.executable, "-S", "-c", MEASURE, *args).stdout.split()
    return float(seconds), int(peak), int(status)


def large():
    """Time is linear, memory within a stated factor of the header. Only inspect's opening is of interest: no hashes."""
    times = []
    for count in 25000, 100000:
        header = "{%s}" % ",".join('"layers.%d.weight":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}' %
                                   (i, 4 * i, 4 * i + 4) for i in range(count))
        write("large%d" % count, packed(header, b"\0" * 4 * count))
        times.append(min(measured(MUSTER, "inspect", "large%d" % count)[0] for _ in range(2)))
    print("100,000 tensors: %.2f s, 25,000: %.2f s" % (times[1], times[0]))
    check(SANITIZED or times[1] < max(12 * times[0], 2), "100,000 tensors take %.2f s, 25,000 %.2f s" % (times[1], times[0]))
    base = measured(MUSTER, "inspect", write("small", packed("{}")))[1]
    wide = '{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}'
    for name, header, want in (
            ("one text", '{"__metadata__":{"k":"%s"}}' % ("x" * 30000000), 1),
            ("short metadata", '{"__metadata__":{%s}}' % ",".join('"%06x":""' % i for i in range(2000000)), 0),
            ("empty arrays", wide % ",".join(["[]"] * 10000000), 1),
            ("members that are no tensors", "{%s}" % ",".join('"%x":1' % i for i in range(2000000)), 1),
            ("one deep value", '{"a":' + "[" * 30000000, 1)):
        write("big", packed(header))
        seconds, peak, code = measured(MUSTER, "inspect", "big")
        factor = (peak - base) / len(header)
        print("%s: header of %.0f MB, %.1f s, %.1f bytes of memory for each of its own" % (name, len(header) / 1e6, seconds, factor))
        check(SANITIZED or (factor < 30 and seconds < 20), "%s: factor %.1f, %.1f s" % (name, factor, seconds))
        check((code != 0) == bool(want), "%s: exit %d" % (name, code))


# What is asked of each file of bad_st: words of the error, or the number of tensors.
SHARED_FILES = {
    "7_bytes": "7 bytes", "bad_dtype": "'F33'", "bytes_overflow": "overflow", "data_truncated": "is 77 bytes, its header describes 79",
    "deep_json": "depth", "dtype_number": "dtype is an integer", "dup_field": "duplicate", "dup_key": "'a' twice",
    "empty_file": "empty", "exp_offset": "real number", "extra_field": 1, "hole": "belong to no tensor",
    "hole_at_start": "begins at byte 4", "json_array": "no JSON object", "len_100000001": "100000001 bytes, more than",
    "len_2_63": "9223372036854775808 bytes, more than", "len_beyond_file": "is 79 bytes, its header alone needs 5008",
    "len_zero": "where '{' was expected", "lone_surrogate_name": "Unicode", "many_dims": "100000 dimensions",
    "metadata_not_object": "__metadata__", "missing_dtype": "'a' has no dtype", "missing_offsets": "'a' has no data_offsets",
    "neg_offset": "-1", "not_json": "ends at byte 9", "not_utf8": "UTF-8", "offset_2_64": "too big integer", "ok_basic": 1,
    "ok_empty": 0, "ok_order_shuffled": 2, "ok_pad_leading_space": 0, "ok_pad_trailing": 0, "ok_utf8_name": 1,
    "ok_zero_size": 1, "ok_zero_tensor_shares_offset": 2, "overlap": "inside tensor 'a'", "overlap_partial": "inside tensor 'a'",
    "single_quotes": "'''", "three_offsets": "3 numbers", "trailing_bytes": "8 bytes at the end", "trailing_comma": "'}'"}


def shared():
    folder = os.path.join(SHARED, "cases", "bad_st")
    if not os.path.isdir(folder):
        print("no %s: its files are left out" % folder)
        return
    for f in sorted(os.listdir(folder)):
        path, want = os.path.join(folder, f), SHARED_FILES.get(f.rsplit(".", 1)[0])
        r = run(MUSTER, "inspect", "--json", "--hash", path)
        good = r.returncode == 0 and len(json.loads(r.stdout)["tensors"]) == want if isinstance(want, int) else \
            want is not None and r.returncode == 1 and want in r.stderr and path in r.stderr
        check(good, "%s: exit %d: %s" % (f, r.returncode, r.stderr.strip()))
        print("%-42s %-5s %s" % (f, "error" if r.returncode else "ok",
                                 r.stderr.strip().replace(folder + "/", "").replace("muster inspect: ", "")[:150]))


every_rule()
types()
loads()
large()
shared()
finish()
