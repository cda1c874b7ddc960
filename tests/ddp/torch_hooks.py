"""Ready-made communication hooks against PyTorch: powerSGD_hook itself, on gloo ranks, from the same first Q; and
arithmetic on torch.bfloat16. torch_hooks.py HOOK_DUMP; 77: no PyTorch here."""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

SHAPES = {"w": (24, 18), "k": (16, 4, 3, 3), "b": (11,)}
COLUMNS = {"w": 18, "k": 36}
STEPS = 8
PLAIN = 2


def elements(shape):
    return int(np.prod(shape))


def gradients(size):
    """[step][rank][name], with something in common between ranks and steps."""
    rng = np.random.RandomState(size)
    common = {n: rng.randn(*s) for n, s in SHAPES.items()}
    return [[{n: (common[n] + 0.7 * rng.randn(*s)).astype(np.float32) for n, s in SHAPES.items()}
             for _ in range(size)] for _ in range(STEPS)]


def first_q(rank):
    rng = np.random.RandomState(100 + rank)
    return {n: rng.randn(m, rank).astype(np.float32) for n, m in COLUMNS.items()}


def muster(program, what, size, rank, feedback, warm, q, grads):
    data = b"".join(q[n].tobytes() for n in COLUMNS)
    data += b"".join(g[n].tobytes() for step in grads for g in step for n in SHAPES)
    command = [program, what, str(size), str(STEPS), str(rank), str(int(feedback)), str(int(warm))]
    out = subprocess.run(command, input=data, stdout=subprocess.PIPE, timeout=60, check=True).stdout
    rows = np.frombuffer(out, np.float32).reshape(STEPS, -1)
    result = []
    for row in rows:
        at, step = 0, {}
        for n, s in SHAPES.items():
            step[n] = row[at:at + elements(s)].reshape(s)
            at += elements(s)
        result.append(step)
    return result


class Bucket:
    """What the hook asks of a GradBucket, which only the reducer can make: one bucket with everything."""

    def __init__(self, grads):
        self.flat = torch.cat([torch.from_numpy(grads[n].copy()).view(-1) for n in SHAPES])

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.flat

    def gradients(self):
        at, out = 0, []
        for s in SHAPES.values():
            out.append(self.flat[at:at + elements(s)].view(s))
            at += elements(s)
        return out


def torch_rank(rank, size, address, cases, out):
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    grads = gradients(size)
    results = []
    for r, feedback, warm in cases:
        state = power.PowerSGDState(None, matrix_approximation_rank=r, start_powerSGD_iter=PLAIN,
                                    use_error_feedback=feedback, warm_start=warm)
        ours = first_q(r)
        drawn = iter([torch.from_numpy(ours[n]).unsqueeze(0) for n in COLUMNS])
        randn = torch.randn
        # The hook draws Q with torch.randn, in the order of the matrices in the bucket.
        torch.randn = lambda *shape, **kw: next(drawn)
        try:
            steps = []
            for step in grads:
                b = Bucket(step[rank])
                flat = power.powerSGD_hook(state, b).wait()
                steps.append((flat[0] if isinstance(flat, (list, tuple)) else flat).numpy().copy())
            results.append(steps)
        finally:
            torch.randn = randn
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    os._exit(0)  # threads of gloo and of futures do not always survive an orderly end


def compare_power(program, size, folder):
    cases = [(1, True, True), (2, True, True), (1, False, True)]
    out = os.path.join(folder, f"out{size}")
    mp.spawn(torch_rank, (size, os.path.join(folder, f"meet{size}"), cases, out), nprocs=size)
    worst = 0.0
    for case, steps in zip(cases, torch.load(out)):
        ours = muster(program, "powersgd", size, *case, first_q(case[0]), gradients(size))
        for n, (a, flat) in enumerate(zip(ours, steps)):
            at = 0
            for name, s in SHAPES.items():
                b = flat[at:at + elements(s)].reshape(s)
                at += elements(s)
                mean = np.mean([g[name] for g in gradients(size)[n]], axis=0)
                off = np.linalg.norm(a[name] - b) / np.linalg.norm(b)
                worst = max(worst, off)
                assert off < 2e-5, f"{size} ranks, {case}, step {n}, {name}: off by {off}"
                # Compression must have done something, or this compares nothing.
                lossy = np.linalg.norm(a[name] - mean) / np.linalg.norm(mean) > 0.05
                assert lossy == (n >= PLAIN and name in COLUMNS), f"{case}, step {n}, {name}: lossy is {lossy}"
    print(f"PowerSGD on {size} ranks: off by at most {worst:.2g} of a gradient's norm")


def compare_bf16(program, size):
    grads = gradients(size)
    ours = muster(program, "bf16", size, 1, True, True, first_q(1), grads)
    for n, step in enumerate(grads):
        for name in SHAPES:
            sent = [(torch.from_numpy(g[name]) / size).to(torch.bfloat16).float() for g in step]
            total = sent[0]
            for x in sent[1:]:
                total = total + x
            assert np.array_equal(ours[n][name], total.numpy()), f"bf16, {size} ranks, step {n}, {name}"
    print(f"bf16 on {size} ranks: equal to the bit")


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 3):
            compare_bf16(program, size)
            compare_power(program, size, folder)


if __name__ == "__main__":
    main()
