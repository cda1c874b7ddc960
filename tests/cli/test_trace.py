#!/usr/bin/python3
"""Traces of `muster train`, and `muster trace-merge`. test_trace.py CASE"""
import collections
import json
import os
import random
import sys
from decimal import Decimal

from cli_lib import Work


def read(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f, parse_float=Decimal, parse_int=Decimal)


def events_of(trace):
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def check_nesting(events):
    """Slices of a thread lie within each other or apart; returns each one's parent's name."""
    parents = collections.defaultdict(set)
    threads = collections.defaultdict(list)
    for i, e in enumerate(events):
        if e["ph"] == "X":
            # Inner ones are written first.
            threads[e["pid"], e["tid"]].append((e["ts"], -e["dur"], -i, e["name"]))
    for slices in threads.values():
        open_ = []
        for ts, dur, i, name in sorted(slices):
            while open_ and (ts >= open_[-1][1] and not (dur == 0 and ts == open_[-1][1] and i > open_[-1][2])):
                open_.pop()
            assert not open_ or ts - dur <= open_[-1][1], (name, open_)
            parents[name].add(open_[-1][0] if open_ else None)
            open_.append((name, ts - dur, i))
    return parents


def union(spans):
    out = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1][1] = max(b, out[-1][1])
        else:
            out.append([a, b])
    return out


def overlap(events, pid):
    """Seconds of communication and hidden ones, by brute force over all intervals."""
    began, buckets, backward = {}, [], []
    for e in events:
        if e["pid"] != pid:
            continue
        if e.get("cat") == "all_reduce":
            if e["ph"] == "b":
                began[e["id"]] = e["ts"]
            else:
                buckets.append((began.pop(e["id"]), e["ts"]))
        elif e.get("cat") == "backward" and e["ph"] == "X":
            backward.append((e["ts"], e["ts"] + e["dur"]))
    buckets, backward = union(buckets), union(backward)
    hidden = sum(max(min(b, d) - max(a, c), 0) for a, b in buckets for c, d in backward)
    return float(sum(b - a for a, b in buckets)) / 1e6, float(hidden) / 1e6


def check_summary(summary, events):
    kinds = collections.Counter(e["cat"] for e in events if e["ph"] in "Xb")
    assert {k["kind"]: k["events"] for k in summary["kinds"]} == kinds
    for k in summary["kinds"]:
        spent = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == k["kind"])
        spent += sum(e["ts"] * (1 if e["ph"] == "e" else -1) for e in events if e["ph"] in "be" and e["cat"] == k["kind"])
        assert abs(k["seconds"] - float(spent) / 1e6) < 1e-6, (k, spent)
    assert summary["events"] == sum(kinds.values())
    total = hidden = 0
    for r in summary["ranks"]:
        c, h = overlap(events, r["rank"])
        assert abs(c - r["communication"]) < 1e-6 and abs(h - r["hidden"]) < 1e-6, (r, c, h)
        total, hidden = total + c, hidden + h
    assert abs(summary["overlap"] - (hidden / total if total else 0)) < 1e-6, (summary, hidden, total)


