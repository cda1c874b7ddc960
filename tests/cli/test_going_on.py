#!/usr/bin/python3
"""Runs that are killed, told to stop, or gone on with by other ranks. test_going_on.py CASE"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

from cli_lib import MUSTER, Work, rank_pids


def environment():
    return {**{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, "OMP_NUM_THREADS": "1"}


def options(w, ranks, *more):
    return [str(x) for x in ("train", "--model", "cnn", "--data", w.data, "--batch", 16, "--lr", 0.02, "--seed", 3,
                             "--eval-every", 0, "--ranks", ranks, *more)]


def start(w, ranks, *more):
    return subprocess.Popen([MUSTER] + options(w, ranks, *more), cwd=w.cwd, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment())


def content(w, name):
    with open(w.path_of(name), "rb") as f:
        return f.read()


def wait_for(condition, p, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert p.poll() is None, p.communicate()
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.002)


def periodic(w):
    """Killed as a whole at random moments, again and again: what --checkpoint-every left takes it to the same end."""
    ranks, epochs = 2, 12
    out = w.ok(*options(w, ranks, "--epochs", epochs, "--checkpoint", "parts.ckpt", "--save", "parts.pth"))
    losses_of = re.compile(r"^(epoch \d+/12  loss [\d.]+) ", re.M)
    epoch_losses = losses_of.findall(out)
    assert len(epoch_losses) == epochs, out
    whole = [content(w, name) for name in ("parts.ckpt", "parts.pth")]  # a file has its own name in it
    os.remove(w.path_of("parts.ckpt"))
    os.remove(w.path_of("parts.pth"))
    moments = random.Random(7)
    within = killed = 0
    said = []
    while True:
        p = start(w, ranks, "--epochs", epochs, "--checkpoint", "parts.ckpt", "--checkpoint-every", 2, "--resume", "auto",
                  "--save", "parts.pth", "--log", "log.jsonl")
        if killed == 5:
            out, err = p.communicate(timeout=60)
            assert p.returncode == 0, (out, err)
            said += losses_of.findall(out)
            break
        seen = os.stat(w.path_of("parts.ckpt")).st_ino if os.path.exists(w.path_of("parts.ckpt")) else 0
        wait_for(lambda: os.path.exists(w.path_of("parts.ckpt")) and
                 os.stat(w.path_of("parts.ckpt")).st_ino != seen, p)
        time.sleep(moments.random() * 0.02)
        p.kill()
        out, err = p.communicate(timeout=60)
        assert p.returncode == -9, (out, err)
        killed += 1
        said += losses_of.findall(out)
        resumed = re.search(r"resumed parts.ckpt at epoch \d+, step (\d+)\n", out)
        assert (killed == 1) == (resumed is None), out
        within += resumed is not None and int(resumed[1]) % 7 != 0
        w.ok("verify", "parts.ckpt")
    assert re.search(r"resumed parts.ckpt at epoch", out) and within > 0, (within, out)
    assert [content(w, name) for name in ("parts.ckpt", "parts.pth")] == whole
    # The loss of an epoch that was begun by another process is that of the whole epoch.
    assert set(said) == set(epoch_losses), (said, epoch_losses)
    # Steps done twice are twice in the log, with the same loss to the last digit.
    losses = {}
    for line in content(w, "log.jsonl").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut by the kill, and gone on with by the next run
        assert losses.setdefault(entry["step"], entry["loss"]) == entry["loss"], entry
    print(f"killed {killed} times, gone on within an epoch {within} times: the same bytes")


def other_ranks(w):
    """Every image once, whoever goes on; the same number of images a step is the same run, to rounding."""
    def log(name):
        return [json.loads(x) for x in content(w, name).splitlines()]

    base = ["--epochs", 3, "--no-augment", "--lr", 0.005, "--schedule", "cosine"]
    w.ok(*options(w, 2, *base, "--log", "whole.jsonl", "--save", "whole.pth"))
    w.ok(*options(w, 2, *base, "--steps", 9, "--checkpoint", "half.ckpt"))  # within the second epoch: 2 steps of 7
    out = w.ok(*options(w, 1, *base, "--batch", 32, "--resume", "half.ckpt", "--log", "same.jsonl", "--save", "same.pth"))
    assert "going on with --ranks 1 --batch 32 (was --ranks 2 --batch 16)" in out, out
    whole, same = log("whole.jsonl")[9:], log("same.jsonl")
    assert [(x["step"], x["epoch"], x["lr"], x["images"]) for x in whole] == \
        [(x["step"], x["epoch"], x["lr"], x["images"]) for x in same]
    assert all(abs(a["loss"] - b["loss"]) < 2e-3 for a, b in zip(whole, same)), (whole, same)
    assert whole != same and content(w, "whole.pth") != content(w, "same.pth")
    w.ok("diff", "whole.pth", "same.pth", "--atol", 1e-3)

    # 3 ranks with the same batch: after 64 of 203 images, steps of 48. Stopped again, then one rank: steps of 16.
    w.ok(*options(w, 3, *base, "--resume", "half.ckpt", "--steps", 11, "--checkpoint", "more.ckpt", "--log", "three.jsonl"))
    w.ok(*options(w, 1, *base, "--resume", "more.ckpt", "--log", "one.jsonl", "--checkpoint", "end.ckpt"))
    three, one = log("three.jsonl"), log("one.jsonl")
    assert [(x["step"], x["epoch"], x["images"]) for x in three] == [(10, 2, 48), (11, 2, 48)], three
    assert [(x["step"], x["epoch"], x["images"]) for x in one] == \
        [(12, 2, 16), (13, 2, 16), (14, 2, 11)] + [(15 + i, 3, 16 if i < 12 else 11) for i in range(13)], one
    # The schedule is where a run of so many ranks would be: 5 steps an epoch with three ranks, 13 with one.
    import math
    for x, place, steps in ((three[0], 5 + 1, 15), (one[0], 13 + 10, 39), (one[3], 26, 39), (one[-1], 38, 39)):
        assert abs(x["lr"] - 0.005 * 0.5 * (1 + math.cos(math.pi * place / steps))) < 1e-8, (x, place)
    done = w.run(*options(w, 2, *base, "--batch", 8, "--resume", "half.ckpt"))
    assert done.returncode == 2 and "with --batch 16 on 2 ranks, this run has --batch 8 on 2" in done.stderr, done
    print("2 ranks, 3 ranks, 1 rank: every image once, the schedule where it belongs")


def gone(pids):
    """Nobody of them is left, but for those that only wait to be collected."""
    end = time.monotonic() + 5
    while [x for x in pids if os.path.exists(f"/proc/{x}")]:
        assert time.monotonic() < end, pids
        time.sleep(0.01)


def restarts(w):
    """Ranks are killed and stopped at random moments: started again from the last checkpoint, with the same end."""
    ranks, what = 3, ["--epochs", 15, "--checkpoint", "run.ckpt", "--checkpoint-every", 2, "--save", "run.pth"]
    moments = random.Random(5)
    w.ok(*options(w, ranks, *what))
    whole = [content(w, name) for name in ("run.ckpt", "run.pth")]
    done = w.run(*options(w, ranks, *what, "--max-restarts", 3))
    assert done.returncode == 2 and "run.ckpt, which is there already" in done.stderr, done
    os.remove(w.path_of("run.ckpt"))
    os.environ["MUSTER_TIMEOUT"] = "1"
    p = start(w, ranks, *what, "--max-restarts", 3, "--log", "log.jsonl")
    everybody = set()
    for sig in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        seen = os.stat(w.path_of("run.ckpt")).st_mtime_ns if os.path.exists(w.path_of("run.ckpt")) else 0
        wait_for(lambda: os.path.exists(w.path_of("run.ckpt")) and os.stat(w.path_of("run.ckpt")).st_mtime_ns != seen, p)
        pids = rank_pids(p.pid)
        assert sorted(pids) == list(range(ranks)) and not everybody & set(pids.values()), (pids, everybody)
        time.sleep(moments.random() * 0.02)
        os.kill(pids[moments.randrange(ranks)], sig)
        gone(pids.values())
        everybody |= set(pids.values())
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0, (out, err)
    assert re.findall(r"starting all 3 ranks again \((\d) of 3\)", err) == ["1", "2", "3"], err
    assert len(re.findall(r"^resumed run.ckpt at", out, re.M)) == 3, out
    assert [content(w, name) for name in ("run.ckpt", "run.pth")] == whole
    done = w.run(*options(w, 2, "--max-restarts", 1))
    assert done.returncode == 2 and "goes on from --checkpoint, which is missing" in done.stderr, done
    done = w.run(*options(w, 2, *what, "--max-restarts", 1), env={"SLURM_STEP_NUM_TASKS": "2"})
    assert done.returncode == 2 and "under mpirun or srun" in done.stderr, done
    print("killed, stopped and killed again: the same bytes")


def told_to_stop(w):
    """A signal to one rank only, or to the launcher: all stop after the same step, with that signal's exit code, and are
    not started again."""
    what = ["--epochs", 25, "--checkpoint", "run.ckpt", "--save", "run.pth"]
    moments = random.Random(3)
    w.ok(*options(w, 3, *what))
    whole = [content(w, name) for name in ("run.ckpt", "run.pth")]
    os.remove(w.path_of("run.ckpt"))
    starts = [(signal.SIGUSR1, 0), (signal.SIGTERM, 2), (signal.SIGUSR1, None), (signal.SIGTERM, None), (signal.SIGINT, 1)]
    for sig, rank in starts:
        p = start(w, 3, *what, "--resume", "auto", "--max-restarts", 2)
        while "3 ranks" not in p.stdout.readline():  # all are there, and listen
            assert p.poll() is None, p.communicate()
        time.sleep(moments.random() * 0.1)
        os.kill(p.pid if rank is None else rank_pids(p.pid)[rank], sig)
        out, err = p.communicate(timeout=60)
        assert p.returncode == 128 + sig, (sig, rank, p.returncode, out, err)
        assert f"stopped by signal {int(sig)} after step " in err and "--resume run.ckpt" in err, err
        assert "starting" not in err, err
    w.ok(*options(w, 3, *what, "--resume", "auto"))
    assert [content(w, name) for name in ("run.ckpt", "run.pth")] == whole
    print("told to stop", len(starts), "times: the same bytes")


def main():
    with Work() as w:
        {"periodic": periodic, "other_ranks": other_ranks, "restarts": restarts, "told_to_stop": told_to_stop}[sys.argv[1]](w)


if __name__ == "__main__":
    main()
