"""Fashion-MNIST as Debian ships it: every pixel and label against gzip and numpy."""
import gzip
import os
import sys

import numpy as np

from samples import dump

FOLDER = "/usr/share/datasets/fashion-mnist"


def read(name, head):
    with gzip.open(os.path.join(FOLDER, name)) as f:
        return np.frombuffer(f.read(), np.uint8, offset=head)


def main():
    if not os.path.isdir(FOLDER):
        print("skipped: no", FOLDER, "(Debian package dataset-fashion-mnist)")
        return 77
    for split, prefix, count in ("train", "train", 60000), ("test", "t10k", 10000):
        x, y, classes = dump(sys.argv[1], "idx:" + FOLDER, split)
        images = read(prefix + "-images-idx3-ubyte.gz", 16).reshape(count, 1, 28, 28)
        labels = read(prefix + "-labels-idx1-ubyte.gz", 8)
        assert classes == 10 and x.shape == images.shape, (classes, x.shape)
        assert np.array_equal(y, labels)
        assert np.array_equal(x, images.astype(np.float32) / np.float32(255))
        print(split, count, "images equal")
    return 0


sys.exit(main())