def ranks():
    with Work() as w:
        w.train("--steps", 4, "--ranks", 2, "--trace", "t.json", "--checkpoint", "c.ckpt", model="resnet20")
        each = [read(w.path_of(f"t.{r}.json")) for r in range(2)]
        for r, events in enumerate(each):
            head = events[0]
            assert head["name"] == "muster_trace" and head["args"]["rank"] == r and head["args"]["ranks"] == 2, head
            assert head["args"]["offset_ns"] == 0 and head["args"]["run"] == each[0][0]["args"]["run"], head
            assert all(e["pid"] == r for e in events)
            parents = check_nesting(events)
            # Modules within those that hold them, forward and backward, in the whole.
            assert parents["layer1.0.conv1"] >= {"layer1.0"} and parents["layer1.0"] == {"layer1"}, parents
            assert parents["layer1"] == {"forward", "backward"}, parents
            assert parents["wait for a request"] >= {"wait for gradients"}, parents
            count = collections.Counter(e.get("cat") for e in events if e["ph"] != "e")
            assert count["step"] == count["backward"] == count["optimizer"] == count["wait"] == 4, count
            assert count["checkpoint"] == (r == 0), count
            assert count["bucket"] == count["all_reduce"] and count["bucket"] % 4 == 0 and count["bucket"] >= 8, count
            steps = [e for e in events if e.get("cat") == "step"]
            assert [e["args"]["step"] for e in steps] == [1, 2, 3, 4]
            for e in events:  # all of the step's work lies in a step
                if e.get("cat") in ("backward", "wait", "optimizer"):
                    assert any(s["ts"] <= e["ts"] and e["ts"] + e["dur"] <= s["ts"] + s["dur"] for s in steps), e
            times = collections.defaultdict(dict)
            for e in events:
                if e["ph"] in "be":
                    times[e["id"]][e["cat"], e["ph"]] = e
            for t in times.values():
                assert t["bucket", "b"]["ts"] <= t["all_reduce", "b"]["ts"] <= t["all_reduce", "e"]["ts"], t
                assert t["all_reduce", "e"]["ts"] == t["bucket", "e"]["ts"] and t["bucket", "b"]["args"]["bytes"] > 0, t
        w.ok("trace-merge", "t.0.json", "t.1.json", "-o", "all.json")
        merged = read(w.path_of("all.json"))["traceEvents"]
        for e in merged:
            e["args"].pop("merged") if e["name"] == "muster_trace" else None
        assert merged == each[0] + each[1]
        summary = json.loads(w.ok("trace-merge", "t.0.json", "t.1.json", "--json"))
        assert all(r["whole"] and r["steps"] == 4 for r in summary["ranks"]), summary
        check_summary(summary, merged)
        assert json.loads(w.ok("trace-merge", "all.json", "--json")) == summary
        text = w.ok("trace-merge", "all.json")
        assert f"overlap: {100 * summary['overlap']:.1f} % of" in text, text
        # A flag counts for more than the environment, and `muster run` passes that on.
        w.train("--steps", 1, "--trace", "u.json", env={"MUSTER_TRACE": "v.json"})
        assert os.path.exists(w.path_of("u.0.json")) and not os.path.exists(w.path_of("v.0.json"))
        w.train("--steps", 1, "--ranks", 2, env={"MUSTER_TRACE": "v.json"})
        check_nesting(read(w.path_of("v.1.json")))
        done = w.run("train", "--model", "cnn", "--data", w.data, "--trace", "nowhere/t.json")
        assert done.returncode == 2 and "--trace" in done.stderr, done
    print("a traced run of two ranks, merged")


def head(rank, run="r", **more):
    args = {"version": 1, "rank": rank, "ranks": 2, "run": run, "offset_ns": 0, "offset_error_ns": 0, **more}
    return {"ph": "M", "pid": rank, "tid": 0, "name": "muster_trace", "args": args}


def made_up(rank, seed, offset):
    """Some reductions with backwards and buckets at random places, as a rank writes them."""
    rng, events, now, number = random.Random(seed), [head(rank, offset_ns=offset, offset_error_ns=500)], 10**12, 0
    for reduction in range(40):
        start, ddp = now + rng.randrange(1, 1000), rng.choice("DG")
        now = start
        for _ in range(rng.choice([1, 1, 2])):  # deferred ones come first
            took = rng.randrange(1, 3000)
            events.append({"ph": "X", "pid": rank, "ts": now / 1000, "dur": took / 1000, "cat": "backward", "tid": 0,
                           "name": "backward"})
            now += took + rng.randrange(0, 300)
        for bucket in range(rng.randrange(0, 5)):
            number += 1
            a = rng.randrange(start, now + 500)
            b = a + rng.randrange(0, 1500)
            args = {"ddp": ddp, "reduction": reduction, "bucket": bucket}
            for ph, ts in (("b", a), ("e", b)):
                events.append({"ph": ph, "pid": rank, "ts": ts / 1000, "cat": "all_reduce", "tid": 0, "id": f"{rank}.{number}",
                               "name": "x", **({"args": args} if ph == "b" else {})})
            now = max(now, b)
        events.append({"ph": "X", "pid": rank, "ts": now / 1000, "dur": 1.5, "cat": "wait", "tid": 0, "name": "\"ts\":9 { [ \" }"})
    return events


