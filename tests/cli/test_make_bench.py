#!/usr/bin/python3
"""`make bench` in small: one quick round of one workload, from bench/run.py to its JSON and tables. What the numbers are is not
looked at, but that they are there, and that a wrong loss ends the run. test_make_bench.py CASE"""
import copy
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BENCH = os.path.join(HERE, "..", "..", "bench")
sys.path.insert(0, BENCH)
import run  # noqa: E402
MUSTER = os.environ["MUSTER"]
# What stands in for `muster`: its losses, but for the n-th, which is a little larger.
LIAR = """#!/bin/sh
[ "$1 $2" = "bench step" ] || exec "$REAL" "$@"
"$REAL" "$@" | /usr/bin/python3 -c '
import json, sys
r = json.load(sys.stdin)
r["losses"][WHICH] *= 1 + ERROR
print(json.dumps(r))'
"""


def bench(work, muster=MUSTER, workloads="mlp"):
    return subprocess.run([sys.executable, os.path.join(BENCH, "run.py"), "--quick", "--workloads", workloads, "--torch", "none",
                           "--python", sys.executable, "--build", work, "--muster", muster], text=True, timeout=250,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, REAL=MUSTER), check=False)


def quick(work):
    done = bench(work, workloads="mlp,mlp-ddp,allreduce")
    assert done.returncode == 0, done.stdout + done.stderr
    with open(os.path.join(work, "bench", "results.json"), encoding="utf-8") as f:
        results = json.load(f)
    assert results["quick"] and results["machine"]["cores"] >= 1 and "muster" in results["versions"]
    one, two, reduced = results["workloads"]
    assert [one["ranks"], two["ranks"], reduced["kind"]] == [1, 2, "allreduce"]
    # Of the layers: 784-256-128-10, the first without the gradient of its input.
    assert abs(one["gflop_per_step"] - 64e-9 * (4 * 784 * 256 + 6 * (256 * 128 + 128 * 10))) < 1e-9, one["gflop_per_step"]
    for name, r in list(one["rounds"][0].items()) + list(two["rounds"][0].items()):
        assert r["step_ms"]["median"] > 0 and len(r["step_ms_all"]) == 2, (name, r)
        assert r["job_rss_bytes"] >= r["peak_rss_bytes"] > 1e6 and 0 < r["seconds_to_first_step"] < 250, (name, r)
    names = list(two["rounds"][0])
    assert names[0] == "Muster" and [n for n in names if n.endswith("static_graph")], names
    page = done.stdout
    for text in ("A quick run", "MLP 784-256-128-10, batch 64, 2 ranks", "## One rank", "## Two ranks with DDP", "| 4 KiB |",
                 "page faults", "GB/s (of a copy's)", "## Time by kind of kernel", "| gemm | 8 |"):
        assert text in page, f"{text}\n{page}"
    tables(work, results)


def tables(work, results):
    """Ratios and spreads of made-up rounds; a second file's workloads replace those of the first, and may have other peers."""
    one = results["workloads"][0]
    names = list(one["rounds"][0])
    for ours, theirs in ((10, 20), (10, 40), (30, 90)):
        r = copy.deepcopy(one["rounds"][0])
        for n in names:
            r[n]["step_ms"]["median"] = ours if n == "Muster" else theirs
        one["rounds"].append(r)
    one["rounds"] = one["rounds"][1:]
    fewer = dict(one, name="fewer", title="fewer peers", rounds=[{"Muster": r["Muster"], "PyTorch 0.1": r[names[1]]}
                                                                 for r in one["rounds"]])
    paths = [os.path.join(work, n) for n in ("a.json", "b.json", "page.md")]
    for path, w in zip(paths, (results["workloads"], [dict(one, title="the later one"), fewer])):
        with open(path, "w", encoding="utf-8") as f:
            json.dump(dict(results, workloads=w), f)
    subprocess.run([sys.executable, os.path.join(BENCH, "table.py"), "--out", paths[2]] + paths[:2], check=True, timeout=60)
    with open(paths[2], encoding="utf-8") as f:
        page = f.read()
    # Rounds' ratios are 2, 4 and 3: their median is 3, though that of the times would be 40 / 10.
    assert "| the later one | 10.0 [10.0..30.0] | **3.00 x** |" in page, page
    assert "| fewer peers | 10.0 [10.0..30.0] | **3.00 x** | PyTorch 0.1 |  | 3.00 x |" in page, page
    assert page.count("### the later one") == 1 and "### MLP 784-256-128-10, batch 64\n" not in page, page


def wrong_loss(work):
    """A step's loss that is wrong ends a run; how wrong it has to be is asked of the comparison alone."""
    liar = os.path.join(work, "muster")
    with open(liar, "w", encoding="utf-8") as f:
        f.write(LIAR.replace("WHICH", "3").replace("ERROR", "0.05"))
    os.chmod(liar, 0o755)
    done = bench(work, muster=liar)
    assert done.returncode != 0 and "losses are not the same: step 4 " in done.stderr, done.stderr
    for kind, which, error, peer, caught in (("step", 0, 1e-3, "PyTorch", True), ("step", 0, 1e-6, "PyTorch", False),
                                             ("step", 1, 1e-3, "PyTorch", False), ("step", 1, 0.05, "PyTorch", True),
                                             ("step", 1, float("nan"), "PyTorch", True),
                                             ("overhead", 1, 0.05, "PyTorch", True),
                                             ("overhead", 1, 0.05, "PyTorch, apart", False)):
        results = {name: {"losses": [2.5, 2.0]} for name in ("Muster", "Muster, apart", peer)}
        results[peer]["losses"][which] *= 1 + error
        if kind == "overhead" and not caught:
            results["Muster, apart"]["losses"] = list(results[peer]["losses"])
        try:
            run.compare_losses({"name": "these", "kind": kind}, results)
        except SystemExit as e:
            assert caught and f"step {which + 1} " in str(e), e
        else:
            assert not caught, (kind, which, error, peer)


def names(work):
    done = bench(work, workloads="mlp,resnet19")
    assert done.returncode != 0 and "no workload resnet19; there are resnet18-224, " in done.stderr, done.stderr


def main():
    with tempfile.TemporaryDirectory(prefix="muster-test-") as work:
        {"quick": quick, "wrong_loss": wrong_loss, "names": names}[sys.argv[1]](work)
    return 0


if __name__ == "__main__":
    try:
        import torch  # noqa: F401
    except ImportError:
        print("skipped: no PyTorch here")
        sys.exit(77)
    sys.exit(main())
