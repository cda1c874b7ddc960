"""What the scripts of this folder share: running the command and the tool, hashing as `muster inspect --hash` does."""
import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

import torch

MUSTER = os.environ["MUSTER"]
TOOL = os.environ["IO_TOOL"]
SHARED = os.environ.get("MUSTER_SHARED", "")
failures = []
checks = 0


def own_folder():
    """A temporary folder, gone at the end."""
    folder = tempfile.mkdtemp(prefix="muster-io-")
    atexit.register(shutil.rmtree, folder, True)
    return folder


def check(good, what):
    global checks
    checks += 1
    if not good:
        failures.append(what)
        print("FAILED:", what)


def finish():
    print("%d checks, %d failed" % (checks, len(failures)))
    sys.exit(1 if failures else 0)


def run(*args, timeout=60):
    return subprocess.run(args, capture_output=True, text=True, errors="replace", timeout=timeout)


def inspect(path, *flags):
    """The JSON of inspect --hash, or None with the message printed."""
    r = run(MUSTER, "inspect", "--json", "--hash", *flags, path)
    if r.returncode != 0:
        print(r.stderr.strip())
        return None
    return json.loads(r.stdout)


def tool(*args):
    return run(TOOL, *[str(a) for a in args])


def raw(t):
    """Contiguous little-endian bytes."""
    t = t.detach().int_repr() if t.is_quantized else t.detach()
    t = t.resolve_conj().resolve_neg().contiguous().clone()
    return (t.view(torch.int16) if t.dtype is torch.bfloat16 else t).numpy().tobytes()


def leaves(o, path=""):
    """(name, tensor) pairs in inspect's naming, for dicts, lists, tuples, parameters and modules."""
    if isinstance(o, torch.Tensor):
        yield path, o
    elif isinstance(o, torch.nn.Module):
        for k, v in o.state_dict().items():
            yield (path + "." + k if path else k), v
    elif isinstance(o, dict):
        for k, v in o.items():
            yield from leaves(v, path + "." + str(k) if path else str(k))
    elif isinstance(o, (list, tuple)):
        for i, v in enumerate(o):
            yield from leaves(v, "%s[%d]" % (path, i))


def described(o):
    return [{"name": n, "dtype": str(t.dtype).replace("torch.", ""), "shape": list(t.shape),
             "sha256": hashlib.sha256(raw(t)).hexdigest()} for n, t in leaves(o)]


def same(path, o, what):
    """The file's tensors, as inspect sees them, are those of o."""
    got = inspect(path)
    want = described(o)
    if got is None:
        check(False, what + ": not readable")
        return
    mine = [{k: t[k] for k in ("name", "dtype", "shape", "sha256")} for t in got["tensors"]]
    check(mine == want, "%s: %s" % (what, [(a, b) for a, b in zip(mine, want) if a != b][:2] or "counts differ"))


def rezip(source, target, change=None, **options):
    """Writes the members of a zip anew with Python's zipfile; change(name, data) may alter or drop (None) them."""
    with zipfile.ZipFile(source) as a, zipfile.ZipFile(target, "w", **options) as b:
        for i in a.infolist():
            data = a.read(i.filename)
            data = change(i.filename, data) if change else data
            if data is not None:
                b.writestr(i.filename, data)
