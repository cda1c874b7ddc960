#!/usr/bin/python3
"""Steps on many ranks, simulated: the reducer over the group of MPI, as it is, in SimGrid's SMPI, with pauses in the place of
computation. Prints step time, what communication adds to it, and efficiency; beside it what `muster plan` predicts.

    bench/scale.py [--ranks 8,16,32] [--networks 10gbe,25gbe,100gbe,ib200,25gbe-tree] [--buckets 25] [--model resnet50]
                   [--forward 0.1] [--backward 0.2] [--steps 1] [--json] [--build build]

A model is resnet18, resnet50, or a report of `muster train --report`. The time of a run grows with the square of the ranks:
docs/scaling.md has some. 25gbe-tree is a fat tree of 16 hosts to a switch, with half of their bandwidth upwards."""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

MIB = 1 << 20
NETWORKS = {"10gbe": (10, 20, 5), "25gbe": (25, 10, 5), "100gbe": (100, 5, 2), "ib200": (200, 1.5, 1)}  # as `muster plan`
SKIP = 77


def resnet(blocks, bottleneck):
    """Name, elements and work of each parameter, in registration order, of torchvision's network at 224 x 224."""
    out = []

    def conv(name, to, come, kernel, side):
        out.append((name + ".weight", to * come * kernel ** 2, to * come * kernel ** 2 * side ** 2))

    def norm(name, width):
        out.extend([(name + ".weight", width, 0), (name + ".bias", width, 0)])

    conv("conv1", 64, 3, 7, 112)
    norm("bn1", 64)
    come = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            name, to = f"layer{stage + 1}.{block}.", width * (4 if bottleneck else 1)
            widths = [(width, come, 1), (width, width, 3), (to, width, 1)] if bottleneck else [(to, come, 3), (to, to, 3)]
            for i, (a, b, kernel) in enumerate(widths):
                conv(f"{name}conv{i + 1}", a, b, kernel, side)
                norm(f"{name}bn{i + 1}", a)
            if come != to:
                conv(name + "downsample.0", to, come, 1, side)
                norm(name + "downsample.1", to)
            come = to
    out.extend([("fc.weight", 1000 * come, 1000 * come), ("fc.bias", 1000, 0)])
    total = sum(work for _, _, work in out)
    return [(name, count, work / total) for name, count, work in out]


