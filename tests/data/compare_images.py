"""Image folders against Pillow and torchvision: decoded, made grey, resized and cropped, pixel by pixel.

Pillow decodes 16-bit grey to clipped values, which is its known fault; such files are compared by hand below. CMYK
JPEGs are compared too. Everything else must be equal to the byte, except that another libjpeg inside Pillow may decode
a JPEG differently by a few steps: then the test says so and allows that much."""
import os
import sys
import tempfile

import numpy as np

from samples import dump

try:
    from PIL import Image
except ImportError as e:
    print("skipped:", e)
    sys.exit(77)
try:
    from torchvision import transforms
except ImportError:
    transforms = None  # then by Pillow alone, as below

SIZES = [(64, 64), (200, 133), (133, 200), (31, 47), (500, 375), (375, 500), (17, 900), (224, 224), (225, 223), (1, 40)]
JPEG_STEPS = 3


def picture(rng, width, height, channels):
    """Smooth shapes with noise on top, so that both interpolation and rounding are tried."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 90 * np.sin(x / rng.uniform(2, 40) + y / rng.uniform(2, 40) + c) for c in range(channels)]
    noisy = np.stack(planes, -1) + rng.normal(0, 20, (height, width, channels))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def write_all(root, rng):
    """One class folder per kind, named by kind."""
    modes = {"rgb": 3, "grey": 1, "rgba": 4, "greyalpha": 2, "palette": 3, "jpeg": 3, "jpeggrey": 1,
             "jpegprogressive": 3, "jpeg444": 3, "jpegcmyk": 4, "bilevel": 1}
    for kind, channels in modes.items():
        os.makedirs(os.path.join(root, kind))
        for width, height in SIZES:
            pixels = picture(rng, width, height, channels)
            mode = {1: "L", 2: "LA", 3: "RGB", 4: "CMYK" if kind == "jpegcmyk" else "RGBA"}[channels]
            image = Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)
            path = os.path.join(root, kind, "%dx%d" % (width, height))
            if kind.startswith("jpeg"):
                image.save(path + ".jpg", quality=90, progressive=kind == "jpegprogressive",
                           subsampling=0 if kind == "jpeg444" else 2)
            elif kind == "palette":
                image.quantize(200).save(path + ".png")
            elif kind == "bilevel":
                image.convert("1").save(path + ".png")
            else:
                image.save(path + ".png")


def expected(path, side, channels):
    with Image.open(path) as image:
        image = image.convert("RGB")
        if channels == 1:
            image = image.convert("L")
        width, height = image.size
        short = min(width, height)
        resized = image.resize((side * width // short, side * height // short), Image.BILINEAR)
        left, top = (round((n - side) / 2) for n in resized.size)
        pixels = np.asarray(resized.crop((left, top, left + side, top + side))).reshape(side, side, channels)
        result = pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
        if transforms is not None:
            fit = transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side), transforms.ToTensor()])
            assert np.array_equal(result, fit(image).numpy()), path
        return result


def compare(program, root):
    paths = [os.path.join(root, kind, name) for kind in sorted(os.listdir(root))
             for name in sorted(os.listdir(os.path.join(root, kind)))]
    worst = {}
    print("torchvision is", "absent" if transforms is None else "compared too")
    for side, channels in (224, 3), (32, 3), (65, 1), (1, 3):
        x, y, classes = dump(program, "folder:" + root, "train", side, channels)
        assert len(x) == len(paths) and classes == len(os.listdir(root))
        for got, path in zip(x, paths):
            kind = os.path.basename(os.path.dirname(path))
            steps = np.abs(got - expected(path, side, channels)).max() * 255
            worst[kind] = max(worst.get(kind, 0), round(float(steps), 3))
    print("largest difference in steps of 1/255:", worst)
    for kind, steps in worst.items():
        assert steps <= (JPEG_STEPS if kind.startswith("jpeg") else 0), (kind, steps)


def compare_16_bit(program, root, rng):
    os.makedirs(os.path.join(root, "deep"))
    pixels = rng.integers(0, 65536, (20, 20), dtype=np.uint16)
    Image.fromarray(pixels.astype(np.int32), "I").convert("I;16").save(os.path.join(root, "deep", "a.png"))
    x, _, _ = dump(program, "folder:" + root, "train", 20, 1)
    assert np.array_equal(x[0, 0], (pixels >> 8).astype(np.float32) / np.float32(255))


def main():
    rng = np.random.default_rng(11)
    with tempfile.TemporaryDirectory() as root:
        write_all(root, rng)
        compare(sys.argv[1], root)
    with tempfile.TemporaryDirectory() as root:
        compare_16_bit(sys.argv[1], root, rng)
    return 0


sys.exit(main())
