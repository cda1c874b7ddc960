#!/usr/bin/python3
"""`muster train --shard-optimizer`: weights and checkpoints are those of a run without it, it takes half the memory for the
optimiser's state on two ranks, and runs go on from either kind of checkpoint with either."""
import json

from cli_lib import Work, differences

FLAGS = ["--model", "cnn", "--optimizer", "adamw", "--clip", "1", "--batch", "16", "--lr", "0.02", "--seed", "3", "--epochs",
         "2", "--eval-every", "0", "--ranks", "2"]
SHARD = ["--shard-optimizer"]


def same(w, a, b):
    for kind in ("pth", "ckpt"):
        found = differences(w.load(f"{a}.{kind}"), w.load(f"{b}.{kind}"))
        assert not found, f"{a} and {b}:\n" + "\n".join(found[:20])


def main():
    with Work() as w:
        def run(name, *more):
            out = w.ok("train", "--data", w.data, *FLAGS, "--save", f"{name}.pth", "--checkpoint", f"{name}.ckpt", *more)
            return out

        run("plain", "--report", "plain.json")
        out = run("sharded", *SHARD, "--report", "sharded.json")
        assert "optimiser's state shared by 2 ranks: " in out, out
        same(w, "plain", "sharded")
        reports = []
        for name in ("plain", "sharded"):
            with open(w.path_of(f"{name}.json"), encoding="utf-8") as f:
                reports.append(json.load(f))
        whole, half = (r["optimizer_bytes"] for r in reports)
        assert [r["optimizer_ranks"] for r in reports] == [1, 2], reports
        assert [r["scattered"] for r in reports] == [False, True], reports
        assert 0.5 <= half / whole < 0.51, (whole, half)
        print(f"the same weights and state; {half} bytes of state on a rank, {whole} without")
        for first, second in ((SHARD, []), ([], SHARD)):
            run("half", "--steps", "5", *first)
            assert differences(w.load("half.pth"), w.load("plain.pth")), "half a run equals the whole one: nothing is tested"
            run("rest", "--resume", "half.ckpt", *second)
            same(w, "plain", "rest")
        out = run("alone", "--ranks", "1", "--steps", "2", *SHARD)
        assert "shared by" not in out, out
        print("runs go on from either kind of checkpoint")


if __name__ == "__main__":
    main()
