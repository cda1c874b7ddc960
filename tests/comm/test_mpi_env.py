#!/usr/bin/python3
"""Groups over MPI from outside: which engine and which MPI, and how a rank that fails or leaves ends the others.
test_mpi_env.py NAME MPIRUN FROM_ENV MUSTER PLUGINS, with NAME openmpi or mpich"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

NAME, MPIRUN, FROM_ENV, MUSTER, PLUGINS = sys.argv[1:6]
OTHER = "mpich" if NAME == "openmpi" else "openmpi"
LAUNCHER = re.compile("RANK|WORLD_SIZE|MASTER_|TORCHELASTIC|MUSTER_|PMI|MPI_LOCAL|SLURM|OMPI_COMM")


def mpirun(ranks, *args, **env):
    e = {k: v for k, v in os.environ.items() if not LAUNCHER.search(k)}
    e.update({"MUSTER_PLUGINS": PLUGINS, **{k: str(v) for k, v in env.items()}})
    began = time.monotonic()
    done = subprocess.run([MPIRUN, "-n", str(ranks), *args], timeout=60, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=e)
    done.seconds = time.monotonic() - began
    return done


def test_engine():
    for asked, kind in (("mpi", "mpi"), ("shm", "shm"), ("auto", "shm"), ("", "shm")):
        done = mpirun(3, FROM_ENV, MUSTER_GROUP=asked)
        assert done.returncode == 0, (asked, done)
        assert sorted(done.stdout.splitlines()) == [f"{kind} {r} of 3 sum 6 context {r} of 3" for r in range(3)], done
    done = mpirun(2, FROM_ENV, "twice", MUSTER_GROUP="mpi")
    assert done.returncode == 0, done
    # The command finds its plug-ins beside itself.
    done = mpirun(2, MUSTER, "bench", "allreduce", "--sizes", "1000", "--iterations", "3", MUSTER_GROUP="mpi",
                  MUSTER_PLUGINS="")
    assert done.returncode == 0, done


def test_wrong_mpi():
    # The other MPI's plug-in knows nothing of this launcher: every rank would be alone. Where it is not installed, the
    # message says that.
    done = mpirun(2, FROM_ENV, MUSTER_GROUP="mpi", MUSTER_MPI=OTHER)
    assert done.returncode != 0, done
    assert re.search(r"is 2, but MPI says that this is rank 0 of 1: is the launcher that of another MPI|no plug-in for|"
                     r"cannot load the plug-in", done.stderr), done
    done = mpirun(2, FROM_ENV, MUSTER_GROUP="mpi", MUSTER_PLUGINS="/nowhere")
    assert done.returncode != 0 and f"(libmuster-mpi-{NAME}.so) in /nowhere" in done.stderr, done


def test_leaver_and_death():
    done = mpirun(3, FROM_ENV, "leave", MUSTER_GROUP="mpi")
    assert done.returncode != 0 and done.seconds < 20, done
    assert re.search(r"rank 1 \(after \d+ calls\) closed the group while rank [02] waits at a barrier", done.stderr), done
    done = mpirun(3, FROM_ENV, "die", MUSTER_GROUP="mpi")
    assert done.returncode != 0 and done.seconds < 20, done


def head_of(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)[0]["args"]


def test_trace_clocks():
    """Two ranks on one clock know it; in a time namespace that is 1,000 s ahead, the offset is measured."""
    with tempfile.TemporaryDirectory() as d:
        env = {"MUSTER_GROUP": "mpi", "MUSTER_TRACE": os.path.join(d, "t.json")}
        done = mpirun(2, FROM_ENV, **env)
        assert done.returncode == 0, done
        heads = [head_of(os.path.join(d, f"t.{r}.json")) for r in range(2)]
        assert heads[0]["run"] == heads[1]["run"] and heads[0]["clock"] == heads[1]["clock"], heads
        assert [h["offset_ns"] for h in heads] == [0, 0] == [h["offset_error_ns"] for h in heads], heads
        ahead = ["unshare", "-T", "--monotonic", "1000", "--fork"]
        if subprocess.run(ahead + ["true"], stderr=subprocess.DEVNULL).returncode != 0:
            print("no time namespaces here (root, Linux 5.6): offsets between clocks are not tested")
            return
        done = mpirun(1, FROM_ENV, ":", "-n", "1", *ahead, FROM_ENV, **env)
        assert done.returncode == 0, done
        heads = [head_of(os.path.join(d, f"t.{r}.json")) for r in range(2)]
        assert heads[0]["clock"] != heads[1]["clock"] and heads[0]["offset_ns"] == 0, heads
        error = heads[1]["offset_error_ns"]
        assert 0 < error < 500e6 and abs(heads[1]["offset_ns"] + 1000 * 10**9) <= error, heads
        # One rank that does not know of it.
        done = mpirun(1, FROM_ENV, ":", "-n", "1", "env", "-u", "MUSTER_TRACE", FROM_ENV, **env)
        assert done.returncode != 0 and "opening a trace" in done.stderr, done


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name)