def merge():
    """Files made by hand: clocks, overlap, and files that end too early."""
    with Work() as w:
        def write(name, content):
            with open(w.path_of(name), "w", encoding="utf-8") as f:
                f.write(content if isinstance(content, str) else json.dumps(content))

        shift = 1500000000250
        made = [made_up(0, 1, 0), made_up(1, 2, shift)]
        for r in range(2):
            write(f"m.{r}.json", made[r])
        w.ok("trace-merge", "m.0.json", "m.1.json", "--output", "all.json")
        merged = read(w.path_of("all.json"))
        moved = [read(w.path_of(f"m.{r}.json")) for r in range(2)]
        for e in moved[1]:
            if "ts" in e:
                e["ts"] += Decimal(shift) / 1000
        for e in moved[0][:1] + moved[1][:1]:
            e["args"]["merged"] = True
        assert merged["traceEvents"] == moved[0] + moved[1]
        summary = json.loads(w.ok("trace-merge", "m.0.json", "m.1.json", "--json"))
        check_summary(summary, [e for e in merged["traceEvents"] if e["ph"] != "M"])
        assert 0.05 < summary["overlap"] < 0.95, summary
        assert json.loads(w.ok("trace-merge", "m.1.json", "m.0.json", "--json"))["ranks"] == summary["ranks"]
        assert [r["rank"] for r in summary["ranks"]] == [0, 1]
        assert abs(summary["ranks"][1]["offset"] - 1500.00000025) < 1e-9
        assert abs(summary["ranks"][1]["offset_error"] - 5e-7) < 1e-12
        again = json.loads(w.ok("trace-merge", "all.json", "-o", "again.json", "--json"))
        assert again == summary and read(w.path_of("again.json")) == merged
        # Nanoseconds that a double of microseconds has no room for: a clock of a host that runs for years.
        write("years.json", json.dumps([head(1, offset_ns=7)])[:-1] + ',{"ph":"i","pid":1,"ts":90071992547410.005}]')
        w.ok("trace-merge", "years.json", "-o", "moved.json")
        assert read(w.path_of("moved.json"))["traceEvents"][1]["ts"] == Decimal("90071992547410.012")
        # Cut anywhere, the events up to there are taken.
        lines = "[\n" + ",\n".join(json.dumps(e) for e in made[1]) + "\n]\n"
        for cut in list(range(300, 900, 7)) + [len(lines) - 2, len(lines) - 3]:
            write("cut.json", lines[:cut])
            s = json.loads(w.ok("trace-merge", "cut.json", "--json"))
            assert s["events"] == sum(1 for line in lines[:cut].split("\n") if "}" in line and '"ph": "M"' not in line and
                                      '"e"' not in line and line.rstrip(",").endswith("}") and balanced(line)), cut
            assert not s["ranks"] or not s["ranks"][0]["whole"]
        w.ok("trace-merge", "m.0.json", "cut.json", "-o", "with.json")
        s = json.loads(w.ok("trace-merge", "with.json", "--json"))
        assert [r["whole"] for r in s["ranks"]] == [True, False], s
        assert read(w.path_of("with.json"))["traceEvents"][-1]["name"] == "muster_cut"
        # Another program's, in the other form.
        write("torch.json", {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 77, "tid": 77, "ts": 1e3, "dur": 2},
            {"ph": "i", "pid": "Spans", "tid": 1, "ts": 5, "s": "t"}], "traceName": "x"})
        s = json.loads(w.ok("trace-merge", "torch.json", "m.0.json", "--json"))
        assert [(k["kind"], k["events"]) for k in s["kinds"]][:2] == [("cpu_op", 1), ("", 1)], s["kinds"]
    print("merged by hand")


