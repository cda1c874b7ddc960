#!/usr/bin/python3
"""`muster run` and the group of the environment, from outside. test_run.py MUSTER FROM_ENV"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

MUSTER, FROM_ENV = sys.argv[1:3]
LAUNCHER = re.compile("RANK|WORLD_SIZE|MASTER_|TORCHELASTIC|ROLE_|MUSTER_|OMPI_|PMI|MPI_|SLURM|OMP_")


def environment(**more):
    env = {k: v for k, v in os.environ.items() if not LAUNCHER.search(k)}
    env.update({k: str(v) for k, v in more.items()})
    return env


def muster(*args, timeout=60, **env):
    return subprocess.run([MUSTER, "run"] + [str(a) for a in args], timeout=timeout, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=environment(**env))


def program(*args, **env):
    return subprocess.run([FROM_ENV, *args], timeout=60, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=environment(**env))


def alive(pattern):
    """Processes, zombies aside, whose command line contains the pattern."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read().replace(b"\0", b" ").decode(errors="replace")
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                state = f.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if pattern in line and state != "Z" and int(pid) != os.getpid():
            found.append((int(pid), line))
    return found


def gone(pattern, seconds):
    end = time.monotonic() + seconds
    while alive(pattern):
        assert time.monotonic() < end, alive(pattern)
        time.sleep(0.02)


def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def unique():
    unique.n += 1
    return f"4{os.getpid()}{unique.n:03d}"  # seconds to sleep, for ever in practice


unique.n = 0


def test_variables():
    done = muster("-n", 3, "--max-restarts", 2, "sh", "-c", "env", timeout=60)
    assert done.returncode == 0, done
    ranks = [{}, {}, {}]
    for line in done.stdout.splitlines():
        m = re.match(r"(?:\[(\d)\] )?([A-Z_]+)=(.*)", line)
        if m:
            ranks[int(m[1] or 0)][m[2]] = m[3]
    for r, env in enumerate(ranks):
        for name, value in {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0,
                            "GROUP_WORLD_SIZE": 1, "ROLE_RANK": r, "ROLE_WORLD_SIZE": 3, "ROLE_NAME": "default",
                            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": 0,
                            "TORCHELASTIC_MAX_RESTARTS": 2, "OMP_NUM_THREADS": 1}.items():
            assert env[name] == str(value), (r, name, env.get(name))
        assert 0 < int(env["MASTER_PORT"]) < 65536
        for name in ("MASTER_PORT", "MUSTER_JOB", "TORCHELASTIC_RUN_ID"):
            assert env[name] and env[name] == ranks[0][name]
    other = muster("sh", "-c", "echo $MUSTER_JOB; echo $OMP_NUM_THREADS")
    assert other.stdout.splitlines()[0] != ranks[0]["MUSTER_JOB"]
    assert other.stdout.splitlines()[1] == ""  # one rank may use all cores
    assert muster("-n", 2, "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS=5).stdout == "5\n[1] 5\n" or \
        muster("-n", 2, "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS=5).stdout == "[1] 5\n5\n"


