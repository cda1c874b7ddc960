#!/usr/bin/python3
"""Makes the page of tables from the JSON of `make bench`.

    bench/table.py [--out docs/benchmarks.md] RESULTS.json...

Of several files, which have to be of the same machine, the workloads of later ones come after those of the first, or
instead of the same ones there."""
import argparse
import json
import statistics
import sys

HEAD = """# Benchmarks

`make bench` made this page's numbers (`bench/run.py`), `bench/table.py` the tables. Every round starts each contestant once, as
a process of its own; they take turns, on the same cores, with one thread per rank and the same data and initial weights, and
their losses agree. Times are medians over the rounds of each round's median step; in brackets the 10th and 90th percentile
over the rounds. Ratios are medians of the rounds' own ratios: 2.00 x says that Muster is twice as fast.

GB/s are of operands and results, each once, whatever the caches did, beside the bandwidth of a copy of large arrays: a share
beyond 100 % says that much of it came from caches. FLOPs are counted from shapes, and are the same for all contestants.

"Best setting" is whichever of PyTorch's settings was fastest for that workload. "Pages kept" raises glibc's
MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ and MALLOC_TOP_PAD_. Ratios against PyTorch as installed ("stock") owe much to
page faults, which are dear on a virtual machine of this kind: stock PyTorch gives its memory back and takes it again in each
step. Where page faults are cheap, expect what is said of the best setting. Memory is the peak of the whole job: all ranks
and what launched them. The start is from the process's start to the end of its first step, imports included.
"""


