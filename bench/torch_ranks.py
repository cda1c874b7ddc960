"""Ranks of a PyTorch program, without torchrun: the launcher does not import torch, so that it takes neither its time nor
its memory. Flags shared by the programs that use it, and what /proc says of them."""
import os
import socket
import subprocess
import sys
import time


def launch(ranks):
    """In the process that was started by hand: runs this same command once per rank and exits; in a rank: returns its
    number. With one rank there is nothing to launch."""
    if ranks == 1:
        return 0
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    started = [subprocess.Popen([sys.executable] + sys.argv, env=dict(env, RANK=str(r))) for r in range(ranks)]
    failed = 0
    for p in started:
        # A rank that fails leaves the others waiting for it.
        failed = failed or p.wait()
        if failed:
            for other in started:
                other.kill()
    sys.exit(1 if failed else 0)


def peak_bytes(pid="self"):
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
        return 1024 * next(int(line.split()[1]) for line in f if line.startswith("VmHWM:"))


def launcher_bytes():
    return peak_bytes(os.getppid()) if "RANK" in os.environ else 0


def seconds_since_start():
    """Since the launcher was started, or this process where it has none; to a hundredth."""
    pid = os.getppid() if "RANK" in os.environ else "self"
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        ticks = int(f.read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def spread(values):
    """As spread_of in cli/bench.c."""
    x, last = sorted(values), len(values) - 1
    return {"median": 0.5 * (x[last // 2] + x[len(x) // 2]), "min": x[0], "p10": x[last // 10], "p90": x[last - last // 10]}
