"""The files of ../shared/cases: real ones against golden.jsonl, torch's against torch, hostile ones against a table."""
import json
import os
import subprocess
import sys
import time

import numpy
import torch
from torch import nn
import torch.nn.functional as F

from io_lib import check, finish, inspect, own_folder, same, tool, MUSTER, SHARED

CASES = os.path.join(SHARED, "cases")
if not os.path.isdir(CASES):
    print("skipped: no %s" % CASES)
    sys.exit(77)
FOLDER = own_folder()

# What section 9 of checkpoints.md asks for: words of the error, or the number of tensors and globals of a good file.
BAD = {
    "bad_opcode": "0xfe", "bad_utf8": "not UTF-8", "bomb_storage": "bomb", "builtin_eval": (0, ["__builtin__.eval"]),
    "byteorder_bad": "'middle'", "concat_two": "directory", "crc_bad": "checksum", "cyc_list": (0, []),
    "dict_unhashable": "key of a dict", "dup_names": "two members", "dup_pkl": "two members",
    "eocd_count_lies": "60000 members", "expand_bomb": "4398046511104 bytes", "key_traversal": "not in the file",
    "legacy_count_mismatch": "2 elements", "legacy_count_neg": "-1 elements", "legacy_missing_key": "not in the file",
    "legacy_trailing": (1, []), "legacy_truncated": "ends early", "legacy_unknown_key": "'zzz'",
    "lofs_oob": "outside", "long_binput_big": "memo slot", "mark_missing": "MARK", "method_99": "method 99",
    "missing_storage": "storage '0'", "mixed_root": "other/data/0", "no_version": "version", "numel_2_62": "elements",
    "numel_lies_big": "holds 16 bytes", "offset_neg": "tensor 'w'", "offset_oob": "tensor 'w'", "ok": (1, []),
    "pid_not_storage": "persistent id", "prepended": "byte 40", "proto_9": "protocol 9",
    "size_stride_rank_mismatch": "tensor 'w'", "stack_underflow": "stack", "storage_long": "holds 32 bytes",
    "stride_overflow": "tensor 'w'", "trailing": (1, []), "trailing_after_stop": (1, []),
    "unknown_storage": "EvilStorage", "version_99": "version 99", "version_text": "version number"}

# Files of gen/ that torch itself cannot load, or that hold what inspect only names.
GEN = {"handmade_tar": "tar", "sd_p0": "protocol 0", "views_dtype_mix": "not a PyTorch checkpoint"}
GEN_COUNT = {"lite": 8, "script": 8, "script_extra": 8, "trace": 8, "sparse_coo": 1, "sparse_csr": 1, "meta": 1,
             "storage": 0, "ustorage": 0, "inttensor_keys": 2, "cyc": 0}


def golden():
    files = tensors = 0
    for line in open(os.path.join(CASES, "golden.jsonl")):
        g = json.loads(line)
        got = inspect(os.path.join(CASES, "real", g["file"]))
        mine = got and [{k: t[k] for k in ("name", "dtype", "shape", "sha256")} for t in got["tensors"]]
        check(mine == g["tensors"], g["file"])
        files += 1
        tensors += len(g["tensors"])
    print("golden.jsonl: %d files, %d tensors" % (files, tensors))
    check(files > 0, "golden.jsonl is not empty")


def hostile():
    files = sorted(os.listdir(os.path.join(CASES, "bad")))
    for f in files:
        path, want = os.path.join(CASES, "bad", f), BAD.get(f.rsplit(".", 1)[0])
        if want is None:
            check(False, "no outcome is written down for " + f)
            continue
        start = time.time()
        # 1 GiB of address space is plenty for files of 1 MB; under AddressSanitizer it is not.
        limit = "" if "asan" in MUSTER else "ulimit -v 1048576; "
        r = subprocess.run(["bash", "-c", limit + 'exec "$0" "$@"', MUSTER, "inspect", "--json", "--hash", path],
                           capture_output=True, text=True, timeout=60)
        seconds = time.time() - start
        if isinstance(want, str):
            good = r.returncode == 1 and want in r.stderr and path in r.stderr
        else:
            o = json.loads(r.stdout) if r.returncode == 0 else None
            good = o is not None and len(o["tensors"]) == want[0] and o["globals"] == want[1]
        check(good, "%s: exit %d: %s" % (f, r.returncode, r.stderr.strip()))
        check(seconds < 10, "%s took %.1f s" % (f, seconds))
        print("%-32s %-5s %s" % (f, "error" if r.returncode else "ok",
                                 r.stderr.strip().replace(CASES + "/bad/", "").replace("muster inspect: ", "")[:150]))
    print("bad: %d files" % len(files))


def generated():
    files = sorted(os.listdir(os.path.join(CASES, "gen")))
    for f in files:
        path, stem = os.path.join(CASES, "gen", f), f.rsplit(".", 1)[0]
        if stem in GEN:
            r = subprocess.run([MUSTER, "inspect", path], capture_output=True, text=True)
            check(r.returncode == 1 and GEN[stem] in r.stderr, f + ": " + r.stderr)
        elif stem in GEN_COUNT:
            got = inspect(path)
            check(got is not None and len(got["tensors"]) == GEN_COUNT[stem], f)
        else:
            same(path, torch.load(path, map_location="cpu"), f)
    print("gen: %d files" % len(files))


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.pad = (out - into) // 2
        self.stride = stride

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """He et al. 2015, section 4.2, with parameter-free shortcuts: what the public checkpoint was trained as."""
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (into, out, stride) in enumerate(((16, 16, 1), (16, 32, 2), (32, 64, 2)), 1):
            blocks = [Block(into, out, stride)] + [Block(out, out, 1) for _ in range(2)]
            setattr(self, "layer%d" % i, nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def logits():
    path = os.path.join(CASES, "real/akamaster+pytorch_resnet_cifar10/pretrained_models/resnet20-12fca82f.th")
    torch.manual_seed(5)
    x = torch.randn(16, 3, 32, 32)
    x.numpy().tofile(FOLDER + "/x.bin")
    r = tool("logits", "resnet20", path, FOLDER + "/x.bin", FOLDER + "/y.bin")
    check(r.returncode == 0 and '"module." removed' in r.stdout and '"state_dict"' in r.stdout, r.stdout + r.stderr)
    net = ResNet20().eval()
    state = torch.load(path, map_location="cpu")["state_dict"]
    net.load_state_dict({k[len("module."):]: v for k, v in state.items()})
    with torch.no_grad():
        want = net(x).numpy()
    got = numpy.fromfile(FOLDER + "/y.bin", dtype=numpy.float32).reshape(16, 10)
    error = numpy.abs(got - want).max()
    print("resnet20-12fca82f.th: logits differ from PyTorch's by %.2g at most (of %.2g)" % (error, numpy.abs(want).max()))
    check(error < 1e-4, "logits differ by %g" % error)


golden()
hostile()
generated()
logits()
finish()
