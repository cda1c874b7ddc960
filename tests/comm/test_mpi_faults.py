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
LAUNCHER = re.compile("RANK|WORLD_SIZE|MASTER_|TORCHELASTIC|MUSTER_(?!TWO_HOSTS)|PMI|MPI_LOCAL|SLURM|OMPI_COMM")
RANKS, BOUND = 4 if "MUSTER_TWO_HOSTS" in os.environ else 3, 15.0

# What is done, what mpirun is told beside, MUSTER_TIMEOUT, whether the others always speak.
FAULTS = {
    "killed": (signal.SIGKILL, [], 600, NAME == "openmpi" and "MUSTER_TWO_HOSTS" not in os.environ),
    "stopped": (signal.SIGSTOP, [], 1, True),
    "told to end": (signal.SIGTERM, [], 600, True),
    "mpirun killed": (signal.SIGKILL, [], 600, False),
    # Only within `scripts/two_hosts.sh with`: two ranks on each of two hosts, whose link is taken down. Open MPI's mpirun
    # notices that itself where it looks, MPICH's waits for the other host until the link is back.
    "cut off": (None, [], 8 if NAME == "openmpi" else 1, True),
}
KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "1", "OMPI_MCA_oob_tcp_keepalive_intvl": "1",
             "OMPI_MCA_oob_tcp_keepalive_probes": "1", "UCX_TLS": "tcp,self"}
TWO_HOSTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts/two_hosts.sh")
if NAME == "mpich":
    FAULTS["killed, no cleanup"] = (signal.SIGKILL, ["-disable-auto-cleanup"], 1, False)


def mpirun(more, ranks):
    if "MUSTER_TWO_HOSTS" in os.environ:
        return [TWO_HOSTS, "mpirun", NAME, str(ranks // 2)]
    return [MPIRUN, *more, "-n", str(ranks)]


def start(folder, data, more, timeout, ranks=RANKS, last=()):
    env = {k: v for k, v in os.environ.items() if not LAUNCHER.search(k)}
    env.update(MUSTER_PLUGINS=PLUGINS, MUSTER_GROUP="mpi", MUSTER_TIMEOUT=str(timeout), OMP_NUM_THREADS="1")
    if more:
        env["UCX_TLS"] = "^cma"  # or UCX itself ends whoever reads a dead process
    env.update(KEEPALIVE if "MUSTER_TWO_HOSTS" in env else {})
    args = [*mpirun(more, ranks), MUSTER, "train", "--model", "cnn", "--data", data, "--batch", "16", "--epochs",
            "100000", "--eval-every", "0", "--lr", "0.01", "--checkpoint", os.path.join(folder, "run.ckpt"),
            "--checkpoint-every", "3", *last]
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


def wait_for_link():
    """The kernel tells of a new link with a delay of up to a second, and UCX does not use one before."""
    end = time.monotonic() + 5
    for i in range(2):
        while "state UP" not in subprocess.run([TWO_HOSTS, "on", str(i), "ip", "link", "show", f"link{i}"], text=True,
                                               stdout=subprocess.PIPE, check=True).stdout:
            assert time.monotonic() < end, "the link does not come up"
            time.sleep(0.05)


def goes_on(folder, data, step):
    """On another number of ranks, from where it stopped."""
    p = start(folder, data, [], 600, RANKS - 1, ("--resume", "auto", "--steps", str(step + 2)))
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0 and re.search(rf"resumed \S+ at epoch \d+, step {step}\n", out), (out, err)
    assert f"going on with --ranks {RANKS - 1} --batch 16 (was --ranks {RANKS} " in out, out


def trial(data, fault, moments):
    sig, more, timeout, speaks = FAULTS[fault]
    if "MUSTER_TWO_HOSTS" in os.environ:
        wait_for_link()
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
            if sig is None:
                victim = 2
                subprocess.run([TWO_HOSTS, "cut"], check=True)
            else:
                os.kill(p.pid if fault == "mpirun killed" else pids[victim], sig)
            seconds = ended = 0
            while seconds == 0 or ended == 0:
                now = time.monotonic() - began
                assert now < BOUND, (fault, seconds, ended, pids)
                if seconds == 0 and p.poll() is not None:
                    seconds = now
                if ended == 0 and not any(map(alive, pids.values())):
                    ended = now
                    if sig is None:
                        subprocess.run([TWO_HOSTS, "mend"], check=True)
                time.sleep(0.01)
            out, err = p.communicate(timeout=BOUND)
        finally:
            for pid in rank_pids(folder).values():
                os.kill(pid, signal.SIGKILL)
            p.kill()
        assert p.returncode != 0, (fault, out, err)
        if fault == "told to end":
            said = re.search(r"stopped by signal 15 after step (\d+); go on with --resume", err)
            assert said, (out, err)
            goes_on(folder, data, int(said[1]))
        else:
            said = re.search(rf"missing rank {victim} \(after \d+ calls, last seen: \w", err)
        assert said or not speaks, (fault, victim, out, err)
        # Whatever happened when, the checkpoint is a whole one.
        if os.path.exists(os.path.join(folder, "run.ckpt")):
            subprocess.run([MUSTER, "verify", os.path.join(folder, "run.ckpt")], check=True, stdout=subprocess.DEVNULL)
        return seconds, ended, said is not None, p.returncode


def main():
    trials = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    faults = sys.argv[6:] or [x for x in FAULTS if x != "cut off"] if len(sys.argv) > 5 else ["killed", "stopped", "told to end"]
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
