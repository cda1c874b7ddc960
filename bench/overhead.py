#!/usr/bin/python3
"""What reducing many small parameters costs, per parameter and step: Muster's mu_ddp beside PyTorch's DDP (gloo), on two
ranks, with and without parameters that the loss does not reach.

    bench/overhead.py [--build build] [--rounds 3] [--sizes 100,1000,10000]

Each contestant runs the same step (the sum of all parameters, or of all but every tenth, of 64 floats each) without and
with reduction; the difference, divided by the number of parameters, is the overhead. Contestants take turns in one run.
Of the rounds' medians the least counts: other work on the machine only ever adds. PyTorch's default cannot run the step
that leaves parameters out (its second iteration is an error)."""
import argparse
import os
import subprocess
import sys
import tempfile

RANKS = 2
FLOATS = 64
STEPS = {100: (300, 60), 1000: (100, 20), 10000: (30, 6)}  # of ours, of PyTorch's
CONTESTANTS = [(who, kind, which) for which in ("all", "some") for who, kind in (
    ("muster", "plain"), ("muster", "ddp"), ("torch", "plain"), ("torch", "default"), ("torch", "find_unused"),
    ("torch", "static_graph")) if (kind, which) != ("default", "some")]


def build(folder, out):
    here = os.path.dirname(os.path.abspath(__file__))
    subprocess.run(["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-I", os.path.join(here, "../include"),
                    os.path.join(here, "overhead.c"), "-o", out, os.path.join(folder, "libmuster.so"),
                    "-Wl,-rpath," + os.path.abspath(folder)], check=True)


def measure(command):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600)
    if done.returncode != 0:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}")
    wall, cpu = done.stdout.decode().split()
    return float(wall), float(cpu)


def report(size, best):
    print(f"\n{size} parameters of {FLOATS} floats, {RANKS} ranks; per step, and overhead per parameter")
    print(f"{'':32}{'ms wall':>10}{'ms cpu':>10}{'us wall':>10}{'us cpu':>10}")
    cost = {}
    for who, kind, which in CONTESTANTS:
        wall, cpu = best[who, kind, which]
        name = f"{who} {kind}, {which} parameters"
        line = f"{name:32}{wall * 1e3:10.3f}{cpu * 1e3:10.3f}"
        if kind != "plain":
            plain = best[who, "plain", which]
            cost[who, kind, which] = [(x - y) / size * 1e6 for x, y in zip((wall, cpu), plain)]
            line += "{:10.3f}{:10.3f}".format(*cost[who, kind, which])
        print(line)
    for which, rival in (("all", "default"), ("some", "find_unused")):
        ours, theirs = cost["muster", "ddp", which], cost["torch", rival, which]
        print(f"overhead with {which} parameters against PyTorch's {rival}: "
              f"{ours[0] / theirs[0]:.3f} of it by the wall, {ours[1] / theirs[1]:.3f} of it in processor time")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--sizes", default="100,1000,10000")
    p.add_argument("--only", choices=("muster", "torch"), help="leave the other out, and print times only")
    o = p.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as work:
        program = os.path.join(work, "overhead")
        build(o.build, program)
        start = {"muster": [os.path.join(o.build, "muster"), "run", "-n", str(RANKS), program],
                 "torch": ["/usr/bin/python3", os.path.join(here, "overhead_torch.py")]}
        for size in map(int, o.sizes.split(",")):
            steps = dict(zip(("muster", "torch"), STEPS.get(size, (100, 20))))
            best = {}
            for n in range(o.rounds):
                # The other way round every second time, so that nobody always follows the same neighbour.
                for c in CONTESTANTS[::-1 if n % 2 else 1]:
                    who, kind, which = c
                    if o.only is None or who == o.only:
                        new = measure(start[who] + [str(size), str(FLOATS), str(steps[who]), kind, which])
                        best[c] = tuple(map(min, best.get(c, new), new))
            if o.only is None:
                report(size, best)
            else:
                for c, (wall, cpu) in sorted(best.items()):
                    print(size, *c, f"{wall * 1e3:.3f} ms wall, {cpu * 1e3:.3f} ms cpu")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