def test_usage():
    for args, says in [([], "no program"), (["-n"], "needs a value"), (["-n", "0", "true"], "-n is `0`"),
                       (["-n", "two", "true"], "-n is `two`"), (["--wrong", "true"], "unknown option `--wrong`"),
                       (["--nnodes", "2", "true"], "one machine"), (["--nnodes=1:2", "true"], "mpirun and srun"),
                       (["--node_rank", "1", "true"], "--node-rank is `1`"), (["-m", "true"], "python3 -m"),
                       (["--no-python=1", "true"], "--no-python takes no value"),
                       (["--tee", "4", "true"], "--tee is `4`"), (["-r", "0:1,1", "true"], "--redirects is `0:1,1`"),
                       (["--local_ranks_filter", "0,", "true"], "--local-ranks-filter is `0,`"),
                       (["--shutdown_timeout", "x", "true"], "--shutdown-timeout is `x`"),
                       (["-n", "gpu", "true"], "no GPU was found"), (["--max-restarts", "-1", "true"], "--max-restarts"),
                       (["-n", "2", "./no-such-program"], "cannot run ./no-such-program: No such file")]:
        done = muster(*args)
        assert done.returncode == 2 and says in done.stderr, (args, done)
        assert done.stdout == ""
    text = muster("--help")
    assert text.returncode == 0 and text.stdout.startswith("usage: muster run")
    # torchrun's spellings, and a program's own options
    for args in (["--nproc_per_node=2", "--standalone", "--no_python"], ["--nproc-per-node", "2", "--nnodes=1"],
                 ["-n2", "--"], ["-n=2", "--node_rank=0", "--rdzv-backend=c10d", "--rdzv_endpoint", "localhost:0",
                                 "--rdzv-conf", "a=b", "--monitor_interval", "1", "--start-method", "spawn",
                                 "--local-addr", "localhost", "--signals_to_handle", "SIGTERM"], ["-n", "2", "--no-python", "--max_restarts", "0", "--master_port=4321"]):
        done = muster(*args, "echo", "-n", "2", "--help")
        assert done.returncode == 0 and "2 --help" in done.stdout and "[1] " in done.stdout, (args, done)
    for how, ranks in (("cpu", len(os.sched_getaffinity(0))), ("auto", len(os.sched_getaffinity(0))), ("gpu", 3)):
        done = muster("--nproc-per-node", how, "sh", "-c", "echo $WORLD_SIZE", CUDA_VISIBLE_DEVICES="0,GPU-12,2")
        assert len(done.stdout.splitlines()) == ranks and done.stdout.splitlines()[0].split()[-1] == str(ranks), done
    assert "no GPU" in muster("-n", "gpu", "true", CUDA_VISIBLE_DEVICES="").stderr
    done = muster("--role", "trainer", "--rdzv_id=run7", "sh", "-c", "echo $ROLE_NAME $TORCHELASTIC_RUN_ID $MUSTER_JOB")
    assert re.fullmatch(r"trainer run7 muster-\S+\n", done.stdout), done


def test_lines_stay_whole():
    script = ("import sys, os\nr = os.environ['RANK']\n"
              "for i in range(1500):\n"
              "    s = f'{r} {i} ' + 'x' * (i % 190) + '\\n'\n"
              "    f = sys.stdout if i % 2 else sys.stderr\n"
              "    f.write(s[:len(s) // 2]); f.flush(); f.write(s[len(s) // 2:]); f.flush()\n"
              "sys.stdout.write('no newline')\n")
    done = muster("-n", 4, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr[-500:]
    for half, text in ((1, done.stdout), (0, done.stderr)):
        expected = {r: iter(range(half, 1500, 2)) for r in range(4)}
        left = 4
        for line in text.splitlines():
            m = re.fullmatch(r"(?:\[(\d)\] )?(\d) (\d+) (x*)", line)
            if m is None:
                assert re.fullmatch(r"(\[\d\] )?no newline", line), line
                left -= 1
                continue
            r, i = int(m[2]), int(m[3])
            assert (m[1] or "0") == m[2], line
            assert i == next(expected[r]) and len(m[4]) == i % 190, line
        assert all(next(e, None) is None for e in expected.values())
        assert left == (0 if half else 4)


def test_first_failure():
    mark = unique()
    begin = time.monotonic()
    done = muster("-n", 3, "sh", "-c", f"if [ $RANK = 1 ]; then sleep 0.3; echo first >&2; echo it is broken >&2; "
                                       f"exit 7; fi; sleep {mark}")
    assert done.returncode == 7, done
    assert done.stderr.splitlines()[-1] == "muster run: rank 1 exited with code 7; its last line on stderr: " \
                                           "it is broken", done.stderr
    assert time.monotonic() - begin < 4
    gone(f"sleep {mark}", 1)
    done = muster("-n", 3, "sh", "-c", f"if [ $RANK = 2 ]; then kill -9 $$; fi; sleep {mark}")
    assert done.returncode == 137, done
    assert done.stderr.splitlines()[-1] == "muster run: rank 2 was killed by SIGKILL", done.stderr
    gone(f"sleep {mark}", 1)


def test_last_words():
    # The others say what they saw of a rank that died before they are ended; that changes nothing about the exit code.
    for _ in range(5):
        done = muster("-n", 3, FROM_ENV, "die")
        assert done.returncode == 134, done
        lines = done.stderr.splitlines()
        for r in (0, 2):
            said = [x for x in lines if x.startswith("[2] " if r == 2 else "") and "rank 1 (pid " in x
                    and "died: its process ended without closing the group, while rank" in x]
            assert said, done.stderr
        assert lines[-1].startswith("muster run: rank 1 was killed by SIGABRT"), lines
        gone(f"{FROM_ENV} die", 1)
    # A rank that leaves early in good order is no failure by itself; the others' is, and names it.
    done = muster("-n", 3, FROM_ENV, "leave")
    assert done.returncode == 1 and "muster run: rank " in done.stderr.splitlines()[-1], done
    assert re.search(r"rank 1 \(pid \d+, after \d+ calls\) closed the group while rank [02] waits at a barrier", done.stderr)
    # What a rank does because of another's failure is not taken for the cause.
    done = muster("-n", 2, "sh", "-c", "if [ $RANK = 1 ]; then exit 7; fi; sleep 0.1; kill -SEGV $$")
    assert done.returncode == 7, done


def test_stubborn_ranks_are_killed():
    mark = unique()
    begin = time.monotonic()
    done = muster("-n", 2, "sh", "-c", f"if [ $RANK = 1 ]; then sleep 0.5; exit 3; fi; trap '' TERM; sleep {mark} & "
                                       f"while :; do wait; done")
    assert done.returncode == 3, done
    assert 4.5 < time.monotonic() - begin < 15
    gone(f"sleep {mark}", 1)


def start(*args, **env):
    return subprocess.Popen([MUSTER, "run"] + [str(a) for a in args], stdin=subprocess.DEVNULL, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**env))


