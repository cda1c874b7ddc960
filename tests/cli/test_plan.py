#!/usr/bin/python3
"""`muster plan`: times that can be had by hand, what must hold of all of them, what is refused. test_plan.py CASE"""
import json
import os
import subprocess
import sys
import tempfile

MUSTER = os.environ.get("MUSTER", "build/muster")
HEADER = 896  # bytes of a descriptor, one from each rank to each, for each bucket


def report(sizes, forward=0.1, backward=0.2):
    """Parameters of these bytes, ready one after the other in equal times, each a bucket."""
    n = len(sizes)
    ready = [backward * (i + 1) / n for i in range(n)]
    return {"last": {"forward": forward, "backward": backward},
            "buckets": [{"bytes": b, "parameters": 1, "ready": t} for b, t in zip(sizes, ready)],
            "parameters": [{"name": f"p{i}", "bytes": b, "bucket": i, "ready": i + 1} for i, b in enumerate(sizes)]}


def muster(content, *flags, fails=False):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        with open(path, "w", encoding="utf-8") as f:
            f.write(content if isinstance(content, str) else json.dumps(content))
        done = subprocess.run([MUSTER, "plan", path, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=60)
        if fails:
            lines = done.stderr.decode().splitlines()
            assert done.returncode == 2 and done.stdout == b"", done
            assert len([x for x in lines if not x.startswith("Try ")]) == 1, lines
            return lines[0]
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


def plan(content, ranks, network, *flags):
    return json.loads(muster(content, "--ranks", ranks, "--network", network, "--json", *flags))


def exposed(content, ranks, network, mib=100):
    rows = plan(content, ranks, network, "--bucket-mib", mib)["rows"]
    assert len(rows) == 1 and abs(rows[0]["step"] - 0.3 - rows[0]["exposed"]) < 1e-12
    return rows[0]["exposed"]


def near(a, b):
    assert abs(a - b) <= 1e-9 + 1e-9 * abs(b), (a, b)


def tail(ranks, parameters):
    """Bytes that tell who takes part: an element for each parameter and one more, of 20 ranks each; then two."""
    return 4 * ((parameters + 1) * -(-ranks // 20) + 2)


def arithmetic():
    one = report([1 << 20])
    # Latency alone: descriptors come in log2(ranks) steps, slices to and fro four at a time.
    for ranks, trips in ((2, 1 + 1 + 1), (4, 2 + 1 + 1), (8, 3 + 2 + 2), (5, 3 + 1 + 1), (64, 6 + 16 + 16)):
        near(exposed(one, ranks, "gbit=inf,reduce_gb_s=inf,latency_us=10"), trips * 10e-6)
    # The last bucket is launched at the end of backward, though it may be ready long before.
    early = report([1 << 20])
    early["buckets"][0]["ready"] = 0.05
    near(exposed(early, 2, "gbit=inf,reduce_gb_s=inf,latency_us=10"), 3 * 10e-6)
    # The sender's processor alone: as many times as there are messages.
    for ranks, messages in ((2, 3), (4, 2 + 6), (8, 3 + 14)):
        near(exposed(one, ranks, "gbit=inf,reduce_gb_s=inf,overhead_us=3"), messages * 3e-6)
    # Bandwidth alone: (ranks - 1) / ranks of all bytes go out twice, and ranks - 1 descriptors.
    for ranks in (2, 4, 16, 32):
        total = (1 << 20) + tail(ranks, 1)
        near(exposed(one, ranks, "gbit=8,reduce_gb_s=inf"),
             (2 * total * (ranks - 1) / ranks + (ranks - 1) * HEADER) / 1e9)
    # Adding up alone.
    near(exposed(one, 2, "gbit=inf,reduce_gb_s=2"), ((1 << 20) + tail(2, 1)) / 2e9)
    # Two buckets, the first of which is over before the second is ready: only that one is waited for. Between them there
    # have to be gradients, for only then does anything go on.
    near(exposed(report([1 << 20] + [400] * 10), 2, "gbit=8,reduce_gb_s=inf", 1), (4000 + tail(2, 10) + HEADER) / 1e9)
    late = exposed(report([1 << 20, 4000]), 2, "gbit=8,reduce_gb_s=inf", 1)
    assert late > (1 << 20) / 1e9, late
    print("times by hand")


def bounds():
    some = report([300000 * (1 + i % 7) for i in range(60)])
    assert exposed(some, 1, "gbit=0.001") == 0
    assert abs(exposed(some, 4096, "gbit=inf,reduce_gb_s=inf")) < 1e-12
    by_rate = [exposed(some, 32, f"gbit={g},latency_us=5", 4) for g in (1, 5, 25, 100, 1000)]
    assert by_rate == sorted(by_rate, reverse=True) and by_rate[-1] > 0, by_rate
    by_ranks = [exposed(some, 2 ** k, "25gbe", 4) for k in range(13)]
    assert by_ranks == sorted(by_ranks), by_ranks
    # Never less than what its bytes take beyond backward.
    assert by_rate[0] > 2 * 31 / 32 * sum(p["bytes"] for p in some["parameters"]) / 125e6 - 0.2
    told = plan(some, 64, "25gbe")
    best = min(r["step"] for r in told["rows"])
    chosen = [r for r in told["rows"] if r["bucket_mib"] == told["suggested_mib"]]
    assert len(told["rows"]) > 5 and len(chosen) == 1 and chosen[0]["step"] <= best * 1.001, told
    assert f"suggested: buckets of {told['suggested_mib']:g} MiB" in muster(some, "--ranks", 64, "--network", "25gbe")
    # Another backward: gradients are ready in proportion, so a longer one hides more.
    short, long = (plan(some, 4, "10gbe", "--backward", s, "--forward", 1, "--bucket-mib", 4) for s in (0.05, 2))
    assert short["rows"][0]["exposed"] > 1.2 * long["rows"][0]["exposed"], (short, long)
    assert long["forward"] == 1 and long["backward"] == 2, long
    print("bounds")


def specs():
    one = report([1000])
    assert plan(one, 2, "25gbe,latency_us=7")["latency_us"] == 7
    assert plan(one, 2, "gbit=3")["gbit"] == 3
    for spec, word in (("fast", "fast"), ("gbit=", "gbit="), ("gbit=0", "above 0"), ("gbit=x", "gbit=x"), ("25gbe,", "at ''"),
                       ("latency_us=3", "bandwidth"), ("25gbe,latency_us=-1", "from 0 on"), ("gbit=nan", "gbit=nan"),
                       ("25gbe,latency_us=inf", "latency_us=inf"), ("25gbe,mtu=9000", "mtu=9000")):
        assert word in muster(one, "--ranks", 4, "--network", spec, fails=True), spec
    assert "--ranks" in muster(one, "--network", "25gbe", fails=True)
    assert "--ranks" in muster(one, "--ranks", 0, "--network", "25gbe", fails=True)
    assert "--network" in muster(one, "--ranks", 4, fails=True)
    print("networks")


def reports():
    def broken(change):
        r = report([1000, 2000])
        change(r)
        return muster(r, "--ranks", 4, "--network", "25gbe", fails=True)

    assert "report.json" in muster("{", "--ranks", 4, "--network", "25gbe", fails=True)
    assert "report.json" in muster("[1]", "--ranks", 4, "--network", "25gbe", fails=True)
    assert "last.forward" in broken(lambda r: r["last"].pop("forward"))
    assert "buckets" in broken(lambda r: r.update(buckets=[]))
    assert "ready" in broken(lambda r: r["buckets"][1].pop("ready"))
    assert "bucket" in broken(lambda r: r["parameters"][0].update(bucket=7))
    assert "bytes" in broken(lambda r: r["parameters"][0].update(bytes=-4))
    assert "times" in broken(lambda r: r["last"].update(backward=-1))
    assert "gradient" in broken(lambda r: [p.update(ready=-1) for p in r["parameters"]])
    # Frozen and absent parameters bring nothing.
    r = report([1000, 2000])
    r["parameters"].append({"name": "frozen", "bytes": 10 ** 9, "bucket": -1, "ready": -1})
    assert plan(r, 4, "25gbe")["rows"] == plan(report([1000, 2000]), 4, "25gbe")["rows"]
    print("reports")


def recorded():
    """What `muster train` writes is understood, and all of its bytes count."""
    from cli_lib import Work
    with Work() as w:
        w.ok("train", "--model", "mlp", "--data", w.data, "--steps", 3, "--ranks", 2, "--report",
             os.path.join(w.path, "report.json"))
        with open(os.path.join(w.path, "report.json"), encoding="utf-8") as f:
            text = f.read()
    r = json.loads(text)
    total = sum(p["bytes"] for p in r["parameters"])
    row = plan(text, 2, "gbit=0.008,reduce_gb_s=inf", "--bucket-mib", 1000)["rows"][0]
    count = len(r["parameters"])
    assert 1 <= row["buckets"] <= 2, row
    busy = (total + row["buckets"] * (HEADER + tail(2, 0)) + count * 4) / 1e6
    assert abs(row["link_busy"] - busy) < 1e-3 * busy, (row, busy)
    assert abs(row["step"] - r["last"]["forward"] - r["last"]["backward"] - row["exposed"]) < 1e-6
    print("a recorded run")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
