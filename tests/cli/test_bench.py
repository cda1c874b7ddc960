#!/usr/bin/python3
"""muster bench from outside: what it prints, that it trains what PyTorch trains, bad input. test_bench.py CASE"""
import json
import os
import re
import sys

import torch
import torch.nn.functional as F

from cli_lib import Work
from torch_steps import torch_models

LOSS_TOLERANCE = 1e-4
STEP_KEYS = {"model", "batch", "ranks", "threads", "steps", "step_ms", "step_ms_all", "images_per_second", "loss_first",
             "loss_last", "losses", "peak_rss_bytes", "job_rss_bytes", "seconds_to_first_step", "ddp"}


def is_spread(s):
    assert set(s) == {"median", "min", "p10", "p90"}, s
    assert 0 < s["min"] <= s["p10"] <= s["median"] <= s["p90"], s


def bench_json(w, part, *args, **kw):
    out = w.ok("bench", part, "--json", *args, **kw)
    assert out.startswith("{") and out.endswith("}\n"), out
    return json.loads(out)


def make_batch(w, name, count, side=12, classes=5):
    torch.manual_seed(1)
    batch = {"x": torch.randn(count, 1, side, side), "y": torch.randint(classes, (count,))}
    torch.save(batch, w.path_of(name))
    return batch


def close(a, b):
    assert len(a) == len(b)
    off = max(abs(x - y) / abs(y) for x, y in zip(a, b))
    assert off < LOSS_TOLERANCE, f"{off:.1e}: {a} and {b}"


CNN = ["--model", "cnn", "--channels", 1, "--side", 12, "--classes", 5]