def spread(values):
    """As spread_of in cli/bench.c."""
    x, last = sorted(values), len(values) - 1
    return 0.5 * (x[last // 2] + x[len(x) // 2]), x[last // 10], x[last - last // 10]


def number(value):
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread_text(values):
    median, low, high = spread(values)
    return f"{number(median)} [{number(low)}..{number(high)}]"


def row(cells):
    return "| " + " | ".join(str(c) for c in cells) + " |"


def grid(heads, rows):
    return "\n".join([row(heads), "|" + "---|" * len(heads)] + [row(r) for r in rows]) + "\n"


def of(w, name, key):
    """What a contestant had in each round."""
    get = key if callable(key) else lambda result: result[key]
    return [get(r[name]) for r in w["rounds"]]


def step_ms(result):
    return result["step_ms"]["median"]


def faster(w, peer, key=step_ms, ours="Muster"):
    """How many times as long as ours the peer takes; or needs, with another key."""
    return statistics.median(a / b for a, b in zip(of(w, peer, key), of(w, ours, key)))


def peers(w):
    return [n for n in w["rounds"][0] if not n.startswith("Muster")]


def best(w, key=step_ms):
    return min(peers(w), key=lambda n: statistics.median(of(w, n, key)))


def stock(w):
    return [n for n in peers(w) if "," not in n]


def limit(results, w, name):
    """Of one core, or of both at once."""
    return results["limits"][name if w["ranks"] * w["threads"] == 1 else name + "_all"]


def gflops(results, w, name):
    """GFLOP/s of all ranks, and what share of the FMA peak that is."""
    rate = 1e3 * w["gflop_per_step"] * w["ranks"] / statistics.median(of(w, name, step_ms))
    return f"{number(rate)} ({100 * rate / limit(results, w, 'fma_gflops'):.0f} %)"


def bandwidth(results, w):
    """GB/s of all ranks' operands and results, and what share of a copy's bandwidth that is."""
    rate = 1e-6 * sum(row["bytes"] for row in w["profile"]) * w["ranks"] / statistics.median(of(w, "Muster", step_ms))
    return f"{number(rate)} ({100 * rate / limit(results, w, 'copy_gb_s'):.0f} %)"


def megabytes(w, name):
    return number(statistics.median(of(w, name, "job_rss_bytes")) / 1e6)


def start(w, name):
    return number(statistics.median(of(w, name, "seconds_to_first_step")))


# -- sections ------------------------------------------------------------------------------------------------------------


def overview(results, steps, title):
    """One line for each workload: against the best setting first."""
    names = list(dict.fromkeys(n for w in steps for n in stock(w)))  # joined files may differ in their peers
    heads = ["workload", "Muster, ms", "against the best setting", "which is"] + [f"against {n}, stock" for n in names] + \
            ["GFLOP/s (of the FMA peak)", "GB/s (of a copy's)", "MB: Muster / least of PyTorch", "start, s: Muster / " + " / ".join(names)]
    rows = []
    for w in steps:
        top = best(w)
        rows.append([w["title"], spread_text(of(w, "Muster", step_ms)), f"**{faster(w, top):.2f} x**", top] +
                    [f"{faster(w, n):.2f} x" if n in peers(w) else "" for n in names] +
                    [gflops(results, w, "Muster"), bandwidth(results, w), f"{megabytes(w, 'Muster')} / {megabytes(w, best(w, 'job_rss_bytes'))}",
                     " / ".join([start(w, "Muster")] + [start(w, n) if n in peers(w) else "-" for n in names])])
    return f"## {title}\n\n" + grid(heads, rows)


def overhead(w):
    rows = []
    for name in w["rounds"][0]:
        if not name.endswith(", apart"):
            apart = name + ", apart"
            ratios = [a / b - 1 for a, b in zip(of(w, name, step_ms), of(w, apart, step_ms))]
            rows.append([name, spread_text(of(w, name, step_ms)), spread_text(of(w, apart, step_ms)),
                         f"{100 * statistics.median(ratios):+.1f} % [{100 * min(ratios):+.1f}..{100 * max(ratios):+.1f}]"])
    return f"## What DDP adds\n\n{w['title']}; in brackets of the last column, least and most of the rounds.\n\n" + \
        grid(["", "with DDP, ms", "apart, ms", "DDP adds"], rows)


def profile(w):
    """Muster's time by kind of kernel, largest first."""
    rows = sorted(w["profile"], key=lambda r: -r["ms"])
    whole = statistics.median(of(w, "Muster", step_ms))
    return f"**{w['title']}**\n\n" + grid(
        ["kind", "calls", "ms", "of the step", "GFLOP/s", "GB/s"],
        [[r["kind"], f"{r['calls']:.0f}", number(r["ms"]), f"{100 * r['ms'] / whole:.1f} %",
          number(r["gflop"] / r["ms"] * 1e3) if r["gflop"] else "", number(1e-6 * r["bytes"] / r["ms"]) if r["bytes"] else ""]
         for r in rows])


def size_text(count):
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def allreduce(w):
    sizes = [r["bytes"] for r in w["rounds"][0]["Muster"]["rows"]]
    names = peers(w)
    rows = []
    for i, count in enumerate(sizes):
        def us(result, i=i):
            return result["rows"][i]["us"]["median"]
        rate, share = (statistics.median(of(w, "Muster", lambda r, i=i, key=key: r["rows"][i][key]))
                       for key in ("algbw_gb_s", "share_of_limit"))
        rows.append([size_text(count), spread_text(of(w, "Muster", us)), f"{number(rate)} ({100 * share:.0f} %)"] +
                    [f"{number(statistics.median(of(w, n, us)))} us, **{faster(w, n, us):.1f} x**" for n in names])
    return f"## All-reduce in place, {w['ranks']} ranks, float32\n\nMuster's mean and the others' sum. MPI is given huge pages " \
           "and memory that malloc keeps.\n\n" + \
        grid(["size", "Muster, us", "GB/s (of the bandwidth limit)"] + names, rows)


def detail(results, w):
    rows = [[n, spread_text(of(w, n, step_ms)), "" if n == "Muster" else f"{faster(w, n):.2f} x",
             number(statistics.median(of(w, n, "images_per_second"))), gflops(results, w, n), megabytes(w, n), start(w, n)]
            for n in w["rounds"][0]]
    return f"### {w['title']}\n\n" + grid(["", "ms", "Muster is faster by", "images/s", "GFLOP/s (of the FMA peak)", "MB",
                                          "start, s"], rows)


def about(results):
    m = results["machine"]
    virtual = "a virtual machine" if m["virtual"] else "no virtual machine"
    rounds = sorted({len(w["rounds"]) for w in results["workloads"]})
    said = [f"{results['date']}, commit {results['commit'] or 'unknown'}, {' or '.join(map(str, rounds))} rounds. "
            f"{m['cores']} cores of {m['cpu']} (family {m['family']}, model {m['model']}; {', '.join(m['vectors']) or 'no AVX2'}), "
            f"{virtual}, {m['memory_bytes'] / 2**30:.0f} GiB, {m['system']}, Linux {m['kernel']}, transparent huge pages "
            f"`{m['huge_pages']}`.", "Versions: " + "; ".join(f"{k}: {v}" for k, v in results["versions"].items()) + "."]
    if results["quick"]:
        said.insert(0, "**A quick run: it shows that everything runs. Its numbers mean nothing.**")
    said.append(f"Measured peak of float32 multiply-adds: {results['limits']['fma_gflops']:.0f} GFLOP/s on one core, "
                f"{results['limits']['fma_gflops_all']:.0f} on both; of the bandwidth of a copy, read and "
                f"written bytes together: {results['limits']['copy_gb_s']:.1f} GB/s by one core, "
                f"{results['limits']['copy_gb_s_all']:.1f} by both.")
    return "\n\n".join(said) + "\n"


def page(results):
    """The whole page, as Markdown."""
    steps = [w for w in results["workloads"] if w["kind"] == "step"]
    sections = [HEAD, about(results)]
    for ranks, title in ((1, "One rank"), (2, "Two ranks with DDP")):
        some = [w for w in steps if w["ranks"] == ranks]
        sections += [overview(results, some, title)] if some else []
    for w in results["workloads"]:
        sections += [overhead(w)] if w["kind"] == "overhead" else [allreduce(w)] if w["kind"] == "allreduce" else []
    sections += ["## All contestants\n"] if steps else []
    sections += [detail(results, w) for w in steps]
    alone = [w for w in steps if w["ranks"] == 1]
    sections += ["## Time by kind of kernel\n\nOne more run of Muster with --profile, apart from the rounds.\n"] if alone else []
    return "\n".join(sections + [profile(w) for w in alone])


def join(files):
    results = None
    for name in files:
        with open(name, encoding="utf-8") as f:
            new = json.load(f)
        if results is None:
            results = new
        elif (new["machine"], new["quick"]) != (results["machine"], results["quick"]):
            raise SystemExit(f"{name}: not of the same machine as {files[0]}")
        else:
            later = {w["name"] for w in new["workloads"]}
            results["workloads"] = [w for w in results["workloads"] if w["name"] not in later] + new["workloads"]
            results["versions"].update(new["versions"])
    return results


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", help="where the page goes (printed)")
    p.add_argument("results", nargs="+")
    o = p.parse_args()
    text = page(join(o.results))
    if o.out:
        with open(o.out, "w", encoding="utf-8") as f:
            f.write(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
