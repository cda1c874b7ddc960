#!/usr/bin/python3
"""A run stopped half way and resumed equals the unbroken run bit for bit: weights, running statistics, optimiser
state. And runs of which a rank is killed. test_resume.py RANKS [CASE]"""
import os
import re
import signal
import subprocess
import sys
import time

from cli_lib import MUSTER, Work, differences, rank_pids

# 203 images: 13 steps of 16 with one rank, 7 with two, ragged at the end.
CASES = {
    "sgd": ["--model", "resnet20", "--warmup", "3", "--label-smoothing", "0.1"],
    "adamw": ["--model", "cnn", "--optimizer", "adamw", "--clip", "1"],
    "frozen": ["--model", "cnn", "--freeze", "conv1.*", "--schedule", "step"],
}


def run(w, ranks, extra, *more):
    args = ["train", "--data", w.data, "--batch", "16", "--lr", "0.02", "--seed", "3", "--epochs", "3", "--ranks",
            str(ranks), "--eval-every", "0"]
    return w.ok(*args, *extra, *more)


def compare(w, ranks, name, extra):
    per_epoch = -(-203 // (16 * ranks))
    run(w, ranks, extra, "--save", "whole.pth", "--checkpoint", "whole.ckpt")
    whole, state = w.load("whole.pth"), w.load("whole.ckpt")
    # Inside the first epoch, at the end of one, and inside the last.
    for stop in (per_epoch - 2, per_epoch, 2 * per_epoch + 3):
        run(w, ranks, extra, "--steps", stop, "--checkpoint", "half.ckpt")
        assert differences(w.load("half.ckpt"), state), "half a run equals the whole one: nothing is tested"
        out = run(w, ranks, extra, "--resume", "half.ckpt", "--save", "rest.pth", "--checkpoint", "rest.ckpt")
        assert f"step {stop}" in out, out
        found = differences(w.load("rest.pth"), whole) + differences(w.load("rest.ckpt"), state)
        assert not found, f"{name}, {ranks} ranks, stopped at {stop}:\n" + "\n".join(found[:20])
        print(f"{name}, {ranks} rank(s), stopped at step {stop}: bit for bit the same")


def interrupted(w, ranks):
    """SIGTERM in the middle, as a batch system sends it: exit 143, state saved, and the rest gives the same."""
    args = [MUSTER, "train", "--model", "resnet20", "--data", w.data, "--batch", "16", "--lr", "0.02", "--epochs",
            "400", "--ranks", str(ranks), "--eval-every", "0", "--checkpoint", "stopped.ckpt", "--log", "log.jsonl"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    p = subprocess.Popen(args, cwd=w.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    deadline = time.monotonic() + 60
    # The first state file tells that an epoch is over.
    while not os.path.exists(w.path_of("stopped.ckpt")) and time.monotonic() < deadline and p.poll() is None:
        time.sleep(0.05)
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 143, f"exit {p.returncode}\n{out}"
    assert "stopped by signal" in out and "--resume stopped.ckpt" in out, out
    step = int(out.split("after step ")[1].split(";")[0].split()[0])
    common = ["train", "--model", "resnet20", "--data", w.data, "--batch", 16, "--lr", 0.02, "--epochs", 400,
              "--ranks", ranks, "--eval-every", 0]
    w.ok(*common, "--resume", "stopped.ckpt", "--steps", step + 5, "--save", "a.pth")
    w.ok(*common, "--steps", step + 5, "--save", "b.pth", timeout=300)
    assert not differences(w.load("a.pth"), w.load("b.pth"))
    print(f"SIGTERM, {ranks} rank(s), after step {step}: exit 143, and the resumed run is the same")


def killed(w, ranks):
    """SIGKILL to one rank: the others say what it was doing, the exit code tells, and nobody stays."""
    args = [MUSTER, "train", "--model", "resnet20", "--data", w.data, "--batch", "16", "--epochs", "400", "--ranks",
            str(ranks), "--eval-every", "0", "--checkpoint", "killed.ckpt"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    places = []
    for victim in range(ranks):
        if os.path.exists(w.path_of("killed.ckpt")):
            os.remove(w.path_of("killed.ckpt"))
        p = subprocess.Popen(args, cwd=w.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        deadline = time.monotonic() + 60
        while not os.path.exists(w.path_of("killed.ckpt")) and time.monotonic() < deadline and p.poll() is None:
            time.sleep(0.05)
        pids = rank_pids(p.pid)
        assert sorted(pids) == list(range(ranks)), pids
        time.sleep(0.1 * (victim + 1))
        os.kill(pids[victim], signal.SIGKILL)
        _, err = p.communicate(timeout=60)
        assert p.returncode == 137, f"exit {p.returncode}\n{err}"
        assert err.splitlines()[-1].endswith(f"rank {victim} was killed by SIGKILL"), err
        said = re.findall(rf"rank {victim} \(pid {pids[victim]}, after \d+ calls, last seen: (.*)\) died: ", err)
        assert len(said) == ranks - 1 and len(set(said)) == 1 and "reduction" in said[0], err
        places.append(said[0])
        assert not [pid for pid in pids.values() if os.path.exists(f"/proc/{pid}")], pids
    print("\n".join(places))


def refused(w):
    """A run that is not the same run is refused, naming the first difference; softer ones are said."""
    base = ["train", "--model", "cnn", "--data", w.data, "--batch", 16, "--epochs", 2]
    w.ok(*base, "--steps", 5, "--checkpoint", "half.ckpt")
    for change, word in ((["--seed", 9], "--seed"), (["--batch", 8], "--batch"), (["--no-augment"], "--no-augment"),
                         (["--model", "mlp"], "half.ckpt")):
        done = w.run(*base, *change, "--resume", "half.ckpt", "--save", "no.pth")
        assert done.returncode == 2 and any(x in done.stderr for x in word.split("|")), done
        assert not os.path.exists(w.path_of("no.pth"))
    out = w.ok(*base, "--lr", 0.05, "--resume", "half.ckpt")
    assert "--lr" in out and "was" in out, out
    # A PyTorch program's file: its own names, no count of steps.
    import torch
    f = w.load("half.ckpt")
    torch.save({"state_dict": {"module." + k: v for k, v in f["model"].items()}, "optimizer": f["optimizer"], "epoch": 1},
               w.path_of("torch.pth.tar"))
    out = w.ok(*base, "--resume", "torch.pth.tar")
    assert "resumed torch.pth.tar at epoch 2, step 13" in out, out
    torch.save(f["model"], w.path_of("weights.pth"))
    done = w.run(*base, "--resume", "weights.pth")
    assert done.returncode != 0 and "no optimiser's state_dict" in done.stderr, done
    print("runs that differ are refused, and say how")


def main():
    ranks, case = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sgd"
    with Work() as w:
        if case == "refused":
            refused(w)
        elif case == "interrupted":
            interrupted(w, ranks)
        elif case == "killed":
            killed(w, ranks)
        else:
            compare(w, ranks, case, CASES[case])


if __name__ == "__main__":
    main()
