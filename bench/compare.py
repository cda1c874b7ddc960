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


def rate(log):
    """Images per second after warm-up: all images over all time, the log's own clock."""
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    if len(steps) <= WARM_UP + 1:
        raise SystemExit(f"{log}: only {len(steps)} steps")
    images = sum(s["images"] for s in steps[WARM_UP:])
    return images / (steps[-1]["seconds"] - steps[WARM_UP - 1]["seconds"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--muster", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=60)
    o = p.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    common = ["--data", o.data, "--ranks", "2", "--batch", "64", "--steps", str(o.steps), "--lr", "0.1", "--schedule",
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
                rates[name].append(rate(log))
                print(f"round {n + 1}: {name}: {rates[name][-1]:.0f} images/s", flush=True)
    mine = statistics.median(rates["muster"])
    best = max(statistics.median(r) for name, r in rates.items() if name != "muster")
    print(f"\nresnet20, Fashion-MNIST, 2 ranks x batch 64, {o.steps} steps, median of {o.rounds} rounds")
    for name, r in rates.items():
        m = statistics.median(r)
        print(f"  {name:34s} {m:7.0f} images/s  [{min(r):.0f} .. {max(r):.0f}]"
              + ("" if name == "muster" else f"  muster is {mine / m:.2f} x"))
    print(f"muster / best torch setting: {mine / best:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
