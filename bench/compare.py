#!/usr/bin/python3
"""Runs the contestants in turn and prints images/s and ratios; see run.sh."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

# glibc keeps freed pages instead of giving them back each step: an honest setting that helps PyTorch, where page
# faults are dear.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592",
              "MALLOC_TOP_PAD_": "67108864"}
WARM_UP = 10
RANKS = 2


def rates_of(log):
    """Images per second, and per second of processor time of rank 0 (its half of the images), after warm-up."""
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    if len(steps) <= WARM_UP + 1:
        raise SystemExit(f"{log}: only {len(steps)} steps")
    images = sum(s["images"] for s in steps[WARM_UP:])
    first, last = steps[WARM_UP - 1], steps[-1]
    return (images / (last["seconds"] - first["seconds"]),
            images / RANKS / (last["cpu_seconds"] - first["cpu_seconds"]))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--muster", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=60)
    o = p.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    common = ["--data", o.data, "--ranks", str(RANKS), "--batch", "64", "--steps", str(o.steps), "--lr", "0.1", "--schedule",
              "constant"]
    torch = ["/usr/bin/python3", os.path.join(here, "torch_train.py"), "--time"] + common
    contestants = [
        ("muster", [o.muster, "train", "--model", "resnet20", "--quiet", "--eval-every", "0"] + common, {}),
        ("torch", torch, {}),
        ("torch, pages kept", torch, KEEP_PAGES),
        ("torch, pages kept, channels_last", torch + ["--channels-last"], KEEP_PAGES),
    ]
    rates = {name: [] for name, _, _ in contestants}
    with tempfile.TemporaryDirectory() as work:
        log = os.path.join(work, "log.jsonl")
        for n in range(o.rounds):
            # The other way round every second time, so that nobody always follows the same neighbour.
            for name, command, extra in contestants if n % 2 == 0 else reversed(contestants):
                env = dict(os.environ, OMP_NUM_THREADS="1", **extra)
                done = subprocess.run(command + ["--log", log], env=env, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, timeout=900)
                if done.returncode != 0:
                    sys.stdout.write(done.stdout.decode(errors="replace"))
                    raise SystemExit(f"{name}: exit {done.returncode}")
                rates[name].append(rates_of(log))
                print(f"round {n + 1}: {name}: {rates[name][-1][0]:.0f} images/s, "
                      f"{rates[name][-1][1]:.0f} per processor second", flush=True)
    print(f"\nresnet20, Fashion-MNIST, {RANKS} ranks x batch 64, {o.steps} steps, medians of {o.rounds} rounds")
    print(f"{'':34s}  images/s  [min .. max]         images per processor second")
    table = {name: [statistics.median(x[i] for x in r) for i in (0, 1)] for name, r in rates.items()}
    for name, r in rates.items():
        spread = f"[{min(x[0] for x in r):.0f} .. {max(x[0] for x in r):.0f}]"
        ratios = "" if name == "muster" else "   muster is {:.2f} x, {:.2f} x".format(
            *(table["muster"][i] / table[name][i] for i in (0, 1)))
        print(f"  {name:32s}  {table[name][0]:8.0f}  {spread:18s}  {table[name][1]:8.0f}{ratios}")
    best = [max(v[i] for name, v in table.items() if name != "muster") for i in (0, 1)]
    print(f"muster / the best setting of torch: {table['muster'][0] / best[0]:.2f} by the clock, "
          f"{table['muster'][1] / best[1]:.2f} by processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
