"""Who takes part in `make bench`: Muster, each PyTorch and each MPI that is here, with its version."""
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# glibc keeps freed pages instead of giving them back each step: an honest setting that few know, and that helps where page
# faults are dear.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592",
              "MALLOC_TOP_PAD_": "67108864"}


def output_of(command):
    """What it prints, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=False)
    except OSError:
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


# Prints its version, and the BLAS that it loaded where that is a library of the system's.
ASK = """
import os, re, torch
with open("/proc/self/maps") as f:
    found = {os.path.realpath(p) for p in re.findall(r"/\\S*lib(?:open)?blas\\S*", f.read())}
print(torch.__version__, *sorted(found)[:1])
"""


class Torch:
    def __init__(self, python, version, *blas):
        self.python, self.version, self.blas = python, version, blas
        if any("/blas/" in b for b in blas):
            print(f"{python}: PyTorch {version} has the reference BLAS ({', '.join(blas)}), and its linear layers are slow "
                  "for that; scripts/deps.sh bench installs OpenBLAS", file=sys.stderr, flush=True)
        self.name = "PyTorch " + ".".join(version.split("+")[0].split(".")[:2])

    def command(self, script, flags):
        return [self.python, os.path.join(HERE, script)] + flags


class Mpi:
    """Given what it needs to be fast: huge pages (mpi_allreduce.c asks) and memory that malloc keeps."""
    environment = dict(KEEP_PAGES, GLIBC_TUNABLES="glibc.malloc.hugetlb=1", OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def __init__(self, name, mpirun, program):
        self.name, self.mpirun, self.program = name, mpirun, program

    def command(self, ranks, arguments):
        return [self.mpirun, "-n", str(ranks), self.program] + arguments


def find_torch(python):
    said = output_of([python, "-c", ASK])
    return Torch(python, *said.split()) if said else None


def make_current_torch(build):
    """A virtual environment with the PyTorch that pip finds, made once. None, after a line, where that cannot be had."""
    folder = os.path.join(build, "bench", "torch")
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    found = find_torch(python)
    if found is None and os.path.exists(python):
        print(f"installing a current PyTorch in {folder}", flush=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--retries", "1", "torch", "numpy"], stderr=subprocess.DEVNULL,
                       check=False)
        found = find_torch(python)
    if found is None:
        print("no current PyTorch: pip could not install one; MUSTER_BENCH_TORCH can name a Python that has it", flush=True)
    return found


def find_mpis(folder):
    names = {"openmpi": "Open MPI", "mpich": "MPICH"}
    for kind, name in names.items():
        program = os.path.join(folder, "mpi_allreduce." + kind)
        built = output_of(["mpicc." + kind, "-O2", os.path.join(HERE, "mpi_allreduce.c"), "-o", program])
        version = output_of(["dpkg-query", "-W", "-f", "${Version}", "libopenmpi3" if kind == "openmpi" else "libmpich12"])
        if built is None:
            print(f"no {name}: mpicc.{kind} is not here or fails", flush=True)
        else:
            yield Mpi(f"{name} {version.split('-')[0]}" if version else name, "mpirun." + kind, program)


class Peers:
    KEEP_PAGES = KEEP_PAGES

    def __init__(self, o):
        self.program = o.muster
        if output_of([o.muster, "bench", "--help"]) is None:
            raise SystemExit(f"{o.muster}: no muster there with `muster bench`; make build")
        # It makes the weights and batches: without it there is nothing to compare.
        self.maker = find_torch(o.python)
        if self.maker is None:
            raise SystemExit(f"{o.python} cannot import torch; scripts/deps.sh bench installs Debian's")
        newer = None
        if o.torch == "":
            newer = make_current_torch(o.build)
        elif o.torch != "none":
            newer = find_torch(o.torch)
            if newer is None:
                raise SystemExit(f"MUSTER_BENCH_TORCH: {o.torch} cannot import torch")
        self.torches = [self.maker] + ([newer] if newer and newer.version != self.maker.version else [])
        self.mpis = list(find_mpis(os.path.join(o.build, "bench")))
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            self.winograd = "avx512f" in f.read()

    def muster(self, part, flags):
        return [self.program, "bench", part] + flags

    def versions(self):
        return dict({"muster": output_of([self.program, "--version"])},
                    **{t.name: ", ".join([t.version, *t.blas]) for t in self.torches}, **{m.name: m.name.split()[-1] for m in self.mpis})