def test_signals_to_the_launcher():
    for sig in (signal.SIGINT, signal.SIGTERM):
        mark = unique()
        p = start("-n", 3, "sh", "-c", f"sleep {mark}; true")
        eventually(lambda m=mark: len([x for x in alive(f"sleep {m}") if x[1].startswith("sleep")]) == 3)
        p.send_signal(sig)
        err = p.communicate(timeout=20)[1]
        assert p.returncode == 128 + sig, (p.returncode, err)
        gone(f"sleep {mark}", 1)


def test_nothing_outlives_a_killed_launcher():
    for _ in range(5):
        mark = unique()
        # a rank with children of its own, as shell wrappers have
        p = start("-n", 3, "sh", "-c", f"sleep {mark} & sleep {mark}; true")
        eventually(lambda m=mark: len([x for x in alive(f"sleep {m}") if x[1].startswith("sleep")]) == 6)
        p.kill()
        p.communicate(timeout=20)
        gone(mark, 2)


def test_killed_while_reducing():
    for _ in range(10):
        p = start("-n", 3, FROM_ENV, "for-ever")
        p.stdout.readline()
        victim = [pid for pid, line in alive(f"{FROM_ENV} for-ever") if line.startswith(FROM_ENV)]
        assert len(victim) == 3
        os.kill(victim[1], signal.SIGKILL)
        err = p.communicate(timeout=20)[1]
        assert p.returncode == 137 and err.splitlines()[-1].endswith("was killed by SIGKILL"), err
        gone(f"{FROM_ENV} for-ever", 2)
    p = start("-n", 3, FROM_ENV, "for-ever")
    p.stdout.readline()
    p.kill()
    p.communicate(timeout=20)
    gone(f"{FROM_ENV} for-ever", 2)


def test_logs():
    with tempfile.TemporaryDirectory() as d:
        logs = os.path.join(d, "logs")
        done = muster("-n", 2, "--log-dir", logs, "sh", "-c", "echo out $RANK; echo err $RANK >&2")
        assert done.returncode == 0 and done.stdout == "out 0\n" and done.stderr == "err 0\n", done
        for r in range(2):
            with open(os.path.join(logs, f"rank-{r}.log"), encoding="utf-8") as f:
                assert sorted(f.read().splitlines()) == [f"err {r}", f"out {r}"]
        done = muster("-n", 2, "--log-dir", logs, "sh", "-c", "echo why >&2; exit $RANK")
        assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("stderr: why"), done


