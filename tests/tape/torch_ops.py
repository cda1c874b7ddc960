"""Every operation that PyTorch has, with all options, against PyTorch: values, gradients and running statistics.

Usage: torch_ops.py OP_RUNNER. Writes cases to a file, has op_runner compute them with both kinds of kernels, and
compares. Exits with 77 (skipped) where PyTorch is missing."""

import os
import struct
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(77)

torch.manual_seed(5)
torch.set_num_threads(1)
PLAIN, GRAD, SWAPPED, LABELS, UPDATED = range(5)


class Case:
    """inputs: (kind, tensor). f: the same in PyTorch, from tensors. tolerance: relative to the largest value."""

    def __init__(self, name, inputs, f, ints=(), floats=(), tolerance=2e-5):
        self.name, self.f, self.ints, self.floats, self.tolerance = name, f, ints, floats, tolerance
        self.inputs = [(k, t.clone()) for k, t in inputs]

    def expected(self):
        """Output, then gradients and updated inputs, in the order of inputs."""
        args = []
        for kind, x in self.inputs:
            args.append(x.clone().requires_grad_(True) if kind in (GRAD, SWAPPED) else x.clone())
        y = self.f(*args)
        self.dy = torch.randn(y.shape)
        (y * self.dy).sum().backward()
        out = [y.detach()]
        for (kind, _), x in zip(self.inputs, args):
            if kind in (GRAD, SWAPPED):
                out.append(torch.zeros_like(x) if x.grad is None else x.grad)
            elif kind == UPDATED:
                out.append(x)
        return out

    def write(self, f):
        f.write(struct.pack("<q", len(self.name)) + self.name.encode())
        f.write(struct.pack("<q%dq" % len(self.ints), len(self.ints), *self.ints))
        f.write(struct.pack("<q%dd" % len(self.floats), len(self.floats), *self.floats))
        f.write(struct.pack("<q", len(self.inputs) + 1))
        for kind, x in self.inputs + [(PLAIN, self.dy)]:
            x = x.transpose(-1, -2) if kind == SWAPPED else x
            f.write(struct.pack("<qq%dq" % x.dim(), kind, x.dim(), *x.shape))
            f.write(x.detach().contiguous().numpy().tobytes())


def read_tensor(f):
    (ndim,) = struct.unpack("<q", f.read(8))
    dims = struct.unpack("<%dq" % ndim, f.read(8 * ndim))
    n = 1
    for d in dims:
        n *= d
    data = f.read(4 * n)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(dims) if n else torch.zeros(dims)


def away_from_zero(*shape):
    x = torch.randn(shape)
    return torch.where(x.abs() < 1e-3, torch.ones_like(x), x)


