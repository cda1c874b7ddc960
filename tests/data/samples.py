"""What dump_samples writes, as numpy arrays."""
import subprocess

import numpy as np


def dump(program, spec, split="train", side=0, channels=0):
    """(x, y, classes): floats (count, c, h, w), labels (count)."""
    out = subprocess.run([program, spec, split, str(side), str(channels)], stdout=subprocess.PIPE, check=True).stdout
    count, classes, *dims = np.frombuffer(out, "<i8", 5).tolist()
    record = np.dtype([("y", "<i8"), ("x", "<f4", tuple(dims))])
    data = np.frombuffer(out, record, count, 40)
    assert len(out) == 40 + count * record.itemsize
    return data["x"], data["y"], classes