def recorded(path):
    """The layout of a report: what was ready between two buckets is shared out by bytes."""
    with open(path, encoding="utf-8") as f:
        r = json.load(f)
    come = sorted((p for p in r["parameters"] if p["bucket"] >= 0 and p["ready"] >= 0), key=lambda p: p["ready"])
    out, before, end = [], 0.0, r["last"]["backward"]
    for k, bucket in enumerate(r["buckets"]):
        mine = [p for p in come if p["bucket"] == k]
        total = sum(p["bytes"] for p in mine)
        ready = max(before, min(bucket["ready"], end))
        out += [(p["name"], p["bytes"] // 4, (ready - before) / end * p["bytes"] / total) for p in mine]
        before = ready
    return out[::-1], r["last"]["forward"], end


def as_report(layout, forward, backward):
    """The report that such a run would write, with buckets of 1 MiB."""
    buckets, parameters, now, size = [], [], 0.0, 0
    for k, (name, count, share) in enumerate(reversed(layout)):
        now += share * backward
        size += 4 * count
        parameters.append({"name": name, "bytes": 4 * count, "bucket": len(buckets), "ready": k + 1})
        if size >= MIB or k == len(layout) - 1:
            buckets.append({"bytes": size, "ready": now})
            size = 0
    return {"last": {"forward": forward, "backward": backward}, "buckets": buckets, "parameters": parameters[::-1]}


def platform(network, ranks):
    gbit, latency, _ = NETWORKS[network.split("-")[0]]
    tree = ""
    if network.endswith("-tree"):
        leaves = -(-ranks // 16)
        tree = f'topology="FAT_TREE" topo_parameters="2;16,{leaves};1,8;1,1" '
        ranks = 16 * leaves
    links = f'bw="{gbit / 8}GBps" lat="{latency / (4 if tree else 2)}us"'
    return f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><zone id="z" routing="Full">
<cluster id="c" prefix="node-" suffix="" radical="0-{ranks - 1}" speed="1Gf" {links} {tree}sharing_policy="SPLITDUPLEX"
 loopback_bw="25GBps" loopback_lat="0.3us"/>
</zone></platform>
"""


def simulate(build, layout, ranks, network, bucket_mib, forward, backward, steps, check=False):
    with tempfile.TemporaryDirectory() as folder:
        def write(name, text):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                f.write(text)
            return os.path.join(folder, name)

        options = ["smpi/simulate-computation:no", "smpi/test:0", "smpi/wtime:0", "smpi/bw-factor:0:1", "smpi/lat-factor:0:1",
                   "network/crosstraffic:0", f"smpi/ois:0:{NETWORKS[network.split('-')[0]][2]}e-6:0"]
        command = ["smpirun", "-np", str(ranks), "-platform", write("platform.xml", platform(network, ranks)), "-hostfile",
                   write("hosts", "".join(f"node-{r}\n" for r in range(ranks))), "-no-privatize",
                   "--log=root.thres:error"] + ["--cfg=" + x for x in options]
        command += [os.path.abspath(os.path.join(build, "bench", "scale.so")),
                    write("layout", "".join(f"{n} {c} {s:.12f}\n" for n, c, s in layout)), forward, backward,
                    int(bucket_mib * MIB), int(min(bucket_mib, 1) * MIB), steps] + ["check"] * check
        env = dict(os.environ, MUSTER_PLUGINS=os.path.abspath(os.path.join(build, "bench")), OMP_NUM_THREADS="1")
        done = subprocess.run([str(x) for x in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        found = re.search(r"^\{.*\}$", done.stdout.decode(), re.M)
        if done.returncode != 0 or found is None or b"Deadlock" in done.stderr + done.stdout:
            sys.stderr.write((done.stdout + done.stderr).decode(errors="replace")[-2000:])
            raise SystemExit(f"scale.py: the simulation of {ranks} ranks failed with {done.returncode}")
    r = json.loads(found.group(0))
    r.update(network=network, bucket_mib=bucket_mib, waiting=r.pop("exposed"), exposed=r["step"] - forward - backward,
             efficiency=(forward + backward) / r["step"])
    return r


def plan(build, layout, r, forward, backward):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(as_report(layout, forward, backward), f)
        f.flush()
        out = subprocess.run([os.path.join(build, "muster"), "plan", f.name, "--ranks", str(r["ranks"]), "--network",
                              r["network"].split("-")[0], "--bucket-mib", str(r["bucket_mib"]), "--json"], check=True,
                             stdout=subprocess.PIPE).stdout
    r["planned"] = json.loads(out)["rows"][0]["step"]
    r["plan_error"] = r["planned"] / r["step"] - 1
    return r


def test(build):
    """A few ranks: means are right, the group closes, the plan is near, and a better network is better."""
    small = [(f"p{i}", 40000 * (1 + i % 3), 0.05) for i in range(20)]
    simulate(build, small, 5, "25gbe", 0.5, 0.001, 0.02, 2, check=True)
    rows = [plan(build, small, simulate(build, small, 8, network, 1, 0.001, 0.02, 1), 0.001, 0.02)
            for network in ("10gbe", "100gbe")]
    print(json.dumps(rows))
    assert rows[0]["exposed"] > 1.5 * rows[1]["exposed"] > 0
    assert all(abs(r["plan_error"]) < 0.02 and r["buckets"] > 2 for r in rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--ranks", default="8,16,32")
    p.add_argument("--networks", default=",".join(NETWORKS))
    p.add_argument("--buckets", default="25", help="in MiB")
    p.add_argument("--model", default="resnet50")
    p.add_argument("--forward", type=float, default=0.1, help="seconds; not of a report")
    p.add_argument("--backward", type=float, default=0.2)
    p.add_argument("--steps", type=int, default=1)
    p.add_argument("--json", action="store_true")
    p.add_argument("--test", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    if not os.path.exists(os.path.join(o.build, "bench", "scale.so")):
        print("skipped: no bench/scale.so in the build folder: SimGrid (libsimgrid-dev) was not there when it was configured")
        return SKIP
    if o.test:
        test(o.build)
        return 0
    forward, backward = o.forward, o.backward
    if o.model in ("resnet18", "resnet50"):
        layout = resnet([2, 2, 2, 2] if o.model == "resnet18" else [3, 4, 6, 3], o.model == "resnet50")
    else:
        layout, forward, backward = recorded(o.model)
    rows = []
    if not o.json:
        print(f"{o.model}: {sum(4 * c for _, c, _ in layout) / 1e6:.1f} MB, {forward * 1e3:g} + {backward * 1e3:g} ms\n")
        print("| network | ranks | bucket MiB | step ms | exposed ms | efficiency | planned ms | error |\n" + "|---" * 8 + "|")
    for network in o.networks.split(","):
        for ranks in map(int, o.ranks.split(",")):
            for bucket in map(float, o.buckets.split(",")):
                r = plan(o.build, layout, simulate(o.build, layout, ranks, network, bucket, forward, backward, o.steps),
                         forward, backward)
                rows.append(r)
                if not o.json:
                    print(f"| {network} | {ranks} | {bucket:g} | {r['step'] * 1e3:.1f} | {r['exposed'] * 1e3:.1f} | "
                          f"{r['efficiency'] * 100:.1f} % | {r['planned'] * 1e3:.1f} | {r['plan_error'] * 100:+.1f} % |",
                          flush=True)
    if o.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
