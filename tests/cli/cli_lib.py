"""Shared by the command's tests: a small made-up data set, running the command, comparing checkpoints bit by bit."""
import gzip
import os
import shutil
import subprocess
import tempfile

import numpy as np

MUSTER = os.environ.get("MUSTER", "build/muster")


def write_idx(path, array, zipped=False):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    with (gzip.open(path + ".gz", "wb") if zipped else open(path, "wb")) as f:
        f.write(head + array.astype(np.uint8).tobytes())


def make_data(folder, train=203, test=97, classes=4, side=12, channels=1):
    """IDX files of noisy shapes, one per class: learnable in a few steps, with sizes that divide by nothing."""
    os.makedirs(folder, exist_ok=True)
    rng = np.random.RandomState(5)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % classes
        rng.shuffle(labels)
        images = rng.randint(0, 80, (count, side, side))
        for i, k in enumerate(labels):
            # Shapes that a flip or a shifted crop leaves what they are.
            third = side // 3
            images[i][[np.s_[:third], np.s_[-third:], np.s_[third:-third, third:-third], np.s_[:]][k % 4]] += 150
        write_idx(os.path.join(folder, f"{part}-images-idx3-ubyte"), images, zipped=part == "train")
        write_idx(os.path.join(folder, f"{part}-labels-idx1-ubyte"), labels, zipped=part == "train")
    return "idx:" + folder


def rank_pids(launcher):
    """rank: pid of the processes below the launcher."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/environ", "rb") as f:
                env = dict(x.split(b"=", 1) for x in f.read().split(b"\0") if b"=" in x)
        except (OSError, ValueError):
            continue
        if parent == launcher and b"RANK" in env:
            found[int(env[b"RANK"])] = int(pid)
    return found


class Work:
    """A folder of its own with data in it; the command runs there."""
    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="muster-test-")
        self.cwd = os.path.join(self.path, "cwd")
        os.mkdir(self.cwd)
        self.data = make_data(os.path.join(self.path, "data"))
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def run(self, *args, timeout=120, env=None):
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        clean.update(env or {})
        clean.setdefault("OMP_NUM_THREADS", "1")
        return subprocess.run([MUSTER] + [str(a) for a in args], cwd=self.cwd, timeout=timeout, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean)

    def ok(self, *args, **kw):
        done = self.run(*args, **kw)
        assert done.returncode == 0, f"muster {' '.join(map(str, args))}: exit {done.returncode}\n" \
                                     f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def train(self, *args, model="cnn", **kw):
        return self.ok("train", "--model", model, "--data", self.data, "--batch", 16, "--lr", 0.02, "--seed", 3,
                       *args, **kw)

    def load(self, name):
        import torch  # takes seconds: only for those who look inside
        return torch.load(os.path.join(self.cwd, name))

    def path_of(self, name):
        return os.path.join(self.cwd, name)


def differences(a, b, where=""):
    """Every place where two loaded checkpoints are not bit for bit the same."""
    import torch
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}[{i}]")]
    if torch.is_tensor(a) and torch.is_tensor(b):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [f"{where}: tensors differ"]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]
