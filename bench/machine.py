"""What a result is worth nothing without: the machine, the system, the date, the commit."""
import datetime
import os
import platform

from peers import output_of


def read(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError:
        return ""


def describe():
    def field(text, name):
        return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(name)), "unknown")

    cpu = read("/proc/cpuinfo")
    flags = field(cpu, "flags").split()
    release = read("/etc/os-release")
    system = next((line.split("=", 1)[1].strip('"') for line in release.splitlines() if line.startswith("PRETTY_NAME=")), "")
    return {
        "cpu": field(cpu, "model name"), "family": field(cpu, "cpu family"), "model": field(cpu, "model\t"),
        "cores": len(os.sched_getaffinity(0)),
        "vectors": [f for f in ("avx2", "avx512f", "avx512_bf16") if f in flags],
        "virtual": "hypervisor" in flags,
        "memory_bytes": int(field(read("/proc/meminfo"), "MemTotal").split()[0]) * 1024,
        "kernel": platform.release(), "system": system,
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
    }


def when():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def commit():
    """The commit of this tree, with + where files differ from it."""
    here = os.path.dirname(os.path.abspath(__file__))
    name = output_of(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    changed = output_of(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return name + ("+" if changed else "") if name else None
