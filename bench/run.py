#!/usr/bin/python3
"""`make bench`: Muster and its peers in turn, in one run, on the same cores, data and initial weights.

Each round starts every contestant once, as a process of its own that warms up and then measures; every second round goes the
other way round, so that nobody always follows the same neighbour. Losses must agree, or the run fails. All that was measured
goes to a JSON file; table.py makes the tables of it.

    ROUNDS=5 WORKLOADS=cnn,mlp-ddp make bench       some of the workloads; resnet18* is all that begin so
    QUICK=1 make bench                              two steps each: shows that all runs, measures nothing
    MUSTER_BENCH_TORCH=PYTHON                       a Python with a current PyTorch, instead of one that pip installs; or none"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import machine
import table
import workloads
from peers import Peers

KINDS = {"step": workloads.step_contestants, "overhead": workloads.overhead_contestants}
# Of one step's loss. The first has seen no update: what differs is rounding alone. Later ones have, in different orders.
FIRST_LOSS, LATER_LOSS = 1e-4, 1e-2


def run_json(name, command, extra, cores, threads=1):
    """Runs it on so many cores and returns its JSON."""
    cores = sorted(os.sched_getaffinity(0))[:cores]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env.update(extra, OMP_NUM_THREADS=str(threads))
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=1800, check=False, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr.decode(errors='replace')}{name}: exit {done.returncode}: {' '.join(command)}")
    return json.loads(done.stdout)


def check_losses(workload, results):
    """Against Muster's: who trains on something else, or wrongly, is no peer."""
    ours = next(iter(results.values()))["losses"]
    for name, result in results.items():
        for step, (a, b) in enumerate(zip(ours, result["losses"])):
            off = abs(a - b) / max(abs(b), 1e-6)
            if not off <= (FIRST_LOSS if step == 0 else LATER_LOSS):
                raise SystemExit(f"{workload}: the losses are not the same: step {step + 1} has {a:.7g} with Muster and "
                                 f"{b:.7g} with {name}")


def compare_losses(w, results):
    if w["kind"] == "overhead":  # ranks apart take other steps after the first
        for apart in (False, True):
            check_losses(w["name"], {n: r for n, r in results.items() if n.endswith(", apart") == apart})
    elif w["kind"] == "step":
        check_losses(w["name"], results)


def make_inputs(w, peers, folder, data):
    command = peers.maker.command("torch_inputs.py", [folder, w["model"], str(w["channels"]), str(w["side"]),
                                                      str(w["classes"]), str(w["batch"] * w["ranks"])])
    command += ["--cifar-stem"] if w.get("cifar_stem") else []
    subprocess.run(command + (["--data", data] if w.get("fashion") else []), check=True)


def run_workload(w, peers, o):
    out = {k: w[k] for k in ("name", "kind", "title", "ranks")}
    threads = out["threads"] = w.get("threads", 1)
    cores = w["ranks"] * threads
    with tempfile.TemporaryDirectory() as folder:
        if w["kind"] == "allreduce":
            contestants = list(workloads.allreduce_contestants(w, peers, o.quick))
        else:
            make_inputs(w, peers, folder, o.data)
            flags = workloads.step_flags(w, folder, o.quick)
            contestants = list(KINDS[w["kind"]](w, peers, flags))
            # Apart from the rounds, since timing kernels takes some time itself.
            out["profile"] = run_json("the profile", peers.muster("step", flags + ["--profile"]), {}, cores, threads)["profile"]
        rounds, count = [], o.rounds or w.get("rounds", workloads.ROUNDS)
        for n in range(count):
            results, begun = {}, time.monotonic()
            for name, command, env in contestants if n % 2 == 0 else reversed(contestants):
                results[name] = run_json(name, command, env, cores, threads)
            results = {name: results[name] for name, _, _ in contestants}
            compare_losses(w, results)
            rounds.append(results)
            print(f"{w['name']}: round {n + 1} of {count}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    if w["kind"] != "allreduce":
        out["gflop_per_step"] = rounds[0]["Muster"]["gflop_per_step"]  # of one rank, from shapes: the same for the peers
    return dict(out, rounds=rounds)


def parse():
    env = os.environ.get
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--muster", help="the command (BUILD/muster)")
    p.add_argument("--python", default="/usr/bin/python3", help="a Python with PyTorch, which makes the inputs too")
    p.add_argument("--torch", default=env("MUSTER_BENCH_TORCH", ""), help="another, with a current one (made under BUILD); none")
    p.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's IDX files")
    p.add_argument("--rounds", type=int, default=int(env("ROUNDS") or 0), help="1 when quick; else 5, or 3 where a step takes seconds")
    p.add_argument("--workloads", default=env("WORKLOADS", ""))
    p.add_argument("--quick", action="store_true", default=env("QUICK", "") not in ("", "0"))
    p.add_argument("--out", help="the JSON (BUILD/bench/results.json)")
    o = p.parse_args()
    o.muster = o.muster or os.path.join(o.build, "muster")
    o.out = o.out or os.path.join(o.build, "bench", "results.json")
    o.rounds = o.rounds or (1 if o.quick else 0)
    return o


def main():
    o = parse()
    wanted = workloads.select(o.workloads)
    os.makedirs(os.path.join(o.build, "bench"), exist_ok=True)
    peers = Peers(o)
    limits = run_json("muster bench machine", peers.muster("machine", ["--ranks", str(workloads.RANKS), "--json"]), {},
                      workloads.RANKS)
    results = {"date": machine.when(), "commit": machine.commit(), "quick": o.quick, "machine": machine.describe(),
               "versions": peers.versions(), "limits": limits, "workloads": []}
    for w in wanted:
        results["workloads"].append(run_workload(w, peers, o))
        with open(o.out, "w", encoding="utf-8") as f:  # after each: an interrupted run keeps what it has
            json.dump(results, f, indent=1)
    print(table.page(results))
    print(f"all numbers are in {o.out}; bench/table.py --out docs/benchmarks.md {o.out} writes the page", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