def step():
    """Keys and numbers; the losses are PyTorch's, from a file's weights on a file's batch, by one rank and by two."""
    with Work() as w:
        batch = make_batch(w, "batch.pth", 16)
        torch.manual_seed(2)
        net = torch_models.Cnn(1, 12, 5)
        torch.save(net.state_dict(), w.path_of("initial.pth"))
        for name, torch_optimizer in (
                ("sgd", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
                ("adam", lambda p: torch.optim.Adam(p, lr=0.002))):
            net.load_state_dict(torch.load(w.path_of("initial.pth")))
            optimizer = torch_optimizer(net.parameters())
            expected = []
            for _ in range(7):
                loss = F.cross_entropy(net(batch["x"]), batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                expected.append(loss.item())
            assert expected[-1] < 0.9 * expected[0], expected
            lr = 0.05 if name == "sgd" else 0.002
            how = [*CNN, "--from", "initial.pth", "--batch-from", "batch.pth", "--optimizer", name, "--lr", lr, "--steps", 4,
                   "--warmup", 3]
            for ranks in (1, 2):
                r = bench_json(w, "step", *how, "--batch", 16 // ranks, "--ranks", ranks)
                assert STEP_KEYS <= set(r), STEP_KEYS - set(r)
                close(r["losses"], expected)
                assert r["loss_first"] == r["losses"][0] and r["loss_last"] == r["losses"][-1], r
                assert (r["ranks"], r["batch"], r["steps"], r["ddp"]) == (ranks, 16 // ranks, 4, ranks > 1), r
        # One process, its batch cut over two replicas.
        close(bench_json(w, "step", *how, "--batch", 16, "--data-parallel", 2)["losses"], expected)
        # Apart, each rank trains on its own half only.
        r = bench_json(w, "step", *how, "--batch", 8, "--ranks", 2, "--no-ddp")
        assert r["ddp"] is False and abs(r["loss_last"] - expected[-1]) > 1e-3, r
        assert abs(r["loss_first"] - expected[0]) < 1e-4, r
    print("losses are PyTorch's")


class CifarResNet18(torch_models.ResNet18):
    """With the first layers that are usual for images of 32 x 32."""
    def __init__(self):
        super().__init__(3, 5)
        self.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)

    def forward(self, x):
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer4(self.layer3(self.layer2(x))).mean((2, 3)))


def cifar_stem():
    """Weights of the changed network fit, and the loss is its own."""
    with Work() as w:
        torch.manual_seed(1)
        x, y = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
        net = CifarResNet18()
        torch.save(net.state_dict(), w.path_of("initial.pth"))
        torch.save({"x": x, "y": y}, w.path_of("batch.pth"))
        r = bench_json(w, "step", "--model", "resnet18", "--cifar-stem", "--classes", 5, "--side", 16, "--batch", 4, "--from",
                       "initial.pth", "--batch-from", "batch.pth", "--steps", 1, "--warmup", 0)
        close(r["losses"], [F.cross_entropy(net(x), y).item()])
    print("the stem is PyTorch's")


def step_numbers():
    """What is measured can be true."""
    with Work() as w:
        for ranks in (1, 2):
            r = bench_json(w, "step", "--model", "resnet20", "--batch", 4, "--steps", 5, "--ranks", ranks)
            is_spread(r["step_ms"])
            assert len(r["step_ms_all"]) == 5 and min(r["step_ms_all"]) >= r["step_ms"]["min"], r
            assert len(r["rank_ms"]) == ranks, r
            rate = 1000 * ranks * 4 / r["step_ms"]["median"]
            assert abs(r["images_per_second"] / rate - 1) < 1e-9, r
            assert 2e6 < r["peak_rss_bytes"] < 1e9, r
            if ranks == 1:
                assert r["job_rss_bytes"] == r["peak_rss_bytes"], r
            else:  # the other rank, and the launcher
                assert r["peak_rss_bytes"] * 1.5 < r["job_rss_bytes"] < r["peak_rss_bytes"] * 3, r
            # Five steps were not done before the process began.
            assert r["seconds_to_first_step"] * 1000 > r["step_ms"]["min"] - 10, r
            assert r["seconds_to_first_step"] < 100, r
        # From the third step on nothing is allocated; the first steps make kernels.
        c = r["counters"]
        assert set(c) == {"allocations", "allocated_bytes", "layout_conversions", "weight_conversions", "converted_bytes",
                          "primitives"}, c
        assert c["allocations"] == 0 and c["primitives"] == 0, c
        first = bench_json(w, "step", "--model", "resnet20", "--batch", 4, "--steps", 1, "--warmup", 0)["counters"]
        assert first["allocations"] > 0 and first["primitives"] > 10, first
        more = bench_json(w, "step", "--model", "resnet20", "--batch", 64, "--steps", 2, "--warmup", 1)
        assert more["step_ms"]["min"] > 3 * r["step_ms"]["min"], (more, r)
        assert more["peak_rss_bytes"] > r["peak_rss_bytes"], (more, r)
        # Threads as the ranks were told, whichever way.
        for args, env, threads in (((), {}, 1), ((), {"OMP_NUM_THREADS": "2,1"}, 2),
                                   (("--threads", 2, "--ranks", 2), {}, 2)):
            r = bench_json(w, "step", *CNN, "--batch", 4, "--steps", 1, *args, env=env)
            assert r["threads"] == threads, (args, env, r)
        text = w.ok("bench", "step", *CNN, "--steps", 2, "--ranks", 2)
        for word in (r"2 ranks, 1 thread,", r"^step +[\d.]+ ms", r"^images/s +[\d.]+", r"^loss +[\d.]+", r"^memory +[\d.]+ MB on a rank",
                     r"^first step [\d.]+ s"):
            assert re.search(word, text, re.M), (word, text)
        assert not [f for f in os.listdir("/dev/shm") if "muster" in f]
    print("numbers, text")


def flops(channels, side, classes):
    """Of the small network's step for one image, by hand: two for each multiply-add; forward, weights' gradients, and inputs'
    for all but the first layer."""
    half, quarter = side // 2, side // 4
    first = channels * 32 * 9 * side * side
    rest = 32 * 64 * 9 * half * half + 64 * quarter * quarter * 128 + 128 * classes
    return 2 * (2 * first + 3 * rest)


def profile():
    """Operations are as many as the shapes ask for, with ranks and replicas too, and the rows are the step."""
    with Work() as w:
        for batch, more in ((16, []), (7, ["--ranks", 2]), (8, ["--data-parallel", 2])):
            r = bench_json(w, "step", "--steps", 3, *CNN, "--batch", batch, *more)
            expected = 1e-9 * batch * flops(1, 12, 5)
            assert abs(r["gflop_per_step"] / expected - 1) < 1e-9, (r["gflop_per_step"], expected)
            assert abs(r["gflops"] / (1000 * r["ranks"] * expected / r["step_ms"]["median"]) - 1) < 1e-9, r
            assert "profile" not in r, r
        r = bench_json(w, "step", "--steps", 5, *CNN, "--batch", 16, "--profile")
        rows = {row["kind"]: row for row in r["profile"]}
        assert {"conv_forward", "conv_backward_data", "conv_backward_weights", "gemm", "pool_forward", "loss",
                "optimizer"} <= set(rows), rows
        expected = 1e-9 * 16 * flops(1, 12, 5)
        assert abs(sum(row["gflop"] for row in rows.values()) / expected - 1) < 1e-9, (rows, expected)
        assert rows["conv_forward"]["calls"] == 2 and rows["conv_backward_data"]["calls"] == 1, rows
        total = sum(row["ms"] for row in rows.values())
        assert 0.2 * total < sum(r["step_ms_all"]) / 5 and total < 1.001 * sum(r["step_ms_all"]) / 5, (total, r)
        text = w.ok("bench", "step", "--steps", 2, *CNN, "--profile")
        assert re.search(r"^conv_forward +2.0 +[\d.]+ +[\d.]+ % ", text, re.M) and "everything else" in text, text
    print("operations, rows")


def allreduce():
    """The rows that were asked for; the sizes' units; each memory."""
    with Work() as w:
        for ranks, memory in ((2, "group"), (2, "own"), (3, "group"), (1, "group")):
            r = bench_json(w, "allreduce", "--ranks", ranks, "--sizes", "4,6K,1M", "--iterations", 5, "--memory", memory)
            assert r["ranks"] == ranks and r["memory"] == memory, r
            assert [row["bytes"] for row in r["rows"]] == [4, 6144, 1 << 20], r
            for row in r["rows"]:
                is_spread(row["us"])
                rate = row["bytes"] / row["us"]["median"] / 1000
                assert abs(row["algbw_gb_s"] / rate - 1) < 1e-9, row
                assert abs(row["share_of_limit"] / (row["algbw_gb_s"] / row["limit_gb_s"]) - 1) < 1e-9, row
                # A terabyte a second is beyond any machine of today; one rank has nothing to do.
                assert ranks == 1 or row["us"]["min"] > row["bytes"] / 1e6, row
                assert row["limit_us"]["min"] > row["bytes"] / 1e6, row
        text = w.ok("bench", "allreduce", "--sizes", "4K,1M", "--iterations", 2)
        assert "2 ranks (shm)" in text and re.search(r"^ +4096 .* %$", text, re.M) and len(text.split("\n")) == 5, text
        assert not [f for f in os.listdir("/dev/shm") if "muster" in f]
    print("rows")


def machine():
    """Numbers that no processor of today is far from, and one core is not faster than all by much."""
    with Work() as w:
        for ranks in (1, 2):
            r = bench_json(w, "machine", "--ranks", ranks, "--megabytes", 16, "--seconds", 0.05)
            assert r["ranks"] == ranks and r["array_bytes"] == 16 << 20 and r["fma_bits"] in (128, 256, 512), r
            assert 1 < r["fma_gflops"] < 1000, r
            for name in ("fma_gflops", "read_gb_s", "write_gb_s", "copy_gb_s", "mean_gb_s"):
                one, both = r[name], r[name + "_all"]
                assert 0.1 < one < 2000 and (both == one if ranks == 1 else 0.2 < both / one < 10), (name, r)
        text = w.ok("bench", "machine", "--ranks", 2, "--megabytes", 8, "--seconds", 0.01)
        for word in (r"2 at once$", r"^multiply-add, \d+ bits, GFLOP/s +[\d.]+ +[\d.]+$", r"^copy of 8 MiB arrays, GB/s +"):
            assert re.search(word, text, re.M), (word, text)
    print("peak, bandwidth")


def load():
    """Images and checkpoints."""
    with Work() as w:
        for workers in (0, 1, 3):
            r = bench_json(w, "load", "--data", w.data, "--batch", 50, "--workers", workers, "--seconds", 0.3, "--shuffle",
                           "--crop", 2, "--flip")
            assert r["workers"] == workers and r["batch"] == 50 and r["images"] > 203, r
            assert 0.3 <= r["seconds"] < 100 and abs(r["images_per_second"] * r["seconds"] / r["images"] - 1) < 1e-9, r
            is_spread(r["batch_ms"])
        torch.save(torch_models.Cnn(3, 12, 5).state_dict(), w.path_of("m.pth"))
        r = bench_json(w, "load", "--checkpoint", "m.pth", "--model", "cnn", "--side", 12, "--classes", 5, "--times", 3)
        assert r["tensors"] == 8 and r["bytes"] == os.path.getsize(w.path_of("m.pth")), r
        is_spread(r["load_ms"])
        text = w.ok("bench", "load", "--data", w.data, "--seconds", 0.05, "--checkpoint", "m.pth", "--model", "cnn", "--side", 12,
                    "--classes", 5)
        for word in (r"^images/s +\d+$", r"^batch +[\d.]+ ms", r"8 tensors, [\d.]+ kB$", r"^load +[\d.]+ ms"):
            assert re.search(word, text, re.M), (word, text)
    print("images, checkpoint")


def bad_input():
    """One clear line, exit 2."""
    with Work() as w:
        make_batch(w, "batch.pth", 16)
        torch.save({"x": torch.zeros(4, 1, 12, 12), "y": torch.zeros(4)}, w.path_of("floats.pth"))
        torch.save({"x": torch.zeros(4, 1, 12, 12)}, w.path_of("no_y.pth"))
        good = ["bench", "step", *CNN]
        table = [
            (["bench"], "usage"),
            (["bench", "stop"], "stop"),
            (["bench", "step"], "--model"),
            (["bench", "step", "--model", "alexnet"], "resnet20"),
            (good + ["--frobnicate"], "--frobnicate"),
            (good + ["extra"], "extra"),
            (good + ["--steps", 0], "--steps"),
            (good + ["--lr", "nan"], "--lr"),
            (good + ["--optimizer", "adamax"], "sgd|adam"),
            (good + ["--cifar-stem"], "--cifar-stem"),
            (good + ["--side", 14], "14"),
            (good + ["--from", "missing.pth"], "missing.pth"),
            (good + ["--from", "batch.pth"], "batch.pth"),
            (good + ["--batch-from", "missing.pth"], "missing.pth"),
            (good + ["--batch-from", "batch.pth", "--batch", 5], "(5, 1, 12, 12)"),
            (good + ["--batch-from", "floats.pth", "--batch", 4], "int64 of (4)"),
            (good + ["--batch-from", "no_y.pth", "--batch", 4], "int64 of (4)"),
            (["bench", "allreduce", "--sizes", "4Q"], "4Q"),
            (["bench", "allreduce", "--sizes", "5"], "divisible by 4"),
            (["bench", "allreduce", "--sizes", "-4"], "-4"),
            (["bench", "allreduce", "--sizes", "1M 2M"], "1M 2M"),
            (["bench", "allreduce", "--sizes", "99999999999999999999"], "16G"),
            (["bench", "allreduce", "--memory", "mine"], "group|own"),
            (["bench", "machine", "--megabytes", 0], "--megabytes"),
            (["bench", "machine", "--seconds", "long"], "long"),
            (["bench", "load"], "--data"),
            (["bench", "load", "--data", "mnist"], "idx:DIR"),
            (["bench", "load", "--data", "idx:/nowhere"], "/nowhere"),
            (["bench", "load", "--checkpoint", "batch.pth"], "--model"),
            (["bench", "load", "--model", "cnn", "--data", w.data], "--checkpoint"),
            (["bench", "load", "--checkpoint", "missing.pth", "--model", "cnn"], "missing.pth"),
            (["bench", "load", "--checkpoint", "batch.pth", "--model", "cnn"], "batch.pth"),
        ]
        wrong = []
        for args, word in table:
            done = w.run(*args)
            lines = [x for x in done.stderr.split("\n") if x and not x.startswith("Try 'muster")]
            if done.returncode != 2 or word not in done.stderr or (args != ["bench"] and len(lines) != 1):
                wrong.append(f"{args}: exit {done.returncode}, wanted {word!r}:\n{done.stderr}{done.stdout}")
            if done.stdout:
                wrong.append(f"{args}: printed {done.stdout}")
        done = w.run(*good, "--ranks", 2, "--batch-from", "batch.pth", "--batch", 16)
        if done.returncode != 2 or "(32, 1, 12, 12)" not in done.stderr or len(done.stderr.split("\n")) != 2:
            wrong.append(f"two ranks: exit {done.returncode}: {done.stderr}")
    assert not wrong, "\n".join(wrong)
    print(f"{len(table) + 1} kinds of bad input: exit 2, one line")


if __name__ == "__main__":
    {"step": step, "cifar_stem": cifar_stem, "step_numbers": step_numbers, "profile": profile, "allreduce": allreduce,
     "machine": machine, "load": load, "bad_input": bad_input}[sys.argv[1]]()
