#!/usr/bin/python3
"""A rank of `muster train` over MPI is killed, stopped, or told to end at a random moment: everybody ends in bounded time
with a non-zero code, nobody is left, and what the others say names that rank and what it was doing.

test_mpi_faults.py NAME MPIRUN MUSTER PLUGINS [TRIALS [FAULT...]]: with TRIALS, so many of each fault, and a table of the
times (docs/faults.md). NAME is openmpi or mpich."""
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../cli"))
from cli_lib import make_data  # noqa: E402

NAME, MPIRUN, MUSTER, PLUGINS = sys.argv[1:5]
LAUNCHER = re.compile("RANK|WORLD_SIZE|MASTER_|TORCHELASTIC|MUSTER_|PMI|MPI_LOCAL|SLURM|OMPI_COMM")
RANKS, BOUND = 3, 15.0

# What is done, what mpirun is told beside, MUSTER_TIMEOUT, whether the others always speak.
FAULTS = {
    "killed": (signal.SIGKILL, [], 600, NAME == "openmpi"),
    "stopped": (signal.SIGSTOP, [], 1, True),
    "told to end": (signal.SIGTERM, [], 600, True),
    "mpirun killed": (signal.SIGKILL, [], 600, False),
}
if NAME == "mpich":
    FAULTS["killed, no cleanup"] = (signal.SIGKILL, ["-disable-auto-cleanup"], 1, False)


def start(folder, data, more, timeout):
    env = {k: v for k, v in os.environ.items() if not LAUNCHER.search(k)}
    env.update(MUSTER_PLUGINS=PLUGINS, MUSTER_GROUP="mpi", MUSTER_TIMEOUT=str(timeout), OMP_NUM_THREADS="1")
    if more:
        env["UCX_TLS"] = "^cma"  # or UCX itself ends whoever reads a dead process
    args = [MPIRUN, *more, "-n", str(RANKS), MUSTER, "train", "--model", "cnn", "--data", data, "--batch", "16", "--epochs",
            "100000", "--eval-every", "0", "--lr", "0.01", "--checkpoint", os.path.join(folder, "run.ckpt"),
            "--checkpoint-every", "3"]
    return subprocess.Popen(args, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rank_pids(folder):
    """rank: pid of the run whose checkpoint is in the folder."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read()
            with open(f"/proc/{pid}/environ", "rb") as f:
                m = re.search(rb"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", f.read())
        except OSError:
            continue
        if line.startswith(MUSTER.encode() + b"\0train") and folder.encode() in line and m:
            found[int(m[1])] = int(pid)
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"  # who was left behind may wait long to be collected
    except OSError:
        return False


def trial(data, fault, moments):
    sig, more, timeout, speaks = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        p = start(folder, data, more, timeout)
        try:
            while f"{RANKS} ranks" not in p.stdout.readline():
                assert p.poll() is None, p.communicate()
            time.sleep(moments.random() * 0.3)
            pids = rank_pids(folder)
            assert sorted(pids) == list(range(RANKS)), pids
            victim = moments.randrange(RANKS)
            began = time.monotonic()
            os.kill(p.pid if fault == "mpirun killed" else pids[victim], sig)
            out, err = p.communicate(timeout=BOUND)
            seconds = time.monotonic() - began
            while any(map(alive, pids.values())):
                assert time.monotonic() - began < BOUND, (fault, "left behind", pids, err)
                time.sleep(0.01)
            ended = time.monotonic() - began
        finally:
            for pid in rank_pids(folder).values():
                os.kill(pid, signal.SIGKILL)
            p.kill()
        assert p.returncode != 0, (fault, out, err)
        if fault == "told to end":
            said = re.search(r"stopped by signal 15 after step \d+; go on with --resume", err) is not None
        else:
            said = re.search(rf"missing rank {victim} \(after \d+ calls, last seen: \w", err) is not None
        assert said or not speaks, (fault, victim, out, err)
        # Whatever happened when, the checkpoint is a whole one.
        if os.path.exists(os.path.join(folder, "run.ckpt")):
            subprocess.run([MUSTER, "verify", os.path.join(folder, "run.ckpt")], check=True, stdout=subprocess.DEVNULL)
        return seconds, ended, said, p.returncode


def main():
    trials = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    faults = sys.argv[6:] or (list(FAULTS) if len(sys.argv) > 5 else ["killed", "stopped", "told to end"])
    moments = random.Random(trials)
    with tempfile.TemporaryDirectory() as d:
        data = make_data(os.path.join(d, "data"))
        for fault in faults:
            found = [trial(data, fault, moments) for _ in range(trials)]
            words = "the state was saved, which rank 0 said" if fault == "told to end" else "the others named the rank"
            for what, times in (("mpirun's end", [x[0] for x in found]), ("the last rank's", [x[1] for x in found])):
                print(f"{NAME}, {fault}: {what} after {statistics.median(times):.2f} s, at most {max(times):.2f} s", end="; ")
            print(f"{sum(x[2] for x in found)} of {trials} times {words}; exit codes",
                  *sorted({x[3] for x in found}), flush=True)


if __name__ == "__main__":
    main()