def conv_cases():
    for shape, k, r, o, bias, swapped in [
        ((2, 3, 9, 8), 4, (3, 3), dict(padding=(1, 1)), True, False),
        ((2, 16, 10, 10), 32, (3, 3), dict(padding=(1, 1)), False, False),
        ((3, 64, 8, 8), 64, (3, 3), dict(padding=(1, 1)), True, False),  # Winograd's domain
        ((1, 1, 1, 1), 1, (1, 1), dict(), True, False),
        ((2, 5, 11, 7), 7, (5, 3), dict(stride=(2, 1), padding=(2, 0)), True, True),
        ((2, 6, 9, 9), 9, (3, 3), dict(groups=3, dilation=(2, 1), padding=(2, 1)), True, False),
        ((2, 8, 7, 7), 8, (3, 3), dict(groups=8, padding=(1, 1), stride=(2, 2)), False, False),
        ((1, 3, 24, 24), 16, (7, 7), dict(stride=(2, 2), padding=(3, 3)), False, False),
        ((4, 32, 6, 6), 16, (1, 1), dict(stride=(2, 2)), False, True),
        ((0, 3, 5, 5), 2, (3, 3), dict(), True, False),
        ((2, 3, 5, 5), 2, (3, 3), dict(padding=(4, 3)), True, False),
    ]:
        g = o.get("groups", 1)
        ins = [(SWAPPED if swapped else GRAD, torch.randn(shape)), (GRAD, torch.randn(k, shape[1] // g, *r) * 0.3)]
        if bias:
            ins.append((GRAD, torch.randn(k)))
        pairs = [o.get("stride", (1, 1)), o.get("padding", (0, 0)), o.get("dilation", (1, 1))]
        ints = [v for p in pairs for v in p] + [g]
        yield Case("conv2d", ins, lambda x, w, b=None, o=o: F.conv2d(x, w, b, **o), ints, tolerance=1e-4)


def norm_cases():
    for shape, affine, running, evaluate, relu, eps, momentum in [
        ((4, 3, 5, 5), 1, 1, 0, 0, 1e-5, 0.1), ((8, 17, 3, 3), 1, 1, 0, 1, 1e-3, 0.3), ((6, 5), 0, 1, 0, 0, 1e-5, 1.0),
        ((4, 3, 5, 5), 1, 1, 1, 0, 1e-5, 0.1), ((2, 16, 4, 4), 1, 1, 1, 1, 1e-5, 0.1), ((5, 4), 1, 0, 0, 1, 1e-5, 0.1),
        ((3, 16, 1, 2), 0, 0, 0, 0, 1e-5, 0.1), ((2, 1, 3, 3), 1, 0, 1, 0, 1e-2, 0.1), ((1, 4, 2, 2), 0, 1, 1, 1, 1e-5, 0.1),
    ]:
        c = shape[1]
        ins = [(SWAPPED if c == 17 else GRAD, torch.randn(shape) * 2 + 1)]
        ins += [(GRAD, torch.randn(c)), (GRAD, torch.randn(c))] if affine else []
        ins += [(UPDATED, torch.randn(c)), (UPDATED, torch.rand(c) + 0.5)] if running else []

        def f(*a, affine=affine, running=running, evaluate=evaluate, relu=relu, eps=eps, momentum=momentum):
            w, b = (a[1], a[2]) if affine else (None, None)
            m, v = (a[-2], a[-1]) if running else (None, None)
            y = F.batch_norm(a[0], m, v, w, b, training=not (evaluate and running), momentum=momentum, eps=eps)
            return F.relu(y) if relu else y

        yield Case("batch_norm", ins, f, [affine, running, evaluate, relu], [eps, momentum], tolerance=1e-4)


def pool_cases():
    for shape, k, s, p, exclude in [
        ((2, 3, 8, 8), (2, 2), (2, 2), (0, 0), 0), ((2, 17, 9, 7), (3, 3), (2, 2), (1, 1), 0),
        ((1, 16, 6, 6), (3, 2), (1, 2), (1, 1), 1), ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0), 0),
        ((0, 2, 4, 4), (2, 2), (2, 2), (0, 0), 0), ((2, 4, 7, 7), (7, 7), (7, 7), (3, 3), 1),
    ]:
        ints = list(k) + list(s) + list(p) + [exclude]
        kind = SWAPPED if k == (3, 2) else GRAD
        x = torch.randperm(max(1, torch.Size(shape).numel())).float()[:torch.Size(shape).numel()].reshape(shape) / 10 - 3
        yield Case("avg_pool2d", [(kind, x)],
                   lambda x, k=k, s=s, p=p, e=exclude: F.avg_pool2d(x, k, s, p, count_include_pad=not e), ints)
        yield Case("max_pool2d", [(kind, x)], lambda x, k=k, s=s, p=p: F.max_pool2d(x, k, s, p), ints)
    x = torch.randn(2, 5, 4, 6)
    yield Case("global_avg_pool2d", [(GRAD, x)], lambda x: x.mean((2, 3), keepdim=True))
    yield Case("global_max_pool2d", [(GRAD, x)], lambda x: x.amax((2, 3), keepdim=True))


def unary_cases():
    fs = dict(relu=F.relu, sigmoid=torch.sigmoid, tanh=torch.tanh, gelu=F.gelu, softplus=F.softplus)
    for shape, kind in [((3, 5), GRAD), ((), GRAD), ((0, 2), GRAD), ((4, 1, 7), SWAPPED), ((1025,), GRAD)]:
        x = away_from_zero(*shape) * 6
        for name, f in fs.items():
            yield Case(name, [(kind, x * 5 if name == "softplus" else x)], f)
        yield Case("leaky_relu", [(kind, x)], lambda x: F.leaky_relu(x, 0.2), floats=[0.2])
        yield Case("scale", [(kind, x)], lambda x: x * -1.25, floats=[-1.25])
        yield Case("sum", [(kind, x)], torch.sum)
        if x.numel():
            yield Case("mean", [(kind, x)], torch.mean)
        yield Case("detach", [(kind, x)], lambda x: x.detach() + 2 * x)
    for shape, kind in [((4, 7), GRAD), ((3, 1), GRAD), ((0, 3), GRAD), ((2, 9, 5), SWAPPED), ((2, 1000), GRAD)]:
        x = torch.randn(shape) * 4
        yield Case("softmax", [(kind, x)], lambda x: F.softmax(x, -1))
        yield Case("log_softmax", [(kind, x)], lambda x: F.log_softmax(x, -1))


def binary_cases():
    fs = dict(add=torch.add, sub=torch.sub, mul=torch.mul)
    for a, b, ka, kb in [
        ((3, 4), (3, 4), GRAD, GRAD), ((3, 4), (3, 4), SWAPPED, GRAD), ((2, 3, 4), (4,), GRAD, GRAD),
        ((5, 1), (1, 6), GRAD, SWAPPED), ((), (2, 2), GRAD, GRAD), ((0, 3), (1, 3), GRAD, GRAD),
        ((2, 1, 3, 1), (4, 1, 5), SWAPPED, GRAD), ((7,), (7,), GRAD, PLAIN),
    ]:
        for name, f in fs.items():
            yield Case(name, [(ka, torch.randn(a)), (kb, torch.randn(b))], f)
    x, y = away_from_zero(4, 6), away_from_zero(4, 6) * 1e-4
    yield Case("add_relu", [(GRAD, x), (SWAPPED, y)], lambda a, b: F.relu(a + b))


def linear_cases():
    for x, w, kx, kw, bias in [((4, 7), (5, 7), GRAD, GRAD, 1), ((2, 3, 8), (1, 8), SWAPPED, SWAPPED, 0),
                               ((6,), (3, 6), GRAD, GRAD, 1), ((0, 4), (3, 4), GRAD, GRAD, 1), ((33, 64), (17, 64), PLAIN, GRAD, 1)]:
        ins = [(kx, torch.randn(x)), (kw, torch.randn(w))] + ([(GRAD, torch.randn(w[0]))] if bias else [])
        yield Case("linear", ins, F.linear, tolerance=5e-5)
    for a, b, ka, kb in [((3, 4), (4, 5), GRAD, GRAD), ((1, 1), (1, 1), GRAD, GRAD), ((9, 17), (17, 2), SWAPPED, SWAPPED),
                         ((2, 0), (0, 3), GRAD, GRAD)]:
        yield Case("matmul", [(ka, torch.randn(a)), (kb, torch.randn(b))], torch.matmul, tolerance=5e-5)


def shape_cases():
    x = torch.randn(4, 6)
    for kind in (GRAD, SWAPPED):
        yield Case("reshape", [(kind, x)], lambda x: x.reshape(2, 3, 4), [3, 2, -1, 4])
        yield Case("permute", [(kind, x)], lambda x: x.permute(1, 0), [2, 1, 0])
        yield Case("narrow", [(kind, x)], lambda x: x.narrow(1, 2, 3), [1, 2, 3])
        yield Case("flatten", [(kind, torch.randn(2, 3, 4))], lambda x: x.flatten(1), [1])
        parts = [(kind, torch.randn(2, k, 3)) for k in (1, 4, 0, 2)]
        yield Case("concat", parts, lambda *p: torch.cat(p, -2), [-2] if kind == SWAPPED else [1])


def loss_cases():
    y = torch.tensor([1, 0, 4, -100, 2, 0])
    for smoothing in (0.0, 0.1, 0.6):
        yield Case("cross_entropy", [(GRAD, torch.randn(6, 5) * 3), (LABELS, y)],
                   lambda x, y, s=smoothing: F.cross_entropy(x, y, label_smoothing=s), [0, 0], [smoothing])
        yield Case("cross_entropy", [(SWAPPED, torch.randn(6, 5) * 50), (LABELS, y.clamp(min=0))],
                   lambda x, y, s=smoothing: F.cross_entropy(x, y, label_smoothing=s, ignore_index=4), [4, 0], [smoothing])
        yield Case("cross_entropy", [(GRAD, torch.randn(6, 5)), (LABELS, y.clamp(min=0))],
                   lambda x, y, s=smoothing: F.cross_entropy(x, y, label_smoothing=s, ignore_index=0), [0, 1], [smoothing])
    yield Case("cross_entropy", [(GRAD, torch.randn(1, 1)), (LABELS, torch.tensor([0]))], F.cross_entropy, [0, 0], [0.0])
    yield Case("cross_entropy", [(GRAD, torch.randn(64, 1000)), (LABELS, torch.randint(1000, (64,)))], F.cross_entropy,
               [0, 0], [0.0])
    for shape, kt in [((4, 5), GRAD), ((), PLAIN), ((3, 2), SWAPPED), ((700,), PLAIN)]:
        x = torch.randn(shape) * 3
        yield Case("mse_loss", [(GRAD, x), (kt, torch.randn(shape))], F.mse_loss)
        yield Case("bce_with_logits", [(GRAD, x * 20), (kt, torch.rand(shape))], F.binary_cross_entropy_with_logits)


def dropout_is_right(inputs, got, p):
    """No oracle for the draws: what was drawn must explain values and gradients, and be about as many as asked."""
    x, dy, y, dx = inputs[0][1], inputs[1], got[0], got[1]
    kept = (y != 0).float()
    ok = torch.allclose(y, x * kept / (1 - p), rtol=1e-5) and torch.allclose(dx, dy * kept / (1 - p), rtol=1e-5)
    return ok and abs(kept.mean().item() - (1 - p)) < 0.03


def compare(cases, expected, path, what):
    bad = 0
    with open(path, "rb") as f:
        for number, (case, want) in enumerate(zip(cases, expected)):
            (status,) = struct.unpack("<q", f.read(8))
            label = "%s case %d %s" % (what, number, case.name)
            if status != 0:
                print("%s: status %d" % (label, status))
                bad += 1
                continue
            kinds = [PLAIN] + [k for k, _ in case.inputs if k in (GRAD, SWAPPED, UPDATED)]
            got = [read_tensor(f) for _ in want]
            got = [g.transpose(-1, -2) if k == SWAPPED else g for k, g in zip(kinds, got)]
            if case.name == "dropout":
                good = dropout_is_right([case.inputs[0], case.dy], got, case.floats[0])
                bad += not good
                print("%s: wrong" % label) if not good else None
                continue
            for i, (g, w) in enumerate(zip(got, want)):
                scale = w.abs().max().item() if w.numel() else 0.0
                if g.shape != w.shape or not torch.allclose(g, w, rtol=0, atol=case.tolerance * (1e-3 + scale),
                                                            equal_nan=True):
                    far = (g - w).abs().max().item() if g.shape == w.shape else float("nan")
                    print("%s: result %d %s differs by %g of %g" % (label, i, tuple(w.shape), far, scale))
                    bad += 1
        if f.read(1):
            print("%s: more results than cases" % what)
            bad += 1
    return bad


def main():
    cases = []
    for make in (conv_cases, norm_cases, pool_cases, unary_cases, binary_cases, linear_cases, shape_cases, loss_cases):
        cases += list(make())
    cases.append(Case("dropout", [(GRAD, away_from_zero(100, 80))], lambda x: x * 1.0, floats=[0.3]))
    expected = [c.expected() for c in cases]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "cases")
        with open(source, "wb") as f:
            for c in cases:
                c.write(f)
            f.write(struct.pack("<q", 0))
        for kernels in ("reference", "default"):
            results = os.path.join(folder, kernels)
            r = subprocess.run([sys.argv[1], kernels, source, results], timeout=100)
            if r.returncode != 0:
                print("op_runner %s ended with %d" % (kernels, r.returncode))
                return 1
            bad += compare(cases, expected, results, kernels)
    print("%d cases, %d wrong results" % (len(cases), bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
