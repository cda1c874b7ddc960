#!/usr/bin/python3
"""What loading a checkpoint of 400 MB into a model takes, beside reading its bytes once, and beside PyTorch.

    bench/loading.py [--build build] [--rounds 5] [--times 3]

Two state dicts, of few large tensors and of many small ones, each in PyTorch's zip, its legacy format and safetensors
(where Python has it). In each round every contestant is a process of its own that does the same once unmeasured and then
--times times; they take turns, the other way round every second round. Printed are medians by the clock and of processor
time, the ratio of both to reading the bytes once into memory that is there already (read) and into new memory (fresh),
and the memory each took beyond what it had before: a model is there before, its file is in the system's cache.

PyTorch is Debian's, and where MUSTER_TORCH_PYTHON names the Python of a newer one, that too, with mmap=True as well."""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile

MAKE = """
import sys, torch
folder = sys.argv[1]
torch.manual_seed(0)
few = [(4096, 4096)] * 5 + [(2048, 2048)] * 5
many, n = [], 0
while n < 100_000_000:
    many += [(64,), (256, 256), (128, 64, 3, 3), (512,), (1000, 100)]
    n += 64 + 65536 + 73728 + 512 + 100000
for name, shapes in ("few", few), ("many", many):
    d = {f"p{i}": torch.randn(s) for i, s in enumerate(shapes)}
    torch.save(d, f"{folder}/{name}.zip")
    torch.save(d, f"{folder}/{name}.legacy", _use_new_zipfile_serialization=False)
    try:
        from safetensors.torch import save_file
        save_file(d, f"{folder}/{name}.safetensors")
    except ImportError:
        pass
"""

# Prints as loading.c does.
TORCH = """
import sys, time, torch
torch.set_num_threads(1)
path, times, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def read():
    if how == "safetensors":
        from safetensors.torch import load_file
        return load_file(path)
    return torch.load(path, **({"mmap": True} if how == "mmap" else {}), weights_only=True)
def status(field):
    with open("/proc/self/status") as f:
        return [int(l.split()[1]) for l in f if l.startswith(field)][0] * 1024
model = torch.nn.Module()
for name, value in read().items():
    model.register_parameter(name, torch.nn.Parameter(torch.ones_like(value)))
del value
model.load_state_dict(read())
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
before = status("VmRSS:")
for _ in range(times):
    wall, cpu = time.monotonic(), time.process_time()
    model.load_state_dict(read())
    print(time.monotonic() - wall, time.process_time() - cpu)
print(status("VmHWM:") - before)
"""


def build(folder, out):
    here = os.path.dirname(os.path.abspath(__file__))
    subprocess.run(["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-I", os.path.join(here, "../include"),
                    os.path.join(here, "loading.c"), "-o", out, os.path.join(folder, "libmuster.so"),
                    "-Wl,-rpath," + os.path.abspath(folder)], check=True)


def has(python, module):
    return subprocess.run([python, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def version(python):
    return subprocess.run([python, "-c", "import torch; print(torch.__version__.split('+')[0])"], stdout=subprocess.PIPE,
                          check=True).stdout.decode().strip()


def measure(command):
    """Seconds by the clock and of the process, one pair for each time, and bytes."""
    done = subprocess.run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=600, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise SystemExit(f"{command[0]}: exit {done.returncode}")
    lines = done.stdout.decode().split("\n")
    return [tuple(map(float, line.split())) for line in lines[:-2]], int(lines[-2])


def contestants(program, file, times, pythons):
    kind = file.rsplit(".", 1)[1]
    yield "read into memory that is there", [program, "read", file, times]
    yield "read into new memory", [program, "fresh", file, times]
    yield "muster, mu_load", [program, "load", file, times]
    yield "muster, open and list (inspect)", [program, "open", file, times]
    for python, name, new in pythons:
        script = [python, "-c", TORCH, file, times]
        if kind == "safetensors":
            if has(python, "safetensors"):
                yield f"load_file, load_state_dict ({name})", script + ["safetensors"]
            continue
        yield f"torch.load, load_state_dict ({name})", script + ["plain"]
        if new and kind == "zip":
            yield f"  with mmap=True ({name})", script + ["mmap"]


def run(title, rows, rounds):
    results = {name: ([], []) for name, _ in rows}
    for n in range(rounds):
        for name, command in rows if n % 2 == 0 else reversed(rows):
            seconds, peak = measure(command)
            results[name][0].extend(seconds)
            results[name][1].append(peak)
    table = [(name, *(statistics.median(x[i] for x in seconds) for i in (0, 1)), max(peaks))
             for name, (seconds, peaks) in results.items()]
    read, fresh = table[0], table[1]
    print(f"\n{title}: medians, load average {os.getloadavg()[0]:.1f}")
    print(f"  {'':44s}  {'ms':>8s} {'cpu ms':>8s}   {'/ read':>6s} {'cpu':>5s}   {'/ fresh':>6s} {'cpu':>5s}   {'MB more':>7s}")
    for name, wall, cpu, peak in table:
        print(f"  {name:44s}  {wall * 1e3:8.1f} {cpu * 1e3:8.1f}   {wall / read[1]:6.2f} {cpu / read[2]:5.2f}   "
              f"{wall / fresh[1]:7.2f} {cpu / fresh[2]:5.2f}   {max(peak, 0) / 1e6:7.0f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--build", default="build")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--times", type=int, default=3)
    o = p.parse_args()
    pythons = [("/usr/bin/python3", "torch " + version("/usr/bin/python3"), False)]
    newer = os.environ.get("MUSTER_TORCH_PYTHON")
    if newer:
        pythons.append((newer, "torch " + version(newer), True))
    with tempfile.TemporaryDirectory() as work:
        program = os.path.join(work, "loading")
        build(o.build, program)
        maker = [python for python, _, _ in pythons if has(python, "safetensors")] or ["/usr/bin/python3"]
        subprocess.run([maker[0], "-c", MAKE, work], check=True)
        for name in ("few", "many"):
            for kind in ("zip", "legacy", "safetensors"):
                file = os.path.join(work, f"{name}.{kind}")
                if os.path.exists(file):
                    run(f"{name} tensors, {kind}, {os.path.getsize(file) / 1e6:.0f} MB",
                        list(contestants(program, file, str(o.times), pythons)), o.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