def test_streams():
    with tempfile.TemporaryDirectory() as d:
        def run(*args):
            logs = tempfile.mkdtemp(dir=d)
            done = muster("-n", 3, "--log-dir", logs, *args, "sh", "-c", "echo o$RANK; echo e$RANK >&2")
            assert done.returncode == 0, done
            files = []
            for r in range(3):
                path = os.path.join(logs, f"rank-{r}.log")
                if os.path.exists(path):
                    with open(path, encoding="utf-8") as f:
                        files += f.read().split()
            return " ".join(sorted(re.sub(r"\[\d\] ", "", done.stdout + done.stderr).split())), " ".join(sorted(files))
        all_of = "e0 e1 e2 o0 o1 o2"
        assert run() == ("e0 o0", all_of)
        assert run("-r", 3) == ("", all_of)
        assert run("--redirects=1") == ("e0 e1 e2", "o0 o1 o2")
        assert run("--tee", 2) == (all_of, "e0 e1 e2")
        assert run("-t", "3", "-r", "1") == (all_of, all_of)
        assert run("-r", "0:3,2:1", "-t1:2") == ("e1 e2 o1", "e0 e1 o0 o2")
        assert run("-t", 3, "--local_ranks_filter=1,2") == ("e1 e2 o1 o2", all_of)
        assert run("--local-ranks-filter", 1) == ("e1 o1", all_of)
        done = muster("-r", 3, "echo", "hidden", TMPDIR=d)
        made = re.fullmatch(r"muster run: logs are in (.*)\n", done.stderr)
        assert made and made[1].startswith(d) and done.stdout == "", done
        with open(os.path.join(made[1], "rank-0.log"), encoding="utf-8") as f:
            assert f.read() == "hidden\n"