def balanced(line):
    try:
        json.loads(line.rstrip(","))
        return True
    except ValueError:
        return False


def bad_input():
    """One line that names the file and what is wrong; exit 2; nothing written."""
    x = {"ph": "X", "pid": 0, "ts": 1, "dur": 1}
    good = json.dumps([head(0), x])
    table = [  # contents of files, and words of the message
        ([""], "empty"),
        (["   \n"], "empty"),
        (["hello"], "'h' at byte 0"),
        (["{}"], "without traceEvents"),
        (['{"traceEvents":3}'], "'3' at byte 15"),
        (['{"traceEvents":[],"traceEvents":[]}'], "a second traceEvents"),
        (["[1]"], "'1' at byte 1, where an event"),
        (["[[]]"], "'['"),
        (["[{}]"], "has no ph"),
        (['[{"ph":"X","pid":0}]'], "has no ts"),
        (['[{"ph":"X","pid":0,"ts":"5"}]'], "no ts"),
        (['[{"ph":"X","pid":0,"ts":1e300}]'], "no time in microseconds"),
        (['[{"ph":"X","pid":0,"ts":1e999}]'], "no valid JSON"),
        (['[{"ph":"X","pid":0,"ts":1,"dur":-1}]'], "has a dur"),
        (['[{"ph":"X","ph":"X","ts":1}]'], "duplicate"),
        (['[{"ph":"X","ts":1,}]'], "no valid JSON at byte"),
        (['[{"ph":"X","ts":1}}]'], "',' or ']'"),
        (['[{"ph":"X","ts":1} {"ph":"X","ts":1}]'], "',' or ']'"),
        (['[{"ph":"X","ts":1},]'], "where an event"),
        (['[{"ph":"X","ts":1}] x'], "end of the file"),
        (['[{"ph":"X","ts":1,"name":"' + "a" * (1 << 20) + '"}]'], "more than 1048576 bytes"),
        (["[" * 100000], "'['"),
        (['[{"ph":"X","ts":1,"x":' + "[" * 5000 + "]" * 5000 + "}]"], "no valid JSON"),
        (['[{"ph":"X","ts":1,"name":"\xff"}]'.encode("latin-1")], "unable to decode byte 0xff"),
        ([json.dumps([head(0, offset_ns=1.5)])], "no head of a trace"),
        ([json.dumps([head(-1)])], "no head of a trace"),
        ([json.dumps([head(0, version=2)])], "version 2"),
        ([json.dumps([head(0, run="")])], "to which run"),
        ([good, good], "both have a trace of rank 0"),
        ([good, json.dumps([head(1, run="s")])], "different runs"),
        ([good, None], "No such file"),
    ]
    with Work() as w:
        for contents, word in table:
            names = [f"x{i}.json" for i in range(len(contents))]
            for name, content in zip(names, contents):
                if content is not None:
                    with open(w.path_of(name), "wb") as f:
                        f.write(content if isinstance(content, bytes) else content.encode())
                elif os.path.exists(w.path_of(name)):
                    os.remove(w.path_of(name))
            done = w.run("trace-merge", *names, "-o", "out.json")
            assert done.returncode == 2 and word in done.stderr and names[-1] in done.stderr, (contents[0][:60], word, done)
            assert len(done.stderr) < 400 and done.stderr.count("\n") == 1, done
            assert not [f for f in os.listdir(w.cwd) if f.startswith("out")], os.listdir(w.cwd)
        assert w.run("trace-merge").returncode == 2
        assert w.run("trace-merge", "x0.json", "-o").returncode == 2
        assert w.run("trace-merge", "x0.json", "-o", "no/out.json").returncode == 2
    print("bad input")


if __name__ == "__main__":
    {"ranks": ranks, "merge": merge, "bad_input": bad_input}[sys.argv[1]]()