def test_signals_that_are_passed_on():
    # The ranks go on, or end as they like: code 5 here. Nobody is hurried because another was faster.
    script = "trap 'sleep 0.$((RANK * 6)); echo saved; exit 5' USR1; echo ready; while :; do sleep 0.05; done"
    p = start("-n", 2, "--max-restarts", 0, "sh", "-c", script)
    assert {p.stdout.readline(), p.stdout.readline()} == {"ready\n", "[1] ready\n"}
    p.send_signal(signal.SIGUSR1)
    out, err = p.communicate(timeout=20)
    assert p.returncode == 5 and "rank 0 exited with code 5" in err and out.count("saved") == 2, (p.returncode, out, err)
    # Ended by it: no reason to begin again.
    p = start("-n", 2, "--max-restarts", 3, "sh", "-c", "echo ready; sleep 20")
    assert {p.stdout.readline(), p.stdout.readline()} == {"ready\n", "[1] ready\n"}
    p.send_signal(signal.SIGUSR2)
    err = p.communicate(timeout=20)[1]
    assert p.returncode == 128 + signal.SIGUSR2 and "again" not in err, (p.returncode, err)
    # What ends the launcher leaves time to save, but not for ever.
    p = start("-n", 2, "--shutdown-timeout", 1, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert {p.stdout.readline(), p.stdout.readline()} == {"ready\n", "[1] ready\n"}
    began = time.monotonic()
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=20)
    assert p.returncode == 128 + signal.SIGTERM and 0.9 < time.monotonic() - began < 4
    p = start("-n", 2, "sh", "-c", "trap 'sleep 5.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    assert {p.stdout.readline(), p.stdout.readline()} == {"ready\n", "[1] ready\n"}
    p.send_signal(signal.SIGTERM)
    out = p.communicate(timeout=20)[0]
    assert p.returncode == 128 + signal.SIGTERM and out.count("saved") == 2, (p.returncode, out)


def test_restarts():
    script = ("echo run $RANK $TORCHELASTIC_RESTART_COUNT; if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; "
              "then exit 9; fi; ")
    done = muster("-n", 2, "--max-restarts", 3, "sh", "-c", script + f"exec {FROM_ENV}")
    assert done.returncode == 0, done
    assert "[1] run 1 2\n" in done.stdout and "run 1 3" not in done.stdout, done.stdout
    assert "shm 0 of 2 sum 3" in done.stdout
    assert "rank 1 exited with code 9; starting all 2 ranks again (2 of 3)" in done.stderr, done.stderr
    done = muster("-n", 2, "--max-restarts", 1, "sh", "-c", script)
    assert done.returncode == 9, done


def test_group_of_the_environment():
    done = muster("-n", 4, FROM_ENV)
    assert done.returncode == 0, done
    assert sorted(re.sub(r"^\[\d\] ", "", x) for x in done.stdout.splitlines()) == \
        [f"shm {r} of 4 sum 10 context {r} of 4" for r in range(4)], done.stdout
    assert muster("-n", 3, FROM_ENV, "twice").returncode == 0
    assert muster("-n", 1, FROM_ENV).stdout == "self 0 of 1 sum 1 context 0 of 1\n"
    assert program().stdout == "self 0 of 1 sum 1 context 0 of 1\n"
    # jobs at one time, told apart by MUSTER_JOB
    jobs = [start("-n", 2, FROM_ENV) for _ in range(6)]
    for p in jobs:
        out, err = p.communicate(timeout=60)
        assert p.returncode == 0 and "sum 3" in out, (out, err)
    # a whole machine's worth of launchers: each pair has only its own variables
    for env in ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29511},
                {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
                 "PMIX_NAMESPACE": f"test-{os.getpid()}"},
                {"PMI_RANK": 0, "PMI_SIZE": 2, "MPI_LOCALNRANKS": 2},
                {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1,
                 "SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 0}):
        rank = next(k for k in env if k.endswith(("RANK", "PROCID")))
        two = [subprocess.Popen([FROM_ENV], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=environment(**{**env, rank: r})) for r in range(2)]
        for r, p in enumerate(two):
            out, err = p.communicate(timeout=60)
            assert p.returncode == 0 and out == f"shm {r} of 2 sum 3 context {r} of 2\n", (env, out, err)


def test_contradicting_environments():
    base = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29512}
    for env, kind, *names in [
            ({"RANK": 0}, "argument", "RANK", "WORLD_SIZE"), ({"WORLD_SIZE": 2}, "argument", "RANK", "WORLD_SIZE"),
            ({"RANK": 2, "WORLD_SIZE": 2}, "argument", "RANK is 2", "WORLD_SIZE is 2"),
            ({"RANK": 0, "WORLD_SIZE": "two"}, "argument", "WORLD_SIZE is `two`"),
            ({"RANK": "0x", "WORLD_SIZE": 2}, "argument", "RANK is `0x`"),
            ({"RANK": -1, "WORLD_SIZE": 2}, "argument", "RANK is `-1`"),
            ({"RANK": 0, "WORLD_SIZE": 0}, "argument", "WORLD_SIZE is `0`"),
            ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 3}, "argument", "LOCAL_WORLD_SIZE is 3", "WORLD_SIZE is 2"),
            ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 1}, "argument", "LOCAL_RANK is 1", "RANK is 0"),
            ({"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}, "unsupported", "WORLD_SIZE is 4", "LOCAL_WORLD_SIZE",
             "MPI"),
            ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": ""}, "argument", "RANK", "WORLD_SIZE", "MASTER_PORT"),
            ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
              "MUSTER_GROUP": "shm"}, "unsupported",
             "OMPI_COMM_WORLD_SIZE is 4", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI"),
            ({"PMI_RANK": 0, "PMI_SIZE": 4, "MUSTER_GROUP": "shm"}, "unsupported", "MPI_LOCALNRANKS"),
            ({"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NUM_NODES": 2, "MUSTER_GROUP": "shm"},
             "unsupported", "MPI"),
            ({"MUSTER_GROUP": "tcp"}, "argument", "MUSTER_GROUP is `tcp`"),
            ({"RANK": 0, "WORLD_SIZE": 2, "MUSTER_GROUP": "mpi"}, "argument", "WORLD_SIZE is 2", "mpirun"),
            ({"MUSTER_GROUP": "mpi", "MUSTER_MPI": "lam"}, "argument", "MUSTER_MPI is `lam`"),
            ({"MUSTER_GROUP": "mpi", "MUSTER_PLUGINS": "/nowhere"}, "unsupported", "no plug-in for any MPI", "/nowhere"),
            ({"MUSTER_GROUP": "mpi", "MUSTER_MPI": "mpich", "MUSTER_PLUGINS": ""}, "unsupported", "libmuster-mpi-mpich.so"),
            ({"MUSTER_TIMEOUT": "soon"}, "argument", "MUSTER_TIMEOUT is `soon`")]:
        done = program(**{**base, **env})
        assert done.returncode == 3 and done.stderr.startswith(kind + ": "), (env, done)
        for n in names:
            assert n in done.stderr, (env, done.stderr)
    done = program(RANK=1, WORLD_SIZE=2, MASTER_PORT=29513, MUSTER_TIMEOUT=0.3)
    assert done.returncode == 3 and done.stderr.startswith("timeout: ") and "rank 0 never came" in done.stderr, done


def test_contradicting_ranks():
    # Each rank's variables make sense; together they do not.
    port = 29514
    for one, other, says in [
            ({"RANK": 0, "WORLD_SIZE": 2}, {"RANK": 1, "WORLD_SIZE": 3}, r"rank 0 \(pid \d+\) is one of 2 ranks, rank 1 "
             r"\(pid \d+\) one of 3"),
            ({"RANK": 0, "WORLD_SIZE": 3}, {"RANK": 1, "WORLD_SIZE": 2}, r"rank 0 \(pid \d+\) is one of 3 ranks, rank 1 "
             r"\(pid \d+\) one of 2")]:
        port += 1
        began = time.monotonic()
        both = [subprocess.Popen([FROM_ENV], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=environment(MASTER_ADDR="localhost", MASTER_PORT=port, **e)) for e in (one, other)]
        for p in both:
            err = p.communicate(timeout=60)[1]
            assert p.returncode == 3 and re.search(says, err), (one, other, err)
        assert time.monotonic() - began < 5


def test_torchrun():
    """torchrun starts a Muster program, and sets no variable that muster run does not."""
    some = False
    for python in filter(None, ("/usr/bin/python3", os.environ.get("MUSTER_TORCH_PYTHON"))):
        if subprocess.run([python, "-c", "import torch.distributed.run"], stderr=subprocess.DEVNULL,
                          check=False).returncode != 0:
            continue
        some = True
        script = f"env | sed \"s/^/$RANK:/\"; exec {FROM_ENV}"
        with tempfile.TemporaryDirectory() as d:
            # -r and -t: torch 1.13's default for them fails on Python 3.11.
            done = subprocess.run([python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no_python",
                                   "-r", "0:1,1:1", "-t", "0:1,1:1", "--log_dir", d, "sh", "-c", script], timeout=120,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        assert done.returncode == 0, done
        for r in range(2):
            assert f"shm {r} of 2 sum 3 context {r} of 2\n" in done.stdout, done.stdout
        ours = muster("-n", 2, "--standalone", "--no_python", "sh", "-c", script)
        names = [dict(re.findall(r"(?m)(?:^|[: \]])(1:[A-Z_]*(?:RANK|WORLD|ROLE|MASTER|ELASTIC|OMP)[A-Z_]*)=(.*)$", x.stdout))
                 for x in (done, ours)]
        assert len(names[0]) >= 12, done.stdout
        # how PyTorch's own parts talk
        apart = {f"1:TORCHELASTIC_{x}" for x in ("ERROR_FILE", "USE_AGENT_STORE", "SIGNALS_TO_HANDLE")}
        assert names[0].keys() - apart <= names[1].keys(), names
        for name in names[0].keys() - apart:
            if not re.search("MASTER|RUN_ID|RESTART", name):  # its own port, name and number of restarts
                assert names[0][name] == names[1][name], (name, names)
    if not some:
        print("  skipped: no torch.distributed.run here")


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and (len(sys.argv) < 4 or name in sys.argv[3:]):
            began = time.monotonic()
            test()
            print(f"{name}: ok ({time.monotonic() - began:.1f} s)", flush=True)
